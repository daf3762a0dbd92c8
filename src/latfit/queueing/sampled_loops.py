"""The two queues of `sampled`, compiled: batches on one server, and a cut-off with a second server behind it.

Everything random is drawn before: moments of arrival, and uniform numbers for the services, one a service in the order
in which they begin. Runs at two loads that share them differ by the load alone. Nothing but numbers and arrays.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

_compiled: Any = njit(cache=True, nogil=True, error_model="numpy")


class Points(NamedTuple):
    """Ratios of a service's time to T(b): values (n,) and the share of the services up to each, reached (n,); those of
    batches of b are first[b]..last[b], both (largest + 1,), with values that rise. No value: every service takes its
    mean time."""

    values: Any
    reached: Any
    first: Any
    last: Any


@_compiled
def _ratio(points, batch, u):  # type: ignore[no-untyped-def]
    """The ratio that a share u of the services of such batches does not exceed; none known (no value): one."""
    if len(points.values) == 0:
        return 1.0
    low, high = points.first[batch], points.last[batch]
    while low < high:
        middle = (low + high) // 2
        if points.reached[middle] > u:
            high = middle
        else:
            low = middle + 1
    return points.values[low]


@_compiled
def serve_batches(arrive, T, threshold, points, u, response):  # type: ignore[no-untyped-def]
    """Response in ms of every arrival (n,), batches of threshold..len(T) - 1; returns how many batches were served.
    T[0] is not used."""
    n, largest = len(arrive), len(T) - 1
    free, served, i = 0.0, 0, 0
    while i < n:
        take = min(threshold, n - i)
        start = max(free, arrive[i + take - 1])
        while take < largest and i + take < n and arrive[i + take] <= start:
            take += 1
        free = start + T[take] * _ratio(points, take, u[served])
        for k in range(i, i + take):
            response[k] = free - arrive[k]
        i += take
        served += 1
    return served


@_compiled
def serve_with_cutoff(arrive, T, cutoff, main, side_ms, side, u, response, aside):  # type: ignore[no-untyped-def]
    """Greedy batches on a main server; who still waits at age `cutoff` goes to a side server, one at a time.

    main, side: the Points of their ratios; side_ms: the side server's mean, its ratios exponential where it has
    no values; u (2, n): for services on either. aside (n,): whether the side server served it. Returns the ms that the
    side server worked.
    """
    n, largest = len(arrive), len(T) - 1
    free = side_free = 0.0
    served = overflowed = i = 0
    worked = 0.0
    exponential = len(side.values) == 0
    while i < n:
        if arrive[i] + cutoff < free:
            begin = max(side_free, arrive[i] + cutoff)
            factor = -np.log1p(-u[1, overflowed]) if exponential else _ratio(side, 1, u[1, overflowed])
            side_free = begin + side_ms * factor
            worked += side_ms * factor
            response[i] = side_free - arrive[i]
            aside[i] = True
            overflowed += 1
            i += 1
            continue
        start = max(free, arrive[i])
        take = 1
        while take < largest and i + take < n and arrive[i + take] <= start:
            take += 1
        free = start + T[take] * _ratio(main, take, u[0, served])
        for k in range(i, i + take):
            response[k] = free - arrive[k]
            aside[k] = False
        i += take
        served += 1
    return worked
