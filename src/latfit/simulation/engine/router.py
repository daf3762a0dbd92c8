"""Route arriving requests to engines: docs/theory/simulation.md, "Router and replicas".

At each arrival all engines advance to that moment, then the route picks one; ties go to the first.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import entry, inner, rare
from latfit.simulation.engine import state as st
from latfit.simulation.engine.loop import advance
from latfit.simulation.engine.prefix_cache import units_there
from latfit.simulation.engine.state import Limits, Load, SmallIntArray, State, blocks_for, one_of
from latfit.simulation.engine.step_cost import StepCosts, Work, step_ms
from latfit.stats import IntArray

ROUND_ROBIN, LEAST_LOADED, SHORTEST_QUEUE, PREFIX, PREDICTED = range(5)

WORTH = 0.5  # smallest cached share of a prompt for which the prefix decides the route, as in SGLang

CHANGES = 4  # status of the core: the number of replicas changes


class Router(NamedTuple):
    route: int  # number of the route
    slack: int  # requests that an engine with the prefix may have beyond the least loaded one
    share: float  # share of a prompt that such an engine has cached
    output: float  # mean output tokens
    replica: IntArray  # engine (n,) of each request
    last: SmallIntArray  # last engine (users,) of each user, -1 for none
    home: NDArray[np.int8]  # 1 where a user has been served before (users, engines)
    up: NDArray[np.int8]  # 1 where an engine (engines,) takes requests
    turn: IntArray  # last engine (1,) routed to in turn


@entry
def serve_routed(o: Limits, load: Load, costs: StepCosts, states: State, router: Router, change_ms: float) -> int:
    """Route and serve the requests of the source that arrive before a change of the replicas.

    Returns 0 when all are done, CHANGES at the change, 2 if a waiting request can never run.
    """
    source, counts = states.source, states.source_i
    while True:
        moment = np.inf
        if counts[st.SEEN] < counts[st.PUSHED]:
            moment = load.arrival[source[counts[st.SEEN]]]
        changed = change_ms <= moment and moment < np.inf
        if changed:
            moment = change_ms
        if load.users > 0:
            k, until = _plans_next(load, states)
            if k >= 0 and until[0] < moment:
                if advance(o, load, costs, one_of(states, k), min(until[1], moment)) == st.STUCK:
                    return st.STUCK
                continue
        elif router.route != ROUND_ROBIN or changed or moment == np.inf:
            for k in range(states.i.shape[0]):
                if states.i[k, st.PUSHED] > 0:
                    answer = advance(o, load, costs, one_of(states, k), moment)
                    if answer == st.STUCK and moment == np.inf:
                        return st.STUCK
        if changed:
            return CHANGES
        if moment == np.inf:
            return 0
        r = source[counts[st.SEEN]]
        counts[st.SEEN] += 1
        k = in_turn(router) if router.route == ROUND_ROBIN else _choose(o, load, costs, states, router, r)
        router.replica[r] = k
        if len(load.known) > 0 and router.route != ROUND_ROBIN:
            load.cached[r] = load.unit * units_there(o, load, one_of(states, k), r)
        states.inbox[k, states.i[k, st.PUSHED]] = r
        states.i[k, st.PUSHED] += 1
        states.i[k, st.QUEUED] += load.prompt[r] - min(load.cached[r], load.prompt[r] - 1)


@inner
def _plans_next(load: Load, states: State) -> tuple[int, tuple[float, float]]:
    """Return the engine that plans the next step (-1: all are idle), when, and when the next engine does."""
    best, first, second = -1, np.inf, np.inf
    for k in range(states.i.shape[0]):
        at = states.f[k, st.NOW]
        if states.i[k, st.COUNT] == 0 and states.i[k, st.WAITING] == 0:
            if states.i[k, st.SEEN] == states.i[k, st.PUSHED]:
                continue
            at = max(at, load.arrival[states.inbox[k, states.i[k, st.SEEN]]])
        if at < first:
            best, first, second = k, at, first
        else:
            second = min(second, at)
    return best, (first, max(second, np.nextafter(first, np.inf)))


@rare
def _choose(o: Limits, load: Load, costs: StepCosts, states: State, router: Router, r: int) -> int:
    """Choose the engine for request r and record that it has the request's prefix."""
    chosen, least = 0, np.inf
    for k in range(states.i.shape[0]):
        if router.up[k] == 0:
            continue
        s = one_of(states, k)
        if router.route == SHORTEST_QUEUE:
            found = float(_outstanding(s))
        elif router.route == PREDICTED:
            found = _predicted_ms(o, load, costs, s, r, router.output)
        else:
            found = float(_in_system(s))
        if found < least:
            chosen, least = k, found
    if router.route != PREFIX:
        return chosen
    if len(load.known) > 0:
        return int(_with_prefix(o, load, states, router, r, least + router.slack))
    user = load.user[r]
    before = router.last[user]
    if before >= 0 and router.up[before] == 1 and _in_system(one_of(states, before)) <= least + router.slack:
        chosen = before
    if router.home[user, chosen] == 1:
        held = int(router.share * load.prompt[r]) // o.block_size * o.block_size
        load.cached[r] = max(load.cached[r], held)
    router.home[user, chosen] = 1
    router.last[user] = chosen
    return chosen


