"""What the next step does: which requests run in it, with how many tokens each.

Chunked: running requests first, in order of admission; the waiting ones get what is left of the token budget, the last
of them a part of its prompt. Where blocks run out the running request admitted last gives up its own, which may be the
one that asked; a step that preempts admits nobody. A request is admitted if all its known tokens would fit, though it
takes blocks only for its first chunk; if not, the queue stops: nobody is passed over.
Selective: whole prompts beside decoding, with room for the whole output set aside, so nothing is ever preempted. A
prompt that is longer than the budget is the only one of its step, there and in continuous batching.
Continuous: a step either prefills whole prompts or decodes. Prefill first: as soon as `start_at` requests wait, or
nothing runs. Decode first: when nothing runs any more.
"""

import numpy as np

from latfit.sim.engine.blocks import blocks_for, put_back, reclaim, surviving, take
from latfit.sim.engine.cost import Work
from latfit.sim.engine.state import (
    CHUNKED,
    CONTINUOUS,
    COUNT,
    EXTRA,
    FREE,
    PREEMPTIONS,
    REUSED,
    SELECTIVE,
    WAITING,
    Limits,
    Load,
    State,
    njit,
    rare,
)
from latfit.sim.engine.waiting import peek, pop, push_front

NOTHING = Work(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@njit
def with_chunk(w: Work, chunk: int, comp: int, decodes: bool) -> Work:
    """The work of a step with one more request that computes `chunk` tokens behind `comp` cached ones."""
    p, k = float(chunk), float(comp)
    if decodes:
        return Work(w.B + 1.0, w.S + p, w.n, w.P, w.KP, w.KD + k, w.A, w.L)
    return Work(
        w.B + 1.0, w.S + p, w.n + 1.0, w.P + p, w.KP + k, w.KD, w.A + p * (k + 0.5 * p), max(w.L, k + p)
    )  # fmt: skip


@njit
def plan(o: Limits, load: Load, s: State) -> Work:
    """Fill `chunk` of every slot and take the blocks for it; the work of the step, with B = 0 where there is none."""
    if o.batching == CONTINUOUS and _prefills_now(o, s):
        for i in range(s.i[COUNT]):
            s.chunk[i] = 0
        work, _ = admit(o, load, s, NOTHING, o.budget)
        if work.B > 0:
            return work  # type: ignore[no-any-return]
    preempted = s.i[PREEMPTIONS]
    work, budget = run(o, load, s)
    if o.batching != CONTINUOUS and s.i[PREEMPTIONS] == preempted:
        work, budget = admit(o, load, s, work, budget)
    return work  # type: ignore[no-any-return]


@njit
def _prefills_now(o: Limits, s: State) -> bool:
    if s.i[WAITING] == 0:
        return False
    return bool(s.i[COUNT] == 0 or (o.prefill_first == 1 and s.i[WAITING] >= o.start_at))


@njit
def run(o: Limits, load: Load, s: State) -> tuple[Work, int]:
    """Plan the running requests; the work, and the tokens that are left of the budget."""
    work, budget, i = NOTHING, o.budget, 0
    while i < s.i[COUNT]:
        left = s.known[i] - s.comp[i]
        chunk = left + (o.draft if left == 1 else 0)
        if o.batching == CHUNKED:
            if left > 1 and o.long_prefill > 0:
                chunk = min(chunk, o.long_prefill)
            chunk = min(chunk, budget)
        if s.fin[i] > 0 or chunk <= 0:
            s.chunk[i] = 0
            i += 1
            continue
        if not _make_room(o, s, i, s.comp[i] + chunk):
            break
        s.chunk[i] = chunk
        budget -= chunk
        work = with_chunk(work, chunk, s.comp[i], left == 1)
        i += 1
    return work, budget


@njit
def _make_room(o: Limits, s: State, i: int, tokens: int) -> bool:
    """Blocks for `tokens` of slot i, preempting from the end while there are too few; False once i itself is out."""
    while tokens > s.cap[i]:
        need = blocks_for(tokens - s.cap[i], o.block_size)
        if need <= s.i[FREE]:
            take(s, need)
            s.cap[i] += need * o.block_size
            return True
        victim = s.i[COUNT] - 1
        preempt(o, s, victim)
        if victim == i:
            return False
    return True


@rare
def preempt(o: Limits, s: State, i: int) -> None:
    """Take the last slot's blocks and put its request in front of the waiting ones, unless it has just finished."""
    r = s.rid[i]
    held = s.cap[i] // o.block_size
    s.i[COUNT] -= 1
    s.i[PREEMPTIONS] += 1
    if s.fin[i] > 0:
        put_back(s, -1, held)
        return
    s.gen_of[r] = s.gen[i]
    s.last[r] = s.token_at[i]
    s.preempted[r] += 1
    push_front(s, r)
    if o.swap == 1:
        s.kept[r] = s.comp[i]
        s.f[EXTRA] += o.swap_ms * s.comp[i]
        put_back(s, -1, held)
        return
    s.kept[r] = s.comp[i] // o.block_size
    put_back(s, r if o.reuse == 1 else -1, held)


@njit
def admit(o: Limits, load: Load, s: State, work: Work, budget: int) -> tuple[Work, int]:
    """Admit waiting requests while there are slots, tokens and blocks; the work with them, and the tokens left."""
    whole = o.batching != CHUNKED
    while budget > 0 and s.i[COUNT] < o.max_num_seqs:
        r = peek(o, load, s)
        if r < 0 or blocks_to_admit(o, load, s, r) > s.i[FREE] - o.watermark:
            break
        known = load.prompt[r] + s.gen_of[r]
        hits = 0 if o.swap == 1 else min(surviving(s, r), (known - 1) // o.block_size)
        comp = _computed(o, load, s, r, known, hits)
        left = known - comp
        if whole and left > budget and work.n > 0:
            break
        chunk = left
        if not whole:
            chunk = min(min(left, o.long_prefill) if o.long_prefill > 0 else left, budget)
        pop(o, load, s, r)
        _enter(o, load, s, r, known, comp)
        i = s.i[COUNT] - 1
        room = blocks_for(known if whole else comp + chunk, o.block_size)
        if o.batching == SELECTIVE:
            room = blocks_to_admit(o, load, s, r)
        reclaim(s, r, hits)
        s.i[REUSED] += hits * o.block_size
        take(s, room - hits)
        s.cap[i] = room * o.block_size
        s.chunk[i] = chunk
        budget -= chunk
        work = with_chunk(work, chunk, comp, left == 1)
    return work, budget


@njit
def blocks_to_admit(o: Limits, load: Load, s: State, r: int) -> int:
    """Blocks that must be free before a request may start: for its known tokens, or for all it will ever have."""
    if o.batching == SELECTIVE:
        return int(blocks_for(load.prompt[r] + load.output[r] - 1 + o.draft, o.block_size))
    return int(blocks_for(load.prompt[r] + s.gen_of[r], o.block_size))


@njit
def _computed(o: Limits, load: Load, s: State, r: int, known: int, hits: int) -> int:
    """Tokens whose keys and values are there when the request starts or resumes."""
    if s.preempted[r] > 0:
        if o.swap == 1:
            s.f[EXTRA] += o.swap_ms * s.kept[r]
            return int(s.kept[r])
        if load.given[r] > 0:
            return int(hits * o.block_size)
    return int(max(hits * o.block_size, min(load.cached[r], known - 1)))


@njit
def _enter(o: Limits, load: Load, s: State, r: int, known: int, comp: int) -> None:
    i = s.i[COUNT]
    s.i[COUNT] = i + 1
    s.rid[i], s.known[i], s.comp[i], s.gen[i] = r, known, comp, s.gen_of[r]
    s.fin[i] = 0
    s.token_at[i] = s.last[r] if s.preempted[r] > 0 else np.nan
