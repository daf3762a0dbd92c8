"""What the engine's core reads and what it changes, as flat arrays that compiled code shares without copies: requests,
running ones in slots, and the KV cache's free blocks.

A running request lives in a slot; slots are in order of admission. `known` tokens are its prompt and what it has
generated, `comp` of them are computed and in the cache, `cap` tokens fit into the blocks it holds. A request that
decodes has known = comp + 1. Everything that must survive preemption is kept by request.

Free blocks are a queue of segments, oldest first, without a name for any single block. A freed request puts its blocks
at the young end, its last ones in front: they are taken first. What matters of a free block is only whose it was, so a
segment (owner, count) stands for a row of them. While a preempted request waits, the blocks of its segment that are
still there hold the front of its sequence, and it takes them back when it resumes. Segments without an owner that lie
next to each other are one. Where contents of prompts are known, a free unit of them is a segment, too: see
`prefix_cache`.

Requests that users send one after the other have no arrival until the one before has ended: then the user thinks, and
the next request takes its place in the source, a queue of requests that will come in order of arrival. The source is
the engine's own inbox, or that of a router which several engines share.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import inner, rare
from latfit.stats import FloatArray, IntArray
from latfit.workload import SERVICE, Streams

SmallIntArray = NDArray[np.int32]
CHUNKED, SELECTIVE, CONTINUOUS, STATIC = range(4)
FCFS, KEYED, FAIR, SWITCH, DEADLINE = range(5)

(
    COUNT, FREE, PUSHED, SEEN, HEAD, STACK, HEAP, HEAP_2, WAITING, OLDEST, NEWEST, STEPS, PREEMPTIONS, FINISHED,
    STEADY, PREFILL_STEPS, PREFILL_TOKENS, TOKENS, REUSED, DRAFTED, ACCEPTED, FULLEST, COMPUTED, QUEUED, ISSUED, STRIDE,
    SHARED, CACHED, COUNTERS,
) = range(29)  # fmt: skip
"""Counters in `State.i`. FREE blocks; PUSHED, SEEN, HEAD: how far the inbox is filled, arrived, and taken (FCFS).
QUEUED: tokens that wait, counted in by a router. CACHED: tokens of prompts that were there when their requests were
first admitted. Of the source: the request that is sent next is number ISSUED, the one after it STRIDE further on;
SHARED is 1 where several engines fill it."""

NOW, BUSY_UNTIL, BUSY, LAST_TOKENS, EXTRA, GAPS, GAPS_MAX, SLICE, ORIGIN, TIMES = range(10)
"""Times in `State.f`, ms. NOW: when the next step is planned. LAST_TOKENS: when those of the last step appeared.
EXTRA: swapping to add to the step being planned."""

GAP_SHIFT = 45
"""Token gaps are counted in bins of 2^-7 of an octave: the float's bits without its last 45."""
GAP_LOWEST = (1023 - 14) << (52 - GAP_SHIFT)
GAP_BINS = (1023 + 30 << (52 - GAP_SHIFT)) - GAP_LOWEST

SLICES = 512
SPENT, RUN, WAIT, USED, MADE = range(5)
"""Rows of the timeline, each weighted by the time of the steps that begin in a slice; MADE counts generated tokens."""

STUCK, ENDED = 2, 3
"""What the core answers where something waits that can never run, and after a step in which a user got an answer."""

INPUT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""Service of a user in fair order: a token generated counts as two of the prompt."""


class Limits(NamedTuple):
    """Settings as numbers; see `EngineSettings`. timed: 1 where the order's key counts from the arrival."""

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
    timed: int
    accept: float
    draft_ms: float
    swap_ms: float


class Load(NamedTuple):
    """The requests, each (n,). cached: tokens at the front whose cache is shared; given: tokens generated elsewhere.
    key, key_2: empty where the order asks for none.  think: time before each is sent, empty where arrivals are known;
    users: who send them, 0 where arrivals are known.  unit: tokens of a known content, 0 where none are known;
    unit_id[unit_start[r]:unit_start[r + 1]]: the contents of request r's prompt, the first first.  known: nothing where
    no contents are, else a number; its length is known when code is compiled, so that code for requests without
    contents holds nothing of what those with them need. Of requests that users have not sent, arrival, user and
    key are written down when they are."""

    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    cached: SmallIntArray
    given: SmallIntArray
    key: FloatArray
    key_2: FloatArray
    user: SmallIntArray
    think: FloatArray
    users: int
    unit: int
    unit_start: IntArray
    unit_id: SmallIntArray
    known: tuple[int, ...]


