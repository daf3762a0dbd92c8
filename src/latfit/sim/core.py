"""The request level, compiled: requests arrive, a policy forms batches of them, and two paths serve the batches.

One loop over the moments at which something may be decided: a server becomes free, a policy's time limit runs out, or
as many wait as the policy asked for. Arrivals in between are only counted, so that a batch costs the same however many
requests it takes in. At one moment, services end first, then requests arrive, then the policy is asked, until it waits.

The queue is the stretch [HEAD, TAIL) of the arrivals where there is one class; with several, each class is a linked
list and whoever comes first by class and age is taken. Requests sent to the side path form a list of their own. A
closed loop keeps the moments at which its users come back in a heap and writes arrivals down as they happen.

N(t), the number in the system, is integrated over the run from the counts alone, and the response times are written
down one by one: that the two agree is Little's law, checked after every run.
"""

import numpy as np

from latfit.scheduling.codes import MAIN, MOVE, NOW, SERVE_MAIN, SIDE, SIDE_FREE, SIDE_LARGEST, WAIT
from latfit.scheduling.compiling import compiled
from latfit.scheduling.decision import decide
from latfit.sim.line import (
    come_back,
    let_come,
    let_come_by_class,
    look,
    pass_time,
    take_from_side,
    take_next,
    to_side,
)
from latfit.sim.records import (
    AREA,
    BATCHES,
    CLOCK,
    DETERMINISTIC,
    DRAINING,
    EXPONENTIAL,
    ISSUED,
    KNOWN,
    MEASURING,
    PHASE,
    QUEUED,
    RETURNING,
    SIDE_QUEUED,
    TAIL,
    WARMING,
)


@compiled
def serve_requests(load, machine, rule, rngs, scratch, out):  # type: ignore[no-untyped-def]
    """Run until everybody is served or the policy waits for ever. rngs: a generator a path."""
    # Taken out of the tuples once: in the loop each access would count a reference.
    arrive, class_id, deadlines, think = load.arrive, load.class_id, load.deadlines, load.think
    typical, servers, kind = machine.typical, machine.servers, machine.kind
    ratios, reached, first, last = machine.ratios, machine.reached, machine.first, machine.last
    times, grid, tokens, warm = machine.times, machine.grid, load.tokens, load.warm
    code, p, aged = rule.code, rule.parameters, rule.ageing
    q, t, busy, sizes = out.counters, out.clocks, out.busy, out.sizes
    response, served_on, batch, start, moved = out.response, out.path, out.batch, out.start, out.moved
    n, users, classes = len(arrive), load.users, len(class_id) > 0
    free, members, view = scratch.free, scratch.members, scratch.seen
    following, lists, returns = scratch.following, scratch.lists, scratch.returns
    q[KNOWN] = 0 if users > 0 else n
    for user in range(min(users, n)):
        come_back(returns, q, think[user])
    until, at = np.inf, 1
    while True:
        moment = min(until, _next_free(servers, free, t[CLOCK]))
        if users > 0 or classes:
            moment = let_come_by_class(arrive, class_id, following, lists, returns, (q, t), (moment, at, users))
        else:
            moment = let_come(arrive, q, t, moment, at)
        if moment == np.inf:
            break
        if q[PHASE] != DRAINING:
            _mark(arrive, warm, servers, free, q, busy)
        pass_time(q, t, moment)
        while True:
            look(arrive, deadlines, lists, servers, free, q, view)
            view[NOW] = moment
            if q[SIDE_QUEUED] > 0 and view[SIDE_FREE] <= moment:
                path, take = SIDE, min(q[SIDE_QUEUED], int(p[SIDE_LARGEST]))
                take_from_side(members, following, q, take)
            else:
                action, take, until, at = decide(code, p, typical, view)
                if action == WAIT:
                    break
                path = MAIN if action == SERVE_MAIN else SIDE
                ageing = 0.0 if action == MOVE else aged
                take_next(members, arrive, following, lists, q, (take, ageing, moment, classes))
                if action == MOVE:
                    to_side(members, following, q, take)
                    if len(batch) > 0:
                        _write_moves(moved, members, take, moment)
                    continue
            lasts = _service_ms(times, grid, tokens, members, path, take)
            if kind[path] != DETERMINISTIC:
                u = rngs[0].random() if path == MAIN else rngs[1].random()
                lasts *= _factor(kind[path], ratios[path], reached[path], (first[path, take], last[path, take]), u)
            ends = _occupy(servers, free, busy, path, moment, lasts)
            t[AREA] += take * lasts
            _write(arrive, response, served_on, members, path, take, ends)
            if len(batch) > 0:
                _write_batch(batch, start, members, take, q[BATCHES], moment)
            for _ in range(take if users > 0 else 0):
                if q[ISSUED] < n:
                    come_back(returns, q, ends + think[q[ISSUED]])
            q[BATCHES] += 1
            if q[PHASE] == MEASURING:
                sizes[path, take] += 1
        if q[QUEUED] == 0 and q[SIDE_QUEUED] == 0 and q[TAIL] == q[KNOWN] and q[RETURNING] == 0:
            break


