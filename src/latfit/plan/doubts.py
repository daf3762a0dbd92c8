"""Where a fit cannot promise: steps whose latency falls on both sides of the SLA over the curves that the data allow.

A step meets the SLA at a percentile when its typical latency times the factor is within it. Over the fit's draws that
has a chance; between 2.5 % and 97.5 % it is neither promised nor denied. Such steps, the least certain first and
apart from each other, are the ones to measure: each decides a part of the boundary.
"""

import numpy as np

from latfit.hardware.profile import ExecutionPath
from latfit.plan.limits import levels_for
from latfit.plan.result import Doubt
from latfit.plan.thresholds import CERTAIN, drawn_ms
from latfit.stats import FloatArray

MOST = 6
APART = 1.6
"""Steps within this factor of each other, in B and in S, say the same."""

GRID = 24


def doubtful_steps(path: ExecutionPath, sla_ms: float, percentile: float) -> list[Doubt]:
    """Steps (B, S) inside the measured box that the fit cannot judge; empty where it keeps no draws."""
    B, S = _grid(path)
    if not len(B):
        return []
    drawn = drawn_ms(path, {"B": B, "S": S})
    if drawn is None:
        return []
    T = drawn * levels_for(path, percentile).factors(B, S)
    chance = np.mean(sla_ms >= T, axis=0)
    low, high = np.quantile(T, CERTAIN, axis=0)
    unsure = np.flatnonzero((chance > CERTAIN[0]) & (chance < CERTAIN[1]))
    found: list[Doubt] = []
    for i in unsure[np.argsort(np.abs(chance[unsure] - 0.5), kind="stable")]:
        b, s = int(B[i]), int(S[i])
        if all(max(b / d.B, d.B / b) > APART or max(s / d.S, d.S / s) > APART for d in found):
            found.append(Doubt(path.name, b, s, float(chance[i]), float(low[i]), float(high[i])))
        if len(found) == MOST:
            break
    return found


def _grid(path: ExecutionPath) -> tuple[FloatArray, ...]:
    (B_low, B_high), (S_low, S_high) = path.fit.domain["B"], path.fit.domain["S"]
    B = np.unique(np.round(np.geomspace(max(B_low, 1), B_high, GRID)))
    S = np.unique(np.round(np.geomspace(max(S_low, 1), S_high, 3 * GRID)))
    grid_B, grid_S = (axis.ravel() for axis in np.meshgrid(B, S))
    kept = grid_S >= grid_B
    steps = grid_B[kept], grid_S[kept]
    if not path.fit.knows_prefill:
        decode = ~path.fit.holds_prefill(*steps)
        steps = steps[0][decode], steps[1][decode]
    return steps
