"""Every dispatch decision, compiled: (policy, parameters, service times, view) -> what to do now.

`decide` returns (action, take, until, at): the action, how many requests from the front of the queue, and for WAIT the
moment and the number waiting at which to ask again, whichever comes first; a path that becomes free always asks again.
It holds no state and reads no clock. `times[path, b]` is the typical T(b) in ms, b = 0 (unused) to the largest batch.

- greedy: an idle main path takes all that wait, up to its largest batch.
- fixed: exactly THRESHOLD requests at a time.
- window: as soon as the largest batch waits, or the oldest has waited for PATIENCE.
- marginal: wait for one more while the rule of `marginal_cost` says so (and the oldest has not waited for PATIENCE).
- cutoff: greedy; a request that has waited for T_CUT moves to the side path.
- three-stage: THRESHOLD requests or more go to an idle main path. An idle side path takes as many as it ends no later
  than the main path would end the whole queue. The rest waits, and at age T_CUT it is flushed: to the main path where
  that is idle and would end earlier, else to the side path, with those behind it that end earlier there.
- optimal: as many as the table of `optimal` says for the number waiting; beyond its end as many as at its end.
- split: with both paths idle, the queue is split where the sum of all delays is least; with one idle, as in
  three-stage. A queue below THRESHOLD waits to be merged with what comes, for PATIENCE at most.
- deadline: wait for the largest batch as long as every deadline can still be met.
"""

import math

from latfit.compiled import entry, inner
from latfit.policies import marginal_cost
from latfit.policies.codes import (
    AMORTISED,
    ANY,
    CUTOFF,
    DUE,
    FIXED,
    GREEDY,
    HEADER,
    LITERAL,
    MAIN,
    MAIN_FREE,
    MAIN_LARGEST,
    MARGINAL,
    MOVE,
    NOW,
    OLDEST,
    OPTIMAL,
    PATIENCE,
    RATE,
    RULE,
    SERVE_MAIN,
    SERVE_SIDE,
    SIDE,
    SIDE_FREE,
    SIDE_LARGEST,
    SIDE_WAITING,
    SPLIT,
    T_CUT,
    THREE_STAGE,
    THRESHOLD,
    WAIT,
    WAITING,
    WINDOW,
)

_literal = inner(marginal_cost.literal_waits)
_amortised = inner(marginal_cost.amortised_waits)
_total_delay = inner(marginal_cost.total_delay_waits)


@entry
def decide(code, p, times, view):  # type: ignore[no-untyped-def]
    """What policy `code` with parameters `p` does; see the module. One way out of each function: numba then drops the
    counting of references, which would cost more than the decision."""
    if view[WAITING] < 1:
        found = (WAIT, 0, math.inf, 1)
    elif code == CUTOFF:
        found = _cutoff(p, view)
    elif code == THREE_STAGE:
        found = _three_stage(p, times, view)
    elif code == SPLIT:
        found = _split(p, times, view)
    elif view[MAIN_FREE] > view[NOW]:
        found = (WAIT, 0, math.inf, ANY)
    elif code == GREEDY:
        found = _serve(p, view)
    elif code == FIXED:
        found = _patient(p, view, int(p[THRESHOLD]))
    elif code == WINDOW:
        found = _patient(p, view, int(p[MAIN_LARGEST]))
    elif code == MARGINAL:
        found = _patient(p, view, _marginal(p, times, int(view[WAITING])))
    elif code == OPTIMAL:
        found = _tabled(p, view)
    else:
        found = _deadline(p, times, view)
    return found


@inner
def _serve(p, view):  # type: ignore[no-untyped-def]
    return SERVE_MAIN, min(int(view[WAITING]), int(p[MAIN_LARGEST])), 0.0, 0


@inner
def _patient(p, view, enough):  # type: ignore[no-untyped-def]
    """Wait until `enough` are there, or the oldest has waited for PATIENCE."""
    until = view[OLDEST] + p[PATIENCE]
    found = (WAIT, 0, until, enough)
    if view[WAITING] >= enough or view[NOW] >= until:
        found = _serve(p, view)
    return found


@inner
def _tabled(p, view):  # type: ignore[no-untyped-def]
    waiting = int(view[WAITING])
    take = int(p[min(HEADER + waiting, len(p) - 1)])
    found = (WAIT, 0, math.inf, waiting + 1)
    if take > 0:
        found = (SERVE_MAIN, min(take, int(p[MAIN_LARGEST])), 0.0, 0)
    return found


