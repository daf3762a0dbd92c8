"""The ways to run a load side by side, the one to take, and why the others are rejected.

Taken is, among those that meet the SLA, the one with the least cost: its objective where one is given, else its
percentile. Of two that are within a thousandth, the one with fewer paths, then the simpler one (listed first).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from latfit.errors import SlaOutOfReach
from latfit.planning.load.strategies import GREEDY, Both, Machine, System, Target, law_or_none
from latfit.planning.request import Objective
from latfit.planning.result import Alternative, Cutoff
from latfit.planning.wording import rate_text
from latfit.queueing import (
    COARSE,
    HEAVIEST,
    LOWEST_OF_GRID,
    QUICK,
    Effort,
    ResponseLaw,
    cutoff_queue,
    exact_law,
    feasible_rates,
    sustainable_rate,
)
from latfit.units import format_ms

CUTOFF_SHARES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.65)
"""T_cut, as shares of the SLA, that are tried at each rate when the highest rate of GPU + CPU is searched."""

NEAR = (1.0, 1.02, 0.95, 0.9)
COLLECTED = 2.5
"""Standard deviations above the mean of what arrives within T_cut, for the batch that must end in time."""

RATE_PRECISION = 0.005
"""Of the highest rate of GPU + CPU, as a share of the sum of their limits."""

PRECISION = 1e-4
"""Of the highest rate of one path, as a share of it."""

SAMPLED_PRECISION = 1e-3
HIGHEST_SAMPLED = 0.97
"""Share of the stability limit up to which a queue that is run counts as carried: beyond it the run would be too long.
"""

LIGHT = 1e-3
"""Share of the stability limit at which a system is next to idle."""

SIMULATED = "simulated"
SAME = 1e-3
ROUNDING = 1e-6


def compared(
    machine: Machine,
    systems: Sequence[System],
    waiting: Cutoff | None,
    rate: float,
    target: Target,
    objective: Objective | None,
) -> list[Alternative]:
    """Every alternative at a rate per ms, one of them chosen where any meets the SLA."""
    found = [_judged(system, law_or_none(system, rate), rate, target, feasible(system, target)) for system in systems]
    if waiting is not None and (both := machine.both) is not None:
        best = _gpu_alone(both, systems, found)
        system = cutoff_system(both, waiting.shown_ms)
        law = law_or_none(system, rate)
        met = law is not None and law.percentile(target.q) <= target.sla_ms * (1 + ROUNDING)
        capacity = cutoff_capacity(both, target, max(best, rate) if met else best)
        found.append(_judged(system, law, rate, target, ((0.0, capacity),) if capacity > 0 else ()))
    meeting = [row for row in found if row.margin is not None and row.margin >= -ROUNDING]
    if not meeting:
        return found
    chosen = _best(meeting, rate, objective)
    return [_verdict(row, row is chosen) for row in found]


def _gpu_alone(both: Both, systems: Sequence[System], rows: Sequence[Alternative]) -> float:
    """Rate per ms that the GPU carries alone, taking all that wait: what any T_cut as long as the SLA carries too."""
    greedy = [row for system, row in zip(systems, rows, strict=True) if system.name == f"{both.gpu.label}, {GREEDY}"]
    return (greedy[0].sustainable_per_s or 0.0) / 1e3 if greedy else 0.0


def cutoff_name(both: Both, cutoff_ms: float) -> str:
    """What GPU + CPU at one T_cut are called."""
    return f"{both.label}, T_cut {format_ms(cutoff_ms)}"


def cutoff_system(both: Both, cutoff_ms: float) -> System:
    """GPU + CPU at one T_cut."""

    def law(rate: float, effort: Effort) -> ResponseLaw:
        return both.law(rate, cutoff_ms, effort)

    limit = both.gpu.times.rate_limit() + both.cpu_rate
    return System(cutoff_name(both, cutoff_ms), (both.gpu.path, both.cpu.path), law, limit)


def _judged(
    system: System, law: ResponseLaw | None, rate: float, target: Target, rates: Sequence[tuple[float, float]]
) -> Alternative:
    """rates: ranges per ms within which the system meets the target."""
    capacity = carried(rates, rate)
    replicas = replicas_within(rates, rate)
    late = None if law is None else law.percentile(target.q)
    price = system.price_per_hour
    return Alternative(
        name=system.name,
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
        verdict=_failure(system, law, late, rate, target),
        feasible_per_s=[(low * 1e3, high * 1e3) for low, high in rates],
    )


def replicas_within(rates: Sequence[tuple[float, float]], rate: float) -> int | None:
    """The fewest machines among which a rate per ms meets the target; None where no number of them does."""
    counts = [(max(1, math.ceil(rate / high * (1 - 1e-9))), low) for low, high in rates]
    return min((count for count, low in counts if rate / count >= low), default=None)


def carried(rates: Sequence[tuple[float, float]], rate: float) -> float:
    """The highest rate per ms of the range that a rate is in, of the highest range where it is in none; 0 without
    any."""
    own = [high for low, high in rates if low <= rate <= high * (1 + ROUNDING)]
    return own[0] if own else max((high for _, high in rates), default=0.0)


def _failure(system: System, law: ResponseLaw | None, late: float | None, rate: float, target: Target) -> str:
    if law is None:
        limit = system.rate_limit
        if rate >= limit:
            return f"unstable from {rate_text(limit * 1e3)} on"
        return "overloaded, or too near its limit to be computed"
    if late is not None and late > target.sla_ms * (1 + ROUNDING):
        return f"misses the SLA by {format_ms(late - target.sla_ms)}"
    return ""


def _utilisation(system: System, law: ResponseLaw | None, rate: float) -> float | None:
    """Load over the highest stable load; of a system with a cut-off that of the CPU's queue."""
    if law is not None and len(system.paths) == 2:
        return law.utilisation
    return rate / system.rate_limit if math.isfinite(system.rate_limit) else None


