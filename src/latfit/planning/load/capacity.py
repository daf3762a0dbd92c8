"""What load the selected strategy carries and costs, what a change would bring, and the operating points there are.

Operating points are compared by percentile, mean and goodput (the rate of requests within the SLA), over strategies and
T_cut. In a stable open system everything that arrives is served, so throughput is the rate, whatever the rule: it
cannot decide between rules. It counts where the rate is a decision; then the objective alpha p99 + beta mean - gamma
throughput is followed over the rate (`best_rate`).

A path whose steps take f times as long answers at a rate as the path as it is does at f times the rate, in f times the
time; what a change brings is therefore found near what is carried as it is.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from latfit.planning import wording
from latfit.planning.load.compare import Judged, cutoff_capacity, highest_near, replicas_within
from latfit.planning.load.strategies import Machine, System, Target, law_or_none, system_of
from latfit.planning.load.varying import schedule
from latfit.planning.request import Objective, PlanRequest
from latfit.planning.result import Alternative, Capacity, Change, FrontierPoint, Kind
from latfit.queueing import COARSE, ResponseDistribution

RATES = 25


def frontier(
    found: Sequence[Judged],
    waiting: Mapping[float, ResponseDistribution],
    rate: float,
    target: Target,
    objective: Objective | None,
) -> list[FrontierPoint]:
    """Every strategy at the rate (per ms), and GPU + CPU over T_cut, with those marked that nothing beats. waiting: the
    distributions by T_cut."""
    points, both = [], ""
    for each in found:
        if each.system.strategy.kind is Kind.CUTOFF:
            both = " + ".join(each.system.strategy.paths)
        elif each.law is not None:
            points.append(_point(each.system.strategy.name, rate, None, each.law, target, objective))
    points += [_point(both, rate, cutoff, law, target, objective) for cutoff, law in sorted(waiting.items())]
    return _marked(points)


def best_rate(system: System, target: Target, objective: Objective) -> list[FrontierPoint]:
    """The objective over the rate, up to the stability limit; the point with the least cost is marked."""
    points = []
    for rate in (np.linspace(0.02, 0.98, RATES) * system.rate_limit).tolist():
        law = law_or_none(system, rate, COARSE)
        if law is not None:
            points.append(_point(system.strategy.name, rate, None, law, target, objective))
    if not points:
        return []
    least = min(points, key=lambda point: point.cost or 0.0)
    return [structs.replace(point, best=point is least) for point in points]


def _point(
    name: str, rate: float, cutoff: float | None, law: ResponseDistribution, target: Target, objective: Objective | None
) -> FrontierPoint:
    late = law.percentile(target.q)
    return FrontierPoint(
        name=name,
        rate_per_s=rate * 1e3,
        T_cut_ms=cutoff,
        percentile_ms=late,
        mean_ms=law.mean_ms,
        goodput_per_s=rate * (1 - law.tail(target.sla_ms)) * 1e3,
        cost=None if objective is None else objective.of(late, law.mean_ms, rate),
        best=False,
    )


def _marked(points: Sequence[FrontierPoint]) -> list[FrontierPoint]:
    def beaten(point: FrontierPoint, others: Iterable[FrontierPoint]) -> bool:
        own = (point.percentile_ms, point.mean_ms)
        return any(
            all(a <= b for a, b in zip((o.percentile_ms, o.mean_ms), own, strict=True))
            and (o.percentile_ms, o.mean_ms) != own
            for o in others
        )

    return [structs.replace(point, best=not beaten(point, points)) for point in points]


FASTER = 0.9
HOUR_S = 3600.0


def capacity_of(row: Alternative, request: PlanRequest, promised_per_s: float | None) -> Capacity | None:
    """The capacity of a strategy; None where it meets the SLA at no rate. The request hold a rate or a load."""
    each = request.rate_each
    if row.sustainable_per_s is None or each is None:
        return None
    rate_s, whole_s = each * 1e3, each * request.replicas * 1e3
    ranges = [(low, high) for low, high in row.feasible_per_s] or [(0.0, row.sustainable_per_s)]
    needed = replicas_within(ranges, whole_s)
    price = None if row.price_per_hour is None or not row.replicas else row.price_per_hour / row.replicas
    hourly = None if price is None or needed is None else price * needed
    load = None
    if request.load is not None:
        load = schedule(request.load, row.sustainable_per_s / 1e3, price)
    return Capacity(
        system=row.name,
        rate_per_s=rate_s,
        sustainable_per_s=row.sustainable_per_s,
        utilisation=row.utilisation,
        goodput_per_s=row.goodput_per_s,
        replicas=needed,
        headroom=row.sustainable_per_s / rate_s - 1,
        binding=wording.binding(row),
        price_per_hour=hourly,
        price_per_million=None if hourly is None else hourly / (whole_s * HOUR_S) * 1e6,
        promised_per_s=promised_per_s,
        load=load,
    )


@dataclass(frozen=True)
class Situation:
    """What a change is applied to: rate per ms at one replica of `replicas`; the strategy that is shown, and the
    highest rate per ms that it carries within the SLA."""

    machine: Machine
    rate: float
    replicas: int
    target: Target
    shown: Alternative
    sustainable: float


@dataclass(frozen=True)
class Thresholds:
    """B1 as it is, with a CPU and with a GPU that take nine tenths of their time, and at twice the rate; None without
    both paths, or where no batch is worth the wait."""

    as_it_is: int | None = None
    cpu_faster: int | None = None
    gpu_faster: int | None = None
    twice_the_rate: int | None = None


def sensitivity(now: Situation, B1: Thresholds) -> list[Change]:
    """What a CPU or a GPU a tenth faster, and a doubled rate, change."""
    # Simulated with less effort here: what counts is the ratio to the distribution as it is, on the same numbers.
    as_it_is, late = _law(now), now.shown.percentile_ms
    shown_over = 1.0 if as_it_is is None or late is None else late / as_it_is.percentile(now.target.q)
    rows = [_change(wording.AS_IT_IS, now, B1.as_it_is, shown_over)]
    if (cpu := now.machine.cpu) is not None:
        faster = _on(now, replace(now.machine, cpu=cpu.scaled(FASTER)))
        rows.append(_change(wording.faster_path(cpu.label, 1 - FASTER), faster, B1.cpu_faster, shown_over))
    if (gpu := now.machine.gpu) is not None:
        faster = _on(now, replace(now.machine, gpu=gpu.scaled(FASTER)))
        rows.append(_change(wording.faster_path(gpu.label, 1 - FASTER), faster, B1.gpu_faster, shown_over))
    rows.append(_change(wording.TWICE, replace(now, rate=2 * now.rate), B1.twice_the_rate, shown_over))
    return rows


def _law(now: Situation) -> ResponseDistribution | None:
    system = system_of(now.shown.strategy, now.machine, now.rate)
    return None if system is None else law_or_none(system, now.rate, COARSE)


def _on(now: Situation, machine: Machine) -> Situation:
    """The same strategy on another machine, with what it carries there."""
    other, both = replace(now, machine=machine), machine.both
    system = system_of(now.shown.strategy, machine, now.rate)
    if system is None or now.sustainable <= 0:
        return replace(other, sustainable=0.0)
    if both is not None and system.strategy.kind is Kind.CUTOFF:
        return replace(other, sustainable=cutoff_capacity(both, now.target, 0.0))
    if all(part in now.machine.parts for part in system.parts):
        return other
    return replace(other, sustainable=highest_near(system, now.target, now.sustainable))


def _change(label: str, now: Situation, B1: int | None, shown_over: float) -> Change:
    """The strategy under the change, its T_cut kept; what it carries is with the best T_cut."""
    law = _law(now)
    highest, whole = now.sustainable, now.rate * now.replicas
    late = None if law is None else law.percentile(now.target.q) * shown_over
    needed = max(1, math.ceil(whole / highest * (1 - 1e-9))) if highest > 0 else None
    if needed == 1 and (late is None or late > now.target.sla_ms):
        needed = None  # too low a load, where steps hold too few requests: more machines make it lower
    return Change(
        change=label,
        B1=B1,
        percentile_ms=late,
        sustainable_per_s=highest * 1e3 if highest > 0 else None,
        replicas=needed,
    )
