"""Noise of single steps: a step of typical time T (curve times level of its size) lasts T F plus its pauses.

F is the distribution of measured ratios to T, by groups of batch sizes. A curve misses the steps of a size every time;
levels are shrunk towards the curve by empirical Bayes (Efron & Morris 1973). See docs/theory/fitting.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray, IntArray, by_group, distinct, mad_sigma, weighted_quantiles

SIZES_PER_OCTAVE = 8  # sizes closer than this count as one
CLIP_SIGMA = 3.0  # of log ratios about the median of their size: pauses do not move a level
LEAST_VARIANCE = 1e-12  # between sizes; less does not matter
MAX_RATIO = 1e60  # of observed over typical time, and one over the least; its square is still a number


@dataclass(frozen=True, eq=False)
class SizeLevels:
    """sizes (m,) of steps in tokens, rising; log_level (m,) over the curve there, and its standard error (m,)."""

    sizes: FloatArray
    log_level: FloatArray
    error: FloatArray

    def __post_init__(self) -> None:
        usable = (np.diff(self.sizes, prepend=0.0) > 0) & (self.error >= 0)
        if not np.all(usable & (np.abs(self.log_level) + self.error < np.log(MAX_RATIO))):
            raise ValueError("levels of ratios are not rising sizes with a level and an error each")

    def factors(self, S: FloatArray) -> FloatArray:
        """Return level over curve at S tokens: linear in ln S, constant beyond the measured sizes."""
        return np.asarray(np.exp(np.interp(np.log(S), np.log(self.sizes), self.log_level)))

    def drawn_factors(self, S: FloatArray, rng: np.random.Generator) -> FloatArray:
        """Return factors (n,) of levels that the steps allow; between two sizes a level steps at an unknown place."""
        level = self.log_level + self.error * rng.standard_normal(len(self.sizes))
        place = np.interp(np.log(S), np.log(self.sizes), np.arange(len(self.sizes)))
        return np.asarray(np.exp(level[np.floor(place + rng.random() * (1 - 1e-9)).astype(np.intp)]))


NO_LEVELS = SizeLevels(np.ones(1), np.zeros(1), np.zeros(1))


def by_size(sizes: FloatArray) -> NDArray[np.intp]:
    """Return the number (n,) of each size in rising order, without gaps."""
    return distinct(np.round(SIZES_PER_OCTAVE * np.log2(sizes)))[1]


def size_levels(S: FloatArray, ratio: FloatArray, weights: FloatArray, steps_for_one: float = 1.0) -> SizeLevels:
    """Estimate the levels of steps of S tokens (n,) with ratios to the curve (n,).

    weights: steps (n,) of each row, of which steps_for_one are worth an independent one.
    """
    number = by_size(S)
    count = np.bincount(number, weights=weights)
    order = np.argsort(number, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(number))[:-1])
    logs = np.log(ratio)
    middle = np.array([weighted_quantiles(logs[rows], (0.5,), weights[rows])[0] for rows in parts])
    off = logs - middle[number]
    reach = CLIP_SIGMA * mad_sigma(off, weights)
    found = by_group(np.clip(off, -reach, reach), number, weights)
    if len(count) < 2 or found.freedom < len(count):
        return NO_LEVELS
    error = np.sqrt(found.within * steps_for_one / count)
    level = middle + found.mean
    # F takes up what all sizes share.
    level -= np.average(level, weights=count)
    between = max(float(np.average(level**2 - error**2, weights=count)), LEAST_VARIANCE)
    trust = between / (between + error**2)
    return SizeLevels(np.bincount(number, weights=weights * S) / count, trust * level, np.sqrt(trust) * error)


T = TypeVar("T", "Pauses", "Ratios", SizeLevels)

POINTS_PER_DECADE = 250  # of rank; the slowest hundred steps keep a point each
JEFFREYS = 0.5  # of an event, added to a count (Jeffreys' prior): the rate is then covered from both sides


@dataclass(frozen=True, eq=False)
class Pauses:
    """Stalls added to a step of T ms: on average max(per_step, per_ms T) of them, each max(ms, ratio T) long.

    Where the data leave the kind of length open, ms and ratio are both set, and where that of the rate, both rates are.
    """

    ms: FloatArray  # points (m,) of rising length
    ratio: FloatArray  # to T; 0 for a fixed time
    weights: FloatArray  # of the points, sum 1
    per_step: float
    per_ms: float
    independent: float  # independent pauses that were measured

    @property
    def length_is_known(self) -> bool:
        return not np.any(self.ratio > 0)

    @property
    def rate_is_known(self) -> bool:
        return 0.0 in (self.per_step, self.per_ms)

    def expected(self, T: FloatArray, power: int = 0) -> FloatArray:
        """Return the expected sum (n,) of length^power over the pauses of a step of T (n,) ms."""
        lengths = np.maximum(self.ms, np.multiply.outer(T, self.ratio))
        return np.asarray(np.maximum(self.per_step, self.per_ms * np.asarray(T)) * (lengths**power @ self.weights))

    def drawn(self, rng: np.random.Generator) -> "Pauses":
        """Return pauses that the measured ones allow: one kind of length and of rate, and one longer pause more."""
        upper = np.cumsum(self.weights) >= 0.5
        counts = self.independent * self.weights
        total, excesses = counts[upper] @ (self.ms[upper] - self.ms[upper][0]), max(float(counts[upper].sum()) - 1, 1.0)
        longer = 1 + total / (self.ms[-1] or 1.0) * rng.standard_exponential() / rng.standard_gamma(excesses)
        weights = rng.standard_gamma(np.append(counts, 1.0))
        more = rng.standard_gamma(self.independent + JEFFREYS) / self.independent
        fixed, of_steps = (rng.random(2) < 0.5).tolist()
        return Pauses(
            np.append(self.ms, longer * self.ms[-1]) * (fixed or self.length_is_known),
            np.append(self.ratio, longer * self.ratio.max()) * (not fixed),
            weights / weights.sum(),
            more * self.per_step * (of_steps or self.rate_is_known),
            more * self.per_ms * (not of_steps or self.rate_is_known),
            self.independent,
        )


@dataclass(frozen=True, eq=False)
class Ratios:
    """Distribution of F: rising points `values` (n,) with `weights` of so many `steps`, worth `independent` ones."""

    values: FloatArray
    weights: FloatArray
    steps: float
    independent: float

    @cached_property
    def mean(self) -> float:
        return float(self.weights @ self.values)

    @cached_property
    def variance(self) -> float:
        return float(self.weights @ (self.values - self.mean) ** 2)

    def drawn(self, rng: np.random.Generator) -> "Ratios":
        counts = self.independent * self.weights
        counts[-1] += 1
        counts = rng.standard_gamma(counts)
        return replace(self, weights=counts / counts.sum())


@dataclass(frozen=True, eq=False)
class StepNoise:
    """F, the ratio to the curve times `levels`, by groups of batch sizes with edges between them, and pauses."""

    groups: tuple[Ratios, ...]
    edges: FloatArray
    levels: SizeLevels = NO_LEVELS
    pauses: Pauses | None = None

    @cached_property
    def pooled(self) -> Ratios:
        steps = sum(group.steps for group in self.groups)
        values = np.concatenate([group.values for group in self.groups])
        weights = np.concatenate([group.weights * (group.steps / steps) for group in self.groups])
        order = np.argsort(values, kind="stable")
        return Ratios(values[order], weights[order], steps, sum(group.independent for group in self.groups))

    def group_of(self, batches: FloatArray) -> IntArray:
        return np.searchsorted(self.edges, batches, side="left")

    def up_to(self, largest: float) -> "StepNoise":
        last = int(self.group_of(np.array([largest]))[0])
        return replace(self, groups=self.groups[: last + 1], edges=self.edges[:last])

    def padded(self, buckets: Sequence[int]) -> "StepNoise":
        """Return the noise of an engine that pads batches to the next size in `buckets`: F is that of the bucket."""
        sizes = np.array([0.0, *sorted(set(buckets))])
        return replace(self, edges=sizes[np.searchsorted(sizes, self.edges, side="right") - 1])

    def mean_ms(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Return the mean time (n,) of steps of typical time T (n,) ms and so many requests."""
        means = np.array([group.mean for group in self.groups])[self.group_of(batches)] * T
        return means if self.pauses is None else means + self.pauses.expected(T, 1)

    def cv(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Return the coefficient of variation (n,) of the same times."""
        variance = np.array([group.variance for group in self.groups])[self.group_of(batches)] * np.asarray(T) ** 2
        if self.pauses is not None:
            variance = variance + self.pauses.expected(T, 2)
        return np.asarray(np.sqrt(variance) / self.mean_ms(T, batches))

    def sees(self, share: float) -> bool:
        """Return whether each group has independent steps enough to show this quantile."""
        return min(group.independent for group in self.groups) * (1 - share) >= 1 - 1e-9

    def slow_share(self, T: float) -> float:
        """Return the share of the mean square of steps of T ms due to pauses and to the slowest hundredth of F."""
        F = self.pooled
        beyond = np.clip(np.cumsum(F.weights) - 0.99, 0.0, F.weights)
        paused = 0.0
        if self.pauses is not None:
            mean, square = (float(self.pauses.expected(np.array([T]), power)[0]) for power in (1, 2))
            paused = 2 * T * F.mean * mean + mean**2 + square
        return (T**2 * float(beyond @ F.values**2) + paused) / (T**2 * (F.variance + F.mean**2) + paused)

    def drawn(self, rng: np.random.Generator) -> "StepNoise":
        groups = tuple(group.drawn(rng) for group in self.groups)
        return replace(self, groups=groups, pauses=None if self.pauses is None else self.pauses.drawn(rng))

    def to_json(self) -> dict[str, Any]:
        """Return the points of all groups by rising value, with the group of each where there are several."""
        found: dict[str, Any] = {
            **_plain(self.pooled),
            "mean": self.pooled.mean,
            "mean_square": self.pooled.variance + self.pooled.mean**2,
            "levels": _plain(self.levels),
            "pauses": None if self.pauses is None else _plain(self.pauses),
        }
        if len(self.groups) > 1:
            edges, points = self.edges.tolist(), [len(group.values) for group in self.groups]
            order = np.argsort(np.concatenate([group.values for group in self.groups]), kind="stable")
            number = np.repeat(np.arange(len(points)), points)[order].tolist()
            found["by_batch"] = {"low": [1.0, *edges], "high": [*edges, edges[-1]], "group": number}
        return found


def edges_between(low: FloatArray, high: FloatArray) -> FloatArray:
    """Return the edges (m - 1,) between groups of batch sizes from `low` to `high` (m,). Raises ValueError."""
    if not np.all(np.diff(np.stack([low, high], axis=1).ravel(), prepend=0.0) >= 0):
        raise ValueError("groups are not rising batches")
    return np.sqrt(high[:-1] * low[1:])


def noise_from_json(document: Mapping[str, Any] | None) -> StepNoise | None:
    """Return the noise that `to_json` wrote; None without any. Raises ValueError, TypeError, KeyError."""
    if not document:
        return None
    found = _read(Ratios, document)
    if found.values[0] <= 1 / MAX_RATIO or np.any(np.diff(found.values) < 0):
        raise ValueError("ratios are not rising values above zero with a weight each")
    edges, number = np.empty(0), np.zeros(len(found.values))
    if by_batch := document.get("by_batch"):
        low, high, number = (np.asarray(by_batch[name], dtype=np.float64) for name in ("low", "high", "group"))
        if number.shape != found.values.shape or set(number) != set(range(len(low))):
            raise ValueError("groups of ratios do not say the group of each point")
        edges = edges_between(low, high)
    groups = []
    for g in range(len(edges) + 1):
        values, weights = found.values[number == g], found.weights[number == g]
        share = float(weights.sum())
        groups.append(Ratios(values, weights / share, found.steps * share, found.independent * share))
    levels = _read(SizeLevels, document["levels"]) if (document.get("levels") or {}).get("sizes") else NO_LEVELS
    pauses = _read(Pauses, document["pauses"]) if document.get("pauses") else None
    return StepNoise(tuple(groups), edges, levels, pauses)


def _plain(record: Ratios | Pauses | SizeLevels) -> dict[str, Any]:
    found = {each.name: getattr(record, each.name) for each in fields(record)}
    return {
        name: value if isinstance(value, float) else [float(f"{number:.10g}") for number in value.tolist()]
        for name, value in found.items()
    }


def _read(kind: type[T], document: Mapping[str, Any]) -> T:
    what = kind.__name__.lower()
    found: dict[str, Any] = {each.name: np.asarray(document[each.name], dtype=np.float64) for each in fields(kind)}
    points = [found[each.name] for each in fields(kind) if each.type is not float]
    if len(points[0]) == 0 or any(each.shape != points[0].shape or each.ndim != 1 for each in points):
        raise ValueError(f"{what} are not points with as many numbers each")
    for name, each in found.items():
        if not np.all(np.abs(each) < MAX_RATIO) or (name != "log_level" and np.any(each < 0)):
            raise ValueError(f"{name} of {what} is not at least zero and finite")
    if not abs(found.get("weights", np.ones(1)).sum() - 1) < 1e-6 or found.get("independent") == 0:
        raise ValueError(f"weights of {what} do not add up to 1, or stand for no steps")
    values: dict[str, Any] = {name: each if each.ndim else float(each) for name, each in found.items()}
    return kind(**values)


def noise_of(values: FloatArray, weights: FloatArray, share: float = 1.0) -> StepNoise:
    """Return the noise of measured ratios (n,), n >= 1, that stand for weights (n,) steps; see `ratios_of`."""
    return StepNoise((ratios_of(values, weights, share),), np.empty(0))


def ratios_of(values: FloatArray, weights: FloatArray, share: float) -> Ratios:
    """Return the distribution of ratios (n,) that stand for `weights` steps; share: independent steps per step."""
    rising, number = distinct(np.asarray(values, dtype=np.float64))
    count: FloatArray = np.bincount(number, weights=weights).astype(np.float64)
    steps = float(count.sum())
    starts = tail_points(count)
    counts = np.add.reduceat(count, starts)
    return Ratios(np.add.reduceat(count * rising, starts) / counts, counts / steps, steps, share * steps)


def tail_points(count: FloatArray) -> IntArray:
    """Return the index of the first value of each tail point. count (n,): steps at each of the rising values."""
    slower = np.cumsum(count[::-1])[::-1] - count / 2
    return np.flatnonzero(np.diff(np.floor(POINTS_PER_DECADE * np.log10(slower)), prepend=np.inf))
