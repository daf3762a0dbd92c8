"""Drift of the residuals: whether the machine changed during a run, by how much, and when.

For a series x_1..x_n with mean m let S_k = sum_{i<=k} (x_i - m). Without a change max_k |S_k| / (sigma sqrt n) tends to
the largest excursion of a Brownian bridge, whose law is Kolmogorov's (CUSUM test; Csörgő & Horváth 1997). The change is
dated where |S_k| is largest, and its size is the difference of the means on both sides.

sigma^2 is the long-run variance: neighbours in time share their noise. The series is whitened by its lag-one
correlation rho, what remains is added up with falling (Bartlett) weights, and the sum divided by (1 - rho)^2 (Andrews &
Monahan 1992). It is taken after each side's own mean is removed, or a large change would hide itself; that lowers rho,
three times as much as the removal of one mean does in simulation, (1 + 3 rho)/n, which is put back. A single heavy
outlier is no change: the series is clipped at three robust standard deviations about its median.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.stats import FloatArray, mad_sigma
from latfit.trace.clean import runs_in_time
from latfit.trace.table import Trace

LEAST_ROWS = 50
CERTAIN = 0.01
LEAST_SHIFT = 0.02
_CLIP = 3.0
_SHRINKS = 3.0
_LEAST_PART = 0.3


@dataclass(frozen=True)
class ChangePoint:
    """index: first element after the change.  shift: mean after minus mean before.  p_value: of there being none."""

    index: int
    shift: float
    p_value: float


def change_point(series: FloatArray) -> ChangePoint | None:
    """The most likely change of level in a series (n,) in time order; None where it does not vary or is short."""
    n = len(series)
    if n < LEAST_ROWS:
        return None
    x = clipped(series)
    if float(np.ptp(x)) < 1e-12:
        return None
    sums = np.cumsum(x - x.mean())
    index = int(np.argmax(np.abs(sums[:-1]))) + 1
    before, after = float(x[:index].mean()), float(x[index:].mean())
    rest = np.concatenate([x[:index] - before, x[index:] - after])
    sigma = math.sqrt(long_run_variance(rest))
    if sigma <= 0:
        return ChangePoint(index, after - before, 0.0)
    from scipy.stats import kstwobign

    excursion = float(np.abs(sums[index - 1])) / (sigma * math.sqrt(n))
    return ChangePoint(index, after - before, float(kstwobign.sf(excursion)))


def clipped(series: FloatArray) -> FloatArray:
    """The series with its outliers moved to three robust standard deviations from its median."""
    middle = float(np.median(series))
    reach = _CLIP * mad_sigma(series - middle)
    return np.clip(series, middle - reach, middle + reach) if reach > 0 else series


def long_run_variance(series: FloatArray) -> float:
    """n times the variance of the mean of an autocorrelated series (n,) of mean zero."""
    n = len(series)
    square = float(series @ series)
    if square <= 0:
        return 0.0
    rho = float(series[1:] @ series[:-1]) / square
    rho = min(max(rho + _SHRINKS * (1 + 3 * rho) / n, -0.97), 0.97)
    rest = series[1:] - rho * series[:-1]
    variance = float(rest @ rest) / n
    lags = max(1, int(4 * (n / 100) ** (2 / 9)))
    total = variance
    for k in range(1, min(lags, n - 2) + 1):
        total += 2 * (1 - k / (lags + 1)) * float(rest[k:] @ rest[:-k]) / n
    return max(total, _LEAST_PART * variance) / (1 - rho) ** 2


def drift(trace: Trace, log_ratio: FloatArray) -> dict[str, Any]:
    """The `drift` of the diagnostics from ln(observed/predicted) (n,) of a trace's rows: runs whose level changes by
    2 % or more, each with the time of the change, at 1 % over all runs together (Bonferroni)."""
    if "t_s" not in trace:
        return {"reason": "the trace has no column t_s"}
    runs = [rows for rows in runs_in_time(trace) if len(rows) >= LEAST_ROWS]
    if not runs:
        return {"reason": f"no run has {LEAST_ROWS} rows"}
    found: dict[str, Mapping[str, float]] = {}
    for i, rows in enumerate(runs):
        change = change_point(log_ratio[rows])
        if change is None or change.p_value * len(runs) > CERTAIN or abs(change.shift) < math.log1p(LEAST_SHIFT):
            continue
        name = str(trace["run"][rows[0]]) if "run" in trace else f"run {i + 1}"
        found[name] = {
            "t_s": float(trace.floats("t_s")[rows[change.index]]),
            "relative_shift": math.expm1(change.shift),
            "p_value": change.p_value,
        }
    return {"test": "CUSUM, long-run variance", "runs_tested": len(runs), "runs": found, "sentence": _sentence(found)}


def _sentence(found: Mapping[str, Mapping[str, float]]) -> str:
    if not found:
        return "No run changes its level by 2 % or more."
    name, worst = max(found.items(), key=lambda item: abs(item[1]["relative_shift"]))
    more = f" ({len(found)} runs change)" if len(found) > 1 else ""
    faster = "slower" if worst["relative_shift"] > 0 else "faster"
    size = abs(worst["relative_shift"]) * 100
    return f"Steps of {name or 'the run'} are {size:.0f} % {faster} from t = {worst['t_s']:.1f} s on{more}."
