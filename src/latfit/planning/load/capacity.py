"""How much load a strategy carries: the rates that meet the target, by simulation on the same random numbers.

The grid and the bisection take short runs; the end that is reported is lowered until a long run confirms it, so that a
plan at the capacity is feasible.
"""

from collections.abc import Sequence

import numpy as np

from latfit.planning import wording
from latfit.planning.load.cutoff import is_surely_met, likely_cutoffs
from latfit.planning.load.strategies import Machine, Target, cutoff_strategy
from latfit.planning.load.varying import replicas_for, schedule
from latfit.planning.request import PlanRequest
from latfit.planning.result import Alternative, Capacity, Kind, Strategy
from latfit.queueing import COARSE, FINE, QUICK, Effort, bisect, feasible_ranges

RateRange = tuple[float, float]

LIGHTEST, LIGHT, HEAVIEST = 1e-5, 0.05, 0.97  # of the stability limit: the rates that are simulated
GRID = 6  # rates in each of three parts: next to idle, light, heavy
PRECISION = 1e-3
GROWTH, CUTOFF_PRECISION, MAX_STEPS_DOWN = 1.3, 0.01, 4
BACKOFF_STEP = 0.005  # of a rate that a long run rejects; doubled each time
ROUNDING = 1e-6
HOUR_S = 3600.0


def feasible_rates(machine: Machine, strategy: Strategy, target: Target, start: float = 0.0) -> list[RateRange]:
    """Return the ranges of the rate per ms that meet the target; one from 0 has no lower end.

    Where a larger batch is quicker, or a rule waits to fill batches, there may be several ranges. With a T_cut the best
    one at each rate counts, from `start` on: a rate that is known to be met.
    """
    limit = machine.rate_limit(strategy)
    top, lowest = HEAVIEST * limit, LIGHTEST * limit
    if strategy.kind is Kind.CUTOFF:
        return _feasible_with_cutoff(machine, target, max(start, LIGHT * limit / 5), top)
    idle = np.geomspace(lowest, LIGHT * limit, GRID, endpoint=False)
    light = np.geomspace(LIGHT * limit, limit / 2, GRID, endpoint=False)
    heavy = limit - np.geomspace(limit / 2, limit - top, GRID)
    ranges = feasible_ranges(
        np.concatenate([idle, light, heavy]),
        lambda rate: target.is_met(machine.simulate(strategy, rate, QUICK)),
        lambda rate: target.is_met(machine.simulate(strategy, rate, COARSE)),
        precision=PRECISION,
    )
    return [(0.0 if low <= lowest else low, high) for low, high in ranges]


def _feasible_with_cutoff(machine: Machine, target: Target, start: float, top: float) -> list[RateRange]:
    """From `start` by steps of GROWTH and bisection: each rate takes a search for its T_cut."""

    def met(rate: float) -> bool:
        return cutoff_at(machine, rate, target, QUICK) is not None

    low = high = min(start, top)
    for _ in range(MAX_STEPS_DOWN):
        if met(low):
            break
        low, high = low / GROWTH, low
    else:
        return []
    while high == low < top and met(high := min(low * GROWTH, top)):
        low = high
    return [(0.0, low if low >= top else bisect(met, low, high, CUTOFF_PRECISION))]


def cutoff_at(machine: Machine, rate: float, target: Target, effort: Effort) -> Strategy | None:
    """Return GPU + CPU with a T_cut that meets the target at a rate."""
    tried = (cutoff_strategy(machine, cutoff) for cutoff in likely_cutoffs(machine, rate, target))
    return next((each for each in tried if target.is_met(machine.simulate(each, rate, effort))), None)


def confirmed_end(machine: Machine, strategy: Strategy, target: Target, ends: RateRange) -> tuple[float, Strategy]:
    """Return the highest rate of a range that a long run confirms, and the strategy there."""
    low, high = ends
    at = [strategy]

    def confirmed(rate: float) -> bool:
        if strategy.kind is not Kind.CUTOFF:
            return is_surely_met(machine.simulate(strategy, rate, FINE), target)
        there = cutoff_at(machine, rate, target, COARSE)
        at[0] = there or at[0]
        return there is not None and target.is_met(machine.simulate(there, rate))

    high = high if strategy.kind is not Kind.CUTOFF else (1 + CUTOFF_PRECISION) * high
    missed, step = high, BACKOFF_STEP * high
    while high > low and not confirmed(high):
        missed, high, step = high, high - step, 2 * step
    if high <= low:
        return low, strategy
    return bisect(confirmed, high, missed, BACKOFF_STEP), at[0]


def range_of(ranges: Sequence[RateRange], rate: float) -> RateRange:
    """Return the range that a rate is in, else the highest; (0, 0) without any."""
    own = [each for each in ranges if each[0] <= rate <= each[1] * (1 + ROUNDING)]
    return own[0] if own else max(ranges, key=lambda each: each[1], default=(0.0, 0.0))


def replicas_within(ranges: Sequence[RateRange], rate: float) -> int | None:
    """Return the fewest replicas among which a rate meets the target; None where no number does."""
    counts = [(replicas_for(rate, high), low) for low, high in ranges]
    return min((count for count, low in counts if rate / count >= low), default=None)


def capacity_of(row: Alternative, request: PlanRequest, promised_per_s: float | None) -> Capacity | None:
    """Return the capacity of the strategy that carries most; None where it meets the target at no rate."""
    each = request.rate_each
    if row.sustainable_per_s is None or each is None:
        return None
    whole_s = each * 1e3 * request.replicas
    needed = replicas_within(row.feasible_per_s or [(0.0, row.sustainable_per_s)], whole_s)
    price = None if row.price_per_hour is None or not row.replicas else row.price_per_hour / row.replicas
    hourly = None if price is None or needed is None else price * needed
    return Capacity(
        system=row.name,
        rate_per_s=each * 1e3,
        sustainable_per_s=row.sustainable_per_s,
        utilisation=row.utilisation,
        goodput_per_s=row.goodput_per_s,
        replicas=needed,
        headroom=row.sustainable_per_s / (each * 1e3) - 1,
        binding=wording.binding(row),
        price_per_hour=hourly,
        price_per_million=None if hourly is None else hourly / (whole_s * HOUR_S) * 1e6,
        promised_per_s=promised_per_s,
        load=None if request.load is None else schedule(request.load, row.sustainable_per_s / 1e3, price),
    )
