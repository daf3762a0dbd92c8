"""Plan the next step of an engine: docs/concepts/simulation.md, "What is simulated".

Chunked prefill (vLLM V1), selective (whole prompts with decoding, output space reserved), continuous (a step prefills
or decodes), static batches.
"""

import numpy as np

from latfit.compiled import entry, inner, rare
from latfit.simulation.engine import prefix_cache as cache, state as st
from latfit.simulation.engine.state import Limits, Load, State
from latfit.simulation.engine.statistics import count_gaps, note_step
from latfit.simulation.engine.step_cost import StepCosts, Work, drawn_ms, phase_row
from latfit.simulation.heap import pop as heap_pop, push
from latfit.stats import FloatArray, IntArray


@inner
def absorb(o: Limits, load: Load, s: State, now: float) -> int:
    """Queue the requests that have arrived by `now`; return their number."""
    before = s.i[st.SEEN]
    while s.i[st.SEEN] < s.i[st.PUSHED] and load.arrival[s.inbox[s.i[st.SEEN]]] <= now:
        r = s.inbox[s.i[st.SEEN]]
        s.i[st.SEEN] += 1
        s.seen[r] = now
        if o.order == st.KEYED or o.order == st.SWITCH or o.order == st.DEADLINE:
            push(s.heap, s.i, st.HEAP, load.key, r)
        if o.order == st.SWITCH:
            push(s.heap_2, s.i, st.HEAP_2, load.key_2, r)
        elif o.order == st.FAIR:
            _queue(load, s, r)
    s.i[st.WAITING] += s.i[st.SEEN] - before
    return int(s.i[st.SEEN] - before)


@inner
def peek(o: Limits, load: Load, s: State) -> int:
    if s.i[st.WAITING] == 0:
        return -1
    if s.i[st.STACK] > 0:
        return int(s.stack[s.i[st.STACK] - 1])
    if o.order == st.FCFS:
        return int(s.inbox[s.i[st.HEAD]])
    if o.order == st.KEYED:
        return int(s.heap[0])
    if o.order == st.FAIR:
        return int(s.user_head[_least_served(s)])
    if o.order == st.DEADLINE:
        while s.i[st.HEAP] > 0 and load.key[s.heap[0]] <= s.f[st.NOW]:
            push(s.heap_2, s.i, st.HEAP_2, load.key_2, heap_pop(s.heap, s.i, st.HEAP, load.key))
        return int(s.heap_2[0] if s.i[st.HEAP_2] > 0 else s.heap[0])
    if s.i[st.WAITING] < o.switch_at:
        return int(_first_left(s, s.heap, st.HEAP, load.key))
    return int(_first_left(s, s.heap_2, st.HEAP_2, load.key_2))


@inner
def pop(o: Limits, load: Load, s: State, r: int) -> None:
    """Remove the request that `peek` returned."""
    s.i[st.WAITING] -= 1
    if s.i[st.STACK] > 0:
        s.i[st.STACK] -= 1
    elif o.order == st.FCFS:
        s.i[st.HEAD] += 1
    elif o.order == st.DEADLINE and s.i[st.HEAP_2] > 0:
        heap_pop(s.heap_2, s.i, st.HEAP_2, load.key_2)
    elif o.order == st.KEYED or o.order == st.DEADLINE:
        heap_pop(s.heap, s.i, st.HEAP, load.key)
    elif o.order == st.FAIR:
        s.user_head[load.user[r]] = s.after[r]
    else:
        s.taken[r] = 1


@rare
def _queue(load: Load, s: State, r: int) -> None:
    user = load.user[r]
    s.after[r] = -1
    if s.user_head[user] < 0:
        least = _least_served(s)
        if least >= 0:
            s.served[user] = max(s.served[user], s.served[least])
        s.user_head[user] = r
    else:
        s.after[s.user_tail[user]] = r
    s.user_tail[user] = r


@inner
def _least_served(s: State) -> int:
    """Return the waiting user with the least service (ties: the lowest number), or -1."""
    best = -1
    for user in range(len(s.served)):
        if s.user_head[user] >= 0 and (best < 0 or s.served[user] < s.served[best]):
            best = user
    return best


@rare
def _first_left(s: State, heap: IntArray, place: int, key: FloatArray) -> int:
    """Drop requests that were taken by the other key; return the first that is left."""
    while s.taken[heap[0]] == 1:
        heap_pop(heap, s.i, place, key)
    return int(heap[0])


@entry
def advance_static(o: Limits, load: Load, costs: StepCosts, s: State) -> int:
    """Serve all requests of the inbox in static batches; returns 0 as `advance` does."""
    head = 0
    while head < s.i[st.PUSHED]:
        n = s.i[st.PUSHED]
        start_at = min(head + o.start_at, n) - 1
        now = max(s.f[st.NOW], load.arrival[s.inbox[start_at]])
        arrived = head
        while arrived < n and load.arrival[s.inbox[arrived]] <= now:
            arrived += 1
        size, prompt, output = _fitting(o, load, s, head, arrived)
        s.f[st.NOW] = now
        s.i[st.COUNT], s.i[st.WAITING], s.i[st.SEEN] = size, arrived - head - size, head + size
        s.i[st.FREE] = o.blocks - size * st.blocks_for(prompt + output - 1, o.block_size)
        _make_batch(o, load, costs, s, (head, size, prompt, output))
        head += size
        s.f[st.NOW] = s.f[st.BUSY_UNTIL]
    s.i[st.COUNT], s.i[st.WAITING], s.i[st.FREE] = 0, 0, o.blocks
    return 0


