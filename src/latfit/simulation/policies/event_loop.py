"""Simulate requests that arrive, are batched by a policy and served on two paths, in compiled code.

The queue of each class is a slice of `line`, which holds the requests by class, then in order of arrival.
"""

from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import entry, inner
from latfit.model import drawn_step_ms
from latfit.policies import codes, decide
from latfit.simulation.heap import pop, push

ARRIVED, QUEUED, KNOWN, RETURNING, ISSUED, BATCHES, PHASE, MOST, COUNTERS = range(9)

DETERMINISTIC, EXPONENTIAL, EMPIRICAL = range(3)  # distributions of the service time around its typical value

WARMING, MEASURING, DRAINING = range(3)
FIRST, PASSED, TAKEN, END = range(4)
"""Rows of `Scratch.slices`, places in the line: of the first request that waits, behind those passed over and behind
those taken while a batch is formed, behind the last that has arrived."""


class Load(NamedTuple):
    arrive: Any  # arrival times (n,), ms
    tokens: Any  # tokens (n,); empty if all requests are alike
    class_id: Any  # classes (n,); empty with one class
    deadlines: Any  # deadlines (classes,), ms
    own_deadlines: Any  # deadlines (n,) of recorded requests; empty if the class decides
    think: Any  # think times (n,), ms; empty for an open load
    users: int  # users of a closed loop
    warm: int  # first request that counts


class Machine(NamedTuple):
    times: Any  # T (2, Bmax + 1, grid) in ms by path, batch and tokens
    grid: Any  # tokens at which `times` is given
    typical: Any  # T (2, Bmax + 1) in ms that the policy sees
    servers: Any  # servers (2,) by path
    kind: Any  # service-time distribution (2,) by path
    fixed: Any  # constant (2,) added to each time, ms
    noise: Any  # noise of both paths if empirical


class Rule(NamedTuple):
    code: int
    parameters: Any
    ageing: float


class Scratch(NamedTuple):
    free: Any  # when each server (2, servers) is free
    members: Any  # requests of the current batch (Bmax + 1,)
    seen: Any  # view of the policy (VIEW + 2 servers,)
    line: Any  # requests (n,) by class, then in order of arrival
    slices: Any  # slice of each class in the line (4, classes)
    returns: Any  # heap (users,) of the requests that users will send
    sent: Any  # think time of each request (n,), then its sending time


class Out(NamedTuple):
    response: Any  # response times (n,), ms; NaN if not served
    path: Any  # path (n,); -1 if not served
    sizes: Any  # batches by size (2, Bmax + 1)
    busy: Any  # service begun in ms (3, 2): in all, up to the first and up to the last arrival that counts
    batch: Any  # number of each request's batch (n,); empty if not requested
    start: Any  # start of each request's batch (n,); empty if not requested
    counters: Any


@inner
def admit(arrive, class_id, slices, sending, q, limits):  # type: ignore[no-untyped-def]
    """Queue arrivals up to a moment, or until `at` requests wait; return the time reached."""
    returns, sent = sending
    moment, at = limits
    i, waiting = q[ARRIVED], q[QUEUED]
    while i < q[KNOWN] or q[RETURNING] > 0:
        now = sent[returns[0]] if q[RETURNING] > 0 else arrive[i]
        if now > moment:
            break
        if q[RETURNING] > 0:
            arrive[i] = now
            pop(returns, q, RETURNING, sent)
            q[KNOWN] += 1
        slices[END, class_id[i] if len(class_id) > 0 else 0] += 1
        i += 1
        waiting += 1
        if waiting >= at:
            moment = now
    q[ARRIVED], q[QUEUED] = i, waiting
    return moment


@inner
def observe(arrive, deadlines, queue, paths, q, view):  # type: ignore[no-untyped-def]
    """Fill the policy's view, except for the time and the number of aged requests."""
    line, slices = queue
    _, free = paths
    view[codes.WAITING] = q[QUEUED]
    for path in range(2):
        for server in range(free.shape[1]):
            view[codes.VIEW + path * free.shape[1] + server] = free[path, server]
    view[codes.OLDEST] = view[codes.DUE] = np.inf
    for c in range(len(deadlines)):
        if slices[FIRST, c] < slices[END, c]:
            arrived = arrive[line[slices[FIRST, c]]]
            view[codes.OLDEST] = min(view[codes.OLDEST], arrived)
            view[codes.DUE] = min(view[codes.DUE], arrived + deadlines[c])


@inner
def count_aged(arrive, queue, now, cutoff):  # type: ignore[no-untyped-def]
    """Count the requests that have waited for `cutoff`, up to MOST_AGED; each slice is in order of age."""
    line, slices = queue
    aged = 0
    for c in range(slices.shape[1]):
        place = slices[FIRST, c]
        while place < slices[END, c] and aged < codes.MOST_AGED and arrive[line[place]] + cutoff <= now:
            aged += 1
            place += 1
    return aged


