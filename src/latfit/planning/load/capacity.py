"""What load the chosen way carries, what it costs, what breaks first, and what a change would bring.

Operating points against each other: percentile, mean and goodput over T_cut and over the ways to run the load.

In a stable open system everything that arrives is served, so throughput is the rate, whatever the rule: it cannot
decide between rules. It counts where the rate is a decision; then the objective alpha p99 + beta mean - gamma
throughput is followed over the rate (`best_rate`). Goodput is the rate of requests within the SLA.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.planning.load.compare import cutoff_capacity, cutoff_system, path_capacity, replicas_within
from latfit.planning.load.strategies import Machine, System, Target, law_or_none, simple_systems
from latfit.planning.load.varying import schedule
from latfit.planning.request import Objective, Wishes
from latfit.planning.result import Alternative, Capacity, Change, Cutoff, FrontierPoint, Threshold
from latfit.planning.wording import rate_text
from latfit.queueing import COARSE, ResponseLaw

CUTOFFS = 13
RATES = 25


def frontier(
    machine: Machine, systems: Sequence[System], rate: float, target: Target, objective: Objective | None
) -> list[FrontierPoint]:
    """Every way to run the rate (per ms), and T_cut over (0, SLA], with those marked that nothing beats."""
    points = []
    for system in systems:
        law = law_or_none(system, rate, COARSE)
        if law is not None:
            points.append(_point(system.name, rate, None, law, target, objective))
    if (both := machine.both) is not None:
        for cutoff in np.geomspace(target.sla_ms / 50, target.sla_ms, CUTOFFS).tolist():
            try:
                law = both.law(rate, cutoff, COARSE)
            except SlaOutOfReach:
                continue
            points.append(_point(both.label, rate, cutoff, law, target, objective))
    return _marked(points)


def best_rate(system: System, target: Target, objective: Objective) -> list[FrontierPoint]:
    """The objective over the rate, up to the stability limit; the point with the least cost is marked."""
    points = []
    for rate in (np.linspace(0.02, 0.98, RATES) * system.rate_limit).tolist():
        law = law_or_none(system, rate, COARSE)
        if law is not None:
            points.append(_point(system.name, rate, None, law, target, objective))
    if not points:
        return []
    least = min(points, key=lambda point: point.cost or 0.0)
    return [replace(point, best=point is least) for point in points]


def _point(
    name: str, rate: float, cutoff: float | None, law: ResponseLaw, target: Target, objective: Objective | None
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

    return [replace(point, best=not beaten(point, points)) for point in points]


FASTER = 0.9
NEARLY = 0.969
"""Share of the stability limit from which that is what ends a load: a queue that is run is tried up to 0.97 of it."""

HOUR_S = 3600.0


def capacity_of(rows: Sequence[Alternative], wishes: Wishes, binding: str) -> Capacity | None:
    """The capacity of the chosen alternative, or of the one that carries most within the SLA; None where none does.

    The wishes hold a rate or a load.
    """
    able = [row for row in rows if row.sustainable_per_s]
    row = next((row for row in able if row.chosen), None) or max(
        able, key=lambda r: r.sustainable_per_s or 0, default=None
    )
    each = wishes.rate_each
    if row is None or row.sustainable_per_s is None or each is None:
        return None
    rate_s, whole_s = each * 1e3, each * wishes.replicas * 1e3
    ranges = [(low, high) for low, high in row.feasible_per_s] or [(0.0, row.sustainable_per_s)]
    needed = replicas_within(ranges, whole_s) or max(1, math.ceil(whole_s / row.sustainable_per_s * (1 - 1e-9)))
    price = None if row.price_per_hour is None or not row.replicas else row.price_per_hour / row.replicas
    load = None
    if wishes.load is not None:
        load = schedule(wishes.load, row.sustainable_per_s / 1e3, price)
    return Capacity(
        system=row.name,
        rate_per_s=rate_s,
        sustainable_per_s=row.sustainable_per_s,
        utilisation=row.utilisation,
        goodput_per_s=row.goodput_per_s,
        replicas=needed,
        headroom=row.sustainable_per_s / rate_s - 1,
        binding=binding,
        price_per_hour=None if price is None else price * needed,
        price_per_million=None if price is None else price * needed / (whole_s * HOUR_S) * 1e6,
        load=load,
    )


def breaks_first(row: Alternative, sla_text: str) -> str:
    """What ends the growth of an alternative's load."""
    if row.sustainable_per_s is None:
        return f"the SLA: even an idle machine misses {sla_text}"
    limit = row.rate_limit_per_s
    least = next((low for low, high in row.feasible_per_s if high == row.sustainable_per_s), 0.0)
    below = f"; below {rate_text(least)} too, where steps hold too few requests to be quick" if least else ""
    if limit is not None and row.sustainable_per_s >= NEARLY * limit:
        return (
            f"stability, at {rate_text(limit)}, where the queue grows without bound; the SLA holds almost until"
            f" then{below}"
        )
    end = "" if limit is None else f" (the queue would be stable up to {rate_text(limit)})"
    return f"the SLA, beyond {rate_text(row.sustainable_per_s)}{end}{below}"


