"""What the pictures of a plan show, as numbers: latency over the batch, and the percentile over T_cut and over rate."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware import HardwareProfile, PathLatency
from latfit.planning.load.strategies import Both, System, Target, law_or_none, machine_of, simple_systems
from latfit.planning.request import PlanRequest
from latfit.queueing import COARSE, cutoff_queue
from latfit.stats import FloatArray

RATES, CUTOFFS, BATCHES = 16, 25, 200
HIGHEST = 0.97
"""Of the stability limit: up to here the percentile is drawn."""


@dataclass(frozen=True)
class Line:
    """A curve: x (n,), y (n,) in ms, NaN where there is none; low and high where its range is known."""

    label: str
    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None


def latency_lines(profile: HardwareProfile, tokens: int, context: float | None = None) -> list[Line]:
    """Typical latency over the batch, for every path, with the range that its data allow."""
    lines = []
    for path in profile.paths.values():
        latency = PathLatency(path, tokens, context)
        B = np.asarray(np.unique(np.round(np.geomspace(1, len(latency.batches), BATCHES))), dtype=np.float64)
        T, low, high = latency.range_ms(B)
        lines.append(Line(path.label, B, T, low, high))
    return lines


def cutoff_lines(profile: HardwareProfile, target: Target, request: PlanRequest) -> list[Line]:
    """The percentile over T_cut by method, at the plan's rate; none without two paths and a rate."""
    both, rate = machine_of(profile, target.tokens, request).both, request.rate_each
    if both is None or rate is None:
        return []
    cutoffs = np.linspace(target.sla_ms / 100, target.sla_ms, CUTOFFS)
    found: dict[str, list[float]] = {}
    for cutoff in cutoffs.tolist():
        for name, value in _by_method(both, rate, cutoff, target.q).items():
            found.setdefault(name, []).append(value)
    return [Line(name, cutoffs, _finite(values)) for name, values in found.items()]


def _by_method(both: Both, rate: float, cutoff_ms: float, q: float) -> dict[str, float]:
    """The percentile at a T_cut by every method that describes the paths; NaN where it gives none."""
    late = {"poisson": np.nan} | dict.fromkeys(("rigorous", "exact") if both.closed_form else ("simulated",), np.nan)
    with contextlib.suppress(SlaOutOfReach):
        queue = cutoff_queue(rate, cutoff_ms, both.gpu.times, both.cpu_rate)
        late["poisson"] = queue.textbook_percentile(q)
        if both.closed_form:
            late["rigorous"] = queue.proved_percentile(q)
    with contextlib.suppress(SlaOutOfReach):
        late["exact" if both.closed_form else "simulated"] = both.law(rate, cutoff_ms, COARSE).percentile(q)
    return late


def rate_lines(profile: HardwareProfile, target: Target, request: PlanRequest) -> list[Line]:
    """The percentile over the rate, in requests/s, for every strategy on one path."""
    machine = machine_of(profile, target.tokens, request)
    rate = request.rate_each
    systems = simple_systems(machine, rate if rate is not None else machine.main.times.rate_limit() / 2)
    return [_over_rate(system, target, rate) for system in systems if np.isfinite(system.rate_limit)]


def _over_rate(system: System, target: Target, rate: float | None) -> Line:
    highest = HIGHEST * system.rate_limit
    lowest = min(highest / 100, highest if rate is None else rate / 2)
    rates = np.geomspace(lowest, highest, RATES)
    laws = [law_or_none(system, rate, COARSE) for rate in rates.tolist()]
    return Line(
        system.strategy.name,
        rates * 1e3,
        _finite([np.nan if law is None else law.percentile(target.q) for law in laws]),
    )


def _finite(values: Sequence[float]) -> FloatArray:
    y = np.array(values, dtype=np.float64)
    return np.where(np.isfinite(y), y, np.nan)
