"""Noise of single steps: a step of typical time T (curve times level of its size) lasts T F plus its pauses.

F is the distribution of measured ratios to T, stored as weighted points, equally many for each decade of the tail; a
point is the mean of its steps. Batch sizes whose F differs form groups. Pauses are stalls whose length is not
proportional to T; they come per step, per ms, or as the larger of both if the data do not decide. `drawn` returns a
noise that the measured steps allow. See docs/theory/fitting.md#noise-and-pauses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from latfit.model.noise.size_levels import MAX_RATIO, NO_LEVELS, SizeLevels, levels_from_json
from latfit.stats import FloatArray, IntArray, distinct

RESOLUTION = 200  # points of each decade of the tail
DECADES = (0.99, 0.999, 0.9999, 0.99999)
MIN_BEYOND = 1  # independent steps beyond a percentile from which its tail counts as measured
REFERENCE_MS = 100.0  # a usual step with prefill
MAX_SLOW_SHARE = 0.01  # "the slowest hundredth", of `slow_share`


@dataclass(frozen=True, eq=False)
class Pauses:
    """Stalls that add to a step of typical time T, as a Poisson process.

    Parameters
    ----------
    ms, ratio, weights
        Points (m,) by rising length: a pause takes max(ms, ratio T); weights sum to 1. A ratio of 0 is a fixed time;
        both are above 0 where the data cannot tell a fixed time from a multiple of T, so that the longer one counts.
    per_step, per_ms
        Expected pauses of a step: max(per_step, per_ms T). One is 0 unless the data cannot tell.
    independent
        Independent pauses that were measured.
    """

    ms: FloatArray
    ratio: FloatArray
    weights: FloatArray
    per_step: float
    per_ms: float
    independent: float

    @cached_property
    def reached(self) -> FloatArray:
        """Share of the pauses up to each point (m,)."""
        return _cumulated(self.weights)

    @property
    def length_is_known(self) -> bool:
        """Whether the data show that pauses take a fixed time."""
        return not np.any(self.ratio > 0)

    @property
    def rate_is_known(self) -> bool:
        """Whether the data show that pauses come per step, or per second."""
        return 0.0 in (self.per_step, self.per_ms)

    def per_step_of(self, T: FloatArray) -> FloatArray:
        """Expected pauses (n,) of steps of typical time T (n,) ms."""
        return np.maximum(self.per_step, self.per_ms * np.asarray(T))

    def moment(self, T: FloatArray, power: int) -> FloatArray:
        """E[length^power] (n,) of one pause of steps of T (n,) ms."""
        T = np.asarray(T, dtype=np.float64)
        if self.length_is_known:
            return np.full(T.shape, float(self.weights @ self.ms**power))
        return np.asarray(
            sum(w * np.maximum(ms, r * T) ** power for ms, r, w in zip(self.ms, self.ratio, self.weights, strict=True))
        )

    @cached_property
    def mean_excess(self) -> float:
        """Mean of what pauses longer than the median exceed it by, over the longest; one more excess, as long as the
        longest pause, stands for what so few show."""
        upper = self.reached >= 0.5
        count = self.independent * float(self.weights[upper].sum())
        excess = self.independent * float(self.weights[upper] @ (self.ms[upper] - self.ms[upper][0]))
        return (excess / float(self.ms[-1]) + 1) / (count + 1)

    def drawn(self, rng: np.random.Generator) -> "Pauses":
        """Return pauses that the measured ones allow: one more is longer than all of them, by an exponential excess."""
        counts = np.append(_bootstrap_counts(self.independent * self.weights, rng), rng.standard_exponential())
        longer = 1 + self.mean_excess * rng.standard_exponential()
        more = float(counts.sum()) / self.independent
        return replace(
            self,
            ms=np.append(self.ms, longer * self.ms[-1]),
            ratio=np.append(self.ratio, longer * self.ratio[-1]),
            weights=counts / counts.sum(),
            per_step=self.per_step * more,
            per_ms=self.per_ms * more,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: _short(getattr(self, name), 8) for name in ("ms", "ratio")},
            "weights": _short(self.weights, 10),
            **{name: getattr(self, name) for name in ("per_step", "per_ms", "independent")},
        }


def pauses_from_json(document: Mapping[str, Any] | None) -> Pauses | None:
    """Return the pauses that `to_json` wrote. Raises ValueError, TypeError, KeyError for anything else."""
    if not document:
        return None
    ms, ratio, weights = (np.asarray(document[name], dtype=np.float64) for name in ("ms", "ratio", "weights"))
    per_step, per_ms, independent = (float(document[name]) for name in ("per_step", "per_ms", "independent"))
    numbers = np.concatenate([ms.ravel(), ratio.ravel(), weights.ravel(), [per_step, per_ms, independent]])
    alike = ms.ndim == 1 and len(ms) > 0 and ms.shape == ratio.shape == weights.shape
    if not alike or not np.all((numbers >= 0) & (numbers < MAX_RATIO)) or not independent > 0:
        raise ValueError("pauses are not lengths with a weight each, and rates of at least zero")
    if not abs(float(weights.sum()) - 1) < 1e-6:
        raise ValueError("weights of pauses do not add up to 1")
    return Pauses(ms, ratio, weights, per_step, per_ms, independent)


@dataclass(frozen=True, eq=False)
class Ratios:
    """Distribution of F: points `values` (n,), rising, with `weights` (n,) that sum to 1, of so many measured `steps`,
    worth `independent` ones."""

    values: FloatArray
    weights: FloatArray
    steps: float
    independent: float

    @cached_property
    def mean(self) -> float:
        """E[F]."""
        return float(self.weights @ self.values)

    @cached_property
    def mean_square(self) -> float:
        """E[F^2]."""
        return float(self.weights @ self.values**2)

    @cached_property
    def reached(self) -> FloatArray:
        """Share of the steps up to each point (n,)."""
        return _cumulated(self.weights)

    def drawn(self, rng: np.random.Generator) -> "Ratios":
        """Return a distribution that the steps allow: a Bayesian bootstrap (Rubin 1981) with one more event at the
        largest value, so that upper limits of tail shares are those of Clopper and Pearson."""
        counts = _bootstrap_counts(self.independent * self.weights, rng)
        counts[-1] += rng.standard_exponential()
        return replace(self, weights=counts / counts.sum())


@dataclass(frozen=True, eq=False)
class StepNoise:
    """F by groups of batch sizes, and pauses.

    Parameters
    ----------
    groups
        F of each group, by rising batch size.
    edges
        Batch sizes (k - 1,) between the k groups; a batch at an edge belongs to the group below.
    levels
        Factor on the fitted curve by step size; F is the ratio to curve times level.
    pauses
        None if F describes all steps.
    """

    groups: tuple[Ratios, ...]
    edges: FloatArray
    levels: SizeLevels = NO_LEVELS
    pauses: Pauses | None = None

    @cached_property
    def pooled(self) -> Ratios:
        """F of all steps, whatever their batch."""
        if len(self.groups) == 1:
            return self.groups[0]
        values, weights, _ = self._points()
        return Ratios(values, weights, self.steps, sum(group.independent for group in self.groups))

    @property
    def values(self) -> FloatArray:
        return self.pooled.values

    @property
    def weights(self) -> FloatArray:
        return self.pooled.weights

    @property
    def mean(self) -> float:
        return self.pooled.mean

    @property
    def steps(self) -> float:
        """Measured steps."""
        return sum(group.steps for group in self.groups)

    def _points(self) -> tuple[FloatArray, FloatArray, IntArray]:
        """Return the points of all groups by rising value: values, shares of all steps, numbers of their groups."""
        values = np.concatenate([group.values for group in self.groups])
        weights = np.concatenate([group.weights * (group.steps / self.steps) for group in self.groups])
        number = np.repeat(np.arange(len(self.groups)), [len(group.values) for group in self.groups])
        order = np.argsort(values, kind="stable")
        return values[order], weights[order], number[order]

    def group_of(self, batches: FloatArray) -> IntArray:
        """Return the group (n,) of batches (n,)."""
        return np.searchsorted(self.edges, batches, side="left")

    def of(self, batch: float) -> Ratios:
        """Return F of one batch size."""
        return self.groups[int(self.group_of(np.array([batch]))[0])]

    def up_to(self, largest: float) -> "StepNoise":
        """Return the noise without groups that no batch of up to `largest` belongs to."""
        last = int(self.group_of(np.array([largest]))[0])
        return replace(self, groups=self.groups[: last + 1], edges=self.edges[:last])

    def padded(self, buckets: Sequence[int]) -> "StepNoise":
        """Return the noise of an engine that pads batches to the next size in `buckets`: F is that of the bucket."""
        sizes = np.array([0.0, *sorted(set(buckets))])
        return replace(self, edges=sizes[np.searchsorted(sizes, self.edges, side="right") - 1])

    def mean_ms(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Mean time (n,) of steps of typical time T (n,) ms and so many requests."""
        means = np.array([group.mean for group in self.groups])[self.group_of(batches)] * T
        return means if self.pauses is None else means + self.pauses.per_step_of(T) * self.pauses.moment(T, 1)

    def mean_square(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Mean square (n,) of the same times."""
        squares = np.array([group.mean_square for group in self.groups])[self.group_of(batches)] * np.asarray(T) ** 2
        if self.pauses is None:
            return squares
        expected, means = self.pauses.per_step_of(T), self.mean_ms(T, batches)
        paused = expected * self.pauses.moment(T, 1)
        return np.asarray(squares + 2 * means * paused - paused**2 + expected * self.pauses.moment(T, 2))

    def cv(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Coefficient of variation (n,) of the same times."""
        return np.asarray(np.sqrt(np.maximum(self.mean_square(T, batches) / self.mean_ms(T, batches) ** 2 - 1, 0.0)))

    @property
    def width(self) -> float:
        """E[F^2] plus the variance of the total pause over T^2, at T = REFERENCE_MS; used to compare phases."""
        square = self.pooled.mean_square
        if self.pauses is not None:
            T = np.array([REFERENCE_MS])
            square += float((self.pauses.per_step_of(T) * self.pauses.moment(T, 2))[0]) / REFERENCE_MS**2
        return square

    def sees(self, share: float) -> bool:
        """Whether each group has MIN_BEYOND independent steps beyond a share of its steps."""
        fewest = min(group.independent for group in self.groups)
        return fewest * (1 - share) >= MIN_BEYOND * (1 - 1e-9)

    def slow_share(self, T: float) -> float:
        """Share of the mean square of the time of steps of T ms that is due to their slowest hundredth; 0.01 or little
        more where nothing stalls."""
        values, weights = self.values * T, self.weights
        if self.pauses is not None:
            often = float(-np.expm1(-self.pauses.per_step_of(np.array([T]))[0]))
            lengths = np.maximum(self.pauses.ms, self.pauses.ratio * T)
            values = np.concatenate([values, self.mean * T + lengths])
            weights = np.concatenate([(1 - often) * weights, often * self.pauses.weights])
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        beyond = np.clip(np.cumsum(weights) - (1 - MAX_SLOW_SHARE), 0.0, weights)
        return float(beyond @ values**2 / (weights @ values**2))

    def drawn(self, rng: np.random.Generator) -> "StepNoise":
        """Return a noise that the measured steps allow."""
        groups = tuple(group.drawn(rng) for group in self.groups)
        return replace(self, groups=groups, pauses=None if self.pauses is None else self.pauses.drawn(rng))

    def to_json(self) -> dict[str, Any]:
        """Return the points of all groups by rising value, with the group of each where there are several."""
        values, weights, number = self._points()
        found = {
            "steps": self.steps,
            "independent": self.pooled.independent,
            "mean": self.mean,
            "mean_square": self.pooled.mean_square,
            "values": _short(values, 8),
            "weights": _short(weights, 10),
            "levels": {name: _short(getattr(self.levels, name), 8) for name in ("sizes", "log_level", "error")},
            "pauses": None if self.pauses is None else self.pauses.to_json(),
        }
        if len(self.groups) > 1:
            edges = self.edges.tolist()
            found["by_batch"] = {"low": [1.0, *edges], "high": [*edges, edges[-1]], "group": number.tolist()}
        return found


def noise_from_json(document: Mapping[str, Any] | None) -> StepNoise | None:
    """Return the noise that `to_json` wrote; None where there is none. Raises ValueError, TypeError, KeyError for
    anything else."""
    if not document:
        return None
    values, weights = (np.asarray(document[name], dtype=np.float64) for name in ("values", "weights"))
    known = len(values) > 0 and values.shape == weights.shape and values.ndim == 1
    usable = (values > 1 / MAX_RATIO) & (values < MAX_RATIO) & (weights >= 0) if known else False
    if not np.all(usable) or np.any(np.diff(values) < 0):
        raise ValueError("ratios are not rising values above zero with a weight each")
    edges, number = _groups_from_json(document.get("by_batch"), len(values))
    shares = np.bincount(number, weights=weights)
    if not abs(float(shares.sum()) - 1) < 1e-6 or not np.all(shares > 0):
        raise ValueError("weights of ratios do not add up to 1")
    steps, independent = float(document["steps"]), float(document["independent"])
    groups = tuple(
        Ratios(values[number == g], weights[number == g] / share, steps * share, independent * share)
        for g, share in enumerate(shares.tolist())
    )
    levels, pauses = levels_from_json(document.get("levels")), pauses_from_json(document.get("pauses"))
    return StepNoise(groups, edges, levels, pauses)


def _groups_from_json(document: Mapping[str, Any] | None, points: int) -> tuple[FloatArray, IntArray]:
    """Return the edges between the groups, and the group of each point."""
    if not document:
        return np.empty(0), np.zeros(points, dtype=np.int64)
    low, high = (np.asarray(document[name], dtype=np.float64) for name in ("low", "high"))
    number = np.asarray(document["group"], dtype=np.int64)
    ends = np.stack([low, high], axis=1).ravel() if low.shape == high.shape and low.ndim == 1 else np.empty(0)
    known = len(ends) > 0 and bool(np.all(np.isfinite(ends) & (ends > 0) & (np.diff(ends, prepend=0) >= 0)))
    if not known or number.shape != (points,) or set(number.tolist()) != set(range(len(low))):
        raise ValueError("groups of ratios are not rising batches with a group of each point")
    return _middles(low, high), number


def noise_of(
    values: FloatArray, weights: FloatArray, independent: float | None = None, levels: SizeLevels = NO_LEVELS
) -> StepNoise:
    """Return the noise of measured ratios (n,) to curve times `levels`, n >= 1, that stand for weights (n,) steps."""
    rising, number = distinct(np.asarray(values, dtype=np.float64))
    count: FloatArray = np.bincount(number, weights=weights).astype(np.float64)
    steps = float(count.sum())
    starts = tail_points(count)
    share = np.add.reduceat(count, starts)
    means = np.add.reduceat(count * rising, starts) / share
    ratios = Ratios(means, share / steps, steps, steps if independent is None else float(independent))
    return StepNoise((ratios,), np.empty(0), levels)


def joined_noise(
    noises: Sequence[StepNoise], low: FloatArray, high: FloatArray, pauses: Pauses | None = None
) -> StepNoise:
    """Return one noise of those of batches low (k,) to high (k,), rising; levels are those of the first."""
    groups = tuple(group for noise in noises for group in noise.groups)
    return StepNoise(groups, _middles(low, high), noises[0].levels, pauses)


def _middles(low: FloatArray, high: FloatArray) -> FloatArray:
    """Return the batch sizes (k - 1,) between groups of batches low (k,) to high (k,), in the middle by ln B."""
    return np.asarray(np.sqrt(high[:-1] * low[1:]))


def tail_points(count: FloatArray) -> IntArray:
    """Return the index of the first value of each tail point. count (n,): steps at each of the rising values."""
    steps = float(count.sum())
    middle = (np.cumsum(count) - count / 2) / steps
    edges: list[FloatArray] = []
    low = 0.0
    # Decade by decade, until each point is a single step.
    for high in (*DECADES, 1.0):
        edges.append(np.linspace(low, high, RESOLUTION + 1)[1:])
        if (high - low) * steps <= RESOLUTION:
            break
        low = high
    if high < 1:
        edges.append(np.linspace(high, 1.0, RESOLUTION + 1)[1:])
    return np.flatnonzero(np.diff(np.searchsorted(np.concatenate(edges), middle), prepend=-1))


def _cumulated(weights: FloatArray) -> FloatArray:
    """Return the share (n,) of the weights up to each; the last is 1."""
    found = np.cumsum(weights)
    return np.asarray(found / found[-1])


def _bootstrap_counts(counts: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Draw gamma variables with means `counts` (n,) by inverse CDF: a small change of counts changes them little."""
    from scipy.special import gammaincinv

    return np.asarray(gammaincinv(np.maximum(counts, 1e-6), rng.random(len(counts))))


def _short(numbers: FloatArray, digits: int) -> list[float]:
    """With so many digits, more than any of them is known to."""
    return [float(f"{number:.{digits}g}") for number in numbers.tolist()]
