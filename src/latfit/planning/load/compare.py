"""The strategies side by side at a rate: which meets the SLA, what each carries, which one to select and why.

Selected is, among those that meet the SLA, the one with the least cost: its objective where one is given, else its
percentile. Of two that are within a thousandth, the one with fewer paths, then the simpler one (listed first).

A queue that is run is run again, longer, where that decides: near the SLA, and for the strategy that is selected. The
rates that it carries are searched by short runs; the end of the range that is told is then lowered until the long run
keeps the SLA there with all that its own length leaves open, so that a plan at that rate is feasible.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import structs

from latfit.errors import SlaOutOfReach
from latfit.planning import wording
from latfit.planning.load.strategies import Both, System, Target, cutoff_system, law_or_none
from latfit.planning.request import Objective
from latfit.planning.result import Alternative, Kind
from latfit.queueing import (
    COARSE,
    FINE,
    HEAVIEST,
    LOWEST_OF_GRID,
    QUICK,
    ResponseDistribution,
    SampledDistribution,
    cutoff_queue,
    exact_distribution,
    feasible_rates,
    sustainable_rate,
)

CUTOFF_SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65)
"""T_cut, as shares of the SLA, that are tried at each rate when the highest rate of GPU + CPU is searched."""

NEAR = (1.0, 1.02, 0.95, 0.9)
COLLECTED = 2.5
"""Standard deviations above the mean of what arrives within T_cut, for the batch that must end in time."""

RATE_PRECISION = 0.01
"""Of the highest rate of GPU + CPU, as a share of it; it is searched from a rate that is carried in steps of GROWTH."""

GROWTH = 1.3

PRECISION = 1e-5
"""Of the highest rate of one path, as a share of it."""

NEAR_PRECISION = 2e-4
"""The same for what a change brings."""

SAMPLED_PRECISION = 1e-3
HIGHEST_SAMPLED = 0.97
"""Share of the stability limit up to which a queue that is run counts as carried: beyond it the run would be too long.
"""

LIGHT = 1e-3
"""Share of the stability limit at which a system is next to idle."""

CLOSE = 0.05
"""Share of the SLA within which a longer run decides whether it is met."""

LOWERED = 0.005
"""Share by which a rate is lowered that a long run finds too high, twice as much each time."""

CLOSED = 0.02
"""Share of a rate within which it is closed in on."""

SAME = 1e-3
ROUNDING = 1e-6


@dataclass(frozen=True)
class Judged:
    """A strategy on its machine, its distribution at the rate (None: overloaded), and what is told of it."""

    system: System
    law: ResponseDistribution | None
    row: Alternative


def compared(
    systems: Sequence[System],
    ranges: Sequence[Sequence[tuple[float, float]]],
    rate: float,
    target: Target,
    objective: Objective | None,
) -> list[Judged]:
    """Every strategy at a rate per ms, one of them chosen where any meets the SLA. ranges: of the rate per ms, for each
    system, within which it does."""
    found = [
        _judged(one, _decisive(one, rate, target), rate, target, own) for one, own in zip(systems, ranges, strict=True)
    ]
    while meeting := [each for each in found if each.row.margin is not None and each.row.margin >= -ROUNDING]:
        best = _best(meeting, rate, objective)
        at, finer = found.index(best), best.system.law(rate, FINE) if best.system.sampled else best.law
        met = finer is not None and finer.percentile(target.q) <= target.sla_ms * (1 + ROUNDING)
        found[at] = _judged(best.system, finer, rate, target, settled(best, rate, target, rate if met else 0.0))
        if met:
            return [_with_verdict(each, each is found[at]) for each in found]
    return found


def told(found: Judged, rate: float, target: Target) -> Judged:
    """What is told of a strategy that does not meet the SLA, the rate that it carries by a long run too."""
    return _judged(found.system, found.law, rate, target, settled(found, rate, target, 0.0))


def settled(found: Judged, rate: float, target: Target, least: float) -> list[tuple[float, float]]:
    """Ranges per ms within which the target is met, the end of the one that counts at `rate` lowered to where a long
    run keeps it, to `least` at the lowest."""
    ranges = [(low / 1e3, high / 1e3) for low, high in found.row.feasible_per_s]
    if not found.system.sampled:
        return ranges
    end = carried(ranges, rate)
    return [
        (low, _kept_to(found.system, high, max(low, least), target) if high == end else high) for low, high in ranges
    ]


def _kept_to(system: System, high: float, least: float, target: Target) -> float:
    def kept(rate: float) -> bool:
        at = system
        if system.both is not None:
            # T_cut changes with the rate.
            cutoff = _met_by(system.both, rate, target)
            if cutoff is None:
                return False
            at = cutoff_system(system.both, cutoff)
        return keeps(law_or_none(at, rate, FINE), target)

    return highest_kept(kept, high, least, LOWERED * high)


def highest_kept(kept: Callable[[float], bool], high: float, least: float, step: float) -> float:
    """A rate from `high` down that is kept, `least` where none above it is: lowered by steps that double, and raised
    again by halves of the last one until CLOSED are left of it, so that it does not hang on where the steps fell."""
    missed = high
    while high > least and not kept(high):
        missed, high, step = high, high - step, 2 * step
    if high <= least:
        return least
    while missed - high > CLOSED * high:
        middle = (missed + high) / 2
        missed, high = (missed, middle) if kept(middle) else (middle, high)
    return high


def keeps(law: ResponseDistribution | None, target: Target) -> bool:
    """Whether a distribution keeps the target, what its own run leaves open included."""
    if law is None:
        return False
    late = law.percentile_interval(target.q)[1] if isinstance(law, SampledDistribution) else law.percentile(target.q)
    return late <= target.sla_ms * (1 + ROUNDING)


def _decisive(system: System, rate: float, target: Target) -> ResponseDistribution | None:
    """The distribution at a rate, from a longer run where a short one is too near the SLA to tell."""
    law = law_or_none(system, rate)
    if law is None or not system.sampled or abs(law.percentile(target.q) / target.sla_ms - 1) > CLOSE:
        return law
    return law_or_none(system, rate, FINE)


def _judged(
    system: System, law: ResponseDistribution | None, rate: float, target: Target, rates: Sequence[tuple[float, float]]
) -> Judged:
    """rates: ranges per ms within which the system meets the target."""
    capacity = carried(rates, rate)
    replicas = replicas_within(rates, rate)
    late = None if law is None else law.percentile(target.q)
    price = system.price_per_hour
    row = Alternative(
        name=system.strategy.name,
        **vars(system.strategy),
        percentile_ms=late,
        mean_ms=None if law is None else law.mean_ms,
        margin=None if late is None or not math.isfinite(late) else 1 - late / target.sla_ms,
        rate_limit_per_s=system.rate_limit * 1e3 if math.isfinite(system.rate_limit) else None,
        sustainable_per_s=capacity * 1e3 if capacity > 0 else None,
        utilisation=_utilisation(system, law, rate),
        goodput_per_s=None if law is None else rate * (1 - law.tail(target.sla_ms)) * 1e3,
        replicas=replicas,
        price_per_hour=None if price is None or replicas is None else price * replicas,
        chosen=False,
        verdict=_failure(system, late, rate, target),
        feasible_per_s=[(low * 1e3, high * 1e3) for low, high in rates],
        source=None if law is None else "simulated" if system.sampled else "exact",
    )
    return Judged(system, law, row)


def replicas_within(rates: Sequence[tuple[float, float]], rate: float) -> int | None:
    """The fewest replicas among which a rate per ms meets the target; None where no number of them does."""
    counts = [(max(1, math.ceil(rate / high * (1 - 1e-9))), low) for low, high in rates]
    return min((count for count, low in counts if rate / count >= low), default=None)


def carried(rates: Sequence[tuple[float, float]], rate: float) -> float:
    """The highest rate per ms of the range that a rate is in, of the highest range where it is in none; 0 without
    any."""
    own = [high for low, high in rates if low <= rate <= high * (1 + ROUNDING)]
    return own[0] if own else max((high for _, high in rates), default=0.0)


def _failure(system: System, late: float | None, rate: float, target: Target) -> str:
    if late is None:
        return wording.unstable(system.rate_limit * 1e3 if rate >= system.rate_limit else None)
    if late > target.sla_ms * (1 + ROUNDING):
        return wording.misses(late - target.sla_ms)
    return ""


def _utilisation(system: System, law: ResponseDistribution | None, rate: float) -> float | None:
    """Load over the highest stable load; of a system with a cut-off that of the CPU's queue."""
    if law is not None and system.strategy.kind is Kind.CUTOFF:
        return law.utilisation
    return rate / system.rate_limit if math.isfinite(system.rate_limit) else None


