"""Who waits, in compiled code: arrivals, classes, those sent to the side path, and users who come back."""

import numpy as np

from latfit.scheduling.codes import DUE, MAIN_FREE, OLDEST, SIDE_WAITING, WAITING
from latfit.scheduling.compiling import compiled
from latfit.sim.records import (
    AREA,
    CLOCK,
    HEAD,
    ISSUED,
    KNOWN,
    LAST,
    MOST,
    NOBODY,
    QUEUED,
    RETURNING,
    SIDE_FIRST,
    SIDE_LAST,
    SIDE_QUEUED,
    TAIL,
)


@compiled
def let_come(arrive, q, t, moment, at):  # type: ignore[no-untyped-def]
    """Let come who comes by `moment`, or until `at` wait; returns when that is."""
    tail, waiting, n = q[TAIL], q[QUEUED], q[KNOWN]
    beside, last, area = q[SIDE_QUEUED], t[LAST], t[AREA]
    while tail < n and arrive[tail] <= moment:
        now = arrive[tail]
        area += (waiting + beside) * (now - last)
        last = now
        tail += 1
        waiting += 1
        if waiting >= at:
            moment = now
    q[TAIL], q[QUEUED], t[LAST], t[AREA] = tail, waiting, last, area
    return moment


@compiled
def let_come_by_class(arrive, class_id, following, lists, returns, clocks, limits):  # type: ignore[no-untyped-def]
    """As `let_come`, for several classes and for a closed loop."""
    q, t = clocks
    moment, at, users = limits
    while True:
        i = q[TAIL]
        now = np.inf
        if users > 0 and q[RETURNING] > 0:
            now = returns[0]
        elif users == 0 and i < q[KNOWN]:
            now = arrive[i]
        if now > moment or now == np.inf:
            return moment
        if users > 0:
            arrive[i] = _pop(returns, q)
            q[KNOWN] += 1
        t[AREA] += (q[QUEUED] + q[SIDE_QUEUED]) * (now - t[LAST])
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


@compiled
def pass_time(q, t, moment):  # type: ignore[no-untyped-def]
    waiting = q[QUEUED] + q[SIDE_QUEUED]
    t[AREA] += waiting * (moment - t[LAST])
    t[CLOCK] = t[LAST] = moment
    q[MOST] = max(q[MOST], waiting)


@compiled
def look(arrive, deadlines, lists, servers, free, q, view):  # type: ignore[no-untyped-def]
    """Fill the policy's view, but for the moment. lists: first and last request of each class."""
    view[WAITING] = q[QUEUED]
    view[SIDE_WAITING] = q[SIDE_QUEUED]
    for path in range(2):
        soonest = free[path, 0]
        for server in range(1, servers[path]):
            soonest = min(soonest, free[path, server])
        view[MAIN_FREE + path] = soonest
    if q[QUEUED] > 0 and len(deadlines) == 1 and lists[0, 0] == NOBODY:
        view[OLDEST] = arrive[q[HEAD]]
        view[DUE] = view[OLDEST] + deadlines[0]
    elif q[QUEUED] > 0:
        view[OLDEST] = view[DUE] = np.inf
        for c in range(len(deadlines)):
            if lists[0, c] != NOBODY:
                arrived = arrive[lists[0, c]]
                view[OLDEST] = min(view[OLDEST], arrived)
                view[DUE] = min(view[DUE], arrived + deadlines[c])


@compiled
def take_next(members, arrive, following, lists, q, how):  # type: ignore[no-untyped-def]
    """The next requests out of the queue, into `members`: by class less age/ageing; ageing 0 is by age alone."""
    take, ageing, moment, classes = how
    q[QUEUED] -= take
    if not classes:
        for k in range(take):
            members[k] = q[HEAD] + k
        q[HEAD] += take
    for k in range(take if classes else 0):
        best, least = NOBODY, np.inf
        for c in range(lists.shape[1]):
            if lists[0, c] != NOBODY:
                age = moment - arrive[lists[0, c]]
                rank = -age if ageing == 0.0 else c - age / ageing
                if rank < least:
                    best, least = c, rank
        members[k] = lists[0, best]
        lists[0, best] = following[members[k]]


@compiled
def to_side(members, following, q, take):  # type: ignore[no-untyped-def]
    for k in range(take):
        i = members[k]
        if q[SIDE_QUEUED] == 0:
            q[SIDE_FIRST] = i
        else:
            following[q[SIDE_LAST]] = i
        following[i] = NOBODY
        q[SIDE_LAST] = i
        q[SIDE_QUEUED] += 1


@compiled
def take_from_side(members, following, q, take):  # type: ignore[no-untyped-def]
    for k in range(take):
        members[k] = q[SIDE_FIRST]
        q[SIDE_FIRST] = following[q[SIDE_FIRST]]
    q[SIDE_QUEUED] -= take


@compiled
def come_back(heap, q, moment):  # type: ignore[no-untyped-def]
    """A user's next request, into the heap."""
    place = q[RETURNING]
    q[RETURNING] += 1
    q[ISSUED] += 1
    while place > 0 and heap[(place - 1) // 2] > moment:
        heap[place] = heap[(place - 1) // 2]
        place = (place - 1) // 2
    heap[place] = moment


@compiled
def _pop(heap, q):  # type: ignore[no-untyped-def]
    """The earliest moment, out of the heap."""
    q[RETURNING] -= 1
    size = q[RETURNING]
    earliest, moved, place = heap[0], heap[size], 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= moved:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = moved
    return earliest
