"""Decide what a dispatch policy does now, in compiled code, without state or clock: docs/concepts/simulation.md.

`decide` returns (action, take, until, at). To serve: start a batch of `take` requests after skipping the first `at`. To
wait: ask again at time `until`, when `at` requests wait, or when a path becomes idle. `times[path, b]` is T(b) in ms.
"""

import math

from latfit.compiled import entry, inner
from latfit.policies import codes, marginal_cost

TIE = 1e-6
"""Relative difference below which two completion times count as equal, because sums of times are rounded."""

_literal = inner(marginal_cost.literal_waits)
_amortised = inner(marginal_cost.amortised_waits)
_total_delay = inner(marginal_cost.total_delay_waits)


@entry
def decide(code, p, times, view):  # type: ignore[no-untyped-def]
    """Return the decision of policy `code`. Functions here have one return, so that numba counts no references."""
    if view[codes.WAITING] < 1:
        found = (codes.WAIT, 0, math.inf, 1)
    elif code == codes.CUTOFF:
        found = _cutoff(p, times, view)
    elif code == codes.THREE_STAGE:
        found = _three_stage(p, times, view)
    elif code == codes.SPLIT:
        found = _split(p, times, view)
    elif _soonest(view, codes.MAIN) > view[codes.NOW]:
        found = (codes.WAIT, 0, math.inf, codes.ANY)
    elif code == codes.GREEDY:
        found = _serve(p, view)
    elif code == codes.FIXED:
        found = _patient(p, view, int(p[codes.THRESHOLD]))
    elif code == codes.WINDOW:
        found = _patient(p, view, int(p[codes.MAIN_LARGEST]))
    elif code == codes.MARGINAL:
        found = _patient(p, view, _marginal(p, times, int(view[codes.WAITING])))
    elif code == codes.OPTIMAL:
        found = _tabled(p, view)
    else:
        found = _deadline(p, times, view)
    return found


@inner
def _serve(p, view):  # type: ignore[no-untyped-def]
    return codes.SERVE_MAIN, min(int(view[codes.WAITING]), int(p[codes.MAIN_LARGEST])), 0.0, 0


@inner
def _patient(p, view, enough):  # type: ignore[no-untyped-def]
    until = view[codes.OLDEST] + p[codes.PATIENCE]
    found = (codes.WAIT, 0, until, enough)
    if view[codes.WAITING] >= enough or view[codes.NOW] >= until:
        found = _serve(p, view)
    return found


@inner
def _tabled(p, view):  # type: ignore[no-untyped-def]
    waiting = int(view[codes.WAITING])
    take = int(p[min(codes.HEADER + waiting, len(p) - 1)])
    found = (codes.WAIT, 0, math.inf, waiting + 1)
    if take > 0:
        found = (codes.SERVE_MAIN, min(take, int(p[codes.MAIN_LARGEST])), 0.0, 0)
    return found


@inner
def _marginal(p, times, B):  # type: ignore[no-untyped-def]
    enough = B
    if int(p[codes.MAIN_LARGEST]) > B:
        now, after, one = times[codes.MAIN, B], times[codes.MAIN, B + 1], times[codes.MAIN, 1]
        if p[codes.RULE] == codes.LITERAL:
            waits = _literal(B, now, after, one, p[codes.RATE])
        elif p[codes.RULE] == codes.AMORTISED:
            waits = _amortised(B, now, after, one, p[codes.RATE])
        else:
            waits = _total_delay(B, now, after, one, p[codes.RATE])
        enough += 1 if waits else 0
    return enough


@inner
def _cutoff(p, times, view):  # type: ignore[no-untyped-def]
    idle, side_idle = _soonest(view, codes.MAIN) <= view[codes.NOW], _soonest(view, codes.SIDE) <= view[codes.NOW]
    waiting, aged = int(view[codes.WAITING]), int(view[codes.AGED])
    left = _left_to_side(p, times, view) if idle else 0
    take, passed = _ended_no_later(p, times, view, aged) if side_idle else (0, 0)
    if waiting > left and idle:
        found = (codes.SERVE_MAIN, min(waiting - left, int(p[codes.MAIN_LARGEST])), 0.0, left)
    elif take > 0:
        found = (codes.SERVE_SIDE, take, 0.0, passed)
    elif idle:
        found = (codes.WAIT, 0, _soonest(view, codes.SIDE), waiting + 1)
    elif aged == 0:
        found = (codes.WAIT, 0, view[codes.OLDEST] + p[codes.T_CUT], codes.ANY)
    else:
        found = (codes.WAIT, 0, math.inf, waiting + 1 if side_idle else codes.ANY)
    return found


@inner
def _three_stage(p, times, view):  # type: ignore[no-untyped-def]
    idle, side_idle = _soonest(view, codes.MAIN) <= view[codes.NOW], _soonest(view, codes.SIDE) <= view[codes.NOW]
    waiting, enough, aged = int(view[codes.WAITING]), int(p[codes.THRESHOLD]), int(view[codes.AGED])
    left = _left_to_side(p, times, view) if idle else 0
    full = idle and waiting - left >= enough
    take, passed = _ended_no_later(p, times, view, waiting) if side_idle and not full else (0, 0)
    if take > 0:
        found = (codes.SERVE_SIDE, take, 0.0, passed)
    elif full or (idle and aged > 0 and waiting > left):
        found = (codes.SERVE_MAIN, min(waiting - left, int(p[codes.MAIN_LARGEST])), 0.0, left)
    elif idle:
        until = _soonest(view, codes.SIDE) if aged > 0 else view[codes.OLDEST] + p[codes.T_CUT]
        found = (codes.WAIT, 0, until, waiting + 1 if side_idle or aged > 0 else enough)
    else:
        found = (codes.WAIT, 0, math.inf, waiting + 1 if side_idle else codes.ANY)
    return found