@compiled
def _next_free(servers, free, now):  # type: ignore[no-untyped-def]
    """When the next busy server ends."""
    soonest = np.inf
    for path in range(2):
        for server in range(servers[path]):
            if now < free[path, server] < soonest:
                soonest = free[path, server]
    return soonest


@compiled
def _service_ms(times, grid, tokens, members, path, take):  # type: ignore[no-untyped-def]
    """Typical T of the batch, on straight lines between the tokens of the grid."""
    lasts = times[path, take, 0]
    if len(grid) > 1:
        total = 0
        for k in range(take):
            total += tokens[members[k]]
        place = 1
        while place < len(grid) - 1 and grid[place] < total:
            place += 1
        low, high = grid[place - 1], grid[place]
        share = (total - low) / (high - low)
        lasts = (1 - share) * times[path, take, place - 1] + share * times[path, take, place]
    return lasts


@compiled
def _factor(kind, ratios, reached, points, u):  # type: ignore[no-untyped-def]
    """Drawn from the service law by one uniform number a batch, so that runs can share their random numbers. points:
    the first and the last of the ratios that batches of this size have."""
    if kind == EXPONENTIAL:
        factor = -np.log1p(-u)
    else:
        low, high = points
        while low < high:
            middle = (low + high) // 2
            if reached[middle] > u:
                high = middle
            else:
                low = middle + 1
        factor = ratios[low]
    return factor


@compiled
def _occupy(servers, free, busy, path, now, lasts):  # type: ignore[no-untyped-def]
    """Serve on the server of the path that became free first; returns when that ends."""
    server = 0
    for other in range(1, servers[path]):
        if free[path, other] < free[path, server]:
            server = other
    free[path, server] = now + lasts
    busy[0, path] += lasts
    return now + lasts


@compiled
def _write(arrive, response, served_on, members, path, take, ends):  # type: ignore[no-untyped-def]
    for k in range(take):
        i = members[k]
        response[i] = ends - arrive[i]
        served_on[i] = path


@compiled
def _write_batch(batch, start, members, take, number, moment):  # type: ignore[no-untyped-def]
    for k in range(take):
        batch[members[k]] = number
        start[members[k]] = moment


@compiled
def _write_moves(moved, members, take, moment):  # type: ignore[no-untyped-def]
    for k in range(take):
        moved[members[k]] = moment


@compiled
def _mark(arrive, warm, servers, free, q, busy):  # type: ignore[no-untyped-def]
    """Note the service done by the first and the last arrival that count, once these have come."""
    while q[PHASE] < DRAINING:
        mark = warm if q[PHASE] == WARMING else len(arrive) - 1
        if q[TAIL] <= mark:
            return
        q[PHASE] += 1
        for path in range(2):
            busy[q[PHASE], path] = busy[0, path]
            for server in range(servers[path]):
                busy[q[PHASE], path] -= max(0.0, free[path, server] - arrive[mark])