@dataclass(frozen=True)
class Situation:
    """What a change is applied to: rate per ms at one replica of `replicas`; the way that is shown, its T_cut, and the
    highest rate per ms that it carries within the SLA."""

    machine: Machine
    rate: float
    replicas: int
    target: Target
    waiting: Cutoff | None
    shown: Alternative
    sustainable: float


def sensitivity(now: Situation, thresholds: Mapping[float, Threshold]) -> list[Change]:
    """What a CPU or a GPU a tenth faster, and a doubled rate, change. thresholds: B1 by factor on the CPU's times, and
    -factor for the GPU's."""
    # A law that is run is run with less effort here: what counts is its ratio to the way as it is, on the same numbers.
    as_it_is, late = _law(now), now.shown.percentile_ms
    shown_over = 1.0 if as_it_is is None or late is None else late / as_it_is.percentile(now.target.q)
    rows = [_change("as it is", now, thresholds.get(1.0), shown_over)]
    if now.machine.cpu is not None:
        faster = replace(now.machine, cpu=now.machine.cpu.scaled(FASTER))
        label = f"{now.machine.cpu.label} 10 % faster"
        rows.append(_change(label, _on(now, faster), thresholds.get(FASTER), shown_over))
    if now.machine.gpu is not None:
        faster = replace(now.machine, gpu=now.machine.gpu.scaled(FASTER))
        label = f"{now.machine.gpu.label} 10 % faster"
        rows.append(_change(label, _on(now, faster), thresholds.get(-FASTER), shown_over))
    rows.append(_change("twice the rate", replace(now, rate=2 * now.rate), thresholds.get(1.0), shown_over))
    return rows


def _law(now: Situation) -> ResponseLaw | None:
    system = _same_system(now)
    return None if system is None else law_or_none(system, now.rate, COARSE)


def _on(now: Situation, machine: Machine) -> Situation:
    """The same way on another machine, with what it carries there."""
    other = replace(now, machine=machine)
    system = _same_system(other)
    if system is None:
        return replace(other, sustainable=0.0)
    if len(system.paths) == 1:
        unchanged = any(old is new for old in now.machine.parts for new in machine.parts if new.path in system.paths)
        return other if unchanged else replace(other, sustainable=path_capacity(system, now.target, now.rate))
    both = machine.both
    assert both is not None
    return replace(other, sustainable=cutoff_capacity(both, now.target, 0.0))


def _change(label: str, now: Situation, threshold: Threshold | None, shown_over: float) -> Change:
    """The way under the change, its T_cut kept; what it carries is with the best T_cut."""
    law = _law(now)
    highest, whole = now.sustainable, now.rate * now.replicas
    return Change(
        change=label,
        B1=None if threshold is None else threshold.value,
        percentile_ms=None if law is None else law.percentile(now.target.q) * shown_over,
        sustainable_per_s=highest * 1e3 if highest > 0 else None,
        replicas=max(1, math.ceil(whole / highest * (1 - 1e-9))) if highest > 0 else None,
    )


def _same_system(now: Situation) -> System | None:
    for system in simple_systems(now.machine, now.rate):
        if system.name == now.shown.name:
            return system
    if now.waiting is not None and (both := now.machine.both) is not None:
        return cutoff_system(both, now.waiting.shown_ms)
    return None