class State(NamedTuple):
    """Everything that changes. Slots: rid, known, comp, gen, cap, fin, chunk, token_at. By request: gen_of, segment,
    kept, preempted, first, last, start, seen, and what the order of waiting needs.  stream (1,): of the steps' ratios.
    source, source_i: requests that users will send, and its counters.  By content of a unit: unit_at, its segment of
    the free blocks (-1 for none), and unit_uses, requests that hold it.  held: 1 for each unit of a request that it
    holds."""

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
    seen: FloatArray
    seg_owner: IntArray
    seg_count: IntArray
    crossing: IntArray
    gaps: IntArray
    batch: IntArray
    timeline: FloatArray
    stream: NDArray[np.uint64]
    source: SmallIntArray
    source_i: IntArray
    unit_at: SmallIntArray
    unit_uses: SmallIntArray
    held: NDArray[np.int8]


def new_state(limits: Limits, load: Load, inbox: SmallIntArray | None = None, engine: int = 0) -> State:
    """An idle engine. inbox: the requests that will come, in order of arrival; None for one that is filled later.
    engine: which one of several, each of which has random numbers of its own."""
    own = _of_engine(limits, load, engine)
    if inbox is not None:
        own["inbox"][: len(inbox)] = inbox
        own["i"][PUSHED] = len(inbox)
    return State(**own, **_of_requests(limits, load), source=own["inbox"], source_i=own["i"])


def new_states(limits: Limits, load: Load, engines: range, source: SmallIntArray, source_i: IntArray) -> State:
    """Idle engines, by number, with one source: what belongs to an engine is a row (engines, ...), what belongs to a
    request is shared by all, as each request is in one of them."""
    rows = {name: _rows(column, len(engines)) for name, column in _of_engine(limits, load, 0).items()}
    rows["stream"] = np.stack([_stream(limits, engine) for engine in engines])
    return State(**rows, **_of_requests(limits, load), source=source, source_i=source_i)


