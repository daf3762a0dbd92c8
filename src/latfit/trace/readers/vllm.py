"""Read the log of a vLLM server.

With `--enable-logging-iteration-details` every step has a line, written by the engine or by its API server:

    (EngineCore_DP0 pid=2010) INFO 12-22 21:44:40 [core.py:349] Iteration(515): 0 context requests, 0 context tokens,
        20 generation requests, 20 generation tokens, iteration elapsed time: 10.99 ms

Without these lines, the statistics logged every ten seconds give one row per window.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.readers.source import Options, Reader, Source
from latfit.trace.table import Array, Coded, Trace

BLOCK_BYTES = 1 << 20  # what is computed from a block stays in the processor's cache
MAX_LINE_BYTES = 1 << 20  # a longer line is no log line and is read in pieces
MAX_ENGINES, MAX_RUNS, MAX_RANK = 1024, 1 << 16, 1024
MAX_MEMO = 1 << 13  # texts; logs with milliseconds in their time stamps never repeat one
PREFIX_BYTES = 512  # of a line in front of its step, where engine and time are looked for
LABEL_BYTES, NAME_BYTES = 64, 200

DAY_S = 86_400
DAYS_BEFORE_MONTH = (0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334)
NO_TIME = -1
MAX_REORDER_S = 60  # API servers write into one log slightly out of order; a clock set back falls further
MAX_REORDER_STEPS = 16  # likewise of the step counter; a restarted engine falls further, or to 0

MAX_WINDOW_S = 120.0  # lines further apart do not bound one window
MAX_LOAD_CHANGE = 1 / 3  # of the running requests within a window, relative to their mean

ANSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
LOG_LINE = re.compile(
    rb"Iteration\(\d+\): \d+ context requests, "
    rb"|\b(?:INFO|WARNING|DEBUG|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]\n]*\.py: ?\d+\] "
    rb"|\((?:EngineCore\w*|APIServer|ApiServer_\d+) pid=\d+\) "
)

BEGIN = b"Iteration("
MAX_DIGITS = 15  # a decimal with no more is a quotient of two exact floats
SLACK = bytes(512)  # behind a block, for cursors that left their line

TAIL = re.compile(rb"( \(dummy\))?(?:, [^,\n]{0,39}? KV cache usage: (\d+\.?\d*)%)?")
PROCESS = re.compile(rb".*\(([^()]*) pid=(\d{1,18})", re.DOTALL)
ENGINE = re.compile(rb"Engine \d+(?=: \Z)")
RANK = re.compile(rb"Engine(?:.*?\D)?(\d*)", re.DOTALL)
CLOCK = re.compile(
    rb".*(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[ T]([01]\d|2[0-3]):([0-5]\d):([0-5]\d)", re.DOTALL
)  # greedy: the last time in the text
PHASE_NAMES = ["", "decode", "prefill", "mixed"]

CACHE_SIZE = re.compile(rb" KV cache size: (\d[\d,]{0,20}) tokens")
START, ARGUMENTS = b"Initializing a V1 LLM engine", b"non-default args: "
SETTINGS: Mapping[bytes, Mapping[str, bytes]] = {
    START: {
        "max_model_len": rb"\bmax_seq_len=(\d{1,9})\b",
        "tp": rb"\btensor_parallel_size=(\d{1,6})\b",
        "pipeline_parallel_size": rb"\bpipeline_parallel_size=(\d{1,6})\b",
        "data_parallel_size": rb"\bdata_parallel_size=(\d{1,6})\b",
        "num_speculative_tokens": rb"speculative_config=SpeculativeConfig\([^)]{0,1000}num_spec_tokens=(\d{1,3})\)",
        "enable_prefix_caching": rb"\benable_prefix_caching=(True|False)\b",
        "enable_chunked_prefill": rb"\benable_chunked_prefill=(True|False)\b",
        "vllm": rb"V1 LLM engine \(v([^)\s]+)\)",
        "model": rb"\bmodel='([^']*)'",
        "dtype": rb"\bdtype=(?:torch\.)?(\w+)",
        "quantization": rb"\bquantization=(\w+)",
        "cache_dtype": rb"\bkv_cache_dtype=(\w+)",
        "device_type": rb"\bdevice_config=(\w+)",
        # The last end of the compiled ranges is the token budget.
        "max_num_batched_tokens": rb"'compile_ranges_(?:endpoints|split_points)': \[(?:[\d, ]{0,200}\D)?(\d{1,9})\]",
    },
    ARGUMENTS: {
        "max_num_seqs": rb"'max_num_seqs': (\d{1,9})\b",
        "max_num_batched_tokens": rb"'max_num_batched_tokens': (\d{1,9})\b",
        "block_size": rb"'block_size': (\d{1,9})\b",
        "long_prefill_token_threshold": rb"'long_prefill_token_threshold': (\d{1,9})\b",
        "num_speculative_tokens": rb"'num_speculative_tokens': (\d{1,3})\b",
        "async_scheduling": rb"'async_scheduling': (True|False)\b",
    },
    b"Chunked prefill is enabled": {"max_num_batched_tokens": rb"max_num_batched_tokens=(\d{1,9})\b"},
    b" blocks: ": {"num_gpu_blocks": rb"# (?:GPU|CUDA|cuda) blocks: (\d{1,9})\b"},
}
"""Start-up lines by a text in them, and the engine settings they report, under the recorder's names."""
MARKS = (*SETTINGS, b" KV cache size: ")