@inner
def _marginal(p, times, B):  # type: ignore[no-untyped-def]
    """B where the rule dispatches B waiting requests, B + 1 where it waits for one more."""
    enough = B
    if int(p[MAIN_LARGEST]) > B:
        now, after, one = times[MAIN, B], times[MAIN, B + 1], times[MAIN, 1]
        if p[RULE] == LITERAL:
            waits = _literal(B, now, after, one, p[RATE])
        elif p[RULE] == AMORTISED:
            waits = _amortised(B, now, after, one, p[RATE])
        else:
            waits = _total_delay(B, now, after, one, p[RATE])
        enough += 1 if waits else 0
    return enough


@inner
def _cutoff(p, view):  # type: ignore[no-untyped-def]
    expires = view[OLDEST] + p[T_CUT]
    if view[MAIN_FREE] <= view[NOW]:
        found = _serve(p, view)
    elif view[NOW] >= expires:
        found = (MOVE, 1, 0.0, 0)
    else:
        found = (WAIT, 0, expires, ANY)
    return found


@inner
def _three_stage(p, times, view):  # type: ignore[no-untyped-def]
    idle = view[MAIN_FREE] <= view[NOW]
    side_idle = view[SIDE_FREE] <= view[NOW] and view[SIDE_WAITING] == 0
    waiting, enough = int(view[WAITING]), int(p[THRESHOLD])
    ends, expires = _main_ends(p, times, view), view[OLDEST] + p[T_CUT]
    side = _ends_by(p, times, view, ends) if side_idle or view[NOW] >= expires else 0
    if idle and waiting >= enough:
        found = _serve(p, view)
    elif side_idle and side > 0:
        found = (SERVE_SIDE, side, 0.0, 0)
    elif view[NOW] < expires:
        at = enough if idle else ANY
        found = (WAIT, 0, expires, min(at, waiting + 1) if side_idle else at)
    elif idle and ends < _side_ends(p, times, view, 1):
        found = _serve(p, view)
    else:
        found = (MOVE, max(1, side), 0.0, 0)
    return found


@inner
def _split(p, times, view):  # type: ignore[no-untyped-def]
    idle = view[MAIN_FREE] <= view[NOW]
    side_idle = view[SIDE_FREE] <= view[NOW] and view[SIDE_WAITING] == 0
    waiting, until = int(view[WAITING]), view[OLDEST] + p[PATIENCE]
    side = 0
    if idle and side_idle:
        side = best_split(p, times, waiting)
    elif side_idle:
        side = _ends_by(p, times, view, _main_ends(p, times, view))
    if not idle and not side_idle:
        found = (WAIT, 0, math.inf, ANY)
    elif waiting < p[THRESHOLD] and view[NOW] < until:
        found = (WAIT, 0, until, int(p[THRESHOLD]))
    elif side > 0:
        found = (SERVE_SIDE, side, 0.0, 0)
    elif idle:
        found = _serve(p, view)
    else:
        found = (WAIT, 0, math.inf, waiting + 1)
    return found


@inner
def best_split(p, times, waiting):  # type: ignore[no-untyped-def]
    """How many of `waiting` the side path takes so that the sum of all their delays is least, both paths being idle."""
    least, best = math.inf, 0
    for side in range(max(0, min(waiting, int(p[SIDE_LARGEST]))) + 1):
        main = min(waiting - side, int(p[MAIN_LARGEST]))
        # Requests that fit on neither path are counted with the main path's batch, behind which they wait.
        delay = (waiting - side) * times[MAIN, main] + side * times[SIDE, side]
        if delay < least:
            least, best = delay, side
    return best


@inner
def _deadline(p, times, view):  # type: ignore[no-untyped-def]
    largest = int(p[MAIN_LARGEST])
    take = min(int(view[WAITING]), largest)
    last = view[DUE] - times[MAIN, min(take + 1, largest)]
    found = (WAIT, 0, last, take + 1)
    if take == largest or view[NOW] >= last:
        found = _serve(p, view)
    return found


@inner
def _main_ends(p, times, view):  # type: ignore[no-untyped-def]
    """When the main path would end all that wait, or its largest batch of them."""
    return max(view[NOW], view[MAIN_FREE]) + times[MAIN, min(int(view[WAITING]), int(p[MAIN_LARGEST]))]


@inner
def _side_ends(p, times, view, more):  # type: ignore[no-untyped-def]
    """When the side path would end `more` requests behind those that already wait for it."""
    largest, total = int(p[SIDE_LARGEST]), int(view[SIDE_WAITING]) + more
    full = (total - 1) // largest
    return max(view[NOW], view[SIDE_FREE]) + full * times[SIDE, largest] + times[SIDE, total - full * largest]


@inner
def _ends_by(p, times, view, deadline):  # type: ignore[no-untyped-def]
    """The most requests that the side path, given them now, ends by `deadline`."""
    take = min(int(view[WAITING]), int(p[SIDE_LARGEST]))
    while take > 0 and _side_ends(p, times, view, take) > deadline:
        take -= 1
    return take
