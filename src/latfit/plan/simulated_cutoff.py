"""T_cut where the CPU's service is far from exponential: by simulation with the service that the fit saw.

The exact law then describes another machine. So T_cut are tried on a grid over the SLA, each simulated until its
percentile is known, and the ends of the ranges that keep the SLA are bisected. The recommended T_cut stays where the
simulation does not deny it (a steadier service waits less than the law says); else it is the largest that the
simulation grants.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from latfit.plan.cutoff import percentiles_at, spans_text
from latfit.plan.result import Cutoff
from latfit.plan.systems import Both, Target
from latfit.sim.check import Checked

TRIED, BISECTIONS = 8, 4


def by_simulation(
    found: Cutoff, both: Both, rate: float, target: Target, simulated: Callable[[float], Checked]
) -> Cutoff:
    """The T_cut with what a simulation says of it. rate per ms; simulated: the check of a T_cut in ms."""
    ranges = _ranges(simulated, np.linspace(target.sla_ms / TRIED, target.sla_ms, TRIED).tolist())
    last = simulated(found.shown_ms)
    value, known = found.value, {**found.ranges, "simulated": ranges}
    if value is not None and last.holds is not False:
        bounds = {**found.bounds_ms, "simulated": last.percentile.value}
        return replace(found, bounds_ms=bounds, ranges=known, holds=[*found.holds, "simulated"])
    largest = ranges[-1][1] if ranges else None
    if largest is None:
        bounds = {**found.bounds_ms, "simulated": last.percentile.value}
        reason = "none meets the SLA in the simulation with the fitted service"
        return replace(found, value=None, bound=None, reason=reason, bounds_ms=bounds, ranges=known)
    granted = simulated(largest).percentile.value
    spans = spans_text(ranges, target.sla_ms)
    return replace(
        found,
        value=largest,
        bound="simulated",
        reason=f"the largest by simulation with the fitted service; {spans} {'meets' if len(ranges) == 1 else 'meet'}"
        " the SLA",
        bounds_ms={**percentiles_at(both, rate, largest, target.q), "simulated": granted},
        ranges=known,
        holds=["simulated"],
    )


def _ranges(simulated: Callable[[float], Checked], grid: list[float]) -> list[tuple[float, float]]:
    """Ranges of T_cut within the grid that keep the SLA for certain; their ends keep it too."""
    keeps = [simulated(cutoff).holds is True for cutoff in grid]
    ranges: list[tuple[float, float]] = []
    for i in (place for place, kept in enumerate(keeps) if kept):
        low = grid[i] if i == 0 or keeps[i - 1] else _end(simulated, grid[i], grid[i - 1])
        high = grid[i] if i + 1 == len(grid) or keeps[i + 1] else _end(simulated, grid[i], grid[i + 1])
        if ranges and i and keeps[i - 1]:
            low = ranges.pop()[0]
        ranges.append((low, high))
    return ranges


def _end(simulated: Callable[[float], Checked], kept: float, missed: float) -> float:
    """The last T_cut towards `missed` that keeps the SLA, by bisection."""
    for _ in range(BISECTIONS):
        middle = (kept + missed) / 2
        if simulated(middle).holds is True:
            kept = middle
        else:
            missed = middle
    return kept
