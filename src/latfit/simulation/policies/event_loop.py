"""Simulate requests that arrive, are batched by a policy and served on two paths, in compiled code.

With one class the queue is the slice [HEAD, TAIL) of `line`; several classes are linked lists, merged by class and age.
"""

from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import entry, inner
from latfit.model import drawn_step_ms
from latfit.policies import codes, decide
from latfit.simulation.heap import pop, push

HEAD, TAIL, QUEUED, KNOWN, RETURNING, ISSUED, BATCHES, PHASE, MOST, COUNTERS = range(10)
CLOCK, LAST, AREA, CLOCKS = range(4)

DETERMINISTIC, EXPONENTIAL, EMPIRICAL = range(3)  # distributions of the service time around its typical value

WARMING, MEASURING, DRAINING = range(3)
NOBODY = -1


class Load(NamedTuple):
    arrive: Any  # arrival times (n,), ms
    tokens: Any  # tokens (n,); empty if all requests are alike
    class_id: Any  # classes (n,); empty with one class
    deadlines: Any  # deadlines (classes,), ms
    think: Any  # think times (n,), ms; empty for an open load
    users: int  # users of a closed loop
    warm: int  # first request that counts


class Machine(NamedTuple):
    times: Any  # T (2, Bmax + 1, grid) in ms by path, batch and tokens
    grid: Any  # tokens at which `times` is given
    typical: Any  # T (2, Bmax + 1) in ms that the policy sees
    servers: Any  # servers (2,) by path
    kind: Any  # service-time distribution (2,) by path
    fixed: Any  # constant (2,) added to drawn times, ms
    noise: Any  # noise of both paths if empirical


class Rule(NamedTuple):
    code: int
    parameters: Any
    ageing: float


class Scratch(NamedTuple):
    free: Any  # when each server (2, servers) is free
    members: Any  # requests of the current batch (Bmax + 1,)
    seen: Any  # view of the policy (VIEW + 2 servers,)
    line: Any  # queue in order of arrival (n,) for one class
    following: Any  # next request of the same class (n,) for several
    lists: Any  # first and last request of each class and two cursors (4, classes)
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
    clocks: Any


@inner
def admit(arrive, q, t, moment, at):  # type: ignore[no-untyped-def]
    """Queue arrivals up to `moment`, or until `at` requests wait; return the time reached."""
    tail, waiting, n = q[TAIL], q[QUEUED], q[KNOWN]
    last, area = t[LAST], t[AREA]
    while tail < n and arrive[tail] <= moment:
        now = arrive[tail]
        area += waiting * (now - last)
        last = now
        tail += 1
        waiting += 1
        if waiting >= at:
            moment = now
    q[TAIL], q[QUEUED], t[LAST], t[AREA] = tail, waiting, last, area
    return moment


@inner
def admit_by_class(arrive, class_id, queue, sending, clocks, limits):  # type: ignore[no-untyped-def]
    """Do the same for several classes and for a closed loop; `sending` is the heap of its next requests."""
    _, following, lists = queue
    returns, sent = sending
    q, t = clocks
    moment, at, users = limits
    while True:
        i = q[TAIL]
        now = np.inf
        if users > 0 and q[RETURNING] > 0:
            now = sent[returns[0]]
        elif users == 0 and i < q[KNOWN]:
            now = arrive[i]
        if now > moment or now == np.inf:
            return moment
        if users > 0:
            arrive[i] = now
            pop(returns, q, RETURNING, sent)
            q[KNOWN] += 1
        t[AREA] += q[QUEUED] * (now - t[LAST])
        t[LAST] = now
        q[TAIL] += 1
        q[QUEUED] += 1
        if len(class_id) > 0:
            c = class_id[i]
            following[i] = NOBODY
            if lists[0, c] == NOBODY:
                lists[0, c] = i
            else:
                following[lists[1, c]] = i
            lists[1, c] = i
        if q[QUEUED] >= at:
            moment = now


@inner
def pass_time(q, t, moment):  # type: ignore[no-untyped-def]
    waiting = q[QUEUED]
    t[AREA] += waiting * (moment - t[LAST])
    t[CLOCK] = t[LAST] = moment
    q[MOST] = max(q[MOST], waiting)


@inner
def observe(arrive, deadlines, queue, paths, q, view):  # type: ignore[no-untyped-def]
    """Fill the policy's view, except for the time and the number of aged requests."""
    line, _, lists = queue
    _, free = paths
    view[codes.WAITING] = q[QUEUED]
    for path in range(2):
        for server in range(free.shape[1]):
            view[codes.VIEW + path * free.shape[1] + server] = free[path, server]
    if q[QUEUED] > 0 and len(deadlines) == 1 and lists[0, 0] == NOBODY:
        view[codes.OLDEST] = arrive[line[q[HEAD]]]
        view[codes.DUE] = view[codes.OLDEST] + deadlines[0]
    elif q[QUEUED] > 0:
        view[codes.OLDEST] = view[codes.DUE] = np.inf
        for c in range(len(deadlines)):
            if lists[0, c] != NOBODY:
                arrived = arrive[lists[0, c]]
                view[codes.OLDEST] = min(view[codes.OLDEST], arrived)
                view[codes.DUE] = min(view[codes.DUE], arrived + deadlines[c])