def feasible(system: System, target: Target) -> tuple[tuple[float, float], ...]:
    """Ranges of the rate per ms within which a system of one path meets the target; a range from 0 has no lower end.

    Where responses take longer at a higher rate there is one at most, and its end is searched. Where a larger batch is
    quicker, or a rule waits to fill batches, there may be several, or one that begins above some rate: there a grid of
    rates is tried and the ends are bisected.
    """
    sampled = _is_sampled(system)
    highest = HIGHEST_SAMPLED if sampled else HEAVIEST

    def law_at(rate: float) -> ResponseLaw:
        return system.law(rate, COARSE)

    try:
        if system.rises:
            found = sustainable_rate(
                law_at, system.rate_limit, target.sla_ms, target.q,
                precision=SAMPLED_PRECISION if sampled else PRECISION, highest=highest,
            )  # fmt: skip
            return ((0.0, found.rate),)
        ranges = feasible_rates(
            law_at, system.rate_limit, target.sla_ms, target.q, scan_at=system.run_at, highest=highest
        ).ranges
    except SlaOutOfReach:
        return ()
    lowest = LOWEST_OF_GRID * system.rate_limit * (1 + 1e-9)
    return tuple((0.0 if low <= lowest and _idle_meets(system, target) else low, high) for low, high in ranges)


def _is_sampled(system: System) -> bool:
    law = law_or_none(system, LIGHT * system.rate_limit, COARSE)
    return law is not None and law.source.startswith(SIMULATED)


def _idle_meets(system: System, target: Target) -> bool:
    """Whether a next to idle system meets the target, so that a range that begins where the grid does begins at 0."""
    law = law_or_none(system, LIGHT * system.rate_limit, COARSE)
    return law is not None and law.tail(target.sla_ms) <= 1 - target.q


def path_capacity(system: System, target: Target, rate: float) -> float:
    """Highest rate per ms that a system of one path carries within the SLA, of the range that holds `rate` where one
    does; 0 where there is none."""
    return carried(feasible(system, target), rate)


def cutoff_capacity(both: Both, target: Target, at_least: float) -> float:
    """Rate per ms that GPU + CPU carry within the SLA with the best T_cut at each rate: from a rate that is known to
    be carried (0: none is), by bisection. Where a batch depends on the one before (T_cut above T(1)) only what bounds
    decide counts: the law would take too long, so the answer may be low."""

    def meets(rate: float) -> bool:
        for cutoff in _cutoffs(both, target.sla_ms, rate):
            try:
                if _meets(both, rate, cutoff, target):
                    return True
            except SlaOutOfReach:
                continue
        return False

    high = both.gpu.times.rate_limit() + both.cpu_rate
    low = at_least if at_least > 0 else 1e-3 * high
    if not meets(low):
        if at_least > 0 or not meets(1e-2 * high):
            return at_least
        low = 1e-2 * high
    while high - low > RATE_PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _cutoffs(both: Both, sla_ms: float, rate: float) -> Iterator[float]:
    """T_cut to try: near the largest that leaves time for the batch that collects meanwhile, which is the best at high
    load, then shares of the SLA."""
    spare = sla_ms - both.gpu.mean_ms
    if spare > 0:
        batch = min(int(rate * spare + COLLECTED * math.sqrt(rate * spare)) + 1, both.gpu.times.max_batch or 1)
        yield from (near * (sla_ms - both.gpu.times(batch)) for near in NEAR if sla_ms > both.gpu.times(batch))
    yield from (share * sla_ms for share in CUTOFF_SHARES)


def _meets(both: Both, rate: float, cutoff_ms: float, target: Target) -> bool:
    """Whether so few are late, by bounds where the law is in closed form and they decide: whoever overflows is served
    no faster than by an idle CPU, and at worst all who overflow are late."""
    if not both.closed_form:
        return both.law(rate, cutoff_ms, QUICK).tail(target.sla_ms) <= 1 - target.q
    queue = cutoff_queue(rate, cutoff_ms, both.gpu.times, both.cpu_rate)
    allowed, overflow = 1 - target.q, queue.overflow_share
    if queue.overflow_rate >= queue.amx_rate:
        return False
    late = queue.gpu_tail(target.sla_ms)
    if late + overflow * math.exp(-queue.amx_rate * (target.sla_ms - queue.cutoff_ms)) > allowed:
        return False
    if late + overflow <= allowed or queue.proved_tail()(target.sla_ms) <= allowed:
        return True
    return queue.independent_batches and exact_law(queue).tail(target.sla_ms) <= allowed


def _best(rows: Sequence[Alternative], rate: float, objective: Objective | None) -> Alternative:
    def cost(row: Alternative) -> float:
        if row.percentile_ms is None or row.mean_ms is None:
            return math.inf
        return row.percentile_ms if objective is None else objective.of(row.percentile_ms, row.mean_ms, rate)

    least = min(cost(row) for row in rows)
    return next(row for row in rows if cost(row) <= least + SAME * abs(least))


def _verdict(row: Alternative, taken: bool) -> Alternative:
    if taken:
        return replace(row, chosen=True, verdict="taken")
    if row.verdict:
        return row
    return replace(row, verdict="meets the SLA, but not better")
