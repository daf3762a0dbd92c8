"""The compiled scan of a vLLM log: one pass over bytes that are whole lines.

A line is first tried against the beginnings of recent steps' lines, which repeat: the same engine within the same
second. Where one fits, `Iteration(` follows at once, and nothing is searched. Every other line is searched for a step,
and for the two start-up lines that matter: a new engine, and the size of its KV cache.

Steps are sorted into streams (one engine process each), and a stream's steps into runs (one engine start each), on the
way, so that nothing but the rows grows with the log.
"""

import inspect
import zlib
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

from latfit.trace.readers import vllm_bytes, vllm_runs, vllm_state, vllm_text
from latfit.trace.readers.vllm_bytes import NEWLINE, NINE, ZERO, byte, compiled, find, newline, past, without_ansi, word
from latfit.trace.readers.vllm_runs import note, run_of, seconds_of, stream_of
from latfit.trace.readers.vllm_state import NO_TIME, PREFIX_WORDS, PREFIXES, TOO_MANY_RUNS, TOO_MANY_STREAMS
from latfit.trace.readers.vllm_text import (
    CLOCK_BYTES,
    DASH,
    DUMMY,
    OPEN,
    STEP,
    clock,
    find_clock,
    parse_encoders,
    parse_step,
    parse_usage,
)
from latfit.trace.table import Array

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


scan = _compiled_scan(
    zlib.crc32("".join(map(inspect.getsource, (vllm_bytes, vllm_runs, vllm_state, vllm_text))).encode())
)
"""(address, its end, whether there are ANSI sequences, state, rows) → number of rows written, TOO_MANY_STREAMS or
TOO_MANY_RUNS. What lies there must be whole lines; its ANSI sequences are taken out of it."""
