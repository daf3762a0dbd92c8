"""How many independent steps the steps of a run are worth.

A series of n values with variance v and autocovariance c_k has a mean whose variance is L/n with the long-run variance
L = v + 2 sum_k c_k, not v/n: neighbours in time that share their noise repeat one another. So n values in a row are
worth n v/L independent ones; for an autoregression of lag-one correlation r that is n (1-r)/(1+r).

L is taken from an autoregression fitted to the autocovariances by Levinson's recursion, of an order up to 10 log10 n:
with innovations of variance s^2 and coefficients that add up to a, L = s^2/(1-a)^2 (the spectrum at frequency zero;
Heidelberger & Welch 1981, Thompson 2010). BIC says whether neighbours tell anything at all: where it takes order 0,
L = v exactly, as for white noise. Where it takes another, L is the larger one of its order and of that which AIC takes,
since slow noise under fast noise needs a long one. Taking the mean off a series lowers a by about (1 + 3a)/n, which is
put back. A few heavy outliers would hide what all others share, so the series is clipped at three robust standard
deviations about its median, and at a tick of the clock if that is more: where most steps have one time, what the others
have would be outliers, and what is left is how fits differ. The variance is that of a clock's rounding at least, a
twelfth of its tick's square, for the same reason. Several runs count together, each about its own mean: runs are
independent of one another, so n steps are worth as many as there are runs at least.

The number is known to one part in its root, as that of independent steps would be, and what is not known is not
promised: of n v/L it is the lower end, n v/L less its root, that counts.

Which order is that of time: the rows of a log by their times, and where it has none (nor repeats, `rep`) those of a
table as they stand, but a table may be sorted. In one that is sorted by size, neighbours resemble each other because
the model is wrong for them in the same way. So without times the order is one of time

* where most steps have others of the same cell (equal in all that is known of them) and cells are returned to: 1.5
  visits each or more on average;
* where few have, if no known column is sorted: if ranks of neighbours differ as random ones do (von Neumann's ratio of
  1 or more; 2 is random, 0 sorted).

Else nothing is said of it, nor of cells, as statistics of many rows. Where most steps have others of the same cell, the
series is what each deviates from its own cell's mean, so that the model's lack of fit is gone from it. Of m steps of a
cell that leaves each 1 - 1/m of its own deviation and of the variance, and L/v - 1 is seen as so much less, which is
put back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.stats import FloatArray, distinct, mad_sigma, weighted_quantile

FEWEST = 8
"""Steps below which nothing is said of their correlation."""
CLIP = 3.0
VISITS = 1.5
SORTED_BELOW = 1.0


@dataclass(frozen=True)
class Series:
    """What neighbours in time may share. rows: row numbers of a trace by run, each (m,), in the order of time.  values:
    the same of the series.  ticks: the same of what a clock cannot tell of them.  own: the share of each step's own
    deviation that is in it.  visit: steps of a cell in a row, on average, where cells are returned to."""

    rows: Sequence[NDArray[np.intp]] = ()
    values: Sequence[FloatArray] = ()
    ticks: Sequence[FloatArray] = ()
    own: float = 1.0
    visit: float = 1.0


@dataclass(frozen=True)
class Persistence:
    """lag_one: correlation of neighbours.  likely: how many steps in a row are worth an independent one, 1 or more.
    steps_for_one: the same with what is not known of it, to count by.  in_visit: how many of the likely ones a visit to
    a cell holds, at most.  runs: that it was seen in."""

    lag_one: float = 0.0
    likely: float = 1.0
    steps_for_one: float = 1.0
    in_visit: float = 1.0
    runs: int = 1

    @property
    def why(self) -> str:
        """Why steps in a row are worth fewer: what neighbours tell, or, where that explains less than half, more."""
        by_neighbours = (1 + self.lag_one) / max(1 - self.lag_one, 1e-9)
        if 2 * by_neighbours >= self.likely:
            return f"autocorrelation {self.lag_one:.3g}"
        return "their level wanders slowly"


@dataclass(frozen=True)
class TimeOrder:
    """The order in which the rows of a trace were measured. runs: row numbers by run, none where the order tells
    nothing of time.  cell: of each row (n,), whose lack of fit is to be taken off; None where times are known.  tick:
    what a clock cannot tell of each row (n,), in ln T; None where times are unknown."""

    runs: Sequence[NDArray[np.intp]]
    cell: NDArray[np.intp] | None = None
    tick: FloatArray | None = None

    @staticmethod
    def of(data: FitData) -> "TimeOrder":
        runs, cell = data.runs, data.known_cell
        if not data.single:
            return TimeOrder([])
        if data.in_time:
            return TimeOrder(runs, tick=data.tick)
        shared = _shared(cell)
        if 2 * int(shared.sum()) <= len(data):
            return TimeOrder([] if _by_size(data) else runs, cell)
        visits = _visits([cell[run[shared[run]]] for run in runs])
        return TimeOrder(runs if visits >= VISITS * len(np.unique(cell[shared])) else [], cell)

    def series(self, rows: NDArray[np.intp], values: FloatArray) -> Series:
        """The series of values (m,) that belong to rows (m,) of the trace."""
        if not self.runs or not len(rows):
            return Series()
        n = sum(len(run) for run in self.runs)
        placed, there = np.zeros(n), np.zeros(n, dtype=bool)
        placed[rows], there[rows] = values, True
        own = visit = 1.0
        if self.cell is not None and 2 * int((shared := _shared(self.cell[rows])).sum()) > len(rows):
            there[rows] = shared
            inside = self.cell[there]
            mean = np.bincount(inside, weights=placed[there]) / np.maximum(np.bincount(inside), 1)
            placed[there] -= mean[inside]
            own = 1 - len(np.unique(inside)) / len(inside)
            visit = len(inside) / _visits([self.cell[run[there[run]]] for run in self.runs])
        runs = [run[there[run]] for run in self.runs]
        tick = np.zeros(n) if self.tick is None else self.tick
        return Series(runs, [placed[run] for run in runs], [tick[run] for run in runs], own, visit)


def persistence(series: Series) -> Persistence:
    """How far neighbours in time repeat one another."""
    told = [(values, tick) for values, tick in zip(series.values, series.ticks, strict=True) if len(values) > 1]
    parts = [clipped(values, tick=tick) for values, tick in told]
    parts = [part - part.mean() for part in parts]
    n = sum(len(part) for part in parts)
    if n < FEWEST:
        return Persistence()
    most = max(1, min(int(10 * math.log10(n)), n // len(parts) // 4))
    covariance = _autocovariance(parts, most)
    covariance[0] = max(covariance[0], float(np.mean(np.concatenate([tick for _, tick in told]) ** 2)) / 12)
    if covariance[0] <= 1e-24:
        return Persistence()
    innovation, together = _autoregression(covariance, n)
    if together > 0:
        together = min(together + (1 + 3 * together) * len(parts) / n, 1 - 1 / n)
    likely = max(1 + (innovation / (1 - together) ** 2 / float(covariance[0]) - 1) / series.own, 1.0)
    lower = likely / max(1 - math.sqrt(likely / n), 1e-9) if likely > 1 else 1.0
    likely, lower = (min(each, n / len(parts)) for each in (likely, lower))
    return Persistence(float(covariance[1] / covariance[0]), likely, lower, min(likely, series.visit), len(parts))


def clipped(series: FloatArray, weights: FloatArray | None = None, tick: FloatArray | float = 0.0) -> FloatArray:
    """The series (n,) with its outliers moved to three robust standard deviations from its median, or to the tick (n,)
    of the clock where that is more. weights: how many steps each value stands for (n,)."""
    middle = weighted_quantile(series, 0.5, weights)
    reach = np.maximum(CLIP * mad_sigma(series - middle, weights), tick)
    return np.clip(series, middle - reach, middle + reach) if np.any(reach > 0) else series


def _shared(cell: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Whether another row is of the same cell (n,)."""
    return np.asarray(np.bincount(cell)[cell] > 1)