@inner
def _fitting(o: Limits, load: Load, s: State, head: int, arrived: int) -> tuple[int, int, int]:
    """Return how many waiting requests from `head` on fit into a batch, with longest prompt and output."""
    size, prompt, output = 0, 0, 0
    while head + size < arrived and size < o.max_num_seqs:
        r = s.inbox[head + size]
        longer, further = max(prompt, load.prompt[r]), max(output, load.output[r])
        if size > 0 and (size + 1) * st.blocks_for(longer + further - 1, o.block_size) > o.blocks:
            break
        size, prompt, output = size + 1, longer, further
    return size, prompt, output


@inner
def _make_batch(o: Limits, load: Load, costs: StepCosts, s: State, batch: tuple[int, int, int, int]) -> None:
    """Run a static batch: (first place in the inbox, size, longest prompt, longest output)."""
    head, size, prompt, output = batch
    B, p = float(size), float(prompt)
    left = size
    for step in range(output):
        begin = s.f[st.NOW] if step == 0 else s.f[st.BUSY_UNTIL]
        if step == 0 and prompt > 1:
            work = Work(B, B * p, B, B * p, 0.0, 0.0, B * p * 0.5 * p, p)
        else:
            work = Work(B, B, 0.0, 0.0, 0.0, B * (p + float(step) - 1.0), 0.0, 0.0)
        duration = drawn_ms(costs, s, work)
        out = begin + duration - min(costs.host_ms[phase_row(work.P, work.S)], duration)
        made = left
        for k in range(head, head + size):
            r = s.inbox[k]
            if step == 0:
                s.seen[r], s.start[r], s.first[r] = load.arrival[r], begin, out
            if load.output[r] == step + 1:
                s.last[r] = out
                s.i[st.FINISHED] += 1
                left -= 1
                if load.users > 0:
                    st.send_next(o, load, s, r, out)
        if step > 0:
            count_gaps(s, out - s.f[st.LAST_TOKENS], made)
        note_step(o, s, work, made, (begin, duration, out))


