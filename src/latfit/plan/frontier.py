"""Operating points against each other: percentile, mean and goodput over T_cut and over the ways to run the load.

In a stable open system everything that arrives is served, so throughput is the rate, whatever the rule: it cannot
decide between rules. It counts where the rate is a decision; then the objective alpha p99 + beta mean - gamma
throughput is followed over the rate (`best_rate`). Goodput is the rate of requests within the SLA.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.plan.result import FrontierPoint
from latfit.plan.systems import Machine, System, Target, law_or_none
from latfit.plan.wishes import Objective
from latfit.queueing.law import ResponseLaw
from latfit.queueing.responses import COARSE

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
