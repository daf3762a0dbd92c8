"""Run an engine step by step: docs/theory/simulation.md, "Engine loop".

An asynchronous engine plans step n+1 when step n begins. `fast_forward` repeats decode steps with identical results.
"""

import numpy as np

from latfit.compiled import entry, inner, shared
from latfit.simulation.engine import state as st, step_cost as cost
from latfit.simulation.engine.prefix_cache import give_back
from latfit.simulation.engine.scheduler import absorb, blocks_to_admit, peek, plan
from latfit.simulation.engine.state import Limits, Load, State, send_all, take
from latfit.simulation.engine.statistics import count_gaps, note_step
from latfit.simulation.engine.step_cost import OF_DECODE, StepCosts, Work, drawn_ms


@shared
def advance(o: Limits, load: Load, costs: StepCosts, s: State, until: float) -> int:
    """Run every step that is planned before `until`.

    Returns 0 when all requests sent are done, 1 if `until` came first, 2 if a waiting request can never run. With a
    shared source `until` moves forward to the first request that is sent meanwhile.
    """
    while True:
        answer = _steps(o, load, costs, s, until)
        if answer != st.ENDED:
            return int(answer)
        until = min(until, send_all(o, load, s))


@inner
def _steps(o: Limits, load: Load, costs: StepCosts, s: State, until: float) -> int:
    """Run steps as `advance` does, but return ENDED after a step that ended requests of a closed loop."""
    stuck = 0
    while s.f[st.NOW] < until:
        release(o, load, s)
        absorb(o, load, s, s.f[st.NOW])
        if o.fast == 1 and s.i[st.STEADY] == 1 and fast_forward(o, load, costs, s, until) > 0:
            continue
        preemptions = s.i[st.PREEMPTIONS]
        work = plan(o, load, s)
        if work.B > 0:
            finished = s.i[st.FINISHED]
            execute(o, load, costs, s, work)
            stuck = 0
            if load.users > 0 and s.i[st.FINISHED] > finished:
                return st.ENDED
        elif s.f[st.BUSY_UNTIL] > s.f[st.NOW]:
            s.f[st.NOW] = s.f[st.BUSY_UNTIL]
        elif s.i[st.COUNT] > 0 or s.i[st.PREEMPTIONS] > preemptions or s.i[st.WAITING] > 0:
            stuck += 1
            if stuck > 4:
                return st.STUCK
        elif s.i[st.SEEN] < s.i[st.PUSHED]:
            s.f[st.NOW] = max(s.f[st.NOW], load.arrival[s.inbox[s.i[st.SEEN]]])
        else:
            return 0
    return 1