def feasible(system: System, target: Target) -> list[tuple[float, float]]:
    """Ranges of the rate per ms within which a system of one path meets the target; a range from 0 has no lower end.

    Where responses take longer at a higher rate there is one at most, and its end is searched. Where a larger batch is
    quicker, or a rule waits to fill batches, there may be several, or one that begins above some rate: there a grid of
    rates is tried and the ends are bisected.
    """
    highest = HIGHEST_SAMPLED if system.sampled else HEAVIEST

    def law_at(rate: float) -> ResponseDistribution:
        return system.law(rate, COARSE)

    try:
        if system.rises:
            precision = SAMPLED_PRECISION if system.sampled else PRECISION
            found = sustainable_rate(
                law_at, system.rate_limit, target.sla_ms, target.q, precision=precision, highest=highest
            )
            return [(0.0, found.rate)]
        ranges = feasible_rates(
            law_at, system.rate_limit, target.sla_ms, target.q, scan_at=system.run_at, highest=highest
        ).ranges
    except SlaOutOfReach:
        return []
    lowest = LOWEST_OF_GRID * system.rate_limit * (1 + 1e-9)
    return [(0.0 if low <= lowest and _idle_meets(system, target) else low, high) for low, high in ranges]


def _idle_meets(system: System, target: Target) -> bool:
    """Whether a next to idle system meets the target, so that a range that begins where the grid does begins at 0."""
    law = law_or_none(system, LIGHT * system.rate_limit, COARSE)
    return law is not None and law.tail(target.sla_ms) <= 1 - target.q