def _of_engine(limits: Limits, load: Load, engine: int) -> dict[str, Any]:
    """Arrays of one engine."""
    n = len(load.arrival)
    slots = max(min(limits.max_num_seqs, n), 1) + 1
    fair, two = limits.order == FAIR, limits.order in (SWITCH, DEADLINE)
    users = int(load.user.max()) + 1 if fair and n else 1
    counters, times = _ints(COUNTERS), np.zeros(TIMES)
    counters[FREE] = limits.blocks
    counters[NEWEST] = 1
    counters[STRIDE] = 1
    start = float(load.arrival[: max(load.users, 1)].min()) if n else 0.0
    times[[NOW, BUSY_UNTIL, LAST_TOKENS, ORIGIN]] = start, start, -np.inf, start
    times[SLICE] = 1.0
    units = int(load.unit_id.max()) + 1 if len(load.unit_id) else 1
    most = min(units, limits.blocks * limits.block_size // load.unit + 1) if load.unit else 0
    segments = 4 * slots + 64 + 4 * most
    owner, count = _ints(segments, -1), _ints(segments)
    count[0] = limits.blocks
    return {
        "i": counters,
        "f": times,
        **{name: _ints(slots) for name in ("rid", "known", "comp", "gen", "cap", "fin", "chunk", "stack")},
        "token_at": np.zeros(slots),
        "inbox": np.zeros(n, dtype=np.int32),
        "heap": _ints(n if two or limits.order == KEYED else 1),
        "heap_2": _ints(n if two else 1),
        "user_head": _ints(users, -1),
        "user_tail": _ints(users, -1),
        "served": _ints(users),
        "seg_owner": owner,
        "seg_count": count,
        "crossing": _ints(limits.block_size),
        "gaps": _ints(GAP_BINS),
        "batch": _ints(slots + 1),
        "timeline": np.zeros((5, SLICES)),
        "unit_at": np.full(units, -1, dtype=np.int32),
        "unit_uses": np.zeros(units, dtype=np.int32),
        "stream": _stream(limits, engine),
    }


def _stream(limits: Limits, engine: int) -> NDArray[np.uint64]:
    return Streams(limits.seed).generator(SERVICE, engine).integers(2**64, size=1, dtype=np.uint64)


def _rows(column: NDArray[Any], count: int) -> NDArray[Any]:
    """The column so many times; where it is nothing but zeros, memory that is taken when it is written to."""
    found = np.zeros((count, *column.shape), dtype=column.dtype)
    if column.any():
        found[:] = column
    return found


def _of_requests(limits: Limits, load: Load) -> dict[str, Any]:
    """Arrays by request."""
    n = len(load.arrival)
    return {
        "taken": np.zeros(n if limits.order == SWITCH else 1, dtype=np.int8),
        "after": _ints(n if limits.order == FAIR else 1, -1),
        "held": np.zeros(max(len(load.unit_id), 1), dtype=np.int8),
        "gen_of": load.given.copy(),
        "segment": np.full(n, -1, dtype=np.int32),
        "kept": np.zeros(n, dtype=np.int32),
        "preempted": np.zeros(n, dtype=np.int32),
        "first": np.full(n, np.nan),
        "last": np.full(n, np.nan),
        "start": np.full(n, np.nan),
        "seen": np.full(n, np.nan),
    }


def _ints(size: int, value: int = 0) -> IntArray:
    return np.full(size, value, dtype=np.int64)


def engines_of(states: State) -> list[State]:
    """The engines that are made by `new_states`, each with the source that all share."""
    columns: dict[str, Any] = states._asdict()
    own = [name for name, column in columns.items() if column.ndim > 1]
    return [states._replace(**{name: columns[name][k] for name in own}) for k in range(len(states.i))]


@inner
def one_of(states: State, k: int) -> State:
    """Engine k of `engines_of`, in compiled code."""
    a = states
    return State(
        a.i[k], a.f[k], a.rid[k], a.known[k], a.comp[k], a.gen[k], a.cap[k], a.fin[k], a.chunk[k], a.token_at[k],
        a.inbox[k], a.stack[k], a.heap[k], a.heap_2[k], a.taken, a.user_head[k], a.user_tail[k], a.served[k], a.after,
        a.gen_of, a.segment, a.kept, a.preempted, a.first, a.last, a.start, a.seen, a.seg_owner[k],
        a.seg_count[k], a.crossing[k], a.gaps[k], a.batch[k], a.timeline[k], a.stream[k], a.source, a.source_i,
        a.unit_at[k], a.unit_uses[k], a.held,
    )  # fmt: skip


@rare
def send_next(o: Limits, load: Load, s: State, r: int, end: float) -> None:
    """The user whose request r has ended thinks, and sends the next one, if there is one."""
    i = s.source_i
    q = i[ISSUED]
    if q >= len(load.arrival):
        return
    i[ISSUED] = q + i[STRIDE]
    moment = end + load.think[q]
    load.arrival[q], load.user[q] = moment, load.user[r]
    if o.timed == 1:
        load.key[q] += moment
    if o.order == DEADLINE:
        load.key_2[q] += moment
    at = i[PUSHED]
    while at > i[SEEN] and load.arrival[s.source[at - 1]] > moment:
        s.source[at] = s.source[at - 1]
        at -= 1
    s.source[at] = q
    i[PUSHED] += 1


@rare
def send_all(o: Limits, load: Load, s: State) -> float:
    """The users whose requests have ended in the last step think, and send their next ones. When the next request comes
    to a source that is shared, infinite for one that is not."""
    for i in range(s.i[COUNT]):
        if s.chunk[i] > 0 and s.fin[i] == 1 + o.asynchronous:
            send_next(o, load, s, s.rid[i], s.f[LAST_TOKENS])
    counts = s.source_i
    if counts[SHARED] == 0 or counts[SEEN] == counts[PUSHED]:
        return np.inf
    return float(load.arrival[s.source[counts[SEEN]]])


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
        if s.seg_owner[at] != -1:
            disown(s, at)
        if at + 1 == s.i[NEWEST]:
            break
        at += 1
    s.i[OLDEST] = at


@rare
def disown(s: State, at: int) -> None:
    """The segment is nobody's from now on."""
    owner = s.seg_owner[at]
    if owner >= 0:
        s.segment[owner] = -1
    elif owner < -1:
        s.unit_at[-2 - owner] = -1
    s.seg_owner[at] = -1


@inner
def put_back(s: State, owner: int, count: int) -> None:
    """Free blocks, as the segment of `owner`, of nobody (-1), or of content c (-2 - c)."""
    s.i[FREE] += count
    if count == 0:
        return
    young = s.i[NEWEST] - 1
    if owner == -1 and s.seg_owner[young] == -1:
        s.seg_count[young] += count
        return
    if s.i[NEWEST] == len(s.seg_count):
        _compact(s)
    at = s.i[NEWEST]
    s.seg_owner[at], s.seg_count[at] = owner, count
    if owner >= 0:
        s.segment[owner] = at
    elif owner < -1:
        s.unit_at[-2 - owner] = at
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
        if owner == -1 and to > 0 and s.seg_owner[to - 1] == -1:
            s.seg_count[to - 1] += count
            continue
        s.seg_owner[to], s.seg_count[to] = owner, count
        if owner >= 0:
            s.segment[owner] = to
        elif owner < -1:
            s.unit_at[-2 - owner] = to
        to += 1
    if to == 0:
        s.seg_owner[0], s.seg_count[0] = -1, 0
        to = 1
    s.i[OLDEST], s.i[NEWEST] = 0, to
    s.i[FULLEST] = max(s.i[FULLEST], to)
