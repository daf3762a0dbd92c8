"""Response times of many requests: counts, ends and sums by bin, 512 an octave.

Interpolation: docs/theory/simulation.md, "Statistics of response times".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import entry
from latfit.stats import FloatArray

SHIFT = 43  # low bits of a float64 that a bin drops; nine bits of the fraction stay

LEAST = 2.0**-30  # ms; shorter times go into the lowest bin

LEANS = 2.5
"""Significant offset of a bin's mean from its middle, times √(requests): four standard errors of a uniform spread."""

LEAST_BITS = int(np.float64(LEAST).view(np.int64))


@dataclass(frozen=True, eq=False)
class Histogram:
    """Response times of some requests by bin (bins,)."""

    first: int
    totals: NDArray[np.int64]
    low: FloatArray
    high: FloatArray
    mass: FloatArray

    @cached_property
    def reached(self) -> NDArray[np.int64]:
        """Cumulative count (bins,)."""
        return np.cumsum(self.totals)

    @property
    def size(self) -> int:
        return int(self.reached[-1]) if len(self.reached) else 0

    @property
    def mean(self) -> float:
        return float(self.mass.sum()) / self.size if self.size else math.nan

    def share_in_bin(self, time: float) -> tuple[int, float]:
        """Return a time's bin, and the share of its requests at or below the time."""
        bits = max(int(np.float64(time).view(np.int64)), LEAST_BITS) if time > 0 else LEAST_BITS
        number = bits >> SHIFT
        column = number - self.first
        if not 0 <= column < len(self.totals) or not self.totals[column] or time < self.low[column]:
            return number, 0.0
        low, high, count = float(self.low[column]), float(self.high[column]), int(self.totals[column])
        if time >= high:
            return number, 1.0
        at_low, at_high = self._ends(column)
        inside = at_low + (count - at_low - at_high) * (time - low) / (high - low)
        return number, min(1.0, max(0.0, inside / count))

    def at_most(self, number: int, share: float) -> float:
        column = number - self.first
        if column < 0 or not self.size:
            return 0.0
        if column >= len(self.totals):
            return float(self.size)
        return float(self.reached[column]) - (1 - share) * int(self.totals[column])

    def above(self, time: float) -> float:
        return 1 - self.at_most(*self.share_in_bin(time)) / self.size

    def value(self, share: float) -> float:
        """Return the quantile of a share in ms; NaN without requests."""
        if not self.size:
            return math.nan
        rank = min(self.size, max(1, math.ceil(share * self.size - 1e-9)))
        column = int(np.searchsorted(self.reached, rank))
        low, high, count = float(self.low[column]), float(self.high[column]), int(self.totals[column])
        inside = rank - (int(self.reached[column]) - count)
        at_low, at_high = self._ends(column)
        between = count - at_low - at_high
        if inside <= max(at_low, 1):
            return low
        if inside > count - at_high or between <= 1:
            return high
        return low + (high - low) * min(1.0, max(0.0, (inside - at_low - 1) / (between - 1)))

    def _ends(self, column: int) -> tuple[float, float]:
        """Return the requests at exactly the bin's smallest and largest time."""
        low, high, count = float(self.low[column]), float(self.high[column]), int(self.totals[column])
        if high <= low:
            return float(count), 0.0
        # Rounding of the sum can put the mean outside a narrow bin.
        lean = min(1.0, max(-1.0, 2 * (float(self.mass[column]) / count - low) / (high - low) - 1))
        if abs(lean) < LEANS / math.sqrt(count):
            return 0.0, 0.0
        return count * max(0.0, -lean), count * max(0.0, lean)


def histogram_of(times: FloatArray) -> Histogram:
    """Count times (n,) in ms; NaN stands for requests that were never served."""
    times = times[times == times]
    number = np.maximum(times, LEAST).view(np.int64) >> SHIFT
    first = int(number.min()) if len(number) else 0
    bins = int(number.max()) - first + 1 if len(number) else 0
    totals, low, high, mass = np.zeros(bins, np.int64), np.full(bins, np.inf), np.zeros(bins), np.zeros(bins)
    _count(times, number, first, (totals, low, high, mass))
    return Histogram(first, totals, np.where(totals > 0, low, 0.0), high, mass)


@entry
def _count(times, number, first, bins):  # type: ignore[no-untyped-def]
    totals, low, high, mass = bins
    for i in range(len(times)):
        k = number[i] - first
        totals[k] += 1
        low[k] = min(low[k], times[i])
        high[k] = max(high[k], times[i])
        mass[k] += times[i]


def pooled(histograms: Sequence[Histogram]) -> Histogram:
    kept = [each for each in histograms if len(each.totals)]
    first = min((each.first for each in kept), default=0)
    bins = max((each.first + len(each.totals) for each in kept), default=0) - first
    totals, low, high, mass = np.zeros(bins, np.int64), np.full(bins, np.inf), np.zeros(bins), np.zeros(bins)
    for each in kept:
        own = slice(each.first - first, each.first - first + len(each.totals))
        totals[own] += each.totals
        low[own] = np.where(each.totals > 0, np.minimum(low[own], each.low), low[own])
        high[own] = np.maximum(high[own], each.high)
        mass[own] += each.mass
    return Histogram(first, totals, low, high, mass)
