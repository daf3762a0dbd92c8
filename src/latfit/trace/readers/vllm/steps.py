"""Steps in a block of a vLLM log, read by NumPy: all lines of the block at once, one word of them after another.

A `Cursor` holds a place in each line. It skips a literal or reads a number in all of them together, and forgets lines
that have something else there. Nothing is kept between two blocks but the texts that stood before steps, which repeat:
the same engine within the same second.

Up to eight digits become a number as the bytes of one little-endian word (Lemire 2022, "Parsing numbers eight digits at
a time"): with the first digit in the lowest byte, x (1 + 10 * 2^8) >> 8 holds pairs of digits in every second byte, and
so on for fours and eights. A decimal of at most 15 digits is a whole number over a power of ten, both exact, so that
their quotient is what `float` gives.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.trace.readers.vllm.start_up import MARKS as OF_START, START, facts_in
from latfit.trace.table import Array

SLACK = bytes(512)
"""Read behind a block's last line, by cursors that have lost their line; a whole step has less than this left."""

NEWLINE, OPEN, COMMA, BLANK, POINT, ZERO = b"\n(,\x20.0"
ZEROS, ONES, LOWS, HIGHS = (np.uint64(0x0101010101010101 * byte) for byte in (ZERO, 0x01, 0x7F, 0x80))
NO_DIGIT = np.uint64(0x0101010101010101 * 0x76)  # carries into the high bit of a byte from 10 on
GATHER = tuple(
    (np.uint64(1 + (10**size << 8 * size)), np.uint64(8 * size), np.uint64(kept))
    for size, kept in ((1, 0x00FF00FF00FF00FF), (2, 0x0000FFFF0000FFFF), (4, 0x00000000FFFFFFFF))
)
MOST_DIGITS, COUNT_DIGITS, STEP_DIGITS = 15, 9, 18
POWERS = 10 ** np.arange(STEP_DIGITS + 1)


class Cursor:
    """A place in each line (n,), and which lines have had all that was asked of them."""

    def __init__(self, block: Array, at: Array) -> None:
        self.block, self.at = block, at
        self.whole = np.ones(len(at), dtype=bool)

    def stands(self, text: bytes) -> Array:
        """Where `text` comes next (n,)."""
        windows = np.ndarray((len(self.block) - len(text) + 1,), f"S{len(text)}", self.block, strides=(1,))
        return np.asarray(windows[self.at] == text)

    def skip(self, text: bytes) -> "Cursor":
        """Past `text`, which has to come next."""
        self.whole &= self.stands(text)
        self.at = self.at + len(text)
        return self

    def number(self, most: int) -> Array:
        """The number (n,) of 1 to `most` digits that has to come next."""
        value, digits = self._digits(self.at)
        for more in (8, 16):
            if not (digits == more).any():
                break
            higher, found = self._digits(self.at + more)
            found[digits < more] = 0
            value = value * POWERS[found] + np.where(found > 0, higher, 0)
            digits += found
        self.whole &= (digits > 0) & (digits <= most)
        self.at = self.at + digits
        return value

    def decimal(self) -> Array:
        """The number (n,) that has to come next, with or without decimals, of up to 15 digits."""
        start = self.at
        value = self.number(MOST_DIGITS)
        pointed = np.flatnonzero(self.block[self.at] == POINT)
        if not len(pointed):
            return value.astype(np.float64)
        part = Cursor(self.block, self.at[pointed] + 1)
        decimals, places = part.number(MOST_DIGITS), part.at - self.at[pointed] - 1
        self.whole[pointed] &= part.whole & (part.at - start[pointed] - 1 <= MOST_DIGITS)
        self.at[pointed] = part.at
        scale = np.ones(len(value))
        scale[pointed] = POWERS[np.minimum(places, MOST_DIGITS)]
        value[pointed] = value[pointed] * POWERS[np.minimum(places, MOST_DIGITS)] + decimals
        return value / scale

    def _digits(self, at: Array) -> tuple[Array, Array]:
        """(number, how many digits it has) (n,) of up to eight digits at `at`."""
        words = np.ndarray((len(self.block) - 7,), "<u8", self.block, strides=(1,))
        eight = words[at] ^ ZEROS
        others = (((eight & LOWS) + NO_DIGIT) | eight) & HIGHS
        digits = ((((others & (~others + np.uint64(1))) >> np.uint64(7)) - np.uint64(1)) & ONES) * ONES >> np.uint64(56)
        eight = eight << (np.uint64(64) - np.uint64(8) * digits)
        for factor, shift, kept in GATHER:
            eight = eight * factor >> shift & kept
        return eight.astype(np.int64), digits.astype(np.int64)


LOOK_BACK = 512  # how far before a step its engine and time are looked for
DEVICE_BYTES = 40
DAY_S = 86_400
NO_TIME = -1
TIME_BITS = 32
MOST_PREFIXES = 1 << 16
MOST_ENGINES = 1024
MOST_RANKS = 1024
LABEL_BYTES = 64

