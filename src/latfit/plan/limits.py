"""Inverse SLA: the steps that one execution path finishes in time.

A step meets the SLA at a percentile when its typical latency times the fit's upper factor stays below it, so the point
inverse of `model.inverse` is asked with the limit divided by that factor.
"""

from dataclasses import dataclass

import numpy as np

from latfit.hardware.profile import ExecutionPath
from latfit.model.inverse import Range, feasible_range
from latfit.plan.result import BatchRange, TokenRange


@dataclass(frozen=True)
class Level:
    """The percentile a path is asked for: share of steps in percent (None: the typical step), and its upper factor."""

    percentile: float | None
    factor: float


def level_for(path: ExecutionPath, percentile: float) -> Level:
    """The asked-for percentile, or the highest one below it that the fit's data can give, or the typical step."""
    known = path.fit.intervals.get("ratio_quantiles", {})
    usable = [float(name) for name, factor in known.items() if factor is not None and float(name) <= percentile / 100]
    if not usable:
        return Level(None, 1.0)
    share = max(usable)
    return Level(round(share * 100, 6), max(path.fit.upper_factor(share) or 1.0, 1e-9))


def token_ranges(path: ExecutionPath, limit_ms: float) -> list[TokenRange]:
    """S_min..S_max for B = 1, 2, 4, ... up to the largest measured B; batches without any are left out."""
    found = []
    for B in _doubling(path, "B"):
        span = feasible_range(lambda S, B=B: _typical_ms(path, B, S), limit_ms, B)  # type: ignore[misc]
        if span is not None:
            found.append(TokenRange(path.name, B, span.low, span.high, _beyond(path, "S", span)))
    return found


def batch_ranges(path: ExecutionPath, limit_ms: float) -> list[BatchRange]:
    """B_min..B_max for S = 1, 2, 4, ... up to the largest measured S; every request brings a token, so B <= S."""
    found = []
    for S in _doubling(path, "S"):
        span = feasible_range(lambda B, S=S: _typical_ms(path, B, S), limit_ms, 1, S)  # type: ignore[misc]
        if span is not None:
            found.append(BatchRange(path.name, S, span.low, span.high, _beyond(path, "B", span)))
    return found


def fastest_step(path: ExecutionPath) -> tuple[float, int, int]:
    """(typical ms, B, S) of the fastest step within the measured box, S >= B: every B, and for each the best S by
    convexity
    checked on a geometric grid."""
    B_top, S_top = (int(path.fit.domain[name][1]) for name in ("B", "S"))
    B = np.unique(np.geomspace(1, B_top, 200).astype(int))
    S = np.unique(np.concatenate([np.geomspace(1, max(S_top, B_top), 400).astype(int), B]))
    grid_B, grid_S = (axis.ravel().astype(float) for axis in np.meshgrid(B, S))
    rows = grid_S >= grid_B
    times = path.fit.latency_ms(grid_B[rows], grid_S[rows])
    best = int(np.argmin(times))
    return float(times[best]), int(grid_B[rows][best]), int(grid_S[rows][best])


def _typical_ms(path: ExecutionPath, B: int, S: int) -> float:
    return float(path.fit.latency_ms(np.array([float(B)]), np.array([float(S)]))[0])


def _doubling(path: ExecutionPath, column: str) -> list[int]:
    """1, 2, 4, ... and the largest measured value."""
    top = max(1, int(path.fit.domain[column][1]))
    return sorted({*(1 << i for i in range(top.bit_length())), top})


def _beyond(path: ExecutionPath, column: str, span: Range) -> bool:
    low, high = path.fit.domain[column]
    return span.high is None or span.high > high or span.low < low
