"""Curves for the pictures of a plan."""

from dataclasses import dataclass

import numpy as np

from latfit.hardware import HardwareProfile, PathLatency
from latfit.planning.load.capacity import HEAVIEST
from latfit.planning.load.strategies import Target, machine_of, single_path_strategies
from latfit.planning.request import PlanOptions
from latfit.queueing import COARSE
from latfit.stats import FloatArray

RATES, BATCHES = 16, 200


@dataclass(frozen=True)
class Line:
    """A curve: x (n,), y (n,) in ms, NaN where there is none, and its range where known."""

    label: str
    x: FloatArray
    y: FloatArray
    low: FloatArray | None = None
    high: FloatArray | None = None


def latency_lines(profile: HardwareProfile, tokens: int, context: float | None = None) -> list[Line]:
    lines = []
    for path in profile.paths.values():
        latency = PathLatency(path, tokens, context)
        B = np.asarray(np.unique(np.round(np.geomspace(1, len(latency.batches), BATCHES))), dtype=np.float64)
        lines.append(Line(path.label, B, *latency.range_ms(B)))
    return lines


def rate_lines(profile: HardwareProfile, target: Target, request: PlanOptions) -> list[Line]:
    """Return the percentile over the rate, in requests/s, for every strategy on one path."""
    machine, planned = machine_of(profile, target.tokens, request), request.rate_each
    lines = []
    for strategy in single_path_strategies(machine, planned or machine.main.times.rate_limit() / 2):
        highest = HEAVIEST * machine.rate_limit(strategy)
        rates = np.geomspace(min(highest / 100, highest if planned is None else planned / 2), highest, RATES)
        laws = [machine.simulate(strategy, rate, COARSE) for rate in rates.tolist()]
        late = [np.nan if law is None else law.percentile(target.q) for law in laws]
        lines.append(Line(strategy.name, rates * 1e3, np.array(late)))
    return lines
