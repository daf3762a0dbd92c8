"""The simulation of requests, compiled: they arrive, a policy forms batches of them, and two paths serve the batches.

One loop over the moments at which something may be decided: a server becomes free, a policy's time limit runs out, or
as many wait as the policy asked for. Arrivals in between are only counted, so that a batch costs the same however many
requests it takes in. At one moment, services end first, then requests arrive, then the policy is asked, until it waits.

The queue is the stretch [HEAD, TAIL) of `line`, in order of arrival, where there is one class; with several, each class
is a linked list and whoever comes first by class and age is taken. A batch may pass over the front of the queue. A
closed loop keeps the requests that its users think about in a heap by the moment at which they send them, and writes
arrivals down as they happen.

N(t), the number in the system, is integrated over the run from the counts alone, and the response times are written
down one by one: that the two agree is Little's law, checked after every run.

Compiled functions share plain tuples of arrays: a queue (line, following, lists), the paths' servers
(servers, free), the counters q and the clocks t, which go by the numbers below.
"""

from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import entry, first_beyond, inner
from latfit.policies import (
    AGED,
    DUE,
    MAIN,
    MOST_AGED,
    NOW,
    OLDEST,
    SERVE_MAIN,
    SIDE,
    T_CUT,
    VIEW,
    WAIT,
    WAITING,
    decide,
)
from latfit.simulation.heap import pop, push

HEAD, TAIL, QUEUED, KNOWN, RETURNING, ISSUED, BATCHES, PHASE, MOST, COUNTERS = range(10)
CLOCK, LAST, AREA, CLOCKS = range(4)

DETERMINISTIC, EXPONENTIAL, EMPIRICAL = range(3)
"""Distributions of the service time given its typical value."""

WARMING, MEASURING, DRAINING = range(3)
NOBODY = -1


class Load(NamedTuple):
    """arrive (n,) ms; tokens (n,) or empty where all are alike; class_id (n,) or empty for one class; deadlines
    (classes,) ms; think (n,) ms, empty for an open load; users of a closed one; warm: the first that counts."""

    arrive: Any
    tokens: Any
    class_id: Any
    deadlines: Any
    think: Any
    users: int
    warm: int


class Machine(NamedTuple):
    """times (2, Bmax + 1, grid) ms by path, batch and tokens in it; grid of tokens; typical (2, Bmax + 1) ms, for the
    policy; servers (2,); kind (2,) of the service-time distribution; of an empirical one the ratios (2, k) to the
    typical time and the share (2, k) of services up to each; those of batches of b are first[., b]..last[., b]
    (2, Bmax + 1), rising."""

    times: Any
    grid: Any
    typical: Any
    servers: Any
    kind: Any
    ratios: Any
    reached: Any
    first: Any
    last: Any


class Rule(NamedTuple):
    """A policy: code, parameters, and the ms of waiting that make up for a class."""

    code: int
    parameters: Any
    ageing: float


class Scratch(NamedTuple):
    """What the core works on.

    free (2, servers): when each server is free.  members (Bmax + 1,).  seen (VIEW + 2 servers,).  line (n,): requests
    in order of arrival, for one class; following (n,): the next of its class behind a request, for several.  lists (4,
    classes): first and last of each class, and two places of a walk.  returns (users,): heap of the requests that
    users will send.  sent (n,): when, once that is known, before that how long they think.
    """

    free: Any
    members: Any
    seen: Any
    line: Any
    following: Any
    lists: Any
    returns: Any
    sent: Any


class Out(NamedTuple):
    """response (n,) ms, NaN until served; path (n,), -1 until served; sizes (2, Bmax + 1): batches by size; busy (3,
    2): ms of service begun, in all, up to the first and up to the last arrival that count; batch (n,) and start
    (n,): number and start of the batch, empty where not wanted; counters and clocks at the end."""

    response: Any
    path: Any
    sizes: Any
    busy: Any
    batch: Any
    start: Any
    counters: Any
    clocks: Any


@inner
def admit(arrive, q, t, moment, at):  # type: ignore[no-untyped-def]
    """Queue the arrivals up to `moment`, but stop once `at` requests wait. Returns the moment it went up to."""
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
    """As `admit`, for several classes and for a closed loop; sending: its users' next requests, a heap by time."""
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
            pop(returns, q[RETURNING], sent)
            q[RETURNING] -= 1
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
    """Fill the policy's view, all but the time and how many requests are aged."""
    line, _, lists = queue
    _, free = paths
    view[WAITING] = q[QUEUED]
    for path in range(2):
        for server in range(free.shape[1]):
            view[VIEW + path * free.shape[1] + server] = free[path, server]
    if q[QUEUED] > 0 and len(deadlines) == 1 and lists[0, 0] == NOBODY:
        view[OLDEST] = arrive[line[q[HEAD]]]
        view[DUE] = view[OLDEST] + deadlines[0]
    elif q[QUEUED] > 0:
        view[OLDEST] = view[DUE] = np.inf
        for c in range(len(deadlines)):
            if lists[0, c] != NOBODY:
                arrived = arrive[lists[0, c]]
                view[OLDEST] = min(view[OLDEST], arrived)
                view[DUE] = min(view[DUE], arrived + deadlines[c])