@inner
def release(o: Limits, load: Load, s: State) -> None:
    """Free the slots and blocks of ended requests whose end the planner has seen."""
    to, count = 0, s.i[st.COUNT]
    while to < count and s.fin[to] == 0:
        to += 1
    for i in range(to, count):
        if s.fin[i] == 1:
            give_back(o, load, s, s.rid[i], s.cap[i] // o.block_size)
            continue
        if s.fin[i] > 1:
            s.fin[i] -= 1
        if to < i:
            s.rid[to], s.known[to], s.comp[to], s.gen[to] = s.rid[i], s.known[i], s.comp[i], s.gen[i]
            s.cap[to], s.fin[to], s.token_at[to] = s.cap[i], s.fin[i], s.token_at[i]
        to += 1
    s.i[st.COUNT] = to


@inner
def execute(o: Limits, load: Load, costs: StepCosts, s: State, work: Work) -> None:
    begin = max(s.f[st.NOW], s.f[st.BUSY_UNTIL])
    duration = drawn_ms(costs, s, padded(o, work)) + s.f[st.EXTRA]
    if o.draft > 0 and work.n < work.B:
        duration += o.draft * o.draft_ms
    s.f[st.EXTRA] = 0.0
    end = begin + duration
    out = end - min(costs.host_ms[cost.phase_row(work.P, work.S)], duration)
    made, together, steady = 0, 0, 1
    for i in range(s.i[st.COUNT]):
        if s.chunk[i] == 0:
            if s.fin[i] == 0:
                steady = 0
            continue
        tokens, same = _progress(o, load, s, i, begin, out)
        made += tokens
        together += same
        if tokens == 0 or s.fin[i] > 1:
            steady = 0
    count_gaps(s, out - s.f[st.LAST_TOKENS], together)
    note_step(o, s, work, made, (begin, duration, out))
    s.i[st.STEADY] = steady if o.draft == 0 else 0
    s.f[st.NOW] = begin if o.asynchronous == 1 else end


@entry
def captured(B: float) -> float:
    """Return the captured graph's batch that runs a decode step: 1, 2, 4, then multiples of 8, up to 512."""
    if B <= 2.0 or B > 512.0:
        return B
    return 4.0 if B <= 4.0 else float(8.0 * np.ceil(B / 8.0))


@inner
def padded(o: Limits, w: Work) -> Work:
    if o.graphs == 0 or w.P > 0.0 or w.S > w.B:
        return w
    B = captured(w.B)
    return Work(B, B, w.n, w.P, w.KP, w.KD, w.A, w.L)


@inner
def _progress(o: Limits, load: Load, s: State, i: int, begin: float, out: float) -> tuple[int, int]:
    """Advance one request by a step; return its new tokens, and how many directly follow the step before."""
    r, chunk = s.rid[i], s.chunk[i]
    if np.isnan(s.start[r]):
        s.start[r] = begin
    made = 1
    if s.known[i] - s.comp[i] > 1:
        s.comp[i] += chunk
        if o.order == st.FAIR:
            s.served[load.user[r]] += st.INPUT_WEIGHT * chunk
        if s.comp[i] < s.known[i]:
            return 0, 0
    else:
        if chunk > 1:
            hits = cost.accepted(o.seed, r, s.gen[i], chunk - 1, o.accept)
            s.i[st.DRAFTED] += chunk - 1
            s.i[st.ACCEPTED] += hits
            made = min(1 + hits, load.output[r] - s.gen[i])
        s.comp[i] += made
    s.known[i] += made
    if s.gen[i] == 0:
        s.first[r] = out
    same = 0
    if s.token_at[i] == s.f[st.LAST_TOKENS]:
        same = 1
    elif s.gen[i] > 0 and s.token_at[i] == s.token_at[i]:
        count_gaps(s, out - s.token_at[i], 1)
    if made > 1:
        count_gaps(s, 0.0, made - 1)
    s.gen[i] += made
    s.token_at[i] = out
    if o.order == st.FAIR:
        s.served[load.user[r]] += st.OUTPUT_WEIGHT * made
    if s.gen[i] >= load.output[r]:
        s.fin[i] = 1 + o.asynchronous
        s.last[r] = out
        s.i[st.FINISHED] += 1
    return made, same


@inner
def fast_forward(o: Limits, load: Load, costs: StepCosts, s: State, until: float) -> int:
    """Run steps of pure decoding until something may change; return how many."""
    stops, count = _stops_on_arrival(o, load, s), s.i[st.COUNT]
    if stops < 0 or count == 0:
        return 0
    steps, cached = np.int64(1) << 60, 0
    for offset in range(o.block_size):
        s.crossing[offset] = 0
    for i in range(count):
        steps = min(steps, load.output[s.rid[i]] - s.gen[i] - 1)
        cached += s.comp[i]
        if o.batching == st.CHUNKED or o.batching == st.CONTINUOUS:
            s.crossing[s.cap[i] - s.comp[i]] += 1
    made = _repeat(o, load, costs, s, (int(steps), stops, float(cached), until))
    for i in range(count if made > 0 else 0):
        s.comp[i] += made
        s.known[i] += made
        s.gen[i] += made
        while s.comp[i] > s.cap[i]:
            s.cap[i] += o.block_size
        s.token_at[i] = s.f[st.LAST_TOKENS]
        if o.order == st.FAIR:
            s.served[load.user[s.rid[i]]] += st.OUTPUT_WEIGHT * made
    return int(made)


@inner
def _repeat(o: Limits, load: Load, costs: StepCosts, s: State, bounds: tuple[int, int, float, float]) -> int:
    """Run repeated decode steps; bounds: (most steps, whether an arrival stops, cached tokens now, `until`)."""
    steps, stops, cached, until = bounds
    B = float(s.i[st.COUNT])
    computed = captured(B) if o.graphs == 1 else B
    c = costs.typical[0]
    base = cost.of_decode(c, Work(computed, computed, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    level = cost.level_of(costs.scatter, OF_DECODE, computed)
    group = cost.noise_group(costs.scatter, OF_DECODE, computed)
    work, host = Work(B, B, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), costs.host_ms[OF_DECODE]
    at, made = 0, 0
    while made < steps and s.f[st.NOW] < until:
        if s.i[st.SEEN] < s.i[st.PUSHED] and load.arrival[s.inbox[s.i[st.SEEN]]] <= s.f[st.NOW]:
            if stops == 1:
                break
            absorb(o, load, s, s.f[st.NOW])
        if s.crossing[at] > s.i[st.FREE]:
            break
        if s.crossing[at] > 0:
            take(s, s.crossing[at])
        at = at + 1 if at + 1 < o.block_size else 0
        begin = max(s.f[st.NOW], s.f[st.BUSY_UNTIL])
        held = Work(computed, computed, 0.0, 0.0, 0.0, cached, 0.0, 0.0)
        typical = (base + cost.of_context(c, held)) * cost.of_decoding(costs.table, computed, cached)
        duration = cost.noisy_ms(costs.scatter, s, group, typical * level) + 0.0
        end = begin + duration
        out = end - min(host, duration)
        count_gaps(s, out - s.f[st.LAST_TOKENS], s.i[st.COUNT])
        note_step(o, s, work, s.i[st.COUNT], (begin, duration, out))
        s.f[st.NOW] = begin if o.asynchronous == 1 else end
        cached += B
        made += 1
    return made


@inner
def _stops_on_arrival(o: Limits, load: Load, s: State) -> int:
    """Return 1 if an arrival may be admitted, 0 if nothing may until a request ends, -1 if a waiting one may."""
    if s.i[st.COUNT] >= o.max_num_seqs:
        return 0
    if s.i[st.WAITING] == 0:
        return 1
    if o.batching == st.CONTINUOUS:
        return 1 if s.i[st.WAITING] < o.start_at else -1
    if o.order != st.FCFS and o.order != st.KEYED:
        return -1
    if blocks_to_admit(o, load, s, peek(o, load, s)) <= s.i[st.FREE]:
        return -1
    return 0 if o.order == st.FCFS or s.i[st.STACK] > 0 else 1