@inner
def count_aged(arrive, queue, q, now, cutoff):  # type: ignore[no-untyped-def]
    """Count the requests that have waited for `cutoff`, up to MOST_AGED; the queue is in order of age."""
    line, following, lists = queue
    aged = 0
    if len(following) == 0:
        most = min(q[QUEUED], codes.MOST_AGED)
        while aged < most and arrive[line[q[HEAD] + aged]] + cutoff <= now:
            aged += 1
    for c in range(lists.shape[1]):
        i = lists[0, c]
        while i != NOBODY and aged < codes.MOST_AGED and arrive[i] + cutoff <= now:
            aged += 1
            i = following[i]
    return aged


@inner
def take_next(members, arrive, queue, q, how):  # type: ignore[no-untyped-def]
    """Take `take` requests behind the first `passed` out of the queue, by class less age/ageing."""
    line, following, lists = queue
    take, passed, ageing, moment = how
    q[QUEUED] -= take
    walked = passed + take
    if len(following) == 0:
        first, walked = q[HEAD] + passed, 0
        for k in range(take):
            members[k] = line[first + k]
        for k in range(passed):
            line[first + take - 1 - k] = line[first - 1 - k]
        q[HEAD] += take
    for c in range(lists.shape[1]):
        lists[2, c], lists[3, c] = lists[0, c], NOBODY
    for k in range(walked):
        best, least = NOBODY, np.inf
        for c in range(lists.shape[1]):
            if lists[2, c] != NOBODY:
                rank = c - (moment - arrive[lists[2, c]]) / ageing
                if rank < least:
                    best, least = c, rank
        i, before = lists[2, best], lists[3, best]
        lists[2, best] = following[i]
        if k < passed:
            lists[3, best] = i
        else:
            members[k - passed] = i
            if before == NOBODY:
                lists[0, best] = following[i]
            else:
                following[before] = following[i]
            if following[i] == NOBODY:
                lists[1, best] = before


@inner
def send_next(returns, sent, q, idle_from):  # type: ignore[no-untyped-def]
    i = q[ISSUED]
    sent[i] += idle_from
    push(returns, q, RETURNING, sent, i)
    q[ISSUED] += 1


@entry
def serve_requests(load, machine, rule, rngs, scratch, out):  # type: ignore[no-untyped-def]
    """Run until all requests are served or the policy waits forever; `rngs` has a generator for each path."""
    # Unpacked once: each tuple access in the loop would count a reference.
    arrive, class_id, deadlines, warm = load.arrive, load.class_id, load.deadlines, load.warm
    typical, kind, fixed, noise = machine.typical, machine.kind, machine.fixed, machine.noise
    times, grid, tokens = machine.times, machine.grid, load.tokens
    code, p, ageing = rule.code, rule.parameters, rule.ageing
    q, t, busy, sizes = out.counters, out.clocks, out.busy, out.sizes
    served = (out.response, out.path, out.batch, out.start)
    n, users, classes = len(arrive), load.users, len(class_id) > 0
    members, view, returns, sent = scratch.members, scratch.seen, scratch.returns, scratch.sent
    queue, paths = (scratch.line, scratch.following, scratch.lists), (machine.servers, scratch.free)
    q[KNOWN] = 0 if users > 0 else n
    for _ in range(min(users, n)):
        send_next(returns, sent, q, 0.0)
    until, at = np.inf, 1
    while True:
        moment = min(until, _next_free(paths, t[CLOCK]))
        if users > 0 or classes:
            moment = admit_by_class(arrive, class_id, queue, (returns, sent), (q, t), (moment, at, users))
        else:
            moment = admit(arrive, q, t, moment, at)
        if moment == np.inf:
            break
        _mark(arrive, warm, paths, q, busy)
        pass_time(q, t, moment)
        while True:
            observe(arrive, deadlines, queue, paths, q, view)
            view[codes.NOW] = moment
            view[codes.AGED] = (
                count_aged(arrive, queue, q, moment, p[codes.T_CUT]) if machine.servers[codes.SIDE] > 0 else 0
            )
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
                lasts = fixed[path] + lasts
            ends = _occupy(paths, busy, path, moment, lasts)
            t[AREA] += take * lasts
            _answer(arrive, served, members, take, (path, q[BATCHES], moment, ends))
            for _ in range(min(take, n - q[ISSUED]) if users > 0 else 0):
                send_next(returns, sent, q, ends)
            q[BATCHES] += 1
            if q[PHASE] == MEASURING:
                sizes[path, take] += 1
        if q[QUEUED] == 0 and q[TAIL] == q[KNOWN] and q[RETURNING] == 0:
            break


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
        if q[TAIL] <= mark:
            return
        q[PHASE] += 1
        for path in range(2):
            busy[q[PHASE], path] = busy[0, path]
            for server in range(servers[path]):
                busy[q[PHASE], path] -= max(0.0, free[path, server] - arrive[mark])