@inner
def count_aged(arrive, queue, q, now, cutoff):  # type: ignore[no-untyped-def]
    """How many requests have waited for `cutoff`, up to MOST_AGED: whoever is behind one that has not, has not."""
    line, following, lists = queue
    aged = 0
    if len(following) == 0:
        most = min(q[QUEUED], MOST_AGED)
        while aged < most and arrive[line[q[HEAD] + aged]] + cutoff <= now:
            aged += 1
    for c in range(lists.shape[1]):
        i = lists[0, c]
        while i != NOBODY and aged < MOST_AGED and arrive[i] + cutoff <= now:
            aged += 1
            i = following[i]
    return aged


@inner
def take_next(members, arrive, queue, q, how):  # type: ignore[no-untyped-def]
    """Take the `take` requests behind the first `passed` out of the queue: by class less age/ageing."""
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
    """Schedule the next request of a user whose last one ended at `idle_from`, after the thinking time."""
    i = q[ISSUED]
    sent[i] += idle_from
    push(returns, q[RETURNING], sent, i)
    q[RETURNING] += 1
    q[ISSUED] += 1


@entry
def serve_requests(load, machine, rule, rngs, scratch, out):  # type: ignore[no-untyped-def]
    """Run until everybody is served or the policy waits for ever. rngs: a generator a path."""
    # Taken out of the tuples once: in the loop each access would count a reference.
    arrive, class_id, deadlines, warm = load.arrive, load.class_id, load.deadlines, load.warm
    typical, kind, ratios, reached = machine.typical, machine.kind, machine.ratios, machine.reached
    times, grid, tokens, first, last = machine.times, machine.grid, load.tokens, machine.first, machine.last
    code, p, ageing = rule.code, rule.parameters, rule.ageing
    q, t, busy, sizes = out.counters, out.clocks, out.busy, out.sizes
    batch, start, served = out.batch, out.start, (out.response, out.path)
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
            view[NOW] = moment
            view[AGED] = count_aged(arrive, queue, q, moment, p[T_CUT]) if machine.servers[SIDE] > 0 else 0
            action, take, until, at = decide(code, p, typical, view)
            if action == WAIT:
                break
            path = MAIN if action == SERVE_MAIN else SIDE
            take_next(members, arrive, queue, q, (take, at, ageing, moment))
            lasts = _service_ms(times, grid, tokens, members, path, take)
            if kind[path] != DETERMINISTIC:
                u = rngs[0].random() if path == MAIN else rngs[1].random()
                lasts *= _factor(kind[path], ratios[path], reached[path], (first[path, take], last[path, take]), u)
            ends = _occupy(paths, busy, path, moment, lasts)
            t[AREA] += take * lasts
            _answer(arrive, served, members, take, (path, ends))
            _log(batch, members, take, q[BATCHES])
            _log(start, members, take, moment)
            for _ in range(min(take, n - q[ISSUED]) if users > 0 else 0):
                send_next(returns, sent, q, ends)
            q[BATCHES] += 1
            if q[PHASE] == MEASURING:
                sizes[path, take] += 1
        if q[QUEUED] == 0 and q[TAIL] == q[KNOWN] and q[RETURNING] == 0:
            break


@inner
def _next_free(paths, now):  # type: ignore[no-untyped-def]
    """When the next busy server ends."""
    servers, free = paths
    soonest = np.inf
    for path in range(2):
        for server in range(servers[path]):
            if now < free[path, server] < soonest:
                soonest = free[path, server]
    return soonest


@inner
def _service_ms(times, grid, tokens, members, path, take):  # type: ignore[no-untyped-def]
    """Typical T of the batch, interpolated linearly between the tokens of the grid."""
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
def _factor(kind, ratios, reached, points, u):  # type: ignore[no-untyped-def]
    """Drawn from the service-time distribution by one uniform number a batch, so that runs can share their random
    numbers. points: the first and the last of the ratios that batches of this size have."""
    return -np.log1p(-u) if kind == EXPONENTIAL else ratios[first_beyond(reached, points[0], points[1], u)]


@inner
def _occupy(paths, busy, path, now, lasts):  # type: ignore[no-untyped-def]
    """Serve on the server of the path that became free first; returns when that ends."""
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
    """Write down the responses of a batch and the path that served it."""
    response, served_on = served
    path, ends = how
    for k in range(take):
        i = members[k]
        response[i] = ends - arrive[i]
        served_on[i] = path


@inner
def _log(column, members, take, value):  # type: ignore[no-untyped-def]
    """Note a value of each member of a batch; an empty column is not wanted."""
    for k in range(take if len(column) > 0 else 0):
        column[members[k]] = value


@inner
def _mark(arrive, warm, paths, q, busy):  # type: ignore[no-untyped-def]
    """Note the service done by the first and the last arrival that count, once these have come."""
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
