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

POINTS_PER_DECADE = 250  # the slowest hundred steps are a point each
MIN_BEYOND = 1  # independent steps beyond a percentile from which its tail counts as measured
MAX_SLOW_SHARE = 0.01  # "the slowest hundredth", of `slow_share`
JEFFREYS = 0.5  # events added to a count, whose gamma distribution then covers the rate from both sides


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
        return np.asarray(np.maximum(self.ms, np.multiply.outer(T, self.ratio)) ** power @ self.weights)

    @cached_property
    def excesses(self) -> tuple[float, float]:
        """Sum of what pauses exceed the median by, over the longest pause, and their number, at least one."""
        upper = self.reached >= 0.5
        total = self.independent * float(self.weights[upper] @ (self.ms[upper] - self.ms[upper][0]))
        return total / float(self.ms[-1]), max(self.independent * float(self.weights[upper].sum()) - 1, 1.0)

    def drawn(self, rng: np.random.Generator) -> "Pauses":
        """Return pauses that the measured ones allow, of one kind where the kind is not known.

        One more pause exceeds the longest: where excesses over the median are exponential, by such an excess.
        """
        total, count = self.excesses
        longer = 1 + total * rng.standard_exponential() / rng.standard_gamma(count)
        weights = rng.standard_gamma(np.append(self.independent * self.weights, 1.0))
        more = rng.standard_gamma(self.independent + JEFFREYS) / self.independent
        fixed, of_steps = (rng.random(2) < 0.5).tolist()
        return Pauses(
            np.append(self.ms, longer * self.ms[-1]) * (fixed or self.length_is_known),
            np.append(self.ratio, longer * self.ratio[-1]) * (not fixed),
            weights / weights.sum(),
            more * self.per_step * (of_steps or self.rate_is_known),
            more * self.per_ms * (not of_steps or self.rate_is_known),
            self.independent,
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
    ms, ratio, weights = _points(document, "pauses", "ms", "ratio", "weights")
    per_step, per_ms, independent = (float(document[name]) for name in ("per_step", "per_ms", "independent"))
    if not (0 <= per_step < MAX_RATIO and 0 <= per_ms < MAX_RATIO and 0 < independent < MAX_RATIO and ms[-1] > 0):
        raise ValueError("pauses are not lengths with a weight each, and rates of at least zero")
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
    def variance(self) -> float:
        return float(self.weights @ (self.values - self.mean) ** 2)

    @cached_property
    def reached(self) -> FloatArray:
        """Share of the steps up to each point (n,)."""
        return _cumulated(self.weights)

    def drawn(self, rng: np.random.Generator) -> "Ratios":
        """Return a distribution that the steps allow: a Bayesian bootstrap (Rubin 1981) with one more event at the
        largest value, so that upper limits of tail shares are those of Clopper and Pearson."""
        counts = self.independent * self.weights
        counts[-1] += 1
        counts = rng.standard_gamma(counts)
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
    def pooled(self) -> tuple[Ratios, IntArray]:
        """F of all steps, whatever their batch, and the group of each of its points."""
        steps = sum(group.steps for group in self.groups)
        values = np.concatenate([group.values for group in self.groups])
        weights = np.concatenate([group.weights * (group.steps / steps) for group in self.groups])
        number = np.repeat(np.arange(len(self.groups)), [len(group.values) for group in self.groups])
        order = np.argsort(values, kind="stable")
        independent = sum(group.independent for group in self.groups)
        return Ratios(values[order], weights[order], steps, independent), number[order]

    @property
    def values(self) -> FloatArray:
        return self.pooled[0].values

    @property
    def weights(self) -> FloatArray:
        return self.pooled[0].weights

    @property
    def mean(self) -> float:
        return self.pooled[0].mean

    @property
    def steps(self) -> float:
        """Measured steps."""
        return self.pooled[0].steps

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

    def cv(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Coefficient of variation (n,) of the same times."""
        variance = np.array([group.variance for group in self.groups])[self.group_of(batches)] * np.asarray(T) ** 2
        if self.pauses is not None:
            variance = variance + self.pauses.per_step_of(T) * self.pauses.moment(T, 2)
        return np.asarray(np.sqrt(variance) / self.mean_ms(T, batches))

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
        all_steps, number = self.pooled
        found = {
            "steps": all_steps.steps,
            "independent": all_steps.independent,
            "mean": all_steps.mean,
            "mean_square": all_steps.variance + all_steps.mean**2,
            "values": _short(all_steps.values, 8),
            "weights": _short(all_steps.weights, 10),
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
    values, weights = _points(document, "ratios", "values", "weights")
    if not values[0] > 1 / MAX_RATIO or np.any(np.diff(values) < 0):
        raise ValueError("ratios are not rising values above zero with a weight each")
    edges, number = _groups_from_json(document.get("by_batch"), len(values))
    steps, independent = float(document["steps"]), float(document["independent"])
    groups = tuple(
        Ratios(values[of], weights[of] / weights[of].sum(), steps * weights[of].sum(), independent * weights[of].sum())
        for of in (number == g for g in range(len(edges) + 1))
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


def _points(document: Mapping[str, Any], what: str, *names: str) -> list[FloatArray]:
    """Return arrays (n,) of numbers of at least zero, n >= 1, the last of weights that add up to 1."""
    found = [np.asarray(document[name], dtype=np.float64) for name in names]
    alike = found[0].ndim == 1 and len(found[0]) > 0 and len({each.shape for each in found}) == 1
    if not alike or not np.all((np.stack(found) >= 0) & (np.stack(found) < MAX_RATIO)):
        raise ValueError(f"{what} are not numbers of at least zero with a weight each")
    if not abs(float(found[-1].sum()) - 1) < 1e-6:
        raise ValueError(f"weights of {what} do not add up to 1")
    return found


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
    slower = np.cumsum(count[::-1])[::-1] - count / 2
    return np.flatnonzero(np.diff(np.floor(POINTS_PER_DECADE * np.log10(slower)), prepend=np.inf))


def _cumulated(weights: FloatArray) -> FloatArray:
    """Return the share (n,) of the weights up to each; the last is 1."""
    found = np.cumsum(weights)
    return np.asarray(found / found[-1])


def _short(numbers: FloatArray, digits: int) -> list[float]:
    """With so many digits, more than any of them is known to."""
    return [float(f"{number:.{digits}g}") for number in numbers.tolist()]