PROCESS = re.compile(rb".*\(([^()]*) pid=(\d{1,18})", re.DOTALL)
ENGINE = re.compile(rb"Engine \d+(?=: \Z)")
RANK = re.compile(rb"Engine(?:.*?\D)?(\d*)", re.DOTALL)
CLOCK = re.compile(
    rb".*(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)", re.DOTALL
)  # the last one, as are processes
KV_SIZE = re.compile(rb" KV cache size: (\d[\d,]{0,20}) tokens")
SIZE = b" KV cache size: "
MARKS = (*OF_START, SIZE)
SHORTEST_MARK = min(map(len, MARKS))

Engine = tuple[bytes, int]
"""Name and process of what writes steps; -1 where the process does not matter or is not said."""


@dataclass(frozen=True)
class Note:
    """What a line that is no step says: an engine starts (tokens = 0), or its KV cache holds `tokens`. rows: steps
    before it. rank: that of the engine, -1 where none is named."""

    rows: int
    rank: int
    tokens: int


@dataclass(frozen=True)
class Block:
    """The steps of a block by column, its lines, how many steps are cut short, its notes, and what its lines of an
    engine's start say."""

    columns: dict[str, Array]
    lines: int
    cut: int
    notes: list[Note]
    starts: list[dict[str, Any]]


class Engines(dict[bytes, int]):
    """The text before a step → number of its engine, and above `TIME_BITS` bits its time + 1. Keeps recent texts."""

    def __init__(self) -> None:
        self.numbers: dict[Engine, int] = {}

    def __missing__(self, before: bytes) -> int:
        if len(self) >= MOST_PREFIXES:
            self.clear()
        self[before] = code = (self.number(_engine(before)) << TIME_BITS) + _time(before) + 1
        return code

    def number(self, engine: Engine) -> int:
        """That of an engine, new or known. All above `MOST_ENGINES` have one number: such a log is refused."""
        return self.numbers.setdefault(engine, min(len(self.numbers), MOST_ENGINES))


def engines_and_times(codes: Array) -> tuple[Array, Array]:
    """The engine's number and the time (n,) of what `Engines` makes of texts."""
    return (codes >> TIME_BITS).astype(np.int16), ((codes & ((1 << TIME_BITS) - 1)) - 1).astype(np.int32)


def read_block(text: bytes, engines: Engines) -> Block:
    """All steps in `text`, which is whole lines, as they follow one another; two may stand in one line."""
    block = np.frombuffer(text + SLACK, dtype=np.uint8)
    marks = np.flatnonzero((block == NEWLINE) | (block == OPEN))
    ends = block[marks] == NEWLINE
    begins = np.maximum.accumulate(np.where(ends, marks + 1, 0))
    named = ~ends & (marks >= len("Iteration"))
    hits, begins = marks[named] - len("Iteration"), begins[named]
    stands = Cursor(block, hits).stands(b"Iteration(")
    hits, begins = hits[stands], begins[stands]
    columns, whole, after = _steps(block, hits)
    behind = np.zeros(len(hits), dtype=np.intp)  # the last step, which may stand in the same line
    behind[1:] = np.maximum.accumulate(np.where(whole, after, 0))[:-1]
    torn = ~whole & (hits >= behind) & (block[hits + len("Iteration(")] - ZERO < 10)
    lines, begins = begins[whole], np.maximum(np.maximum(begins, behind), hits - LOOK_BACK)[whole]
    hits, after = hits[whole], after[whole]
    befores = [text[begin:hit] for begin, hit in zip(begins.tolist(), hits.tolist(), strict=True)]
    codes = np.array([engines[before] for before in befores], dtype=np.int64)
    columns["engine"], columns["time"] = engines_and_times(codes)
    found = Block(columns, int(np.count_nonzero(ends)), int(np.count_nonzero(torn)), [], [])
    _add_starts(found, text, lines, after)
    return found


def _steps(block: Array, hits: Array) -> tuple[dict[str, Array], Array, Array]:
    """(columns of whole steps, which of `hits` are whole steps, where each of these ends)."""
    line = Cursor(block, hits + len("Iteration("))
    step = line.number(STEP_DIGITS)
    prefill_requests = line.skip(b"): ").number(COUNT_DIGITS)
    prefill_tokens = line.skip(b" context requests, ").number(COUNT_DIGITS)
    requests = line.skip(b" context tokens, ").number(COUNT_DIGITS)
    tokens = line.skip(b" generation requests, ").number(COUNT_DIGITS)
    ms = line.skip(b" generation tokens, iteration elapsed time: ").decimal()
    whole = line.skip(b" ms").whole
    columns = {
        "S": prefill_tokens + tokens,
        "T_ms": ms,
        "prefill_tokens": prefill_tokens,
        "step": step,
        "B": (prefill_requests + requests).astype(np.int32),
        "prefill_requests": prefill_requests.astype(np.int32),
        "phase": ((requests > 0) + 2 * (prefill_requests > 0)).astype(np.uint8),
    }
    if not whole.all():
        columns = {name: column[whole] for name, column in columns.items()}
    rest = Cursor(block, line.at[whole])
    columns |= _rest(rest)
    after = np.zeros(len(hits), dtype=np.intp)
    after[whole] = rest.at
    return columns, whole, after


