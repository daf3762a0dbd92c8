"""Bytes where they lie in memory, looked at by compiled functions: literals, numbers, ends of lines.

A text is an address: arrays as arguments would be counted in and out of every small function, which takes longer than
what it does. Bytes are looked at eight at a time, as one little-endian number. Every line ends with a newline, which no
literal holds and no number passes: reading cannot leave its line. Behind the last line there must be more bytes
(`SLACK_BYTES`), but what they are does not matter. From these come the words of a log's lines: steps, and what stands
before them.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from latfit.trace.readers.vllm.state import NO_TIME
from latfit.trace.table import Array

F = TypeVar("F", bound=Callable[..., Any])


def _repeated(byte: int) -> int:
    """Eight times the same byte, as a signed number."""
    return int.from_bytes(bytes([byte]) * 8, "little", signed=True)


NEWLINE, ESCAPE, BRACKET, POINT, ZERO, NINE = 10, 27, ord("["), ord("."), ord("0"), ord("9")
NEWLINES, ESCAPES, ZEROS = _repeated(NEWLINE), _repeated(ESCAPE), _repeated(ZERO)
ONES, LOWS, HIGHS = _repeated(0x01), _repeated(0x7F), _repeated(0x80)
NO_DIGIT = _repeated(0x76)  # carries into the high bit of a byte from 10 on
MOST_DIGITS = 15  # such a decimal is a whole number over a power of ten, both exact: the quotient is what float() gives
WHOLE_POWERS = 10 ** np.arange(MOST_DIGITS + 1)
POWERS = WHOLE_POWERS.astype(np.float64)


def compiled(function: F) -> F:
    """`function` as machine code that does not hold Python's lock."""
    return cast(F, numba.njit(nogil=True)(function))


def _word(_: Any, at: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)

    return types.int64(types.int64), build


def _byte(_: Any, at: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(builder.inttoptr(args[0], ir.IntType(8).as_pointer())), ir.IntType(64))

    return types.int64(types.int64), build


