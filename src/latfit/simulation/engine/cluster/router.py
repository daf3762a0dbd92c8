"""The router in front of several engines: who gets the request that has come, compiled.

At each arrival every engine is brought up to that moment, then the router chooses; of equals the first. It knows what
an engine knows: requests that wait and run, their prompts, the tokens computed, free slots and blocks. It does not know
how long an output will be, only their mean.

least-loaded: the fewest requests.  shortest-queue: the fewest tokens to be computed, which are the prompts that wait,
what is left of those that run, and one for each request that decodes.  prefix: see `replicas`; where contents of
prompts are known, the engine that finds most of the prompt, of those within `slack` requests of the least loaded; one
that finds less than half of it is not worth that, and the least loaded one is taken (as in SGLang's router).
predicted-latency: the least time to the first token. With D requests that decode over K cached tokens, P prompt tokens
to be computed before this request's own p, and a budget of b tokens a step, that takes n = ceil((P + p) / (b - D))
steps after the one that runs, each as long as the costs say of D single tokens and (P + p) / n of prefill. If slots or
blocks are lacking, it waits for e requests to end: for the slots, e is how many more wait than slots are free; for the
blocks, what is lacking over what a running request holds. Of R running requests with m output tokens on the mean, one
ends every m / R steps, so that is e m / R steps of decoding.

Users who wait for their answers send the next request when one has ended, whichever engine ends it. So engines must not
run ahead of one another: the one that plans next makes a step, and only as long as no request has come before.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import entry, inner, rare
from latfit.simulation.engine.cluster.fleet import CROWDED, UP, Fleet, change, in_turn, next_change
from latfit.simulation.engine.loop import advance
from latfit.simulation.engine.prefix_cache import units_there
from latfit.simulation.engine.state import (
    BUSY_UNTIL,
    COUNT,
    FREE,
    NOW,
    PUSHED,
    QUEUED,
    SEEN,
    STUCK,
    WAITING,
    Limits,
    Load,
    SmallIntArray,
    State,
    blocks_for,
    one_of,
)
from latfit.simulation.engine.step_cost import StepCosts, Work, step_ms
from latfit.stats import IntArray

ROUND_ROBIN, LEAST_LOADED, SHORTEST_QUEUE, PREFIX, PREDICTED = range(5)

WORTH = 0.5
"""Share of a prompt from which on an engine is chosen because it has it."""

FULL = 4
"""What the router answers where replicas that come and go find no place."""


class Router(NamedTuple):
    """route: its number.  slack: requests that an engine with the prefix may have more than the least loaded one.
    share: of a prompt that such an engine holds.  output: mean output tokens.  replica (n,): where each request went.
    last (users,): the engine that a user went to last, -1 for none; home (users, engines): 1 where it has been.
    fleet: which engines are there."""

    route: int
    slack: int
    share: float
    output: float
    replica: IntArray
    last: SmallIntArray
    home: NDArray[np.int8]
    fleet: Fleet


@entry
def serve_routed(o: Limits, load: Load, costs: StepCosts, states: State, router: Router) -> int:
    """Route and serve all requests of the source; 0 when all is done, 2 when something waits that can never run, 4 when
    the fleet has no place for a replica that is asked for."""
    source, counts, fleet = states.source, states.source_i, router.fleet
    while True:
        moment = np.inf
        if counts[SEEN] < counts[PUSHED]:
            moment = load.arrival[source[counts[SEEN]]]
        changes = next_change(fleet)
        changed = changes <= moment and moment < np.inf
        if changed:
            moment = changes
        if load.users > 0:
            k, until = _plans_next(load, states)
            if k >= 0 and until[0] < moment:
                if advance(o, load, costs, one_of(states, k), min(until[1], moment)) == STUCK:
                    return STUCK
                continue
        elif router.route != ROUND_ROBIN or changed or moment == np.inf:
            for k in range(states.i.shape[0]):
                if states.i[k, PUSHED] > 0:
                    answer = advance(o, load, costs, one_of(states, k), moment)
                    if answer == STUCK and moment == np.inf:
                        return STUCK
        if changed:
            change(o, fleet, states, moment)
            if fleet.i[CROWDED] > 0:
                return FULL
            continue
        if moment == np.inf:
            return 0
        r = source[counts[SEEN]]
        counts[SEEN] += 1
        k = in_turn(fleet) if router.route == ROUND_ROBIN else _choose(o, load, costs, states, router, r)
        router.replica[r] = k
        if len(load.known) > 0 and router.route != ROUND_ROBIN:
            load.cached[r] = load.unit * units_there(o, load, one_of(states, k), r)
        states.inbox[k, states.i[k, PUSHED]] = r
        states.i[k, PUSHED] += 1
        states.i[k, QUEUED] += load.prompt[r] - min(load.cached[r], load.prompt[r] - 1)


@inner
def _plans_next(load: Load, states: State) -> tuple[int, tuple[float, float]]:
    """The engine that plans the next step, -1 where none has anything to do; when it does, and until when it is the
    only one."""
    best, first, second = -1, np.inf, np.inf
    for k in range(states.i.shape[0]):
        at = states.f[k, NOW]
        if states.i[k, COUNT] == 0 and states.i[k, WAITING] == 0:
            if states.i[k, SEEN] == states.i[k, PUSHED]:
                continue
            at = max(at, load.arrival[states.inbox[k, states.i[k, SEEN]]])
        if at < first:
            best, first, second = k, at, first
        else:
            second = min(second, at)
    return best, (first, max(second, np.nextafter(first, np.inf)))


@rare
def _choose(o: Limits, load: Load, costs: StepCosts, states: State, router: Router, r: int) -> int:
    """The engine for request r, which from then on knows the request's prefix."""
    chosen, least = 0, np.inf
    for k in range(states.i.shape[0]):
        if router.fleet.phase[k] != UP:
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
    if before >= 0 and router.fleet.phase[before] == UP and _in_system(one_of(states, before)) <= least + router.slack:
        chosen = before
    if router.home[user, chosen] == 1:
        held = int(router.share * load.prompt[r]) // o.block_size * o.block_size
        load.cached[r] = max(load.cached[r], held)
    router.home[user, chosen] = 1
    router.last[user] = chosen
    return chosen


