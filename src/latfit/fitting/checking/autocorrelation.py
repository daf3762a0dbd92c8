"""Effective sample size of autocorrelated steps.

n steps with variance v and long-run variance L are worth n v/L independent ones. L comes from an autoregression fitted
by Levinson's recursion; BIC and AIC choose the order.
Derivation: docs/theory/fitting.md, "Independent samples".
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
MIN_VISITS = 1.5  # of each cell of a grid, on average, from which its order is one of time


@dataclass(frozen=True)
class Series:
    """Time series of a trace, one per run. rows, values: row numbers and values of each run (m,), in time order."""

    rows: Sequence[NDArray[np.intp]] = ()
    values: Sequence[FloatArray] = ()
    own: float = 1.0  # share of a step's own deviation left after its cell's mean is removed
    visit: float = 1.0  # mean number of consecutive steps of one cell; 1 if cells do not repeat


@dataclass(frozen=True)
class Persistence:
    """Autocorrelation of steps."""

    lag_one: float = 0.0  # correlation of neighbouring steps
    likely: float = 1.0  # consecutive steps per independent sample, at least 1
    steps_for_one: float = 1.0  # upper end of the same, with its estimation error; used for counting
    in_visit: float = 1.0  # the smaller of `likely` and the steps of one visit to a cell
    runs: int = 1  # number of runs

    @property
    def why(self) -> str:
        """Reason for the loss of samples: lag-one correlation, or slow changes if that explains less than half."""
        by_neighbours = (1 + self.lag_one) / max(1 - self.lag_one, 1e-9)
        if 2 * by_neighbours >= self.likely:
            return f"autocorrelation {self.lag_one:.3g}"
        return "their level wanders slowly"


@dataclass(frozen=True)
class TimeOrder:
    """Order in which the rows of a trace were measured. runs: row numbers of each run; empty if no row has a time, or
    rows are not single steps. cell: cell of each row (n,), whose mean is removed from a series of a grid; None for a
    log."""

    runs: Sequence[NDArray[np.intp]]
    cell: NDArray[np.intp] | None = None

    @staticmethod
    def of(data: FitData) -> "TimeOrder":
        known = data.single and data.times is not None
        return TimeOrder(data.runs if known else [], None if data.in_time else data.known_cell)

    def series(self, rows: NDArray[np.intp], values: FloatArray) -> Series:
        """Return the series of values (m,) at rows (m,) of the trace."""
        if not self.runs or not len(rows):
            return Series()
        n = sum(len(run) for run in self.runs)
        placed, there = np.zeros(n), np.zeros(n, dtype=bool)
        placed[rows], there[rows] = values, True
        own = visit = 1.0
        if self.cell is not None:
            repeated = np.bincount(self.cell[rows])[self.cell[rows]] > 1
            if 2 * int(repeated.sum()) > len(rows):
                there[rows] = repeated
                inside = self.cell[there]
                mean = np.bincount(inside, weights=placed[there]) / np.maximum(np.bincount(inside), 1)
                placed[there] -= mean[inside]
                own = 1 - len(np.unique(inside)) / len(inside)
                cells = [self.cell[run[there[run]]] for run in self.runs]
                visits = sum(1 + int(np.count_nonzero(np.diff(run))) for run in cells if len(run))
                if visits < MIN_VISITS * len(np.unique(inside)):
                    return Series()  # a level that wanders is that of the cells
                visit = len(inside) / visits
        runs = [run[there[run]] for run in self.runs]
        return Series(runs, [placed[run] for run in runs], own, visit)


def persistence(series: Series) -> Persistence:
    """Estimate the autocorrelation of a series."""
    parts = [clipped(values) for values in series.values if len(values) > 1]
    parts = [part - part.mean() for part in parts]
    n = sum(len(part) for part in parts)
    if n < FEWEST:
        return Persistence()
    most = max(1, min(int(10 * math.log10(n)), n // len(parts) // 4))
    covariance = _autocovariance(parts, most)
    if covariance[0] <= 1e-24:
        return Persistence()
    innovation, together = _autoregression(covariance, n)
    if together > 0:
        together = min(together + (1 + 3 * together) * len(parts) / n, 1 - 1 / n)
    likely = max(1 + (innovation / (1 - together) ** 2 / float(covariance[0]) - 1) / series.own, 1.0)
    lower = likely / max(1 - math.sqrt(likely / n), 1e-9) if likely > 1 else 1.0
    likely, lower = (min(each, n / len(parts)) for each in (likely, lower))
    return Persistence(float(covariance[1] / covariance[0]), likely, lower, min(likely, series.visit), len(parts))


def clipped(series: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """Clip a series (n,) at three robust standard deviations from its median. weights: steps of each value (n,)."""
    middle = weighted_quantile(series, 0.5, weights)
    reach = CLIP * mad_sigma(series - middle, weights)
    return np.clip(series, middle - reach, middle + reach) if reach > 0 else series


def _autocovariance(parts: Sequence[FloatArray], most: int) -> FloatArray:
    """Return the autocovariance at lags 0 to `most` (most + 1,), pooled over runs of mean zero."""
    n = sum(len(part) for part in parts)
    return np.array(
        [sum(float(part[k:] @ part[: len(part) - k]) for part in parts if len(part) > k) / n for k in range(most + 1)]
    )


def _autoregression(covariance: FloatArray, n: int) -> tuple[float, float]:
    """Return (innovation variance, sum of the coefficients) of the autoregression for n values. Order 0 if BIC selects
    it, else BIC's or AIC's order, whichever has the larger long-run variance."""
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