def _visits(cells: Sequence[NDArray[np.intp]]) -> int:
    """How often a cell is come to, in runs whose steps are in these cells."""
    return sum(1 + int(np.count_nonzero(np.diff(run))) for run in cells if len(run))


def _by_size(data: FitData) -> bool:
    """Whether a known column of the rows of runs is sorted, up or down or in loops."""
    for column in data.steps.values():
        ranks = [distinct(column[run])[1].astype(np.float64) for run in data.runs if len(run) > 1]
        spread = sum(float(np.sum((rank - rank.mean()) ** 2)) for rank in ranks)
        if spread > 0 and sum(float(np.sum(np.diff(rank) ** 2)) for rank in ranks) < SORTED_BELOW * spread:
            return True
    return False


def _autocovariance(parts: Sequence[FloatArray], most: int) -> FloatArray:
    """Of lags 0 to `most`, over runs of mean zero together (most + 1,)."""
    n = sum(len(part) for part in parts)
    return np.array(
        [sum(float(part[k:] @ part[: len(part) - k]) for part in parts if len(part) > k) / n for k in range(most + 1)]
    )


def _autoregression(covariance: FloatArray, n: int) -> tuple[float, float]:
    """(variance of the innovations, sum of the coefficients) of the order that BIC or AIC chooses for n values, the one
    with the larger long-run variance; of order 0 where BIC chooses that."""
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
