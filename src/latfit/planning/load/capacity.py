"""Searches over rates and T_cut on common random numbers.

Short runs scan a grid and bisect its ends. Reported ends are lowered until a long run confirms them, so that a plan at
the capacity is feasible.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from latfit.planning import wording
from latfit.planning.load.strategies import Machine, Part, Target, cutoff_strategy
from latfit.planning.load.varying import replicas_for
from latfit.planning.request import Objective, PlanOptions
from latfit.planning.result import Alternative, Capacity, Cutoff, Kind, Strategy
from latfit.planning.verdict import MOST_IDLE
from latfit.queueing import (
    COARSE,
    FINE,
    QUICK,
    USUAL,
    Effort,
    ResponseDistribution,
    bisect,
    feasible_ranges,
)
from latfit.units import format_ms, format_percent

RateRange = tuple[float, float]

LIGHTEST, LIGHT, HEAVIEST = 1e-5, 0.05, 0.97  # of the stability limit: the rates that are simulated
GRID = 4  # rates in each of three parts: next to idle, light, heavy
PRECISION = 1e-3
CUTOFF_PRECISION, CUTOFF_MARGIN = 0.01, 0.04  # with a T_cut; short runs may find an end by so much too low
BACKOFF_STEP = 0.005  # of a rate that a long run rejects; doubled each time
ROUNDING = 1e-6
HOUR_S = 3600.0

CUTOFF_GRID = 12
CUTOFF_END = 5e-3  # precision of the ends of a range of T_cut
SLA_SHARES = (0.1, 0.3)
NEAR_LARGEST = (1.0, 0.97, 0.92)
COLLECTED_SIGMA = 2.5  # of the requests that arrive within T_cut, for the batch that must end in time
BACKOFF = (1.0, 0.99, 0.98, 0.96, 0.92, 0.85)  # of the largest T_cut of short runs, until a long run confirms


def feasible_rates(machine: Machine, strategy: Strategy, target: Target) -> list[RateRange]:
    """Return the ranges of the rate per ms that meet the target; one from 0 has no lower end."""
    limit = machine.rate_limit(strategy)
    top, lowest = HEAVIEST * limit, LIGHTEST * limit
    # Each rate with a T_cut takes a search for the best one.
    precision, finer = (CUTOFF_PRECISION, QUICK) if strategy.kind is Kind.CUTOFF else (PRECISION, COARSE)
    idle = np.geomspace(lowest, LIGHT * limit, GRID, endpoint=False)
    light = np.geomspace(LIGHT * limit, limit / 2, GRID, endpoint=False)
    heavy = limit - np.geomspace(limit / 2, limit - top, GRID)
    ranges = feasible_ranges(
        np.concatenate([idle, light, heavy]),
        lambda rate: strategy_at(machine, strategy, rate, target, QUICK) is not None,
        lambda rate: strategy_at(machine, strategy, rate, target, finer) is not None,
        precision=precision,
    )
    return [(0.0 if low <= lowest else low, high) for low, high in ranges]


def strategy_at(machine: Machine, strategy: Strategy, rate: float, target: Target, effort: Effort) -> Strategy | None:
    """Return the strategy, with the first likely T_cut that meets the target if it has one; None if it misses."""
    tried = iter([strategy])
    if strategy.kind is Kind.CUTOFF:
        tried = (cutoff_strategy(machine, cutoff) for cutoff in likely_cutoffs(machine, rate, target))
    return next((each for each in tried if target.is_met(machine.simulate(each, rate, effort))), None)


def likely_cutoffs(machine: Machine, rate: float, target: Target) -> Iterator[float]:
    gpu = machine.main
    spare = target.sla_ms - gpu.mean_ms
    if spare > 0:
        collected = int(rate * spare + COLLECTED_SIGMA * math.sqrt(rate * spare)) + 1
        largest = target.sla_ms - float(gpu.times.mean_ms[min(collected, gpu.times.max_batch) - 1])
        yield from (near * largest for near in NEAR_LARGEST if largest > 0)
    yield from (share * target.sla_ms for share in SLA_SHARES)


def confirm_end(machine: Machine, strategy: Strategy, target: Target, ends: RateRange) -> tuple[float, Strategy]:
    """Return the highest rate of a range that a long run confirms, and the strategy there."""
    (low, high), there = ends, strategy

    def confirmed(rate: float) -> bool:
        nonlocal there
        tried = strategy_at(machine, strategy, rate, target, COARSE)
        there = tried or there
        return tried is not None and is_surely_met(machine.simulate(tried, rate, FINE), target)

    high *= 1 + CUTOFF_MARGIN if strategy.kind is Kind.CUTOFF else 1
    missed, step = high, BACKOFF_STEP * high
    while high > low and not confirmed(high):
        missed, high, step = high, high - step, 2 * step
    if high <= low:
        return low, strategy
    return bisect(confirmed, high, missed, BACKOFF_STEP), there


def is_surely_met(law: ResponseDistribution | None, target: Target) -> bool:
    return law is not None and law.percentile_interval(target.q)[1] <= target.sla_ms * (1 + ROUNDING)


def range_of(ranges: Sequence[RateRange], rate: float) -> RateRange:
    """Return the range that contains a rate, else the highest; (0, 0) without any."""
    around = [each for each in ranges if each[0] <= rate <= each[1] * (1 + ROUNDING)]
    return around[0] if around else max(ranges, key=lambda each: each[1], default=(0.0, 0.0))


def replicas_within(ranges: Sequence[RateRange], rate: float, limit: float) -> int | None:
    """Return the fewest replicas among which a rate meets the target; None if nearly all of them would be idle.

    limit: rate up to which one is stable.
    """
    counts = [(replicas_for(rate, high), low) for low, high in ranges]
    most = MOST_IDLE * replicas_for(rate, limit)
    return min((count for count, low in counts if rate / count >= low and count <= most), default=None)


def capacity_of(row: Alternative, request: PlanOptions, binding: str, promised_per_s: float | None) -> Capacity | None:
    if row.sustainable_per_s is None or request.rate_each is None:
        return None
    rate_per_s = request.rate_each * 1e3
    whole_s = rate_per_s * request.replicas
    needed = replicas_within(row.feasible_per_s, whole_s, row.rate_limit_per_s or math.inf)
    price = None if row.price_per_hour is None or not row.replicas else row.price_per_hour / row.replicas
    hourly = None if price is None or needed is None else price * needed
    return Capacity(
        system=row.name,
        rate_per_s=rate_per_s,
        sustainable_per_s=row.sustainable_per_s,
        utilisation=row.utilisation,
        goodput_per_s=row.goodput_per_s,
        replicas=needed,
        headroom=row.sustainable_per_s / rate_per_s - 1,
        binding=binding,
        price_per_hour=hourly,
        price_per_million=None if hourly is None else hourly / (whole_s * HOUR_S) * 1e6,
        promised_per_s=promised_per_s,
    )


def plan_cutoff(machine: Machine, rate: float, target: Target, objective: Objective | None = None) -> Cutoff | None:
    """Return the largest T_cut that a long run confirms, or the best for an objective; None if unstable."""
    gpu, cpu = machine.parts

    @cache
    def law_at(cutoff: float, effort: Effort = QUICK) -> ResponseDistribution | None:
        return machine.simulate(cutoff_strategy(machine, cutoff), rate, effort)

    grid = {*np.linspace(wording.SMALLEST_SHARE * target.sla_ms, target.sla_ms, CUTOFF_GRID).tolist()}
    grid |= {cutoff for cutoff in likely_cutoffs(machine, rate, target) if cutoff < target.sla_ms}
    laws = {cutoff: law for cutoff in sorted(grid) if (law := law_at(cutoff)) is not None}
    if not laws:
        return None
    ranges = feasible_ranges(
        np.array(sorted(grid)),
        lambda cutoff: target.is_met(law_at(cutoff)),
        lambda cutoff: target.is_met(law_at(cutoff, COARSE)),
        precision=CUTOFF_END,
    )
    value = None
    if ranges and objective is not None:
        inside = [cutoff for cutoff in laws if any(low <= cutoff <= high for low, high in ranges)]
        value = min(inside, key=lambda c: objective.of(laws[c].percentile(target.q), laws[c].mean_ms, rate))
    elif ranges:
        low, high = ranges[-1]
        tried = [share * high for share in BACKOFF if share * high >= low]
        value = next((cutoff for cutoff in tried if is_surely_met(law_at(cutoff, USUAL), target)), None)
        value = value or next((cutoff for cutoff in tried if target.is_met(law_at(cutoff, COARSE))), None)
        ranges = ranges[:-1] + ([] if value is None else [(low, max(value, low))])
    safest = min(laws, key=lambda cutoff: laws[cutoff].percentile(target.q))
    shown = safest if value is None else value
    law = law_at(shown, USUAL)
    assert law is not None
    reason = f"no T_cut meets {format_ms(target.sla_ms)}"
    if value is not None:
        best = "the largest" if objective is None else "best for the objective"
        spans = f"{wording.spans_text(ranges, target.sla_ms)} {'meets' if len(ranges) == 1 else 'meet'}"
        reason = f"{best} in a simulation with the measured noise; {spans} the SLA"
    late = f"the queue of {cpu.label}: overflow keeps it {format_percent(100 * law.utilisation)} busy"
    if law.overflow_share < 1 - target.q or law.utilisation < 0.5:
        late = f"requests that {gpu.label} serves: they wait up to T_cut, then for their batch"
    return Cutoff(
        value=value,
        bound=None if value is None else "simulated",
        reason=reason,
        binding=late,
        percentile=target.percentile,
        bounds_ms={"simulated": law.percentile(target.q)},
        holds=("simulated",),
        ranges={"simulated": ranges},
        safest_ms=safest,
        overflow_share=law.overflow_share,
        mean_ms=law.mean_ms,
        cpu_rate_per_s=1e3 / cpu.mean_ms,
        service=describe_service(cpu),
    )


def describe_service(cpu: Part) -> dict[str, Any]:
    if cpu.times.noise is None:
        sentence = f"{cpu.label}: its service times were not measured; taken as exponential."
        return {"assumed": "exponential", "cv": None, "sentence": sentence}
    cv = float(cpu.times.cv[0])
    sentence = f"{cpu.label}: one request at a time, its service as measured (coefficient of variation {cv:.2g})."
    return {"assumed": "measured", "cv": cv, "sentence": sentence}
