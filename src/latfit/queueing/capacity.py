"""How much load fits: the highest rate under an SLA, replicas, and the backlog of a load that varies.

A distribution at a rate comes from the caller (`batch_queue`, `mm1`, ...), so the same search serves every queue. Where
steps take longer the more they hold, the share of late requests P(R > SLA) of a greedy queue grows with the rate
(`sustainable_rate`). It does not where a larger batch is quicker, nor for a rule that waits to fill batches (its
latency explodes at low load): there the feasible rates form ranges, which are searched on a grid (`feasible_rates`).

Random split over n replicas keeps arrivals Poisson(lambda/n) at each.

Fluid backlog of lambda(t) against a capacity c: max over t of the area of lambda - c since the backlog was last empty.
A load is sized for that peak, not for its mean.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.distribution import ResponseDistribution, positive
from latfit.queueing.overflow import Ranges
from latfit.queueing.roots import root
from latfit.stats import FloatArray
from latfit.units import format_ms

DistributionAt = Callable[[float], ResponseDistribution]

LIGHTEST = 1e-6
HEAVIEST = 1 - 1e-4
"""Rates are searched between these shares of the stability limit."""

LOWEST_OF_GRID, GRID = 1e-3, 40
PROBED = (0.5, 0.9, 0.99, 0.999)

LEAST_TAIL = 1e-15


@dataclass(frozen=True)
class Sustainable:
    """Highest rate per ms under the SLA; `binding` is "sla", or "stability" where the SLA holds up to the limit."""

    rate: float
    binding: str
    sla_ms: float
    q: float


@dataclass(frozen=True)
class Replicas:
    """Smallest number of replicas, the rate at each per ms, and the q-quantile in ms there."""

    count: int
    rate_each: float
    percentile_ms: float


@dataclass(frozen=True)
class Backlog:
    """Fluid backlog: its peak in requests, when it began to build and when it peaked (ms), and the extra wait in ms."""

    peak: float
    start_ms: float
    peak_ms: float
    extra_wait_ms: float


def sustainable_rate(
    law_at: DistributionAt,
    rate_limit: float,
    sla_ms: float,
    q: float = 0.99,
    *,
    precision: float = 1e-9,
    highest: float = HEAVIEST,
) -> Sustainable:
    """Highest rate with P(R <= sla) >= q. law_at: rate per ms -> distribution; rate_limit: its stability limit per ms.

    precision: how far below the highest rate the answer may lie, as a share of it; it keeps the SLA in any case.
    highest: share of the limit up to which rates are tried.
    Raises SlaOutOfReach where even a millionth of the limit is too much.
    """
    limit = positive(rate_limit, "rate limit")
    excess = _excess(law_at, sla_ms, q)
    low = LIGHTEST * limit
    if excess(low) > 0:
        raise SlaOutOfReach(
            f"no rate meets {format_ms(sla_ms)} at {q:.4g}: a nearly idle system needs "
            f"{format_ms(law_at(low).percentile(q))}",
            where="SLA",
            remedy="Relax the SLA or make the step faster; more replicas do not help.",
        )
    # From below: distributions near the limit are the costly ones.
    for share in (*(probed for probed in PROBED if probed < highest), highest):
        if excess(share * limit) > 0:
            rate = root(excess, low, share * limit, xtol=precision * low, rtol=precision)
            # The search may end a hair above; the answer must keep the SLA.
            while excess(rate) > 0:
                rate *= 1 - 2 * precision
            return Sustainable(rate, "sla", sla_ms, q)
        low = share * limit
    return Sustainable(low, "stability", sla_ms, q)


def feasible_rates(
    law_at: DistributionAt,
    rate_limit: float,
    sla_ms: float,
    q: float = 0.99,
    *,
    scan_at: DistributionAt | None = None,
    highest: float = HEAVIEST,
) -> Ranges:
    """All ranges of the rate per ms that meet the SLA, on a grid whose changes are searched; for queues whose latency
    does not grow with the load. scan_at: a quicker distribution of the same queue, for the grid."""
    limit = positive(rate_limit, "rate limit")
    light = np.geomspace(LOWEST_OF_GRID, 0.5, GRID // 2, endpoint=False)
    grid = np.concatenate([light, 1 - np.geomspace(0.5, 1 - highest, GRID - len(light))]) * limit
    excess = _excess(law_at, sla_ms, q)
    scanned = excess if scan_at is None else _excess(scan_at, sla_ms, q)
    keeps = [scanned(float(rate)) <= 0 for rate in grid]
    ranges = []
    for first in (i for i, kept in enumerate(keeps) if kept and not (i and keeps[i - 1])):
        last = next((i for i in range(first, len(keeps)) if not keeps[i]), len(keeps)) - 1
        low = float(grid[first]) if first == 0 else _end(excess, float(grid[first]), float(grid[first - 1]))
        high = float(grid[last]) if last == len(grid) - 1 else _end(excess, float(grid[last]), float(grid[last + 1]))
        if low <= high:
            ranges.append((low, high))
    return Ranges(tuple(ranges), "grid and search")


def _end(excess: Callable[[float], float], kept: float, missed: float) -> float:
    """Where a range ends that `kept` is in and `missed` is not; `kept` where the distribution cannot tell the two
    apart."""
    if excess(kept) > 0 or excess(missed) <= 0:
        return kept
    low, high = min(kept, missed), max(kept, missed)
    end = root(excess, low, high, xtol=1e-6 * high, rtol=1e-4)
    # The search may end a hair outside.
    away = math.copysign(1e-4 * end, kept - end)
    while excess(end) > 0 and abs(away) < abs(kept - end):
        end, away = end + away, 2 * away
    return end if excess(end) <= 0 else kept


def replicas(rate: float, law_at: DistributionAt, rate_limit: float, sla_ms: float, q: float = 0.99) -> Replicas:
    """Smallest n with the q-quantile at rate/n within the SLA (random split)."""
    rate = positive(rate, "rate")
    each = sustainable_rate(law_at, rate_limit, sla_ms, q).rate
    count = max(1, math.ceil(rate / each * (1 - 1e-12)))
    return Replicas(count, rate / count, law_at(rate / count).percentile(q))


def fluid_backlog(times_ms: FloatArray, rates: FloatArray, capacity: float) -> Backlog:
    """Backlog of a load given as rates per ms at increasing times (n,), straight lines between, empty at first.

    Exact for that load: each stretch is split where it crosses the capacity (per ms). n >= 2.
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
    net = np.concatenate([net, np.zeros(len(crossing))])
    order = np.argsort(t, kind="stable")
    t, net = t[order], net[order]
    total = np.concatenate([[0.0], np.cumsum(np.diff(t) * (net[1:] + net[:-1]) / 2)])
    backlog = total - np.minimum.accumulate(total)
    top = int(np.argmax(backlog))
    if backlog[top] <= 0:
        return Backlog(0.0, float(t[0]), float(t[0]), 0.0)
    start = int(np.argmin(total[: top + 1][::-1]))
    return Backlog(float(backlog[top]), float(t[top - start]), float(t[top]), float(backlog[top]) / capacity)


def _excess(law_at: DistributionAt, sla_ms: float, q: float) -> Callable[[float], float]:
    x = positive(sla_ms, "SLA", "in ms")
    if not 0 < q < 1:
        raise WrongUsage(f"percentile {q:g} is not between 0 and 1", where="percentile", remedy="Write 0.99.")

    @cache
    def excess(rate: float) -> float:
        # The logarithm of a tail is nearly straight in the rate, so that a search by secants ends soon.
        try:
            return math.log(max(law_at(rate).tail(x), LEAST_TAIL) / (1 - q))
        except SlaOutOfReach:
            return -math.log(1 - q)

    return excess