def _put(_: Any, at: Any, number: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


def _put_byte(_: Any, at: Any, number: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.trunc(args[1], ir.IntType(8))
        builder.store(one, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), build


def _trailing_zeros(_: Any, number: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), build


word = cast(Callable[[int], int], intrinsic(_word))
"""The eight bytes at an address, as a number."""

byte = cast(Callable[[int], int], intrinsic(_byte))
"""The byte at an address."""

put = cast(Callable[[int, int], None], intrinsic(_put))
"""Write a number as eight bytes to an address."""

put_byte = cast(Callable[[int, int], None], intrinsic(_put_byte))
"""Write a number as one byte to an address."""

trailing_zeros = cast(Callable[[int], int], intrinsic(_trailing_zeros))
"""Zero bits below the lowest set bit of a number other than 0."""


def literal(text: bytes) -> Array:
    """(3, words): the bytes, masks that blank what lies behind their end, and their number."""
    padded = -(-len(text) // 8) * 8
    words = np.zeros((3, padded // 8), dtype="<i8")
    words[0] = np.frombuffer(text.ljust(padded, b"\0"), dtype="<i8")
    words[1] = np.frombuffer((b"\xff" * len(text)).ljust(padded, b"\0"), dtype="<i8")
    words[2] = len(text)
    return words


@compiled
def past(at: int, expected: Array) -> int:
    """The position past `expected`; -1 where it does not stand at `at`, or `at` is -1."""
    if at < 0:
        return -1
    different = 0
    for k in range(expected.shape[1]):
        different |= (word(at + 8 * k) & expected[1, k]) ^ expected[0, k]
    return at + int(expected[2, 0]) if different == 0 else -1


@compiled
def find(at: int, end: int, expected: Array) -> int:
    """Where `expected` begins in [at, end), else -1."""
    for i in range(at, end):
        if past(i, expected) >= 0:
            return i
    return -1


@compiled
def _zeros(eight: int) -> int:
    """Not 0 where one of eight bytes is 0; the lowest set bit is in the first of them."""
    return (eight - ONES) & ~eight & HIGHS


@compiled
def _first_zero(eight: int) -> int:
    """The place of the first of eight bytes that is 0; 8 where none is."""
    zeros = _zeros(eight)
    return trailing_zeros(zeros) >> 3 if zeros != 0 else 8


@compiled
def newline(at: int) -> int:
    """The next newline from `at`."""
    while True:
        place = _first_zero(word(at) ^ NEWLINES)
        if place < 8:
            return at + place
        at += 8


@compiled
def _past_ansi(at: int) -> int:
    """The position past the ANSI sequence at `at`, such as `ESC [ 0 ; 36 m`, or `at`."""
    if byte(at) != ESCAPE or byte(at + 1) != BRACKET:
        return at
    i = at + 2
    while 48 <= byte(i) <= 63:
        i += 1
    while 32 <= byte(i) <= 47:
        i += 1
    return i + 1 if 64 <= byte(i) <= 126 else at


@compiled
def without_ansi(at: int, end: int) -> int:
    """Take ANSI sequences (colours and the like) out of the text [at, end), in place; returns its new end."""
    to = at
    while at < end:
        one, two, three, four = word(at), word(at + 8), word(at + 16), word(at + 24)
        escapes = _zeros(one ^ ESCAPES) | _zeros(two ^ ESCAPES) | _zeros(three ^ ESCAPES) | _zeros(four ^ ESCAPES)
        if escapes == 0 and at + 32 <= end:
            put(to, one)
            put(to + 8, two)
            put(to + 16, three)
            put(to + 24, four)
            at += 32
            to += 32
            continue
        plain = min(_first_zero(one ^ ESCAPES), end - at)
        after = at + plain
        if plain < 8 and after < end:
            after = _past_ansi(after)
            plain += after == at + plain  # an escape alone stays
            after = max(after, at + plain)
        if plain <= 8 and (at == to or at - to >= 8):
            put(to, one)  # what it writes too much is written again, and nothing of it is still to be read
        else:
            for k in range(plain):
                put_byte(to + k, byte(at + k))
        to += plain
        at = after
    return to


@compiled
def whole(at: int, most: int) -> tuple[int, int]:
    """(number of 1 to `most` digits, position past it, or -1 where none is or `at` is -1).

    Up to seven digits are turned into a number at once: pairs, fours, then eight.
    """
    if at < 0:
        return 0, -1
    eight = word(at) ^ ZEROS
    others = (((eight & LOWS) + NO_DIGIT) | eight) & HIGHS
    if others != 0:
        digits = trailing_zeros(others) >> 3
        if digits == 0 or digits > most:
            return 0, -1
        eight <<= 64 - 8 * digits
        eight = (eight * (1 + (10 << 8))) >> 8 & 0x00FF00FF00FF00FF
        eight = (eight * (1 + (100 << 16))) >> 16 & 0x0000FFFF0000FFFF
        return (eight * (1 + (10_000 << 32))) >> 32 & 0xFFFFFFFF, at + digits
    value, i = 0, at
    while ZERO <= byte(i) <= NINE:
        value = 10 * value + (byte(i) - ZERO)
        i += 1
    return (value, i) if i - at <= most else (0, -1)


@compiled
def decimal(at: int) -> tuple[float, int]:
    """(number with or without decimals, position past it, or -1)."""
    value, i = whole(at, MOST_DIGITS)
    if i < 0 or byte(i) != POINT:
        return float(value), i
    decimals, last = whole(i + 1, MOST_DIGITS)
    places = last - i - 1
    if last < 0 or i - at + places > MOST_DIGITS:
        return 0.0, -1
    return (value * WHOLE_POWERS[places] + decimals) / POWERS[places], last


STEP = literal(b"Iteration(")
COLON = literal(b"): ")
CONTEXT_REQUESTS = literal(b" context requests, ")
CONTEXT_TOKENS = literal(b" context tokens, ")
GENERATION_REQUESTS = literal(b" generation requests, ")
GENERATION_TOKENS = literal(b" generation tokens, iteration elapsed time: ")
MS = literal(b" ms")
DUMMY = literal(b" (dummy)")
KV_USAGE = literal(b" KV cache usage: ")
ENCODER_INPUTS = literal(b", encoder inputs: ")
ENCODER_EMBEDDINGS = literal(b", encoder output embeddings: ")
KV_SIZE = literal(b" KV cache size: ")
TOKENS = literal(b" tokens")
START = literal(b"Initializing a V1 LLM engine")
ENGINE = literal(b"Engine")
SERVER = literal(b"APIServer")
PID = literal(b" pid=")

BLANK, OPEN, CLOSE, COMMA, DASH, PERCENT, POINTS, TEE = (ord(mark) for mark in " (),-%:T")
ENGINE_BYTES, SERVER_BYTES, CLOCK_BYTES = len("Engine"), len("APIServer"), len("12-22 21:44:40")
COUNT_DIGITS, STEP_DIGITS = 9, 18
DEVICE_BYTES = 40
DAY_S = 86_400


@compiled
def parse_step(at: int) -> tuple[int, int, int, int, int, int, float]:
    """(position past ` ms`, or -1 where this is no whole step; step, context requests and tokens, generation requests
    and tokens, ms), from the position past `Iteration(`."""
    step, i = whole(at, STEP_DIGITS)
    context_requests, i = whole(past(i, COLON), COUNT_DIGITS)
    context_tokens, i = whole(past(i, CONTEXT_REQUESTS), COUNT_DIGITS)
    requests, i = whole(past(i, CONTEXT_TOKENS), COUNT_DIGITS)
    tokens, i = whole(past(i, GENERATION_REQUESTS), COUNT_DIGITS)
    ms, i = decimal(past(i, GENERATION_TOKENS))
    return past(i, MS), step, context_requests, context_tokens, requests, tokens, ms


@compiled
def parse_usage(at: int) -> tuple[float, int]:
    """(share of the KV cache in use, or NaN; position past it), from `, GPU KV cache usage: 41.2%`."""
    if byte(at) != COMMA or byte(at + 1) != BLANK:
        return np.nan, at
    for i in range(at + 2, at + 2 + DEVICE_BYTES):
        if byte(i) == NEWLINE or byte(i) == COMMA:
            break
        if byte(i) == BLANK:
            percent, last = decimal(past(i, KV_USAGE))
            if last >= 0 and byte(last) == PERCENT:
                return percent / 100, last + 1
    return np.nan, at


@compiled
def parse_encoders(at: int) -> tuple[int, int, int]:
    """(encoder inputs, encoder embeddings, position past them); -1 where they are not there."""
    inputs, i = whole(past(at, ENCODER_INPUTS), COUNT_DIGITS)
    embeddings, i = whole(past(i, ENCODER_EMBEDDINGS), COUNT_DIGITS)
    return (inputs, embeddings, i) if i >= 0 else (-1, -1, at)


@compiled
def _two(at: int) -> int:
    """The number of two digits at `at`, else -1."""
    if ZERO <= byte(at) <= NINE and ZERO <= byte(at + 1) <= NINE:
        return 10 * (byte(at) - ZERO) + byte(at + 1) - ZERO
    return -1


@compiled
def clock(at: int) -> int:
    """`12-22 21:44:40` at `at` as (32 month + day) days and seconds; NO_TIME where it is not there."""
    month, day, hour, minute, second = _two(at), _two(at + 3), _two(at + 6), _two(at + 9), _two(at + 12)
    parted = byte(at + 2) == DASH and (byte(at + 5) == BLANK or byte(at + 5) == TEE)
    if not (parted and byte(at + 8) == POINTS and byte(at + 11) == POINTS):
        return NO_TIME
    if not (1 <= month <= 12 and 1 <= day <= 31 and 0 <= hour < 24 and 0 <= minute < 60 and 0 <= second < 60):
        return NO_TIME
    return (32 * month + day) * DAY_S + 3600 * hour + 60 * minute + second


@compiled
def find_clock(start: int, end: int) -> int:
    """Where the last time in [start, end) begins, else -1."""
    for at in range(end - CLOCK_BYTES, start - 1, -1):
        if byte(at + 2) == DASH and clock(at) != NO_TIME:
            return at
    return -1


@compiled
def parse_process(start: int, end: int) -> tuple[int, int, int]:
    """(first byte and end of NAME, PID) of the last `(NAME pid=PID)` in [start, end); an empty name where none is."""
    for i in range(end - 5, start, -1):
        number_at = past(i, PID)
        if number_at >= 0:
            pid, after = whole(number_at, STEP_DIGITS)
            first = i
            while first > start and byte(first - 1) != OPEN and byte(first - 1) != CLOSE:
                first -= 1
            if after >= 0 and first > start and byte(first - 1) == OPEN:
                return first, i, pid
    return start, start, -1


@compiled
def parse_engine(start: int, end: int) -> int:
    """Where the `Engine 000: ` at the end of [start, end) begins, else -1."""
    colon = end - 2
    i = colon
    while i > start and ZERO <= byte(i - 1) <= NINE:
        i -= 1
    first = i - ENGINE_BYTES - 1
    if i == colon or first < start or byte(colon) != POINTS or byte(end - 1) != BLANK or byte(i - 1) != BLANK:
        return -1
    return first if past(first, ENGINE) >= 0 else -1


@compiled
def rank_of(first: int, end: int, ranks: int) -> int:
    """The number at the end of an engine's name, 0 where it has none; -1 for what is no engine of `ranks`."""
    if end - first < ENGINE_BYTES or past(first, ENGINE) < 0:
        return -1
    digits = end
    while digits > first and ZERO <= byte(digits - 1) <= NINE:
        digits -= 1
    number, last = whole(digits, STEP_DIGITS)
    if digits == end:
        return 0
    return number if last >= 0 and number < ranks else -1
