"""Whose step is it? Streams (one engine process each), their runs (one engine start each), their clocks, and the size
of their KV caches. Compiled; all of it is kept in one record of `vllm_state.STATE`.
"""

from typing import Any

import numpy as np

from latfit.trace.readers.vllm_bytes import NINE, ZERO, byte, compiled, find, past
from latfit.trace.readers.vllm_state import (
    LABEL_BYTES,
    MOST_RANKS,
    MOST_RUNS,
    MOST_STREAMS,
    NO_TIME,
    TOO_MANY_RUNS,
    TOO_MANY_STREAMS,
)
from latfit.trace.readers.vllm_text import (
    COMMA,
    DAY_S,
    KV_SIZE,
    SERVER,
    SERVER_BYTES,
    START,
    TOKENS,
    parse_engine,
    parse_process,
    rank_of,
)

DAYS_BEFORE = np.array([0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334])
HALF_YEAR_S = 182 * DAY_S
REORDERED_S = 60  # several API servers write into one log, a little out of order; a clock that is set back goes further
REORDERED_STEPS = 16
MOST_TOKENS = 10**15
FNV_START, FNV_PRIME = 14695981039346656037 - 2**64, 1099511628211


@compiled
def stream_of(start: int, end: int, state: Any) -> int:
    """The stream whose steps are preceded by the text [start, end), new or known, or TOO_MANY_STREAMS.

    Engines that write their own lines differ by process. Lines of API servers name the engine, and only where there is
    one server does its process tell one start from another.
    """
    first, last, pid = parse_process(start, end)
    named = parse_engine(start, end)
    if named >= 0:
        alone = last - first == SERVER_BYTES and past(first, SERVER) >= 0
        first, last, pid = named, end - 2, pid if alone else -1
    key = (FNV_START ^ (pid + 1)) * FNV_PRIME
    for i in range(first, last):
        key = (key ^ byte(i)) * FNV_PRIME
    known = int(state.streams_seen)
    for s in range(known):
        if state.streams[s].key == key:
            return s
    if known == MOST_STREAMS:
        return TOO_MANY_STREAMS
    state.streams_seen += 1
    stream = state.streams[known]
    stream.key = key
    stream.run = -1
    stream.rank = rank_of(first, last, MOST_RANKS)
    stream.label_bytes = min(last - first, LABEL_BYTES)
    for k in range(stream.label_bytes):
        state.labels[known, k] = byte(first + k)
    return known


@compiled
def run_of(state: Any, s: int, step: int) -> int:
    """The run that `step` of stream `s` belongs to: new where the counter starts again or a start-up line came."""
    stream = state.streams[s]
    again = step < stream.highest_step - REORDERED_STEPS or (step == 0 and stream.seen_zero and stream.highest_step > 0)
    if stream.run < 0 or stream.restarted or again:
        if state.runs_seen == MOST_RUNS:
            return TOO_MANY_RUNS
        rank = stream.rank if state.capacities[stream.rank].tokens > 0 else -1
        state.capacities[rank].used = True
        stream.run = state.runs_seen
        state.runs_seen += 1
        state.runs[stream.run].stream = s
        state.runs[stream.run].capacity = state.capacities[rank].tokens
        stream.highest_step = step
        stream.seen_zero = False
        stream.restarted = False
        stream.timed = False
        stream.leap = False
        stream.shift_s = 0
    stream.highest_step = max(stream.highest_step, step)
    stream.seen_zero |= step == 0
    return int(stream.run)


@compiled
def seconds_of(stream: Any, time: int) -> float:
    """Seconds from the first step of the stream's run, never decreasing, though the clock has no year."""
    if time == NO_TIME:
        return np.nan
    days, second = divmod(time, DAY_S)
    month, day = days // 32, days % 32
    stream.leap |= month == 2 and day == 29
    now = (DAYS_BEFORE[month] + day + (stream.leap and month > 2)) * DAY_S + second + stream.shift_s
    if not stream.timed:
        stream.timed = True
        stream.start_s = now
        stream.latest_s = now
    behind = stream.latest_s - now
    if behind > HALF_YEAR_S:
        year_s = (365 + stream.leap) * DAY_S
        stream.shift_s += year_s
        now += year_s
        stream.leap = False
    elif behind > REORDERED_S:
        stream.shift_s += behind
    elif behind < -HALF_YEAR_S:
        now = stream.latest_s
    stream.latest_s = max(stream.latest_s, now)
    return float(stream.latest_s - stream.start_s)


@compiled
def note(at: int, end: int, state: Any) -> None:
    """What a line that is no step says of an engine: that it starts, or how many tokens its KV cache holds."""
    size = find(at, end, KV_SIZE)
    starts = find(at, end, START) >= 0
    if size < 0 and not starts:
        return
    first, last, _ = parse_process(at, end)
    rank = rank_of(first, last, MOST_RANKS)
    if starts:
        for s in range(state.streams_seen):
            state.streams[s].restarted |= rank < 0 or state.streams[s].rank == rank
        return
    tokens, i = 0, past(size, KV_SIZE)
    while byte(i) == COMMA or ZERO <= byte(i) <= NINE:
        if byte(i) != COMMA:
            tokens = 10 * min(tokens, MOST_TOKENS) + byte(i) - ZERO
        i += 1
    if tokens == 0 or past(i, TOKENS) < 0:
        return
    capacity = state.capacities[rank]
    if capacity.used or capacity.tokens == 0:
        capacity.tokens = tokens
        capacity.used = False
    else:  # one of several workers of a start: the engine goes by the smallest
        capacity.tokens = min(capacity.tokens, tokens)