@inner
def _split(p, times, view):  # type: ignore[no-untyped-def]
    idle, side_idle = _soonest(view, codes.MAIN) <= view[codes.NOW], _soonest(view, codes.SIDE) <= view[codes.NOW]
    waiting, until = int(view[codes.WAITING]), view[codes.OLDEST] + p[codes.PATIENCE]
    take, passed = 0, 0
    if side_idle:
        take, passed = best_split(p, times, view) if idle else _ended_no_later(p, times, view, waiting)
    if not idle and not side_idle:
        found = (codes.WAIT, 0, math.inf, codes.ANY)
    elif waiting < p[codes.THRESHOLD] and view[codes.NOW] < until:
        found = (codes.WAIT, 0, until, int(p[codes.THRESHOLD]))
    elif take > 0:
        found = (codes.SERVE_SIDE, take, 0.0, passed)
    elif idle:
        found = _serve(p, view)
    else:
        found = (codes.WAIT, 0, math.inf, waiting + 1)
    return found


@inner
def best_split(p, times, view):  # type: ignore[no-untyped-def]
    """Find the side batch with the least total delay, and the requests in front that stay."""
    waiting, least, best, behind = int(view[codes.WAITING]), math.inf, 0, 0
    for side in range(min(waiting, int(p[codes.SIDE_LARGEST])) + 1):
        main = min(waiting - side, int(p[codes.MAIN_LARGEST]))
        # Requests that fit on neither path wait behind the main batch and count with it.
        delay = (waiting - side) * times[codes.MAIN, main] + side * times[codes.SIDE, side]
        passed = _ends_before(p, times, view, side) if side > 0 else 0
        if delay < least and passed + side <= waiting:
            least, best, behind = delay, side, passed
    return best, behind


@inner
def _deadline(p, times, view):  # type: ignore[no-untyped-def]
    largest = int(p[codes.MAIN_LARGEST])
    take = min(int(view[codes.WAITING]), largest)
    last = view[codes.DUE] - times[codes.MAIN, min(take + 1, largest)]
    found = (codes.WAIT, 0, last, take + 1)
    if take == largest or view[codes.NOW] >= last:
        found = _serve(p, view)
    return found


@inner
def _soonest(view, path):  # type: ignore[no-untyped-def]
    servers, soonest = (len(view) - codes.VIEW) // 2, math.inf
    for place in range(codes.VIEW + path * servers, codes.VIEW + (path + 1) * servers):
        soonest = min(soonest, view[place])
    return soonest


@inner
def _begun_before(view, path, moment, batch_ms):  # type: ignore[no-untyped-def]
    """Count the batches of `batch_ms` each that the servers of a path can start before a moment."""
    servers = (len(view) - codes.VIEW) // 2
    begun = 0
    for place in range(codes.VIEW + path * servers, codes.VIEW + (path + 1) * servers):
        free = max(view[codes.NOW], view[place])
        if free < moment:
            begun += math.ceil((moment - free) / batch_ms)
    return begun


@inner
def _ends_before(p, times, view, take):  # type: ignore[no-untyped-def]
    """Count the requests in front that the main path finishes before the side path finishes `take` started now."""
    waiting, largest = int(view[codes.WAITING]), int(p[codes.MAIN_LARGEST])
    ends, full = view[codes.NOW] + (1 - TIE) * times[codes.SIDE, take], times[codes.MAIN, largest]
    batches = min(_begun_before(view, codes.MAIN, ends - full, full), waiting // largest)
    passed = batches * largest
    last = waiting - passed
    if 0 < last < largest and _begun_before(view, codes.MAIN, ends - times[codes.MAIN, last], full) > batches:
        passed = waiting
    return passed


@inner
def _ended_no_later(p, times, view, most):  # type: ignore[no-untyped-def]
    """Return the largest batch up to `most` that the idle side path ends no later, and who stays in front of it."""
    waiting = int(view[codes.WAITING])
    take, passed = min(waiting, most, int(p[codes.SIDE_LARGEST])), 0
    while take > 0:
        passed = _ends_before(p, times, view, take)
        if passed + take <= waiting:
            break
        take -= 1
    return take, passed


@inner
def _left_to_side(p, times, view):  # type: ignore[no-untyped-def]
    """Count the aged requests in front that the side path finishes before an idle main path."""
    waiting, largest, side = int(view[codes.WAITING]), int(p[codes.MAIN_LARGEST]), int(p[codes.SIDE_LARGEST])
    left, most = 0, min(int(view[codes.AGED]), waiting)
    while left < most:
        batch, last = left // side, left % side + 1
        latest = view[codes.NOW] + (1 - TIE) * times[codes.MAIN, min(waiting - left, largest)] - times[codes.SIDE, last]
        if _begun_before(view, codes.SIDE, latest, times[codes.SIDE, side]) <= batch:
            break
        left += 1
    return left
