"""Which T_cut meets an SLA: a fixed point, since the overflow rate depends on T_cut itself.

F(T_cut) = P(R > SLA) - (1 - q) is not monotone: a small T_cut overloads the AMX, a large one delays the GPU's own
requests. So F is taken on a grid over (0, SLA], is infinite where the AMX would be overloaded, and each change of sign
is bisected. The answer is a list of ranges, and says by which method: the exact law, the proved bound (what it admits
is certain), or the customary formula, which admits what the system then misses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import optimize

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.cutoff import CutoffQueue, cutoff_queue
from latfit.queueing.cutoff_law import exact_law
from latfit.queueing.law import positive
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray

Method = Literal["exact", "proved", "customary", "customary with GPU"]

OVERLOADED = 1.0
SMALLEST_SHARE = 1e-3
"""The grid starts at this share of the SLA."""


@dataclass(frozen=True)
class Ranges:
    """Where a condition holds: closed ranges in order, found on a grid and refined; `method` says by what."""

    ranges: tuple[tuple[float, float], ...]
    method: str

    @property
    def smallest(self) -> float | None:
        return self.ranges[0][0] if self.ranges else None

    @property
    def largest(self) -> float | None:
        return self.ranges[-1][1] if self.ranges else None

    def __contains__(self, value: float) -> bool:
        return any(low <= value <= high for low, high in self.ranges)


def feasible_cutoffs(
    rate: float, times: ServiceTimes, amx_rate: float, sla_ms: float, q: float = 0.99, method: Method = "exact"
) -> Ranges:
    """T_cut in ms, from a thousandth of the SLA up to it, with the q-quantile of all responses within the SLA.

    rate, amx_rate per ms. No range where there is none. Where a T_cut cannot be judged (the AMX within a hair of its
    limit, a largest batch that binds) it is left out.
    """
    positive(rate, "rate"), positive(amx_rate, "AMX rate"), positive(sla_ms, "SLA", "in ms")
    if not 0 < q < 1:
        raise WrongUsage(f"percentile {q:g} is not between 0 and 1", where="percentile", remedy="Write 0.99.")

    def excess(cutoff: float) -> float:
        try:
            queue = cutoff_queue(rate, cutoff, times, amx_rate)
            return _late_share(queue, sla_ms, q, method) - (1 - q)
        except SlaOutOfReach:
            return OVERLOADED

    first = times(1)
    # Beyond T(1) batches depend on each other and little changes: a coarser grid there.
    near = np.linspace(SMALLEST_SHARE * sla_ms, min(sla_ms, first), 41)
    far = np.linspace(first, sla_ms, 9)[1:] if sla_ms > first else np.zeros(0)
    return Ranges(not_above_zero(excess, np.concatenate([near, far])), method)


def customary_cutoff(sla_ms: float, amx_rate: float, overflow_rate: float, q: float = 0.99) -> float:
    """T_cut = SLA - ln(1/(1 - q))/(mu - lambda_a) in ms: the explicit formula in circulation, which takes the overflow
    rate as given; negative where it finds none. Neither necessary nor sufficient: see `feasible_cutoffs`."""
    spare = amx_rate - overflow_rate
    return sla_ms + math.log1p(-q) / spare if spare > 0 else -math.inf


def not_above_zero(excess: Callable[[float], float], grid: FloatArray) -> tuple[tuple[float, float], ...]:
    """Ranges within the ends of `grid` (n,) where excess <= 0, as far as the grid separates them."""
    values = [excess(float(x)) for x in grid]
    ranges: list[tuple[float, float]] = []
    start: float | None = float(grid[0]) if values[0] <= 0 else None
    for i in range(1, len(grid)):
        if (values[i] <= 0) == (start is not None):
            continue
        edge = _edge(excess, float(grid[i - 1]), float(grid[i]))
        if start is None:
            start = edge
        else:
            ranges.append((start, edge))
            start = None
    if start is not None:
        ranges.append((start, float(grid[-1])))
    return tuple(ranges)


def inner_ranges(
    excess: Callable[[float], float], grid: Sequence[float], steps: int
) -> tuple[tuple[float, float], ...]:
    """The same of a condition that a simulation judges: every end is bisected so many times, and keeps it."""
    keeps = [excess(x) <= 0 for x in grid]
    ranges: list[tuple[float, float]] = []
    for i in (place for place, kept in enumerate(keeps) if kept):
        high = grid[i] if i + 1 == len(grid) or keeps[i + 1] else _kept_end(excess, grid[i], grid[i + 1], steps)
        if i and keeps[i - 1]:
            low = ranges.pop()[0]
        else:
            low = grid[i] if i == 0 else _kept_end(excess, grid[i], grid[i - 1], steps)
        ranges.append((low, high))
    return tuple(ranges)


def _kept_end(excess: Callable[[float], float], kept: float, missed: float, steps: int) -> float:
    """The last value towards `missed` that keeps the condition."""
    for _ in range(steps):
        middle = (kept + missed) / 2
        kept, missed = (middle, missed) if excess(middle) <= 0 else (kept, middle)
    return kept


def _edge(excess: Callable[[float], float], low: float, high: float) -> float:
    root: float = optimize.brentq(excess, low, high, xtol=1e-7 * high, rtol=1e-10)
    return root


def _late_share(queue: CutoffQueue, sla_ms: float, q: float, method: Method) -> float:
    """P(R > SLA) by the method, right at 1 - q and on the right side of it elsewhere."""
    if queue.overflow_rate >= queue.amx_rate:
        return OVERLOADED + 1
    if method == "exact":
        # Where bounds decide, the law is not needed: nobody leaves the AMX sooner than its own service ends.
        least = queue.with_amx(lambda y: math.exp(-queue.amx_rate * y))(sla_ms)
        if least > 1 - q:
            return least
        most = queue.proved_tail()(sla_ms)
        return most if most <= 1 - q else exact_law(queue).tail(sla_ms)
    if method == "proved":
        return queue.proved_tail()(sla_ms)
    if method == "customary with GPU":
        return queue.customary_tail(sla_ms)
    if method == "customary":
        return math.exp(-(queue.amx_rate - queue.overflow_rate) * max(sla_ms - queue.cutoff_ms, 0.0))
    raise WrongUsage(f"method {method!r} is not known", where="method", remedy="Take exact, proved or customary.")
