"""Statistics that several packages share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_FREEDOM = 100_000

MAD_TO_SIGMA = 1.482602218505602
"""A normal sample's standard deviation over its median absolute deviation, 1/Phi^-1(3/4)."""


@dataclass(frozen=True)
class MedianInterval:
    """A median with a distribution-free interval, open if n is too small."""

    median: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        return (self.high - self.low) / (2 * self.median) if self.median > 0 else math.inf


def median_interval(samples: FloatArray, level: float = 0.95) -> MedianInterval:
    """Return the median (n,) with its order-statistic interval (Hahn & Meeker 1991, section 5.2)."""
    from scipy.special import bdtr

    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    n = len(ordered)
    if n == 0:
        return MedianInterval(math.nan, -math.inf, math.inf)
    median = float(np.median(ordered))
    # The largest l with P(Bin(n, 1/2) < l) <= (1 - level)/2, so that [x_(l), x_(n+1-l)] covers.
    below = int(np.count_nonzero(bdtr(np.arange(n // 2), n, 0.5) <= (1 - level) / 2))
    if below == 0:
        return MedianInterval(median, -math.inf, math.inf)
    return MedianInterval(median, float(ordered[below - 1]), float(ordered[n - below]))


def student_tail(freedom: float, t: float) -> float:
    """Return P(T > t), t >= 0, by a continued fraction (Numerical Recipes, 6.4); SciPy takes 0.2 s to import."""
    if freedom > MAX_FREEDOM:
        z = t * (1 - 1 / (4 * freedom)) / math.sqrt(1 + t * t / (2 * freedom)) if math.isfinite(freedom) else t
        return 0.5 * math.erfc(z / math.sqrt(2))
    x, y, a, b = freedom / (freedom + t * t), t * t / (freedom + t * t), freedom / 2, 0.5
    swapped = x > (a + 1) / (a + b + 2)
    if swapped:
        x, y, a, b = y, x, b, a
    if x == 0:
        return 0.5 if swapped else 0.0
    d = 1 / (1 - (a + b) * x / (a + 1))
    c, fraction, m = 1.0, d, 0
    while abs(c * d - 1) > 1e-15 and m < MAX_FREEDOM:
        m += 1
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c, d = 1 + term / c, 1 / (1 + term * d)
            fraction *= c * d
    logs = a * math.log(x) + b * math.log(y) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    tail = 0.5 * math.exp(logs) * fraction / a
    return 0.5 - tail if swapped else tail


@cache
def student_quantile(freedom: float, q: float) -> float:
    """Return the quantile of Student's t distribution, by bisection."""
    if q < 0.5:
        return -student_quantile(freedom, 1 - q)
    low, high = 0.0, 1.0
    while student_tail(freedom, high) > 1 - q:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(freedom, middle) > 1 - q else (low, middle)
    return (low + high) / 2


def mad_sigma(residuals: FloatArray, weights: FloatArray | None = None) -> float:
    """Return the robust standard deviation about zero: 1.4826 x (weighted) median of |residual|."""
    return MAD_TO_SIGMA * weighted_quantile(np.abs(residuals), 0.5, weights)


def weighted_quantile(values: FloatArray, q: float, weights: FloatArray | None = None) -> float:
    """Return the smallest value with at least a share `q` of the weight at or below it."""
    return float(np.quantile(values, q)) if weights is None else weighted_quantiles(values, (q,), weights)[0]


def weighted_quantiles(values: FloatArray, shares: Sequence[float], weights: FloatArray) -> list[float]:
    order = np.argsort(values)
    cumulative = np.cumsum(weights[order])
    ranks = np.searchsorted(cumulative, np.asarray(shares) * cumulative[-1] * (1 - 1e-12))
    return [float(value) for value in values[order[np.minimum(ranks, len(values) - 1)]]]


MIN_COUNTED = 4096  # values; fewer are sorted
MAX_SPAN_RATIO = 4  # of whole numbers that are counted: span over number of values


def distinct(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Return np.unique(values, return_inverse=True), faster for whole numbers close together."""
    if len(values) >= MIN_COUNTED and (values.max() - (low := values.min())) <= MAX_SPAN_RATIO * len(values):
        key = (values - low).astype(np.intp)
        if values.dtype.kind in "iu" or np.array_equal(key, values - low):
            seen = np.bincount(key) > 0
            return np.flatnonzero(seen).astype(values.dtype) + low, (np.cumsum(seen) - 1)[key]
    found, number = np.unique(values, return_inverse=True)
    return found, number.ravel()


class Groups(NamedTuple):
    """One-way analysis of variance: weight, mean, and weighted sum of squares about the mean of each group (m,)."""

    size: FloatArray
    mean: FloatArray
    squares: FloatArray
    values: float  # weight of all
    freedom: float  # degrees of freedom within groups
    within: float  # variance within groups; NaN without freedom
    typical_size: float  # of equal groups with the same variance of their means


def by_group(values: FloatArray, group: NDArray[np.integer], weights: FloatArray) -> Groups:
    """Return the groups of values (n,). group: number of each value's group (n,), without gaps."""
    size = np.asarray(np.bincount(group, weights=weights), dtype=np.float64)
    mean = np.bincount(group, weights=weights * values) / size
    squares = np.asarray(np.bincount(group, weights=weights * (values - mean[group]) ** 2), dtype=np.float64)
    n = float(size.sum())
    freedom = n - len(size)
    within = float(squares.sum()) / freedom if freedom > 0 else math.nan
    typical_size = (n - float(size @ size) / n) / max(len(size) - 1, 1) if n > 0 else math.nan
    return Groups(size, mean, squares, n, freedom, within, typical_size)


def error_metrics(
    observed: FloatArray, predicted: FloatArray, weights: FloatArray | None = None
) -> Mapping[str, float]:
    """Return errors of times in ms (n,), see docs/formats.md; r2 is NaN if the observed ones are equal."""
    weights = np.ones_like(observed) if weights is None else weights
    total = float(weights.sum())
    error = predicted - observed
    ape = np.abs(error) / observed * 100
    squared = float(weights @ error**2)
    spread = float(weights @ (observed - float(weights @ observed) / total) ** 2)
    median, p90 = weighted_quantiles(ape, (0.5, 0.9), weights)
    return {
        "n": round(total),
        "r2": 1 - squared / spread if spread > 0 and np.ptp(observed) > 0 else math.nan,
        "rmse_ms": math.sqrt(squared / total),
        "mae_ms": float(weights @ np.abs(error)) / total,
        "mape_pct": float(weights @ ape) / total,
        "median_ape_pct": median,
        "p90_ape_pct": p90,
    }
