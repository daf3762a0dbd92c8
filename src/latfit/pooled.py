"""A sample of positive numbers in batches, as counts: quantiles of all of them, and how far the batches tell these.

A number falls into the bin that its sign, exponent and first BITS bits of fraction name, 2^BITS bins an octave; each
bin knows the smallest and the largest number in it. So a quantile is exact where a bin holds one value (responses of an
idle machine are all alike), and off by less than a bin's width, 2^-BITS of the value, elsewhere; memory does not grow
with the sample, and two samples merge by adding counts.

Quantiles are those of all batches together: with an equal weight for every number and not for every batch. An average
of the batches' own quantiles is too low wherever batches differ, as they do in a queue near saturation. With p_i the
share of batch i at or below the pooled quantile x_q, the standard error of the share is the p_i's standard deviation
over sqrt(m), and the interval of x_q is [x at q - t s, x at q + t s] with Student's t on m - 1 degrees.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from latfit.stats import FloatArray

BITS = 10
_DROPPED = 52 - BITS
_LOWEST, _HIGHEST = 2.0**-30, 2.0**50
_FIRST = int(np.float64(_LOWEST).view(np.int64)) >> _DROPPED
_BINS = (int(np.float64(_HIGHEST).view(np.int64)) >> _DROPPED) - _FIRST + 1


@dataclass(frozen=True, eq=False)
class PooledSample:
    """counts (m, bins) of m batches; least and most (bins,) of the numbers in each bin (infinite where it has none)."""

    counts: NDArray[np.int32]
    least: FloatArray
    most: FloatArray
    sums: FloatArray

    @property
    def size(self) -> int:
        return int(self._reached[-1])

    @property
    def mean(self) -> float:
        return float(self.sums.sum()) / self.size

    @cached_property
    def _sizes(self) -> FloatArray:
        return np.asarray(self.counts.sum(axis=1), dtype=np.float64)

    @cached_property
    def _reached(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts.sum(axis=0, dtype=np.int64))

    def quantile(self, q: float) -> float:
        """The smallest number that a share q of all does not exceed, in (0, 1]."""
        rank = min(max(math.ceil(q * self.size - 1e-9), 1), self.size)
        at = int(np.searchsorted(self._reached, rank))
        before = int(self._reached[at - 1]) if at else 0
        inside = int(self._reached[at]) - before
        share = (rank - before - 1) / (inside - 1) if inside > 1 else 1.0
        return float(self.least[at] + share * (self.most[at] - self.least[at]))

    def above(self, x: float) -> float:
        """Share of all numbers above x."""
        return float(self._above(x).sum()) / self.size

    def above_error(self, x: float) -> float:
        """Standard error of that share, from the batches."""
        m = len(self.counts)
        if m < 2:
            return math.inf
        shares = self._above(x) / self._sizes
        weights = self._sizes / self._sizes.sum()
        return math.sqrt(float(weights**2 @ (shares - float(weights @ shares)) ** 2) * m / (m - 1))

    def quantile_interval(self, q: float, level: float = 0.95) -> tuple[float, float]:
        """Where the quantile lies as far as the batches tell; the upper end is infinite where they cannot."""
        from scipy.special import stdtrit

        half = float(stdtrit(len(self.counts) - 1, 0.5 + level / 2)) * self.above_error(self.quantile(q))
        return self.quantile(max(q - half, 1e-12)), self.quantile(q + half) if q + half < 1 else math.inf

    def _above(self, x: float) -> FloatArray:
        """How many numbers of each batch (m,) are above x, on a straight line within x's bin."""
        at = int(np.searchsorted(self.most, x, side="right")) if len(self.most) else 0
        whole = self.counts[:, at:].sum(axis=1, dtype=np.float64)
        if at < len(self.most) and self.least[at] <= x < self.most[at]:
            share = (x - self.least[at]) / (self.most[at] - self.least[at])
            whole -= share * self.counts[:, at]
        return np.asarray(whole)


def pooled(batches: Sequence[FloatArray]) -> PooledSample:
    """The sample of batches (n_i,) of numbers above zero; numbers out of reach count as the nearest in it."""
    counting = Counting(len(batches))
    for batch in batches:
        counting.add(batch)
    return counting.sample()


class Counting:
    """A sample while its batches come."""

    def __init__(self, batches: int) -> None:
        self._counts = np.zeros((batches, _BINS), np.int32)
        self._least, self._most = np.full(_BINS, np.inf), np.full(_BINS, -np.inf)
        self._sums = np.zeros(batches)
        self._added = 0

    def add(self, batch: FloatArray) -> None:
        """Count one batch; its array may be used again."""
        self._sums[self._added] = _count(
            np.ascontiguousarray(batch), self._counts[self._added], self._least, self._most
        )
        self._added += 1

    def sample(self) -> PooledSample:
        """All batches that came; bins that nothing fell into are left out."""
        used = np.flatnonzero(self._least < np.inf)
        return PooledSample(
            np.ascontiguousarray(self._counts[: self._added, used]),
            self._least[used],
            self._most[used],
            self._sums[: self._added],
        )


_compiled: Any = njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _count(values, counts, least, most):  # type: ignore[no-untyped-def]
    bits = values.view(np.int64)
    total = 0.0
    for i in range(len(values)):
        x = values[i]
        total += x
        place = min(max((bits[i] >> _DROPPED) - _FIRST, 0), _BINS - 1)
        counts[place] += 1
        least[place] = min(least[place], x)
        most[place] = max(most[place], x)
    return total
