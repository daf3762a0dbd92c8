"""What the engine's core reads and what it changes, as flat arrays that compiled code shares without copies: requests,
running ones in slots, and the KV cache's free blocks.

A running request lives in a slot; slots are in order of admission. `known` tokens are its prompt and what it has
generated, `comp` of them are computed and in the cache, `cap` tokens fit into the blocks it holds. A request that
decodes has known = comp + 1. Everything that must survive preemption is kept by request.

Free blocks are a queue of segments, oldest first, without a name for any single block. A freed request puts its blocks
at the young end, its last ones in front: they are taken first. What matters of a free block is only whose it was, so a
segment (owner, count) stands for a row of them. While a preempted request waits, the blocks of its segment that are
still there hold the front of its sequence, and it takes them back when it resumes. Segments without an owner that lie
next to each other are one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import inner, rare
from latfit.stats import FloatArray, IntArray
from latfit.workload import SERVICE, Streams

SmallIntArray = NDArray[np.int32]
CHUNKED, SELECTIVE, CONTINUOUS, STATIC = range(4)
FCFS, KEYED, FAIR, SWITCH = range(4)

(
    COUNT, FREE, PUSHED, SEEN, HEAD, STACK, HEAP, HEAP_2, WAITING, OLDEST, NEWEST, STEPS, PREEMPTIONS, FINISHED,
    STEADY, PREFILL_STEPS, PREFILL_TOKENS, TOKENS, REUSED, DRAFTED, ACCEPTED, FULLEST, COMPUTED,
) = range(23)  # fmt: skip
"""Counters in `State.i`. FREE blocks; PUSHED, SEEN, HEAD: how far the inbox is filled, arrived, and taken (FCFS)."""

NOW, BUSY_UNTIL, BUSY, LAST_END, EXTRA, GAPS, GAPS_MAX, SLICE, ORIGIN = range(9)
"""Times in `State.f`, ms. NOW: when the next step is planned. EXTRA: swapping to add to the step being planned."""

GAP_SHIFT = 45
"""Token gaps are counted in bins of 2^-7 of an octave: the float's bits without its last 45."""
GAP_LOWEST = (1023 - 14) << (52 - GAP_SHIFT)
GAP_BINS = (1023 + 30 << (52 - GAP_SHIFT)) - GAP_LOWEST

SLICES = 512
SPENT, RUN, WAIT, USED, MADE = range(5)
"""Rows of the timeline, each weighted by the time of the steps that begin in a slice; MADE counts generated tokens."""

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Service of a user in fair order: a token generated counts as two of the prompt."""


class Limits(NamedTuple):
    """Settings as numbers; see `EngineSettings`."""

    batching: int
    order: int
    max_num_seqs: int
    budget: int
    blocks: int
    block_size: int
    long_prefill: int
    watermark: int
    start_at: int
    prefill_first: int
    asynchronous: int
    reuse: int
    swap: int
    draft: int
    switch_at: int
    seed: int
    fast: int
    graphs: int
    accept: float
    draft_ms: float
    swap_ms: float


class Load(NamedTuple):
    """The requests, each (n,). cached: tokens at the front whose cache is shared; given: tokens generated elsewhere.
    key, key_2: empty where the order asks for none."""

    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    cached: SmallIntArray
    given: SmallIntArray
    key: FloatArray
    key_2: FloatArray
    user: SmallIntArray


class State(NamedTuple):
    """Everything that changes. Slots: rid, known, comp, gen, cap, fin, chunk, token_at. By request: gen_of, segment,
    kept, preempted, first, last, start, and what the order of waiting needs.  stream (1,): of the steps' ratios."""

    i: IntArray
    f: FloatArray
    rid: IntArray
    known: IntArray
    comp: IntArray
    gen: IntArray
    cap: IntArray
    fin: IntArray
    chunk: IntArray
    token_at: FloatArray
    inbox: SmallIntArray
    stack: IntArray
    heap: IntArray
    heap_2: IntArray
    taken: NDArray[np.int8]
    user_head: IntArray
    user_tail: IntArray
    served: IntArray
    after: IntArray
    gen_of: SmallIntArray
    segment: SmallIntArray
    kept: SmallIntArray
    preempted: SmallIntArray
    first: FloatArray
    last: FloatArray
    start: FloatArray
    seg_owner: IntArray
    seg_count: IntArray
    crossing: IntArray
    gaps: IntArray
    batch: IntArray
    timeline: FloatArray
    stream: NDArray[np.uint64]


