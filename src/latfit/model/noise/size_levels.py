"""Level of the measured steps of each size over the fitted curve: a Gaussian process in ln S.

A curve that misses the steps of a size misses them every time, which is no noise. The covariance is
t^2 exp(-|ln S - ln S'|/r); the marginal likelihood weighs a grid of t and r, t = 0 among them (Rasmussen & Williams
2006, sections 2.2 and 5.4).
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from latfit.stats import FloatArray, by_group, distinct, mad_sigma, weighted_quantiles

MOST_SIZES = 64
DEVIATIONS = tuple(0.005 * 2.0**k for k in range(9))
REACHES = (0.5, 2.0, 8.0)
"""t and r of the levels that are tried."""

LEAST_ERROR = 1e-4
"""No level is known better."""


@dataclass(frozen=True, eq=False)
class SizeLevels:
    """sizes (m,) of steps in tokens, rising; log_level (m,) of the measured steps over the curve there, error (m,) its
    standard error. Without sizes the curve is the level."""

    sizes: FloatArray
    log_level: FloatArray
    error: FloatArray

    def factors(self, S: FloatArray) -> FloatArray:
        """Level over the curve (n,) at S (n,) tokens; S of any shape."""
        if not len(self.sizes):
            return np.ones(np.shape(S))
        sizes, at = distinct(np.ravel(S))
        found = sum(w * each.mean(np.log(sizes)) for w, each in self._processes)
        return np.asarray(np.exp(found)[at].reshape(np.shape(S)))

    def drawn_factors(self, S: FloatArray, rng: np.random.Generator) -> FloatArray:
        """The same of a level that the steps allow; S (n,)."""
        if not len(self.sizes):
            return np.ones(len(S))
        weights = np.array([w for w, _ in self._processes])
        process = self._processes[int(rng.choice(len(weights), p=weights))][1]
        return np.asarray(np.exp(process.drawn(np.log(S), rng)))

    @cached_property
    def _processes(self) -> list[tuple[float, "_Process"]]:
        """The likely processes, each with its weight; those below a thousandth are left out."""
        tried = [
            _Process(t, r, np.log(self.sizes), self.log_level, self.error)
            for t, r in [(0.0, 1.0), *((t, r) for t in DEVIATIONS for r in REACHES)]
        ]
        logs = np.array([process.log_likelihood for process in tried])
        # t = 0 counts as much as all others together.
        logs[1:] -= math.log(len(tried) - 1)
        weights = np.exp(logs - logs.max())
        weights[weights < 1e-3 * weights.max()] = 0
        weights /= weights.sum()
        return [(float(w), process) for w, process in zip(weights, tried, strict=True) if w > 0]


@dataclass(frozen=True, eq=False)
class _Process:
    """A Gaussian process with covariance t^2 exp(-|x - x'|/r) that was seen at x (m,) as y (m,), give or take error."""

    t: float
    r: float
    x: FloatArray
    y: FloatArray
    error: FloatArray

    def _covariance(self, a: FloatArray, b: FloatArray) -> FloatArray:
        return np.asarray(self.t**2 * np.exp(-np.abs(a[:, None] - b[None, :]) / self.r))

    @cached_property
    def _root(self) -> FloatArray:
        return np.asarray(np.linalg.cholesky(self._covariance(self.x, self.x) + np.diag(self.error**2)))

    @cached_property
    def _weights(self) -> FloatArray:
        half = np.linalg.solve(self._root, self.y)
        return np.asarray(np.linalg.solve(self._root.T, half))

    @property
    def log_likelihood(self) -> float:
        return float(-0.5 * self.y @ self._weights - np.log(np.diag(self._root)).sum())

    def mean(self, at: FloatArray) -> FloatArray:
        return np.asarray(self._covariance(at, self.x) @ self._weights)

    def drawn(self, at: FloatArray, rng: np.random.Generator) -> FloatArray:
        z = rng.standard_normal(len(at))
        if self.t == 0:
            return np.zeros(len(at))
        half = np.linalg.solve(self._root, self._covariance(self.x, at))
        left = self._covariance(at, at) - half.T @ half + 1e-6 * self.t**2 * np.eye(len(at))
        return np.asarray(self.mean(at) + np.linalg.cholesky(left) @ z)


MOST_RATIO = 1e60
"""Of observed over typical time, and one over the least; its square is a number still."""
NO_LEVELS = SizeLevels(np.empty(0), np.empty(0), np.empty(0))


def size_levels(S: FloatArray, ratio: FloatArray, weights: FloatArray, steps_for_one: float = 1.0) -> SizeLevels:
    """Levels by size of steps of S tokens (n,) with ratios to the curve (n,), that stand for weights (n,) steps each,
    of which steps_for_one are worth an independent one. Sizes within an eighth of an octave count as one where there
    are more than MOST_SIZES."""
    sizes, number = distinct(S)
    if len(sizes) > MOST_SIZES:
        number = distinct(np.round(8 * np.log2(sizes)))[1][number]
    count = np.bincount(number, weights=weights)
    if len(count) < 2:
        return NO_LEVELS
    logs = np.log(ratio)
    order = np.argsort(number.astype(np.uint16) if len(count) < 1 << 16 else number, kind="stable")
    ends = np.concatenate([[0], np.cumsum(np.bincount(number))])
    parts = [order[a:b] for a, b in itertools.pairwise(ends)]
    middle = np.array([weighted_quantiles(logs[rows], (0.5,), weights[rows])[0] for rows in parts])
    off = logs - middle[number]
    reach = 3 * mad_sigma(off, weights)
    off = np.clip(off, -reach, reach)
    found = by_group(off, number, weights)
    if found.freedom < len(count):
        return NO_LEVELS
    mean = middle + found.mean
    error = np.sqrt(np.maximum(found.within * steps_for_one / count, LEAST_ERROR**2))
    # The mean of the law of single steps takes up what all sizes share.
    centre = float((mean / error**2).sum() / (1 / error**2).sum())
    at = np.bincount(number, weights=weights * S) / count
    return SizeLevels(at, mean - centre, error)


def levels_from_json(document: Mapping[str, Any] | None) -> SizeLevels:
    if not document or not document["sizes"]:
        return NO_LEVELS
    sizes, level, error = (np.asarray(document[name], dtype=np.float64) for name in ("sizes", "log_level", "error"))
    known = sizes.shape == level.shape == error.shape and sizes.ndim == 1
    most = math.log(MOST_RATIO)
    usable = (np.abs(level) < most) & (sizes > 0) & (sizes < np.inf) & (error >= LEAST_ERROR / 2) & (error < most)
    if not known or not np.all(usable) or np.any(np.diff(sizes) <= 0):
        raise ValueError("levels of ratios are not rising sizes with a level and an error each")
    return SizeLevels(sizes, level, error)
