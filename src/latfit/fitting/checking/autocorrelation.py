"""Effective sample size: n steps with variance v and long-run variance L are worth n v/L independent ones.

L comes from an autoregression: docs/theory/fitting.md, "Independent samples".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
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