WINDOW = re.compile(
    rb"Avg prompt throughput: (\d{1,12}(?:\.\d{1,6})?) tokens/s, Avg generation throughput: (\d{1,12}(?:\.\d{1,6})?)"
    rb" tokens/s, Running: (\d{1,9}) reqs, Waiting: (\d{1,9}) reqs"
)


class StartLine(NamedTuple):
    """A start-up line: an engine starts (`tokens` = 0), or its KV cache holds `tokens`."""

    row: int  # steps in front of it
    rank: int  # of the engine; -1 if the line names none
    tokens: int


class Memo(dict[bytes, int]):
    """Numbers parsed from texts that repeat, such as the time stamps of lines within one second."""

    def __init__(self, parse: Callable[[bytes], tuple[float, float]]) -> None:
        super().__init__()
        self.parse = parse
        self.new: list[tuple[float, float]] = []
        self.known: FloatArray = np.empty((0, 2))

    def __missing__(self, text: bytes) -> int:
        self[text] = place = len(self)
        self.new.append(self.parse(text))
        return place

    def parsed(self, texts: Sequence[bytes]) -> FloatArray:
        """Return two numbers per text (n, 2)."""
        places = np.fromiter(map(self.__getitem__, texts), np.intp, len(texts))
        self.known = np.concatenate([self.known, np.array(self.new).reshape(-1, 2)])
        self.new.clear()
        found = self.known[places]
        if len(self) > MAX_MEMO:
            self.clear()
            self.known = self.known[:0]
        return found


@dataclass
class LogScan:
    """What the lines read so far contain."""

    parts: list[dict[str, Array]] = field(default_factory=list)
    rows: int = 0
    lines: int = 0
    cut: int = 0
    starts: list[StartLine] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefixes = Memo(self._parse_prefix)
        self.tails = Memo(_parse_tail)

    def add(self, text: bytes) -> None:
        """Add whole lines."""
        if b"\x1b" in text:
            text = ANSI.sub(b"", text)
        block = np.frombuffer(text + SLACK, dtype=np.uint8)
        newlines = np.flatnonzero(block == ord("\n"))
        self.lines += len(newlines)
        hits = np.flatnonzero(block == ord("(")) - len(BEGIN) + 1
        hits = hits[hits >= 0]
        cursor = Cursor(block, hits[Cursor(block, hits).stands(BEGIN)] + len(BEGIN))
        begins_with_digit = cursor.digit() < 10
        start = cursor.at - len(BEGIN)
        columns = _parse_steps(cursor)
        whole = cursor.whole
        self.cut += int(np.count_nonzero(begins_with_digit & ~whole))
        start, end = start[whole], cursor.at[whole]
        place = np.searchsorted(newlines, start)
        line_begin = np.where(place > 0, newlines[place - 1] + 1, 0)
        line_end = newlines[np.searchsorted(newlines, end)]
        # Lines without a step stand between the line of one step and that of the next.
        gap_begin, gap_end = np.append(0, line_end + 1), np.append(line_begin, len(text))
        for i in np.flatnonzero(gap_end > gap_begin).tolist():
            self._add_start_lines(text[gap_begin[i] : gap_end[i]], i)
        if not len(start):
            return
        previous_end = np.append(0, end[:-1])  # two steps may share a line
        begin = np.maximum(np.maximum(line_begin, previous_end), start - PREFIX_BYTES)
        prefixes = [text[a:b] for a, b in zip(begin.tolist(), start.tolist(), strict=True)]
        engine, time = self.prefixes.parsed(prefixes).astype(np.int64).T
        tails = self.tails.parsed([text[a:b] for a, b in zip(end.tolist(), line_end.tolist(), strict=True)])
        columns = {name: column[whole] for name, column in columns.items()}
        self.parts.append({**columns, "engine": engine, "time": time, "tail": tails})
        self.rows += len(engine)

    def _add_start_lines(self, text: bytes, steps: int) -> None:
        """Keep what start-up lines report. steps: whole steps in front of them in this block."""
        if not any(mark in text for mark in MARKS):
            return
        for line in text.split(b"\n"):
            if settings := settings_in(line):
                self.settings.append(settings)
            size = CACHE_SIZE.search(line)
            tokens = int(size[1].replace(b",", b"")) if size else 0
            if START in line or tokens > 0:
                process = PROCESS.match(line)
                rank = rank_of(process[1] if process else b"")
                self.starts.append(StartLine(self.rows + steps, rank, 0 if START in line else tokens))

    def _parse_prefix(self, text: bytes) -> tuple[float, float]:
        """Return (engine number, time stamp) of the text in front of a step.

        Engines that write their own lines differ by process. Lines of API servers name the engine; the process of a
        single server tells one start from the next.
        """
        text = text[-PREFIX_BYTES:]
        process, engine = PROCESS.match(text), ENGINE.search(text)
        name, pid = (process[1], int(process[2])) if process else (b"", -1)
        if engine:
            name, pid = engine[0], pid if name == b"APIServer" else -1
        number = self.engines.setdefault((name, pid), min(len(self.engines), MAX_ENGINES))
        clock = CLOCK.match(text)
        if clock is None:
            return number, NO_TIME
        month, day, hour, minute, second = map(int, clock.groups())
        return number, (32 * month + day) * DAY_S + 3600 * hour + 60 * minute + second