@rare
def _with_prefix(o: Limits, load: Load, states: State, router: Router, r: int, most: float) -> int:
    """Return the engine with most of the prompt cached, among those with at most `most` requests."""
    chosen, found, fewest = 0, -1, np.inf
    idlest, there, least = 0, -1, np.inf
    for k in range(states.i.shape[0]):
        s = one_of(states, k)
        has = _in_system(s)
        if router.up[k] == 0 or has > most:
            continue
        units = units_there(o, load, s, r)
        if units > found or (units == found and has < fewest):
            chosen, found, fewest = k, units, has
        if has < least or (has == least and units > there):
            idlest, there, least = k, units, has
    return chosen if found * load.unit >= WORTH * load.prompt[r] else idlest


@inner
def _in_system(s: State) -> int:
    """Count requests that wait or run, those not yet seen by the scheduler included."""
    return int(s.i[st.WAITING] + s.i[st.COUNT] + s.i[st.PUSHED] - s.i[st.SEEN])


@inner
def _outstanding(s: State) -> int:
    """Count the tokens still to compute."""
    total = s.i[st.QUEUED]
    for i in range(s.i[st.COUNT]):
        if s.fin[i] == 0:
            total += s.known[i] - s.comp[i]
    return int(total)


@inner
def _predicted_ms(o: Limits, load: Load, costs: StepCosts, s: State, r: int, output: float) -> float:
    cached = load.unit * units_there(o, load, s, r) if len(load.known) > 0 else min(load.cached[r], load.prompt[r] - 1)
    waiting = s.i[st.QUEUED] + load.prompt[r] - cached
    D, K, tokens = 0.0, 0.0, float(waiting)
    for i in range(s.i[st.COUNT]):
        left = s.known[i] - s.comp[i]
        if s.fin[i] == 0 and left == 1:
            D, K = D + 1.0, K + s.comp[i]
        elif s.fin[i] == 0:
            tokens += left
    steps = np.ceil(tokens / max(o.budget - D, 1.0))
    p = tokens / steps
    mixed = Work(D + 1.0, D + p, 1.0, p, 0.0, K, 0.5 * p * p, p)
    found = max(s.f[st.BUSY_UNTIL] - load.arrival[r], 0.0) + steps * _typical_ms(costs, mixed)
    running = max(float(s.i[st.COUNT]), 1.0)
    ends = max(_in_system(s) + 1.0 - o.max_num_seqs, 0.0)
    lacking = float(blocks_for(waiting, o.block_size) - s.i[st.FREE])
    if lacking > 0.0 and s.i[st.COUNT] > 0:
        ends = max(ends, lacking * running / max(float(o.blocks - s.i[st.FREE]), 1.0))
    if ends > 0.0 and D > 0.0:
        found += ends * output / running * _typical_ms(costs, Work(D, D, 0.0, 0.0, 0.0, K, 0.0, 0.0))
    return float(found)


@rare
def _typical_ms(costs: StepCosts, work: Work) -> float:
    return float(step_ms(costs, work))


@inner
def in_turn(router: Router) -> int:
    k = router.turn[0]
    while True:
        k = k + 1 if k + 1 < len(router.up) else 0
        if router.up[k] == 1:
            router.turn[0] = k
            return int(k)