def new_state(limits: Limits, load: Load, inbox: SmallIntArray | None = None, engine: int = 0) -> State:
    """An idle engine. inbox: the requests that will come, in order of arrival; None for one that is filled later.
    engine: which one of several, each of which has random numbers of its own."""
    n = len(load.arrival)
    slots = max(min(limits.max_num_seqs, n), 1) + 1
    keyed, fair, switch = (limits.order == kind for kind in (KEYED, FAIR, SWITCH))
    users = int(load.user.max()) + 1 if fair and n else 1
    counters, times = _ints(23), np.zeros(9)
    counters[FREE] = limits.blocks
    counters[NEWEST] = 1
    counters[PUSHED] = 0 if inbox is None else len(inbox)
    start = float(load.arrival[0]) if n else 0.0
    times[[NOW, BUSY_UNTIL, LAST_END, ORIGIN]] = start, start, -np.inf, start
    times[SLICE] = 1.0
    segments = 4 * slots + 64
    owner, count = _ints(segments, -1), _ints(segments)
    count[0] = limits.blocks
    return State(
        i=counters,
        f=times,
        rid=_ints(slots),
        known=_ints(slots),
        comp=_ints(slots),
        gen=_ints(slots),
        cap=_ints(slots),
        fin=_ints(slots),
        chunk=_ints(slots),
        token_at=np.zeros(slots),
        inbox=inbox if inbox is not None else np.zeros(n, dtype=np.int32),
        stack=_ints(slots),
        heap=_ints(n if keyed or switch else 1),
        heap_2=_ints(n if switch else 1),
        taken=np.zeros(n if switch else 1, dtype=np.int8),
        user_head=_ints(users, -1),
        user_tail=_ints(users, -1),
        served=_ints(users),
        after=_ints(n if fair else 1, -1),
        gen_of=load.given.copy(),
        segment=np.full(n, -1, dtype=np.int32),
        kept=np.zeros(n, dtype=np.int32),
        preempted=np.zeros(n, dtype=np.int32),
        first=np.full(n, np.nan),
        last=np.full(n, np.nan),
        start=np.full(n, np.nan),
        seg_owner=owner,
        seg_count=count,
        crossing=_ints(limits.block_size),
        gaps=_ints(GAP_BINS),
        batch=_ints(slots + 1),
        timeline=np.zeros((5, SLICES)),
        stream=Streams(limits.seed).generator(SERVICE, engine).integers(2**64, size=1, dtype=np.uint64),
    )


def _ints(size: int, value: int = 0) -> IntArray:
    return np.full(size, value, dtype=np.int64)


@inner
def blocks_for(tokens: int, block_size: int) -> int:
    return (tokens + block_size - 1) // block_size


@inner
def take(s: State, count: int) -> None:
    """Take the oldest free blocks; there must be as many."""
    s.i[FREE] -= count
    at = s.i[OLDEST]
    while count > 0:
        there = s.seg_count[at]
        if there > count:
            s.seg_count[at] = there - count
            break
        count -= there
        s.seg_count[at] = 0
        if s.seg_owner[at] >= 0:
            s.segment[s.seg_owner[at]] = -1
            s.seg_owner[at] = -1
        if at + 1 == s.i[NEWEST]:
            break
        at += 1
    s.i[OLDEST] = at


@inner
def put_back(s: State, owner: int, count: int) -> None:
    """Free blocks, as the segment of `owner`, or of nobody (-1)."""
    s.i[FREE] += count
    if count == 0:
        return
    young = s.i[NEWEST] - 1
    if owner < 0 and s.seg_owner[young] < 0:
        s.seg_count[young] += count
        return
    if s.i[NEWEST] == len(s.seg_count):
        _compact(s)
    at = s.i[NEWEST]
    s.seg_owner[at], s.seg_count[at] = owner, count
    if owner >= 0:
        s.segment[owner] = at
    s.i[NEWEST] = at + 1


@inner
def surviving(s: State, r: int) -> int:
    """Full blocks at the front of a preempted request's sequence that nobody has taken yet."""
    return min(s.seg_count[s.segment[r]], s.kept[r]) if s.segment[r] >= 0 else 0


@inner
def reclaim(s: State, r: int, hits: int) -> None:
    """Take `hits` surviving blocks back; what is left of the segment belongs to nobody."""
    at = s.segment[r]
    if at < 0:
        return
    s.seg_count[at] -= hits
    s.seg_owner[at] = -1
    s.segment[r] = -1
    s.i[FREE] -= hits


@rare
def _compact(s: State) -> None:
    """Move the segments to the front of their arrays; empty ones go, neighbours without an owner merge."""
    to = 0
    s_old = s.i[OLDEST]
    for at in range(s_old, s.i[NEWEST]):
        owner, count = s.seg_owner[at], s.seg_count[at]
        if count == 0 and owner < 0:
            continue
        if owner < 0 and to > 0 and s.seg_owner[to - 1] < 0:
            s.seg_count[to - 1] += count
            continue
        s.seg_owner[to], s.seg_count[to] = owner, count
        if owner >= 0:
            s.segment[owner] = to
        to += 1
    if to == 0:
        s.seg_owner[0], s.seg_count[0] = -1, 0
        to = 1
    s.i[OLDEST], s.i[NEWEST] = 0, to
    s.i[FULLEST] = max(s.i[FULLEST], to)
