"""Detect a change of level of the residuals within a run, by how much, and when.

CUSUM test against Kolmogorov's distribution (Csörgő & Horváth 1997), with the long-run variance of an autoregression.
"""

import math
from dataclasses import dataclass

import numpy as np

from latfit.fitting.checking.autocorrelation import clipped, long_run_variance
from latfit.fitting.data import FitData
from latfit.model import Drift, LevelChange
from latfit.stats import FloatArray

MIN_ROWS = 50
CERTAIN = 0.01  # level of the test over all runs together
LEAST_SHIFT = 0.02  # smaller changes are not reported
MIN_EXCURSION = 0.3  # smaller ones are exceeded with a probability above 0.99999
TREND_BIAS = 2.5  # see `long_run_variance`; a line, not only the mean, is removed from each series


@dataclass(frozen=True)
class ChangePoint:
    """First element after the change, mean after minus mean before, and the p-value of no change."""

    index: int
    shift: float
    p_value: float


def change_point(series: FloatArray) -> ChangePoint | None:
    """Return the most likely change of level in a series (n,); None if it is short or does not vary."""
    n = len(series)
    if n < MIN_ROWS:
        return None
    x = clipped(series)
    if float(np.ptp(x)) < 1e-12:
        return None
    sums = np.cumsum(x - x.mean())
    index = int(np.argmax(np.abs(sums[:-1]))) + 1
    before, after = float(x[:index].mean()), float(x[index:].mean())
    sigma = math.sqrt(long_run_variance([_without_line(x[:index]), _without_line(x[index:])], TREND_BIAS))
    if sigma <= 0:
        return ChangePoint(index, after - before, 0.0)
    excursion = float(np.abs(sums[index - 1])) / (sigma * math.sqrt(n))
    return ChangePoint(index, after - before, kolmogorov_tail(excursion))


def kolmogorov_tail(x: float) -> float:
    """Return the probability that Kolmogorov's distribution exceeds x."""
    if x < MIN_EXCURSION:
        return 1.0
    return min(2 * sum((1 if k % 2 else -1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 20)), 1.0)


def _without_line(series: FloatArray) -> FloatArray:
    time = np.arange(len(series)) - (len(series) - 1) / 2
    level = series - series.mean()
    return np.asarray(level - time * (float(time @ level) / max(float(time @ time), 1.0)))


def drift(data: FitData, log_ratio: FloatArray) -> Drift:
    """Return the runs whose level of ln(observed/predicted) (n,) changes by 2 % or more, at 1 % over all runs."""
    if data.times is None or not data.single:
        return Drift(reason="the trace has no column t_s, or its rows are not single steps")
    values = log_ratio + data.dither
    long = [i for i, rows in enumerate(data.runs) if len(rows) >= MIN_ROWS]
    if not long:
        return Drift(reason=f"no run has {MIN_ROWS} rows")
    changes: dict[str, LevelChange] = {}
    moved = 0.0
    for i in long:
        rows = data.runs[i]
        change = change_point(values[rows])
        if change is None or change.p_value * len(long) > CERTAIN or abs(change.shift) < math.log1p(LEAST_SHIFT):
            continue
        at = rows[change.index]
        moved += change.index * (1 - change.index / len(rows)) * change.shift**2
        name = f"run {i + 1}" if data.run is None else str(data.run[at])
        changes[name] = LevelChange(math.expm1(change.shift), change.p_value, float(data.times[at]))
    parts = [clipped(values[rows]) for rows in data.runs if len(rows)]
    variance = sum(len(part) * float(np.var(part)) for part in parts)
    sentence = "No run changes its level by 2 % or more."
    if changes:
        name, worst = max(changes.items(), key=lambda item: abs(item[1].relative_shift))
        more = f" ({len(changes)} runs change)" if len(changes) > 1 else ""
        size = f"{abs(worst.relative_shift) * 100:.0f} % {'slower' if worst.relative_shift > 0 else 'faster'}"
        sentence = f"Steps of {name or 'the run'} are {size} from t = {worst.t_s:.1f} s on{more}."
    return Drift(
        changes,
        runs_tested=len(long),
        variance_share=min(moved / variance, 1.0) if variance > 0 else 0.0,
        test="CUSUM, long-run variance",
        sentence=sentence,
    )