def _parse_tail(text: bytes) -> tuple[float, float]:
    """Return (dummy, KV cache usage) of the text behind a step."""
    found = TAIL.match(text)
    assert found is not None  # both parts are optional
    return float(found[1] is not None), float(found[2]) / 100 if found[2] else np.nan


class Cursor:
    """A place in each of many lines (n,), and which lines have contained all that was parsed."""

    def __init__(self, block: Array, at: Array) -> None:
        self.block, self.at = block, at
        self.whole = np.ones(len(at), dtype=bool)

    def stands(self, text: bytes) -> Array:
        """Return where `text` comes next (n,)."""
        windows = np.ndarray((len(self.block) - len(text) + 1,), f"S{len(text)}", self.block, strides=(1,))
        return np.asarray(windows[self.at] == text)

    def skip(self, text: bytes) -> "Cursor":
        """Go behind `text`, which has to come next."""
        self.whole &= self.stands(text)
        self.at = np.minimum(self.at + len(text), len(self.block) - len(SLACK))
        return self

    def digit(self) -> Array:
        """Return the digit at the cursor (n,), 10 or more for other characters."""
        return self.block[self.at] - np.uint8(ord("0"))

    def number(self) -> Array:
        """Parse the whole number that has to come next (n,)."""
        value, begin = np.zeros(len(self.at), dtype=np.int64), self.at
        for _ in range(MAX_DIGITS + 1):
            digit = self.digit()
            found = digit < 10
            if not found.any():
                break
            value = np.where(found, 10 * value + digit, value)
            self.at = self.at + found
        self.whole &= (self.at > begin) & (self.at - begin <= MAX_DIGITS)
        return value

    def decimal(self) -> FloatArray:
        """Parse the number that has to come next (n,), with or without decimals."""
        first = self.at
        value = self.number()
        pointed = self.stands(b".")
        if not pointed.any():
            return value.astype(np.float64)
        part = Cursor(self.block, self.at[pointed] + 1)
        begin = part.at
        decimals = part.number()
        scale = np.ones(len(value), dtype=np.int64)
        scale[pointed] = 10 ** np.minimum(part.at - begin, MAX_DIGITS)
        value[pointed] = value[pointed] * scale[pointed] + decimals
        self.whole[pointed] &= part.whole & (part.at - first[pointed] - 1 <= MAX_DIGITS)
        self.at[pointed] = part.at
        return np.asarray(value / scale)


