"""The compiled scan of a vLLM log: one pass over bytes that are whole lines.

A line is first tried against the beginnings of recent steps' lines, which repeat: the same engine within the same
second. Where one fits, `Iteration(` follows at once, and nothing is searched. Every other line is searched for a step,
and for the two start-up lines that matter: a new engine, and the size of its KV cache.

Steps are sorted into streams (one engine process each), and a stream's steps into runs (one engine start each), on the
way, so that nothing but the rows grows with the log. A stream's run, clock and KV cache are kept in one record of
`state.STATE`.
"""

import inspect
import sys
import zlib
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

from latfit.trace.readers.vllm import state as records, tokens as tokeniser
from latfit.trace.readers.vllm.state import (
    LABEL_BYTES,
    MOST_RANKS,
    MOST_RUNS,
    MOST_STREAMS,
    NO_TIME,
    PREFIX_WORDS,
    PREFIXES,
    TOO_MANY_RUNS,
    TOO_MANY_STREAMS,
)
from latfit.trace.readers.vllm.tokens import (
    CLOCK_BYTES,
    COMMA,
    DASH,
    DAY_S,
    DUMMY,
    KV_SIZE,
    NEWLINE,
    NINE,
    OPEN,
    SERVER,
    SERVER_BYTES,
    START,
    STEP,
    TOKENS,
    ZERO,
    byte,
    clock,
    compiled,
    find,
    find_clock,
    newline,
    parse_encoders,
    parse_engine,
    parse_process,
    parse_step,
    parse_usage,
    past,
    rank_of,
    without_ansi,
    word,
)
from latfit.trace.table import Array

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


Found = tuple[int, int, int, int, int, int, float]

RETURN = 13
SMALL_N, BIG_K, BIG_V, FIGURE_1 = (ord(mark) for mark in "nKV1")
LOOK_BACK = 512  # how far before a step its engine and time are looked for


@compiled
def _store(found: Found, s: int, time: int, state: Any, row: Any) -> int:
    """Write a step of stream `s` into `row`; returns the position past it, or TOO_MANY_RUNS."""
    after, step, context_requests, context_tokens, requests, tokens, ms = found
    run = run_of(state, s, step)
    if run < 0:
        return TOO_MANY_RUNS
    dummy = past(after, DUMMY) >= 0
    usage, after = parse_usage(past(after, DUMMY) if dummy else after)
    inputs, embeddings, after = parse_encoders(after)
    row.B = context_requests + requests
    row.S = context_tokens + tokens
    row.T_ms = ms
    row.t_s = seconds_of(state.streams[s], time)
    row.run = run
    row.phase = (1 if requests > 0 else 0) + (2 if context_requests > 0 else 0)
    row.prefill_requests = context_requests
    row.prefill_tokens = context_tokens
    row.step = step
    row.dummy = dummy
    row.kv_usage = usage
    row.encoder_inputs = max(inputs, 0)
    row.encoder_embeddings = max(embeddings, 0)
    state.dummies += dummy
    state.with_time += time != NO_TIME
    state.with_usage += not np.isnan(usage)
    state.with_encoders += inputs >= 0
    state.steps += 1
    return after