@rare
def _with_prefix(o: Limits, load: Load, states: State, router: Router, r: int, most: float) -> int:
    """The engine that finds most of a request's prompt, of those that have at most so many requests, where that is
    worth it; else the least loaded one. Of equals the one that is better by the other."""
    chosen, found, fewest = 0, -1, np.inf
    idlest, there, least = 0, -1, np.inf
    for k in range(states.i.shape[0]):
        s = one_of(states, k)
        has = _in_system(s)
        if router.fleet.phase[k] != UP or has > most:
            continue
        units = units_there(o, load, s, r)
        if units > found or (units == found and has < fewest):
            chosen, found, fewest = k, units, has
        if has < least or (has == least and units > there):
            idlest, there, least = k, units, has
    return chosen if found * load.unit >= WORTH * load.prompt[r] else idlest


@inner
def _in_system(s: State) -> int:
    """Requests that wait or run, those that are pushed but not seen yet included."""
    return int(s.i[WAITING] + s.i[COUNT] + s.i[PUSHED] - s.i[SEEN])


@inner
def _outstanding(s: State) -> int:
    """Tokens to be computed of requests that wait or run."""
    total = s.i[QUEUED]
    for i in range(s.i[COUNT]):
        if s.fin[i] == 0:
            total += s.known[i] - s.comp[i]
    return int(total)


@inner
def _predicted_ms(o: Limits, load: Load, costs: StepCosts, s: State, r: int, output: float) -> float:
    """Time until the first token of a request that comes now."""
    cached = load.unit * units_there(o, load, s, r) if len(load.known) > 0 else min(load.cached[r], load.prompt[r] - 1)
    waiting = s.i[QUEUED] + load.prompt[r] - cached
    D, K, tokens = 0.0, 0.0, float(waiting)
    for i in range(s.i[COUNT]):
        left = s.known[i] - s.comp[i]
        if s.fin[i] == 0 and left == 1:
            D, K = D + 1.0, K + s.comp[i]
        elif s.fin[i] == 0:
            tokens += left
    steps = np.ceil(tokens / max(o.budget - D, 1.0))
    p = tokens / steps
    mixed = Work(D + 1.0, D + p, 1.0, p, 0.0, K, 0.5 * p * p, p)
    found = max(s.f[BUSY_UNTIL] - load.arrival[r], 0.0) + steps * _typical_ms(costs, mixed)
    running = max(float(s.i[COUNT]), 1.0)
    ends = max(_in_system(s) + 1.0 - o.max_num_seqs, 0.0)
    lacking = float(blocks_for(waiting, o.block_size) - s.i[FREE])
    if lacking > 0.0 and s.i[COUNT] > 0:
        ends = max(ends, lacking * running / max(float(o.blocks - s.i[FREE]), 1.0))
    if ends > 0.0 and D > 0.0:
        found += ends * output / running * _typical_ms(costs, Work(D, D, 0.0, 0.0, 0.0, K, 0.0, 0.0))
    return float(found)


@rare
def _typical_ms(costs: StepCosts, work: Work) -> float:
    return float(step_ms(costs, work))
