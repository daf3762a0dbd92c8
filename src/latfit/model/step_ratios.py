"""How single steps scatter: the law of F = observed time / typical time, as measured, tail and all.

A quantile function known at a few levels says nothing beyond the last of them, and there a queue's waits are decided:
if one step in 200 takes fifty times as long, the mean service grows by a quarter, its second moment more than tenfold,
and the 99th percentile of a step sees none of it. So the law is kept as weighted points that resolve each decade of the
tail alike: up to RESOLUTION points below the 99th percentile, as many between it and the 99.9th, and so on; a step
beyond them all is a point of its own. A point is the mean of the steps that it stands for, so the mean of the law is
that of the sample, exactly, and what is lost of its second moment is the variance inside points of next to equal steps.

The law is that of single steps about the level of their size (see `size_levels`): a curve that misses all steps of a
size is no scatter.

Where steps of some batch sizes scatter otherwise than those of others (`fitting.checking.step_ratios` finds out), each
group of neighbouring sizes has points of its own, and a batch that nobody measured scatters as the group does that is
nearest in ln B. The points of the groups follow each other, each with its share of all steps.

What n independent steps leave open is drawn by the Bayesian bootstrap (Rubin 1981): the weights of the points become
Gamma(n w_i) variables over their sum. To them one more step is added at the longest one seen, with a weight of
Gamma(1): a count of k exceedances then has the upper limit Gamma(k + 1), that of the exact (Clopper-Pearson) interval
of a rare event's rate, and not Gamma(k), which has none for k = 0. Each group is drawn so.

A curve that misses the steps of some size misses them every time: that is no scatter. So the law is that of single
steps about the level of their size S, exp(l(S)) times the curve. l is taken as a Gaussian process in ln S with
covariance t^2 exp(-|ln S - ln S'|/r): sizes that are near each other are missed alike. Its data are the mean log ratios
of the steps of each size (outliers moved in to three standard deviations) with their standard errors; their marginal
likelihood weighs the t and r of a grid, t = 0 among them, and l and its error are averages over that (Rasmussen &
Williams 2006, sections 2.2 and 5.4). Where the curve misses nothing, t is near 0 and nothing is moved; what nobody
measured is as uncertain as t and the distance to the next size make it.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from latfit.stats import FloatArray, IntArray, by_group, distinct, mad_sigma, weighted_quantiles


@dataclass(frozen=True, eq=False)
class BatchGroups:
    """k groups in rising order: starts (k,), the first point of each; low and high (k,), its smallest and largest
    batch."""

    starts: IntArray
    low: FloatArray
    high: FloatArray

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, batches: FloatArray) -> IntArray:
        """Number of the group (n,) that is nearest in ln B, the lower of two, for batches (n,), 1 or more."""
        return np.searchsorted(np.sqrt(self.high[:-1] * self.low[1:]), batches, side="left")

    def only(self, low: int, high: int) -> "BatchGroups":
        """Groups low..high - 1, their points counted from 0."""
        if high - low == 1:
            return ALIKE
        return BatchGroups(self.starts[low:high] - self.starts[low], self.low[low:high], self.high[low:high])

    def padded(self, buckets: Sequence[int]) -> "BatchGroups":
        """The same where a batch belongs to the group of the next of `buckets`: batches past the last bucket of a group
        are of the next one. A group without a bucket has no batch."""
        sizes = np.array(sorted(set(buckets)), dtype=np.float64)
        ends = np.searchsorted(self.of(sizes), np.arange(len(self)), side="right")
        # The largest batch of each group; up to the first bucket of all where the group is below it.
        last = np.where(ends > 0, sizes[np.maximum(ends, 1) - 1], 0.5)
        first = np.concatenate([[1.0], last[:-1] + 1])
        return BatchGroups(self.starts, first, last)

    def to_json(self, order: IntArray) -> dict[str, Any]:
        """With the group of each point in the given order (n,) of the points."""
        group = np.searchsorted(self.starts, order, side="right") - 1
        return {"low": self.low.tolist(), "high": self.high.tolist(), "group": group.tolist()}


ALIKE = BatchGroups(np.zeros(1, dtype=np.int64), np.ones(1), np.full(1, np.inf))
"""All batches in one group."""


def groups_from_json(document: Mapping[str, Any] | None, points: int) -> tuple[IntArray, BatchGroups]:
    """(order of the points (n,) in which the groups follow each other, groups). Raises ValueError, TypeError, KeyError
    for what are no groups."""
    if not document:
        return np.arange(points), ALIKE
    low, high = (np.asarray(document[name], dtype=np.float64) for name in ("low", "high"))
    group = np.asarray(document["group"], dtype=np.int64)
    ends = np.stack([low, high], axis=1).ravel() if low.shape == high.shape and low.ndim == 1 else np.empty(0)
    known = len(ends) > 0 and bool(np.all(np.isfinite(ends) & (ends > 0) & (np.diff(ends, prepend=0) >= 0)))
    if not known or group.shape != (points,) or set(group.tolist()) != set(range(len(low))):
        raise ValueError("groups of ratios are not rising batches with a group of each point")
    order = np.argsort(group, kind="stable")
    return order, BatchGroups(np.searchsorted(group[order], np.arange(len(low))), low, high)


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


RESOLUTION = 200
"""Points of each decade of the tail."""

DECADES = (0.99, 0.999, 0.9999, 0.99999)
FEWEST_BEYOND = 1
"""Independent steps beyond a percentile from which its tail counts as seen, as in the ranks of
`fitting.checking.conformal`."""


@dataclass(frozen=True, eq=False)
class StepRatios:
    """values (n,) of F, rising in each group of batch sizes, one group after the other; the share of all steps that
    each stands for, weights (n,), summing to 1.

    steps: how many were measured.  independent: how many independent ones these are worth.  levels: of each size, over
    which F is.  groups: which points are of which batch sizes; one group where all scatter alike.
    """

    values: FloatArray
    weights: FloatArray
    steps: float
    independent: float
    levels: SizeLevels = NO_LEVELS
    groups: BatchGroups = ALIKE

    @cached_property
    def parts(self) -> tuple["StepRatios", ...]:
        """The law of each group, alone."""
        return tuple(self._only(g, g + 1) for g in range(len(self.groups)))

    @cached_property
    def pooled(self) -> "StepRatios":
        """The law of all steps, whatever their batch."""
        if len(self.groups) == 1:
            return self
        order = np.argsort(self.values, kind="stable")
        return replace(self, values=self.values[order], weights=self.weights[order], groups=ALIKE)

    def of(self, batch: float) -> "StepRatios":
        """The law of one batch size."""
        return self.parts[int(self.groups.of(np.array([batch]))[0])]

    def up_to(self, largest: float) -> "StepRatios":
        """The same without the groups that no batch of up to `largest` belongs to."""
        return self._only(0, int(self.groups.of(np.array([largest]))[0]) + 1)

    def means(self, batches: FloatArray) -> FloatArray:
        """E[F] (n,) of batches (n,)."""
        return np.array([part.mean for part in self.parts])[self.groups.of(batches)]

    def mean_squares(self, batches: FloatArray) -> FloatArray:
        """E[F^2] (n,) of batches (n,)."""
        return np.array([part.mean_square for part in self.parts])[self.groups.of(batches)]

    def points_of(self, largest: int) -> tuple[IntArray, IntArray]:
        """(first, last) point (largest + 1,) of batches 0 (unused), 1, ..., largest."""
        ends = [*self.groups.starts[1:].tolist(), len(self.values)]
        group = self.groups.of(np.maximum(np.arange(largest + 1.0), 1.0))
        return self.groups.starts[group], np.array(ends, dtype=np.int64)[group] - 1

    def padded(self, buckets: Sequence[int]) -> "StepRatios":
        """Of an engine that pads a batch to the next of `buckets`: it scatters as that one."""
        return replace(self, groups=self.groups.padded(buckets))

    @cached_property
    def mean(self) -> float:
        """E[F] of all steps."""
        return float(self.weights @ self.values)

    @cached_property
    def mean_square(self) -> float:
        """E[F^2] of all steps."""
        return float(self.weights @ self.values**2)

    @cached_property
    def cv(self) -> float:
        """Coefficient of variation, of the group that scatters most."""
        return max(math.sqrt(max(part.mean_square / part.mean**2 - 1, 0.0)) for part in self.parts)

    @cached_property
    def reached(self) -> FloatArray:
        """Share of the steps of its group up to each point (n,); the last of a group is 1."""
        sums = [np.cumsum(self.weights[rows]) for rows in self._rows]
        return np.concatenate([each / each[-1] for each in sums])

    def quantile(self, share: float) -> float:
        """The smallest value that a share of all steps does not exceed."""
        law = self.pooled
        return float(law.values[min(int(np.searchsorted(law.reached, share - 1e-12)), len(law.values) - 1)])

    def sees(self, share: float) -> bool:
        """Whether the tail beyond a share of the steps was seen: FEWEST_BEYOND independent steps of each group lie
        there."""
        fewest = min(part.independent for part in self.parts)
        return fewest * (1 - share) >= FEWEST_BEYOND * (1 - 1e-9)

    @property
    def slow_share(self) -> float:
        """Share of E[F^2] that is due to the slowest hundredth of the steps; 0.01 or little more where nothing
        stalls."""
        law = self.pooled
        beyond = np.clip(law.reached - 0.99, 0.0, law.weights)
        return float(beyond @ law.values**2) / law.mean_square

    def scaled(self) -> "StepRatios":
        """The law of F/E[F], whose mean is 1 in each group."""
        means = np.repeat([part.mean for part in self.parts], [len(part.values) for part in self.parts])
        return replace(self, values=self.values / means)

    def damped(self, share: float) -> "StepRatios":
        """The law of a time of which a share scatters so and the rest does not; of mean 1 where this one is."""
        return replace(self, values=1 + share * (self.values - 1))

    def drawn(self, rng: np.random.Generator) -> "StepRatios":
        """A law that the measured steps allow (see the module)."""
        from scipy.special import gammaincinv

        # By their inverse, which moves as little as the weights do; rejection would draw anew for the last digit.
        counts = gammaincinv(np.maximum(self.independent * self.weights, 1e-6), rng.random(len(self.weights)))
        counts[[rows.stop - 1 for rows in self._rows]] += rng.standard_exponential(len(self.groups))
        return replace(self, weights=np.asarray(counts / counts.sum()))

    def to_json(self) -> dict[str, Any]:
        """The points of all groups in rising order, each with the number of its group where there are several."""
        law = self.pooled
        return {
            "steps": self.steps,
            "independent": self.independent,
            "mean": self.mean,
            "mean_square": self.mean_square,
            "values": _short(law.values, 8),
            "weights": _short(law.weights, 10),
            "levels": {
                "sizes": _short(self.levels.sizes, 8),
                "log_level": _short(self.levels.log_level, 8),
                "error": _short(self.levels.error, 8),
            },
            **(
                {}
                if len(self.groups) == 1
                else {"by_batch": self.groups.to_json(np.argsort(self.values, kind="stable"))}
            ),
        }

    @cached_property
    def _rows(self) -> list[slice]:
        """The points of each group."""
        return [slice(a, b) for a, b in itertools.pairwise([*self.groups.starts.tolist(), len(self.values)])]

    def _only(self, low: int, high: int) -> "StepRatios":
        """Groups low..high - 1 alone."""
        if high - low == len(self.groups):
            return self
        rows = slice(self._rows[low].start, self._rows[high - 1].stop)
        share = float(self.weights[rows].sum())
        return StepRatios(
            self.values[rows],
            self.weights[rows] / share,
            self.steps * share,
            self.independent * share,
            self.levels,
            self.groups.only(low, high),
        )


def ratios_of(
    values: FloatArray, weights: FloatArray, independent: float | None = None, levels: SizeLevels = NO_LEVELS
) -> StepRatios:
    """The law of measured ratios (n,), n >= 1, above 0, that stand for weights (n,) steps each. levels: over which the
    ratios are."""
    rising, number = distinct(np.asarray(values, dtype=np.float64))
    count = np.bincount(number, weights=weights)
    steps = float(count.sum())
    middle = (np.cumsum(count) - count / 2) / steps
    point = np.searchsorted(_edges(steps), middle)
    starts = np.flatnonzero(np.diff(point, prepend=-1))
    share = np.add.reduceat(count, starts)
    means = np.add.reduceat(count * rising, starts) / share
    return StepRatios(means, share / steps, steps, steps if independent is None else float(independent), levels)


def joined_ratios(laws: Sequence[StepRatios], low: FloatArray, high: FloatArray) -> StepRatios:
    """One law of the laws of groups of batches low (k,) to high (k,), rising; levels are those of the first."""
    if len(laws) == 1:
        return laws[0]
    steps = sum(law.steps for law in laws)
    starts = np.cumsum([0, *(len(law.values) for law in laws[:-1])])
    return StepRatios(
        np.concatenate([law.values for law in laws]),
        np.concatenate([law.weights * (law.steps / steps) for law in laws]),
        steps,
        sum(law.independent for law in laws),
        laws[0].levels,
        BatchGroups(starts, np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)),
    )


def ratios_from_json(document: Mapping[str, Any] | None) -> StepRatios | None:
    """The law that `to_json` wrote; None where there is none. Raises ValueError, TypeError, KeyError for what is no
    law."""
    if not document:
        return None
    values = np.asarray(document["values"], dtype=np.float64)
    weights = np.asarray(document["weights"], dtype=np.float64)
    known = len(values) > 0 and values.shape == weights.shape and values.ndim == 1
    usable = (values > 1 / MOST_RATIO) & (values < MOST_RATIO) & (weights >= 0) if known else False
    if not np.all(usable) or np.any(np.diff(values) < 0):
        raise ValueError("ratios are not rising values above zero with a weight each")
    if not abs(float(weights.sum()) - 1) < 1e-6:
        raise ValueError("weights of ratios do not add up to 1")
    order, groups = groups_from_json(document.get("by_batch"), len(values))
    return StepRatios(
        values[order],
        weights[order],
        float(document["steps"]),
        float(document["independent"]),
        levels_from_json(document.get("levels")),
        groups,
    )


def _short(numbers: FloatArray, digits: int) -> list[float]:
    """With so many digits, more than any of them is known to."""
    return [float(f"{number:.{digits}g}") for number in numbers.tolist()]


def _edges(steps: float) -> FloatArray:
    """Shares between the points, until single steps are told apart."""
    edges, low = [np.zeros(0)], 0.0
    for high in (*DECADES, 1.0):
        edges.append(np.linspace(low, high, RESOLUTION + 1)[1:])
        if (high - low) * steps <= RESOLUTION or high == 1.0:
            break
        low = high
    joined = np.concatenate(edges)
    last = float(joined[-1])
    rest = np.linspace(last, 1.0, RESOLUTION + 1)[1:] if last < 1 else np.zeros(0)
    return np.concatenate([joined, rest])