@compiled
def _known(at: int, state: Any) -> tuple[int, int]:
    """(place in `prefixes` of the one that the line at `at` begins with, position past `Iteration(`), or (-1, -1)."""
    for offset in range(PREFIXES):
        k = (state.latest + offset) % PREFIXES
        prefix = state.prefixes[k]
        inside = past(at + prefix.size, STEP) if prefix.size >= 0 else -1
        if inside < 0:
            continue
        different = 0
        for w in range((prefix.size + 7) // 8):
            different |= (word(at + 8 * w) & prefix.masks[w]) ^ prefix.words[w]
        if different == 0 and (prefix.clock_at < 0 or _clock_read(at + prefix.clock_at, prefix)):
            state.latest = k
            return k, inside
    return -1, -1


@compiled
def _clock_read(at: int, prefix: Any) -> bool:
    """Whether there is a time at `at`, which becomes that of `prefix`."""
    first, last = word(at), word(at + CLOCK_BYTES - 8)
    if first != prefix.clock[0] or last != prefix.clock[1]:
        time = clock(at)
        if time == NO_TIME:
            return False
        prefix.time = time
        prefix.clock[0] = first
        prefix.clock[1] = last
    return True


@compiled
def _remember(start: int, end: int, clock_at: int, s: int, state: Any) -> None:
    """Keep the text [start, end) as the beginning of lines of stream `s`, in the place of the same stream's last one.

    Not where it is long, or something like a date follows its time: then another time might be its last.
    """
    if end - start > 8 * PREFIX_WORDS or (clock_at >= 0 and byte(clock_at + CLOCK_BYTES) == DASH):
        return
    place = -1
    for k in range(PREFIXES):
        if state.prefixes[k].size >= 0 and state.prefixes[k].stream == s:
            place = k
    if place < 0:
        place = state.oldest
        state.oldest = (place + 1) % PREFIXES
    state.latest = place
    prefix = state.prefixes[place]
    prefix.size = end - start
    prefix.stream = s
    prefix.clock_at = clock_at - start if clock_at >= 0 else -1
    prefix.time = NO_TIME
    prefix.clock[0] = 0
    for w in range((end - start + 7) // 8):
        mask = 0
        for k in range(8):
            at = start + 8 * w + k
            if at < end and not (clock_at >= 0 and clock_at <= at < clock_at + CLOCK_BYTES):
                mask |= 0xFF << 8 * k
        prefix.masks[w] = mask
        prefix.words[w] = word(start + 8 * w) & mask


@compiled
def _other_line(at: int, state: Any, row: Any) -> int:
    """Where to read on after a line without a known beginning, or after the first step in it, which goes into `row`."""
    end = newline(at)
    step_like, note_like = False, False
    for i in range(at, end - 1):
        one, two = byte(i), byte(i + 1)
        step_like |= (one == SMALL_N) & (two == OPEN)  # as in Iteration(
        note_like |= ((one == BIG_K) & (two == BIG_V)) | ((one == BIG_V) & (two == FIGURE_1))  # as in KV, V1
    hit = find(at, end, STEP) if step_like else -1
    while hit >= 0:
        inside = past(hit, STEP)
        found = parse_step(inside)
        if found[0] >= 0:
            start = max(at, hit - LOOK_BACK)
            s = stream_of(start, hit, state)
            if s < 0:
                return TOO_MANY_STREAMS
            clock_at = find_clock(start, hit)
            _remember(at, hit, clock_at, s, state)
            return _store(found, s, clock(clock_at) if clock_at >= 0 else NO_TIME, state, row)
        state.cut += ZERO <= byte(inside) <= NINE
        hit = find(inside, end, STEP)
    if note_like:
        note(at, end, state)
    return end


def _compiled_scan(parts: int) -> Callable[[int, int, bool, Array, Array], int]:
    """`scan`, kept on disk as machine code under the version of its parts.

    The cache of machine code notices changes of the function's own file, and of what it closes over: `parts`.
    """

    def scan(at: int, end: int, coloured: bool, states: Array, rows: Array) -> int:
        if parts < 0:
            return 0
        if coloured:
            end = without_ansi(at, end)
        state = states[0]
        filled = 0
        while 0 <= at < end:
            if byte(at) == NEWLINE:
                state.lines += 1
                at += 1
                continue
            if byte(at) == RETURN and byte(at + 1) == NEWLINE:
                at += 1
                continue
            before = state.steps
            k, inside = _known(at, state)
            found = parse_step(inside)
            if found[0] >= 0:
                at = _store(found, state.prefixes[k].stream, state.prefixes[k].time, state, rows[filled])
            else:
                at = _other_line(at, state, rows[filled])
            filled += state.steps - before
        return filled if at >= 0 else at

    try:
        return cast(Callable[..., int], numba.njit(nogil=True, cache=True)(scan))
    except RuntimeError:  # there is no place to keep it that can be written to
        return compiled(scan)


scan = _compiled_scan(zlib.crc32("".join(map(inspect.getsource, (records, tokeniser, sys.modules[__name__]))).encode()))
"""(address, its end, whether there are ANSI sequences, state, rows) → number of rows written, TOO_MANY_STREAMS or
TOO_MANY_RUNS. What lies there must be whole lines; its ANSI sequences are taken out of it."""