NOTHING = Work(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@inner
def with_chunk(w: Work, chunk: int, comp: int, decodes: bool) -> Work:
    """Add a request that computes `chunk` tokens behind `comp` cached ones to the work of a step."""
    p, k = float(chunk), float(comp)
    if decodes:
        return Work(w.B + 1.0, w.S + p, w.n, w.P, w.KP, w.KD + k, w.A, w.L)
    work = w.A + p * (k + 0.5 * p)
    return Work(w.B + 1.0, w.S + p, w.n + 1.0, w.P + p, w.KP + k, w.KD, work, max(w.L, k + p))


@inner
def plan(o: Limits, load: Load, s: State) -> Work:
    """Set the chunk of every slot and take its blocks; return the work, B = 0 if there is nothing to do."""
    waiting = s.i[st.WAITING]
    if o.batching == st.CONTINUOUS and waiting > 0 and (s.i[st.COUNT] == 0 or waiting >= o.start_at):
        for i in range(s.i[st.COUNT]):
            s.chunk[i] = 0
        work, _ = admit(o, load, s, NOTHING, o.budget)
        if work.B > 0:
            return work  # type: ignore[no-any-return]
    preempted = s.i[st.PREEMPTIONS]
    work, budget = run(o, load, s)
    if len(load.known) > 0:
        cache.name_planned(o, load, s)
    if o.batching != st.CONTINUOUS and s.i[st.PREEMPTIONS] == preempted:
        work, budget = admit(o, load, s, work, budget)
    return work  # type: ignore[no-any-return]


@inner
def run(o: Limits, load: Load, s: State) -> tuple[Work, int]:
    """Plan the running requests; return the work and the rest of the token budget."""
    work, budget, i = NOTHING, o.budget, 0
    while i < s.i[st.COUNT]:
        left = s.known[i] - s.comp[i]
        chunk = left + (o.draft if left == 1 and s.gen[i] > 0 else 0)
        if o.batching == st.CHUNKED:
            if left > 1 and o.long_prefill > 0:
                chunk = min(chunk, o.long_prefill)
            chunk = min(chunk, budget)
        if s.fin[i] > 0 or chunk <= 0:
            s.chunk[i] = 0
            i += 1
            continue
        if not _make_room(o, load, s, i, s.comp[i] + chunk):
            break
        s.chunk[i] = chunk
        budget -= chunk
        work = with_chunk(work, chunk, s.comp[i], left == 1)
        i += 1
    return work, budget


@inner
def _make_room(o: Limits, load: Load, s: State, i: int, tokens: int) -> bool:
    """Get blocks for `tokens` of slot i, preempting from the end; False if slot i itself is preempted."""
    while tokens > s.cap[i]:
        need = st.blocks_for(tokens - s.cap[i], o.block_size)
        if need <= s.i[st.FREE]:
            st.take(s, need)
            s.cap[i] += need * o.block_size
            return True
        victim = s.i[st.COUNT] - 1
        preempt(o, load, s, victim)
        if victim == i:
            return False
    return True


@rare
def preempt(o: Limits, load: Load, s: State, i: int) -> None:
    """Free the last slot's blocks and requeue its request in front, unless it has just finished."""
    r = s.rid[i]
    held = s.cap[i] // o.block_size
    s.i[st.COUNT] -= 1
    s.i[st.PREEMPTIONS] += 1
    if s.fin[i] > 0:
        cache.give_back(o, load, s, r, held)
        return
    s.gen_of[r] = s.gen[i]
    s.last[r] = s.token_at[i]
    s.preempted[r] += 1
    s.stack[s.i[st.STACK]] = r
    s.i[st.STACK] += 1
    s.i[st.WAITING] += 1
    s.i[st.QUEUED] += s.known[i]
    owner = r if o.reuse == 1 else -1
    if o.swap == 1:
        s.kept[r] = s.comp[i]
        s.f[st.EXTRA] += o.swap_ms * s.comp[i]
        cache.give_back(o, load, s, r, held)
    elif len(load.known) > 0:
        s.kept[r] = cache.behind_units(o, load, s, r, s.comp[i])
        cache.give_back_units(o, load, s, r, held, owner if s.kept[r] > 0 else -1)
    else:
        s.kept[r] = s.comp[i] // o.block_size
        st.put_back(s, owner, held)


@inner
def admit(o: Limits, load: Load, s: State, work: Work, budget: int) -> tuple[Work, int]:
    """Admit waiting requests while slots, tokens and blocks last; return the new work and the rest of the budget."""
    whole = o.batching != st.CHUNKED
    while budget > 0 and s.i[st.COUNT] < o.max_num_seqs:
        r = peek(o, load, s)
        if r < 0 or blocks_to_admit(o, load, s, r) > s.i[st.FREE]:
            break
        known = load.prompt[r] + s.gen_of[r]
        units = cache.units_there(o, load, s, r)
        shared = units * (load.unit // o.block_size)
        hits = 0 if o.swap == 1 else min(st.surviving(s, r), (known - 1) // o.block_size - shared)
        if len(load.known) > 0 and units < load.unit_start[r + 1] - load.unit_start[r]:
            hits = 0
        comp = _computed(o, load, s, r, known, hits + shared)
        left = known - comp
        if whole and left > budget and work.n > 0:
            break
        chunk = left if whole else min(left, budget, o.long_prefill if o.long_prefill > 0 else left)
        pop(o, load, s, r)
        if s.preempted[r] > 0:
            s.i[st.QUEUED] -= known
            s.i[st.REUSED] += (hits + shared) * o.block_size
        else:
            s.i[st.QUEUED] -= known - min(load.cached[r], known - 1)
            s.i[st.CACHED] += comp if load.given[r] == 0 else 0
        i = s.i[st.COUNT]
        s.i[st.COUNT] += 1
        s.rid[i], s.known[i], s.comp[i], s.gen[i], s.fin[i] = r, known, comp, s.gen_of[r], 0
        s.token_at[i] = s.last[r] if s.preempted[r] > 0 else np.nan
        room = _blocks_of(o, load, s, r) if whole else st.blocks_for(comp + chunk, o.block_size)
        st.reclaim(s, r, hits)
        if len(load.known) > 0:
            cache.hold_units(o, load, s, r, units)
        st.take(s, room - hits - shared)
        if len(load.known) > 0:
            cache.name_units(o, load, s, r, comp, comp + chunk)
        s.cap[i] = room * o.block_size
        s.chunk[i] = chunk
        budget -= chunk
        work = with_chunk(work, chunk, comp, left == 1)
    return work, budget


@inner
def blocks_to_admit(o: Limits, load: Load, s: State, r: int) -> int:
    return int(_blocks_of(o, load, s, r) - cache.blocks_shared(o, load, s, r))


@inner
def _blocks_of(o: Limits, load: Load, s: State, r: int) -> int:
    if o.batching == st.SELECTIVE:
        return int(st.blocks_for(load.prompt[r] + load.output[r] - 1 + o.draft, o.block_size))
    return int(st.blocks_for(load.prompt[r] + s.gen_of[r], o.block_size))


@inner
def _computed(o: Limits, load: Load, s: State, r: int, known: int, hits: int) -> int:
    if s.preempted[r] > 0 and o.swap == 1:
        s.f[st.EXTRA] += o.swap_ms * s.kept[r]
        return int(s.kept[r])
    lost = len(load.known) > 0 or (s.preempted[r] > 0 and load.given[r] > 0)
    return int(max(hits * o.block_size, 0 if lost else min(load.cached[r], known - 1)))
