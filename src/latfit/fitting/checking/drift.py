"""Noise over time: the effective sample size of a series, and changes of its level.

n steps with variance v and long-run variance L are worth n v/L independent ones, L from an autoregression
(docs/theory/fitting.md, "Independent samples"). Changes of level: CUSUM test against Kolmogorov's distribution (Csörgő
& Horváth 1997).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.model import Drift, LevelChange
from latfit.stats import FloatArray, mad_sigma, weighted_quantile

FEWEST = 8  # below this many steps the autocorrelation is not estimated
CLIP = 3.0


@dataclass(frozen=True)
class Persistence:
    steps_for_one: float = 1.0  # consecutive steps per independent sample, at least 1: upper end of the estimate
    runs: int = 1  # number of runs


def by_run(data: FitData, rows: NDArray[np.intp], values: FloatArray) -> list[FloatArray]:
    """Return values (m,) at rows (m,) of a log as one series per run, in time order."""
    placed = np.full(len(data), np.nan)
    placed[rows] = values
    return [part[np.isfinite(part)] for part in (placed[run] for run in data.runs)]


def persistence(runs: Sequence[FloatArray]) -> Persistence:
    parts = [clipped(values) for values in runs if len(values) > 1]
    parts = [part - part.mean() for part in parts]
    n = sum(len(part) for part in parts)
    if n < FEWEST:
        return Persistence()
    variance = sum(float(part @ part) for part in parts) / n
    likely = max(long_run_variance(parts) / max(variance, 1e-300), 1.0)
    most_steps = likely / max(1 - math.sqrt(likely / n), 1e-9) if likely > 1 else 1.0
    return Persistence(min(most_steps, n / len(parts)), len(parts))


def long_run_variance(parts: Sequence[FloatArray], bias: float = 1.0) -> float:
    """Return n times the variance of the mean of autocorrelated series of mean zero, n values in all.

    bias: multiples of (1 + 3 a) / n added to a, the sum of autoregressive coefficients; 1 if means were removed.
    """
    n = sum(len(part) for part in parts)
    covariance = _autocovariance(parts, max(1, min(int(10 * math.log10(n)), n // len(parts) // 4)))
    if covariance[0] <= 1e-24:
        return 0.0
    innovation, together = _autoregression(covariance, n)
    if together > 0:
        together = min(together + bias * (1 + 3 * together) * len(parts) / n, 1 - 1 / n)
    return innovation / (1 - together) ** 2


def clipped(series: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    middle = weighted_quantile(series, 0.5, weights)
    reach = CLIP * mad_sigma(series - middle, weights)
    return np.clip(series, middle - reach, middle + reach) if reach > 0 else series


def _autocovariance(parts: Sequence[FloatArray], most: int) -> FloatArray:
    n = sum(len(part) for part in parts)
    return np.array(
        [sum(float(part[k:] @ part[: len(part) - k]) for part in parts if len(part) > k) / n for k in range(most + 1)]
    )


def _autoregression(covariance: FloatArray, n: int) -> tuple[float, float]:
    """Return (innovation variance, sum of coefficients) for n values; order 0 if BIC selects it."""
    coefficients, variance = np.zeros(0), float(covariance[0])
    fits = [(variance, 0.0)]
    for order in range(1, len(covariance)):
        told = float(coefficients @ covariance[order - 1 : 0 : -1])
        reflection = (float(covariance[order]) - told) / variance
        coefficients = np.append(coefficients - reflection * coefficients[::-1], reflection)
        variance *= 1 - reflection**2
        if variance <= 1e-12 * covariance[0]:
            return max(variance, 0.0), 1.0
        fits.append((variance, float(coefficients.sum())))
    orders, misfit = np.arange(len(fits)), n * np.log([variance for variance, _ in fits])
    least, most = (int(np.argmin(misfit + each * orders)) for each in (math.log(n), 2))
    return max(fits[least], fits[most], key=lambda fit: fit[0] / (1 - fit[1]) ** 2) if least else fits[0]


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