def _parse_steps(line: Cursor) -> dict[str, Array]:
    """Parse the step behind each `BEGIN`. Columns of lines that are no whole step are meaningless."""
    step = line.number()
    prefill_requests = line.skip(b"): ").number()
    prefill_tokens = line.skip(b" context requests, ").number()
    requests = line.skip(b" context tokens, ").number()
    tokens = line.skip(b" generation requests, ").number()
    ms = line.skip(b" generation tokens, iteration elapsed time: ").decimal()
    line.skip(b" ms")
    return {
        "B": prefill_requests + requests,
        "S": prefill_tokens + tokens,
        "T_ms": ms,
        "prefill_requests": prefill_requests,
        "prefill_tokens": prefill_tokens,
        "step": step,
        "phase": (requests > 0) + 2 * (prefill_requests > 0),
    }


def settings_in(line: bytes) -> dict[str, Any]:
    """Return the engine settings in a start-up line; empty for any other line."""
    mark = next((mark for mark in SETTINGS if mark in line), None)
    if mark is None:
        return {}
    found: dict[str, Any] = {"arguments_told": True} if mark == ARGUMENTS else {}
    if mark == START and b"speculative_config=None" in line:
        found["num_speculative_tokens"] = 0
    for name, pattern in SETTINGS[mark].items():
        match = re.search(pattern, line)
        if match and 0 < len(match[1]) <= NAME_BYTES:
            found[name] = _setting(match[1])
    return found


def _setting(text: bytes) -> bool | int | str:
    if text in (b"True", b"False"):
        return text == b"True"
    return int(text) if text.isdigit() else text.decode("utf-8", "replace")