@inner
def take_next(members, arrive, queue, q, how):  # type: ignore[no-untyped-def]
    """Take `take` requests behind the first `passed` out of the queue, by class less age/ageing."""
    line, slices = queue
    take, passed, ageing, moment = how
    q[QUEUED] -= take
    classes = slices.shape[1]
    for c in range(classes):
        slices[PASSED, c] = slices[TAKEN, c] = slices[FIRST, c]
    for k in range(passed + take):
        best, least = 0, np.inf
        for c in range(classes if classes > 1 else 0):
            if slices[TAKEN, c] < slices[END, c]:
                rank = c - (moment - arrive[line[slices[TAKEN, c]]]) / ageing
                if rank < least:
                    best, least = c, rank
        if k < passed:
            slices[PASSED, best] += 1
        else:
            members[k - passed] = line[slices[TAKEN, best]]
        slices[TAKEN, best] += 1
    for c in range(classes):
        taken = slices[TAKEN, c] - slices[PASSED, c]
        for place in range(slices[PASSED, c] - 1, slices[FIRST, c] - 1, -1):
            line[place + taken] = line[place]
        slices[FIRST, c] += taken


@inner
def send_next(returns, sent, q, idle_from):  # type: ignore[no-untyped-def]
    i = q[ISSUED]
    sent[i] += idle_from
    push(returns, q, RETURNING, sent, i)
    q[ISSUED] += 1


@entry
def serve_requests(load, machine, rule, rngs, scratch, out):  # type: ignore[no-untyped-def]
    """Run until all requests are served or the policy waits forever; return the time of the last decision.

    rngs: a generator for each path.
    """
    # Unpacked once: each tuple access in the loop would count a reference.
    arrive, class_id, deadlines, warm = load.arrive, load.class_id, load.deadlines, load.warm
    typical, kind, fixed, noise = machine.typical, machine.kind, machine.fixed, machine.noise
    times, grid, tokens = machine.times, machine.grid, load.tokens
    code, p, ageing = rule.code, rule.parameters, rule.ageing
    q, busy, sizes = out.counters, out.busy, out.sizes
    served = (out.response, out.path, out.batch, out.start)
    n, users, slices = len(arrive), load.users, scratch.slices
    members, view, returns, sent = scratch.members, scratch.seen, scratch.returns, scratch.sent
    queue, paths = (scratch.line, slices), (machine.servers, scratch.free)
    q[KNOWN] = 0 if users > 0 else n
    for _ in range(min(users, n)):
        send_next(returns, sent, q, 0.0)
    now, until, at = 0.0, np.inf, 1
    while True:
        moment = min(until, _next_free(paths, now))
        moment = admit(arrive, class_id, slices, (returns, sent), q, (moment, at))
        if moment == np.inf:
            return now
        _mark(arrive, warm, paths, q, busy)
        now = moment
        q[MOST] = max(q[MOST], q[QUEUED])
        while True:
            observe(arrive, deadlines, queue, paths, q, view)
            view[codes.NOW] = moment
            view[codes.AGED] = count_aged(arrive, queue, moment, p[codes.T_CUT]) if paths[0][codes.SIDE] > 0 else 0
            action, take, until, at = decide(code, p, typical, view)
            if action == codes.WAIT:
                break
            path = codes.MAIN if action == codes.SERVE_MAIN else codes.SIDE
            take_next(members, arrive, queue, q, (take, at, ageing, moment))
            lasts = _service_ms(times, grid, tokens, members, path, take)
            if kind[path] != DETERMINISTIC:
                u = rngs[0].random() if path == codes.MAIN else rngs[1].random()
                if kind[path] == EXPONENTIAL:
                    lasts = -lasts * np.log1p(-u)
                else:
                    lasts = drawn_step_ms(noise, noise.group[path, take], lasts, u)
            lasts += fixed[path]
            ends = _occupy(paths, busy, path, moment, lasts)
            _answer(arrive, served, members, take, (path, q[BATCHES], moment, ends))
            for _ in range(min(take, n - q[ISSUED]) if users > 0 else 0):
                send_next(returns, sent, q, ends)
            q[BATCHES] += 1
            if q[PHASE] == MEASURING:
                sizes[path, take] += 1
        if q[QUEUED] == 0 and q[ARRIVED] == q[KNOWN] and q[RETURNING] == 0:
            return now


@inner
def _next_free(paths, now):  # type: ignore[no-untyped-def]
    servers, free = paths
    soonest = np.inf
    for path in range(2):
        for server in range(servers[path]):
            if now < free[path, server] < soonest:
                soonest = free[path, server]
    return soonest


@inner
def _service_ms(times, grid, tokens, members, path, take):  # type: ignore[no-untyped-def]
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


@inner
def _occupy(paths, busy, path, now, lasts):  # type: ignore[no-untyped-def]
    servers, free = paths
    server = 0
    for other in range(1, servers[path]):
        if free[path, other] < free[path, server]:
            server = other
    free[path, server] = now + lasts
    busy[0, path] += lasts
    return now + lasts


@inner
def _answer(arrive, served, members, take, how):  # type: ignore[no-untyped-def]
    response, path_of, batch_of, start_of = served
    path, number, begin, ends = how
    for k in range(take):
        i = members[k]
        response[i] = ends - arrive[i]
        path_of[i] = path
        if len(batch_of) > 0:
            batch_of[i], start_of[i] = number, begin


@inner
def _mark(arrive, warm, paths, q, busy):  # type: ignore[no-untyped-def]
    servers, free = paths
    while q[PHASE] < DRAINING:
        mark = warm if q[PHASE] == WARMING else len(arrive) - 1
        if q[ARRIVED] <= mark:
            return
        q[PHASE] += 1
        for path in range(2):
            busy[q[PHASE], path] = busy[0, path]
            for server in range(servers[path]):
                busy[q[PHASE], path] -= max(0.0, free[path, server] - arrive[mark])
