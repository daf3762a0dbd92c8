"""How much load fits: the rates that meet a target, and the backlog of a load that varies. Rates per ms."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from latfit.errors import WrongUsage
from latfit.queueing.distribution import positive
from latfit.stats import FloatArray

Test = Callable[[float], bool]


def feasible_ranges(
    grid: FloatArray, meets: Test, meets_finely: Test | None = None, *, precision: float = 1e-3
) -> list[tuple[float, float]]:
    """Return the ranges of x within `grid` (n,), increasing, where a condition holds.

    Parameters
    ----------
    meets, meets_finely
        Whether the condition holds at x: quickly on the grid, and more exactly where the ends are bisected.
    precision
        Of an end, relative.
    """
    finely = meets_finely or meets
    found = [meets(float(x)) for x in grid]
    starts = [i for i, ok in enumerate(found) if ok and not (i and found[i - 1])]
    ranges = []
    for first in starts:
        last = next((i for i in range(first, len(grid)) if not found[i]), len(grid)) - 1
        low = float(grid[0]) if first == 0 else bisect(finely, float(grid[first]), float(grid[first - 1]), precision)
        high = float(grid[-1])
        if last < len(grid) - 1:
            high = bisect(finely, float(grid[last]), float(grid[last + 1]), precision)
        if low <= high:
            ranges.append((low, high))
    return ranges


def bisect(meets: Test, inside: float, outside: float, precision: float) -> float:
    """Return the point nearest to `outside` that still meets the condition, within a relative precision."""
    while abs(outside - inside) > precision * abs(inside):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if meets(middle) else (inside, middle)
    return inside


@dataclass(frozen=True)
class Backlog:
    """Fluid backlog: peak in requests, when it began to build and when it peaked (ms), and the extra wait in ms."""

    peak: float
    start_ms: float
    peak_ms: float
    extra_wait_ms: float


def fluid_backlog(times_ms: FloatArray, rates: FloatArray, capacity: float) -> Backlog:
    """Return the backlog of a load against a capacity per ms.

    Parameters
    ----------
    times_ms, rates
        Rates per ms at increasing times (n,), n >= 2, linear in between. The queue is empty at first.
    """
    capacity = positive(capacity, "capacity")
    t, load = np.asarray(times_ms, dtype=np.float64), np.asarray(rates, dtype=np.float64)
    if t.ndim != 1 or t.shape != load.shape or len(t) < 2 or not np.all(np.diff(t) > 0):
        raise WrongUsage("times must increase, with one rate each", where="load", remedy="Sort and pair them.")
    if not np.all(np.isfinite(load)) or np.any(load < 0):
        raise WrongUsage("rates must be finite and not negative", where="load", remedy="Give rates per ms.")
    net = load - capacity
    crossing = np.flatnonzero(net[:-1] * net[1:] < 0)
    share = net[crossing] / (net[crossing] - net[crossing + 1])
    t = np.concatenate([t, t[crossing] + share * np.diff(t)[crossing]])
    order = np.argsort(t, kind="stable")
    t, net = t[order], np.concatenate([net, np.zeros(len(crossing))])[order]
    total = np.concatenate([[0.0], np.cumsum(np.diff(t) * (net[1:] + net[:-1]) / 2)])
    backlog = total - np.minimum.accumulate(total)
    top = int(np.argmax(backlog))
    if backlog[top] <= 0:
        return Backlog(0.0, float(t[0]), float(t[0]), 0.0)
    start = int(np.argmin(total[: top + 1][::-1]))
    return Backlog(float(backlog[top]), float(t[top - start]), float(t[top]), float(backlog[top]) / capacity)