def agreed_settings(starts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings on which all starts agree, and the others with all their values under `differing`."""
    values: dict[str, list[Any]] = {}
    for settings in starts:
        for name, value in settings.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    found = {name: several[0] for name, several in values.items() if len(several) == 1}
    differing = {name: several for name, several in values.items() if len(several) > 1}
    return {**found, "differing": differing} if differing else found


def rank_of(name: bytes) -> int:
    """Return the number at the end of an engine's name, 0 if it has none; -1 for other processes."""
    match = RANK.fullmatch(name)
    if match is None:
        return -1
    rank = int(match[1] or 0) if len(match[1]) < 10 else MAX_RANK
    return rank if rank < MAX_RANK else -1


def recognises(head: bytes) -> bool:
    return LOG_LINE.search(ANSI.sub(b"", head)) is not None


def read(source: Source, options: Options) -> Trace:
    """Return every step of the log, including empty ones, or its windows. `options` apply to tables only.

    Raises
    ------
    BadInput
        If the log contains no step, or more engines or starts than a deployment has.
    """
    with source.open() as stream:
        scan = scan_log(stream)
    if not scan.rows:
        with source.open() as stream:
            windows = _read_windows(line for text in _whole_lines(stream) for line in text.split(b"\n"))
        if windows is not None:
            return windows.with_provenance(**_start_facts(scan))
    return trace_of(scan, source.name)


def start_facts(source: Source) -> dict[str, Any]:
    """Return the engine settings that a log reports, also without a step in it.

    `kv_capacity_tokens` is the KV cache size of the last start, the smallest if several workers report one.
    """
    with source.open() as stream:
        return _start_facts(scan_log(stream))


def _start_facts(scan: LogScan) -> dict[str, Any]:
    sizes: list[int] = []
    previous = -1
    for line in scan.starts:
        if line.tokens and previous == 0:
            sizes = []
        sizes += [line.tokens] if line.tokens else []
        previous = line.tokens
    capacity = {"kv_capacity_tokens": min(sizes)} if sizes else {}
    return {"format": "vllm", **agreed_settings(scan.settings), **capacity}


def scan_log(stream: BinaryIO, block_bytes: int = BLOCK_BYTES) -> LogScan:
    """Scan all lines of a log."""
    scan = LogScan()
    for text in _whole_lines(stream, block_bytes):
        scan.add(text)
    return scan


def _whole_lines(stream: BinaryIO, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the content in blocks that end with a newline, added to the last one if missing."""
    rest = b""
    while block := stream.read(size):
        end = block.rfind(b"\n") + 1
        if end > 0:
            yield rest + block[:end]
            rest = block[end:]
        elif len(rest) + len(block) < MAX_LINE_BYTES:
            rest += block
        else:
            yield rest + block + b"\n"
            rest = b""
    if rest:
        yield rest + b"\n"


def trace_of(scan: LogScan, name: str) -> Trace:
    """Return the scanned steps of the log called `name`. Raises BadInput as `read` does."""
    facts = {"format": "vllm", "lines": scan.lines, "iteration_lines": scan.rows, "cut_lines": scan.cut}
    if not scan.rows:
        torn = f" ({scan.cut} are cut short)" if scan.cut else ""
        raise BadInput(
            f"no line of its {scan.lines} is a whole step{torn}",
            where=name,
            remedy="Record the running server from outside (latfit record URL), or start vLLM with"
            " --enable-logging-iteration-details, and without --disable-log-stats.",
        )
    runs = _split_runs(scan) if len(scan.engines) <= MAX_ENGINES else []
    if not 0 < len(runs) <= MAX_RUNS:
        reason = "step counters that go back and forth" if runs else f"more than {MAX_ENGINES:,} engines"
        remedy = "Give the log of one deployment, with the names of its engines as vLLM writes them."
        raise BadInput(f"has {reason}", where=name, remedy=remedy)
    labels = [process[:LABEL_BYTES].decode("utf-8", "replace") for process, _ in scan.engines]
    columns = {name: np.concatenate([part[name] for part in scan.parts]) for name in scan.parts[0]}
    scan.parts.clear()
    engine_of_run = [int(columns["engine"][rows[0]]) for rows in runs]
    capacity = _capacities(scan, [(int(rows[0]), engine) for rows, engine in zip(runs, engine_of_run, strict=True)])
    replicas = [labels[engine] for engine in engine_of_run]
    known = {label: tokens for label, tokens in zip(replicas, capacity, strict=True) if tokens}
    more = {"engines": len(set(labels)), "runs": len(runs), "kv_capacity_tokens": known}
    facts |= {**agreed_settings(scan.settings), **more}
    return _as_trace(columns, runs, replicas, capacity, facts)


def _split_runs(scan: LogScan) -> list[NDArray[np.intp]]:
    """Return the rows of each run, in order of their first rows: one start of one engine.

    A run ends where the step counter restarts or a start-up line says so.
    """
    engine = np.concatenate([part["engine"] for part in scan.parts])
    step = np.concatenate([part["step"] for part in scan.parts])
    by_engine = np.split(np.argsort(engine, kind="stable"), np.cumsum(np.bincount(engine))[:-1])
    runs = []
    for (name, _), rows in zip(scan.engines, by_engine, strict=False):
        counter = step[rows]
        fall = counter[:-1] - counter[1:]
        restart = (fall > MAX_REORDER_STEPS) | ((counter[1:] == 0) & (fall > 0))
        started = [line.row for line in scan.starts if line.tokens == 0 and line.rank in (-1, rank_of(name))]
        places = {*(np.flatnonzero(restart) + 1).tolist(), *np.searchsorted(rows, started).tolist()} - {0, len(rows)}
        runs += np.split(rows, sorted(places))
    return sorted((rows for rows in runs if len(rows)), key=lambda rows: int(rows[0]))


def _capacities(scan: LogScan, runs: Sequence[tuple[int, int]]) -> list[int]:
    """Return the KV cache tokens of each run, given as (first row, engine number); 0 if unknown.

    Of several lines of a start (one per worker) the smallest counts. Lines without a rank apply to ranks that have
    none of their own.
    """
    ranks = [rank_of(name) for name, _ in scan.engines]
    sizes = [line for line in scan.starts if line.tokens][::-1]
    known: dict[int, int] = {}
    used: set[int] = set()
    found = []
    for first, engine in runs:
        while sizes and sizes[-1].row <= first:
            line = sizes.pop()
            before = line.tokens if line.rank in used else known.get(line.rank, line.tokens)
            known[line.rank] = min(before, line.tokens)
            used.discard(line.rank)
        rank = ranks[engine] if ranks[engine] in known else -1
        used.add(rank)
        found.append(known.get(rank, 0))
    return found


def _as_trace(
    columns: dict[str, Array],
    runs: Sequence[Array],
    replicas: Sequence[str],
    capacity: Sequence[int],
    facts: dict[str, Any],
) -> Trace:
    """Name runs and replicas, and add the columns that the log has values for."""
    time, tail, phase = columns.pop("time"), columns.pop("tail"), columns.pop("phase")
    del columns["engine"]
    if (time != NO_TIME).any():
        columns["t_s"] = np.empty(len(time))
    run_of_row = np.empty(len(time), dtype=np.int32)
    for number, rows in enumerate(runs):
        run_of_row[rows] = number
        if "t_s" in columns:
            columns["t_s"][rows] = seconds_since_start(time[rows])
    names = _run_names(replicas)
    codes: dict[str, Coded] = {"phase": (phase, PHASE_NAMES), "run": (run_of_row, names)}
    if any(replicas):
        distinct = list(dict.fromkeys(replicas))
        codes["replica"] = np.array([distinct.index(label) for label in replicas])[run_of_row], distinct
    columns |= {name: np.array(values, dtype=object)[code] for name, (code, values) in codes.items()}
    dummy, usage = tail.T
    if np.isfinite(usage).any():
        columns["kv_usage"] = usage
        if any(capacity):
            tokens = np.array([size or np.nan for size in capacity])
            columns["context_tokens"] = usage * tokens[run_of_row]
    if dummy.any():
        columns["dummy"] = dummy > 0
    return Trace(columns, facts, codes)


def _run_names(replicas: Sequence[str]) -> list[str]:
    """Return `EngineCore_DP0/2` for the second run of that engine, `2` for an engine without a name."""
    counts: dict[str, int] = {}
    names = []
    for label in replicas:
        counts[label] = counts.get(label, 0) + 1
        names.append(f"{label}/{counts[label]}" if label else str(counts[label]))
    return names


def seconds_since_start(stamps: Array) -> FloatArray:
    """Return seconds since the first stamp, never decreasing; NaN without a stamp.

    The stamps have no year: a fall by more than half a year is a turn of the year, a smaller one a clock set back, or
    lines slightly out of order.
    """
    seconds = np.full(len(stamps), np.nan)
    known = np.flatnonzero(stamps != NO_TIME)
    if not len(known):
        return seconds
    days, second = np.divmod(stamps[known], DAY_S)
    month, day = np.divmod(days, 32)
    leap = bool(np.any((month == 2) & (day == 29)))
    year_s = (365 + leap) * DAY_S
    clock = (np.array(DAYS_BEFORE_MONTH)[month] + day + (leap & (month > 2))) * DAY_S + second
    change = (np.diff(clock) + year_s // 2) % year_s - year_s // 2
    change[change < -MAX_REORDER_S] = 0
    seconds[known] = np.maximum.accumulate(np.concatenate([[0], np.cumsum(change)]))
    return seconds


def _read_windows(lines: Iterator[bytes]) -> Trace | None:
    """Return one row per window of about ten seconds; None if no line reports one.

    Each running request gets one token per step: with B requests and g generated tokens/s a step takes B/g seconds.
    B is the mean of both ends. Windows whose ends differ too much are counted as `unsteady` and left out; those that
    begin or end without a request are `idle`.
    """
    scan = LogScan()
    reports: list[tuple[float, ...]] = []
    prefixes = []
    for line in lines:
        line = ANSI.sub(b"", line)
        if found := WINDOW.search(line):
            prefixes.append(line[: found.start()])
            reports.append(tuple(map(float, found.groups())))
    if not reports:
        return None
    engines, stamps = scan.prefixes.parsed(prefixes).astype(np.int64).T
    times = seconds_since_start(stamps).tolist()
    names = [str(max(rank_of(name), 0)) for name, _ in scan.engines]
    last: dict[int, tuple[float, float]] = {}
    unsteady = 0
    rows = []
    for engine, now, (prompt, generated, running, waiting) in zip(engines.tolist(), times, reports, strict=True):
        start, running_before = last.get(engine, (now, 0.0))
        last[engine] = now, running
        if not 0 < now - start <= MAX_WINDOW_S:
            continue
        B = (running + running_before) / 2
        busy = running > 0 and running_before > 0 and generated > 0
        if busy and abs(running - running_before) > MAX_LOAD_CHANGE * B:
            unsteady += 1
            continue
        T_s = B / generated if busy else 0.0
        S = max(B, (prompt + generated) * T_s)
        rows.append((start, 1e3 * (now - start), B, S, 1e3 * T_s, waiting, not busy, engine))
    if not rows:
        return None
    t_s, window_ms, B_mean, S_mean, T_ms, queued, idle, engine_of_row = np.array(rows).T
    columns = {
        "B": B_mean,
        "S": S_mean,
        "T_ms": T_ms,
        "t_s": t_s - t_s.min(),
        "window_ms": window_ms,
        "window_steps": np.divide(window_ms, T_ms, out=np.zeros_like(T_ms), where=T_ms > 0),
        "queued_requests": queued,
        "idle": idle > 0,
        "run": np.array(names, dtype=object)[engine_of_row.astype(np.intp)],
    }
    return Trace(columns, {"format": "vllm", "windows": len(rows), "unsteady": unsteady})


READER = Reader("vllm", "a vLLM server log with --enable-logging-iteration-details", recognises, read, path="gpu")