def highest_near(system: System, target: Target, start: float) -> float:
    """Highest rate per ms up to which a system keeps the target, searched from a rate nearby; 0 where none is found."""

    def meets(rate: float) -> bool:
        law = law_or_none(system, rate, COARSE)
        return law is not None and law.tail(target.sla_ms) <= 1 - target.q

    top = HIGHEST_SAMPLED if system.sampled else HEAVIEST
    precision = SAMPLED_PRECISION if system.sampled else NEAR_PRECISION
    return _searched(meets, start, top * system.rate_limit, precision)


def _searched(meets: Callable[[float], bool], start: float, top: float, precision: float) -> float:
    """The highest rate up to `top` that meets, by steps of GROWTH from `start` and bisection; 0 where none does within
    four steps below it."""
    low = high = min(start, top)
    if meets(low):
        while low < top and meets(high := min(low * GROWTH, top)):
            low = high
        if low >= top:
            return top
    else:
        for _ in range(4):
            low, high = low / GROWTH, low
            if meets(low):
                break
        else:
            return 0.0
    while high - low > precision * low:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def cutoff_capacity(both: Both, target: Target, at_least: float) -> float:
    """Rate per ms that GPU + CPU carry within the SLA with the best T_cut at each rate: from a rate that is known to
    be carried (0: none is). Where a batch depends on the one before (T_cut above T(1)) only what bounds decide counts:
    the distribution would take too long, so the answer may be low."""
    most = 0.999 * both.rate_limit
    start = at_least if at_least > 0 else both.cpu_rate / 2

    return max(_searched(lambda rate: _met_by(both, rate, target) is not None, start, most, RATE_PRECISION), at_least)


def _met_by(both: Both, rate: float, target: Target) -> float | None:
    """A T_cut that keeps the target at a rate per ms, of those that are tried."""
    for cutoff in cutoffs(both, target.sla_ms, rate):
        with suppress(SlaOutOfReach):
            if _meets(both, rate, cutoff, target):
                return cutoff
    return None


def cutoffs(both: Both, sla_ms: float, rate: float) -> Iterator[float]:
    """T_cut to try: near the largest that leaves time for the batch that collects meanwhile, which is the best at high
    load, then shares of the SLA."""
    spare = sla_ms - both.gpu.mean_ms
    if spare > 0:
        batch = min(int(rate * spare + COLLECTED * math.sqrt(rate * spare)) + 1, both.gpu.times.max_batch or 1)
        yield from (near * (sla_ms - both.gpu.times(batch)) for near in NEAR if sla_ms > both.gpu.times(batch))
    yield from (share * sla_ms for share in CUTOFF_SHARES)


def _meets(both: Both, rate: float, cutoff_ms: float, target: Target) -> bool:
    """Whether so few are late, by bounds where the distribution is in closed form and they decide: whoever overflows is
    served no faster than by an idle CPU, and at worst all who overflow are late."""
    if not both.closed_form:
        return both.law(rate, cutoff_ms, QUICK).tail(target.sla_ms) <= 1 - target.q
    queue = cutoff_queue(rate, cutoff_ms, both.gpu.times, both.cpu_rate)
    allowed, overflow = 1 - target.q, queue.overflow_share
    if queue.overflow_rate >= queue.cpu_rate:
        return False
    late = queue.gpu_tail(target.sla_ms)
    if late + overflow * math.exp(-queue.cpu_rate * (target.sla_ms - queue.cutoff_ms)) > allowed:
        return False
    if late + overflow <= allowed or queue.proved_tail()(target.sla_ms) <= allowed:
        return True
    return queue.independent_batches and exact_distribution(queue).tail(target.sla_ms) <= allowed


def _best(found: Sequence[Judged], rate: float, objective: Objective | None) -> Judged:
    def cost(row: Alternative) -> float:
        if row.percentile_ms is None or row.mean_ms is None:
            return math.inf
        return row.percentile_ms if objective is None else objective.of(row.percentile_ms, row.mean_ms, rate)

    least = min(cost(each.row) for each in found)
    return next(each for each in found if cost(each.row) <= least + SAME * abs(least))


def _with_verdict(each: Judged, selected: bool) -> Judged:
    if selected:
        return replace(each, row=structs.replace(each.row, chosen=True, verdict=wording.SELECTED))
    return each if each.row.verdict else replace(each, row=structs.replace(each.row, verdict=wording.NOT_BETTER))