def _rest(line: Cursor) -> dict[str, Array]:
    """What may follow a step: a column of each that any line has, for all lines. Leaves `line` behind it."""
    columns: dict[str, Array] = {}
    dummy = line.stands(b" (dummy)")
    if dummy.any():
        columns["dummy"] = dummy
        line.at = line.at + len(b" (dummy)") * dummy
    rows, usage, ends = _usage(line.block, line.at)
    if len(rows):
        columns["kv_usage"] = np.full(len(line.at), np.nan)
        columns["kv_usage"][rows] = usage
        line.at[rows] = ends
    rows = np.flatnonzero(line.stands(b", encoder inputs: "))
    if len(rows):
        part = Cursor(line.block, line.at[rows])
        inputs = part.skip(b", encoder inputs: ").number(COUNT_DIGITS)
        embeddings = part.skip(b", encoder output embeddings: ").number(COUNT_DIGITS)
        rows, part.at = rows[part.whole], part.at[part.whole]
        for name, values in (("encoder_inputs", inputs), ("encoder_embeddings", embeddings)):
            if len(rows):
                columns[name] = np.zeros(len(line.at), dtype=np.int32)
                columns[name][rows] = values[part.whole]
        line.at[rows] = part.at
    return columns


def _usage(block: Array, at: Array) -> tuple[Array, Array, Array]:
    """(which of the places `at` have a `, GPU KV cache usage: 41.2%`, the share, the place behind it). The device may
    have another name, of several words."""
    found: list[tuple[Array, Array, Array]] = []
    rows = np.flatnonzero(Cursor(block, at).stands(b", "))
    for place in range(2, 2 + DEVICE_BYTES):
        letters = block[at[rows] + place]
        rows = rows[(letters != COMMA) & (letters != NEWLINE)]
        blank = np.flatnonzero(block[at[rows] + place] == BLANK)
        if len(blank):
            part = Cursor(block, at[rows[blank]] + place)
            percent = part.skip(b" KV cache usage: ").decimal()
            done = part.skip(b"%").whole
            found.append((rows[blank[done]], percent[done] / 100, part.at[done]))
            rows = np.delete(rows, blank[done])
        if not len(rows):
            break
    if not found:
        return rows[:0], np.empty(0), rows[:0]
    joined = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    return joined[0], joined[1], joined[2]


def _add_starts(block: Block, text: bytes, lines: Array, after: Array) -> None:
    """What lines of an engine's start say. lines: where those of the steps begin; after: where the steps end. Of most
    logs nothing is left between two steps; what stands before a step in its line is none."""
    begins, ends = np.append(0, after), np.append(lines, len(text))
    for rows in np.flatnonzero(ends - begins > SHORTEST_MARK).tolist():
        between = text[begins[rows] : ends[rows]]
        if not any(mark in between for mark in MARKS):
            continue
        for line in between.split(b"\n"):
            if facts := facts_in(line):
                block.starts.append(facts)
            size = KV_SIZE.match(line, line.find(SIZE))
            tokens = int(size[1].replace(b",", b"")) if size else 0
            if START in line or tokens > 0:
                process = PROCESS.match(line)
                block.notes.append(Note(rows, rank_of(process[1] if process else b""), 0 if START in line else tokens))


def _engine(before: bytes) -> Engine:
    """Engines that write their own lines differ by process. Lines of API servers name the engine, and only where there
    is one server does its process tell one start from another."""
    process, engine = PROCESS.match(before), ENGINE.search(before)
    name, pid = (process[1], int(process[2])) if process else (b"", -1)
    if engine:
        return engine[0], pid if name == b"APIServer" else -1
    return name, pid


def rank_of(name: bytes) -> int:
    """The number at the end of an engine's name, 0 where it has none; -1 for what is no engine."""
    match = RANK.fullmatch(name)
    if match is None:
        return -1
    rank = int(match[1] or 0) if len(match[1]) <= STEP_DIGITS else MOST_RANKS
    return rank if rank < MOST_RANKS else -1


def _time(before: bytes) -> int:
    """The last time in the text as (32 month + day) days and seconds; NO_TIME where there is none."""
    clock = CLOCK.match(before)
    if clock is None:
        return NO_TIME
    month, day, hour, minute, second = map(int, clock.groups())
    return (32 * month + day) * DAY_S + 3600 * hour + 60 * minute + second
