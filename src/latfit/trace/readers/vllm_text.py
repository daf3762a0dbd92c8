"""The words of a vLLM log's lines: steps, and what stands before them. Compiled; see `vllm_bytes`."""

import numpy as np

from latfit.trace.readers.vllm_bytes import NEWLINE, NINE, ZERO, byte, compiled, decimal, literal, past, whole
from latfit.trace.readers.vllm_state import NO_TIME

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
