"""Noise of single steps: a step of typical time T (curve times level) lasts T F plus its pauses.

F is the distribution of the measured ratio to T. It is stored as weighted points, equally many for each decade of the
tail. Each point is the mean of its steps, so the mean of F is that of the sample. Pauses are stalls whose length is not
proportional to T. They have their own distribution of lengths and a rate: per step, per ms, or the larger of both if
the data do not decide. No drawn pause is longer than the longest measured one. Groups of batch sizes whose F differs
have separate points. A level by size (Gaussian process in ln S) corrects the bias of the curve at each size. Redraws
follow the Bayesian bootstrap (Rubin 1981) with one more event at the largest value, so that upper limits of tail shares
are those of Clopper and Pearson. See docs/theory.md.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from latfit.model.noise.batch_groups import ALIKE, BatchGroups, groups_from_json
from latfit.model.noise.size_levels import MOST_RATIO, NO_LEVELS, SizeLevels, levels_from_json
from latfit.stats import FloatArray, IntArray, distinct

RESOLUTION = 200
"""Points of each decade of the tail."""

DECADES = (0.99, 0.999, 0.9999, 0.99999)
FEWEST_BEYOND = 1
"""Independent steps beyond a percentile from which its tail counts as seen, as in the ranks of
`fitting.checking.conformal`."""

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
        found = np.cumsum(self.weights)
        return np.asarray(found / found[-1])

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

    def drawn(self, rng: np.random.Generator) -> "Pauses":
        """Return pauses that the measured ones allow."""
        counts = _bootstrap_counts(self.independent * self.weights, rng)
        counts[-1] += rng.standard_exponential()
        more = float(counts.sum()) / self.independent
        return replace(self, weights=counts / counts.sum(), per_step=self.per_step * more, per_ms=self.per_ms * more)

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
    if not alike or not np.all((numbers >= 0) & (numbers < MOST_RATIO)) or not independent > 0:
        raise ValueError("pauses are not lengths with a weight each, and rates of at least zero")
    if not abs(float(weights.sum()) - 1) < 1e-6:
        raise ValueError("weights of pauses do not add up to 1")
    return Pauses(ms, ratio, weights, per_step, per_ms, independent)


@dataclass(frozen=True, eq=False)
class StepNoise:
    """The distribution of F for each group of batch sizes, and the pauses.

    Parameters
    ----------
    values, weights
        Points (n,) of F, one group after another, rising within each; the share of all steps at each point, sum 1.
    steps, independent
        Number of measured steps, and their effective sample size.
    levels
        Factor on the fitted curve by step size; F is the ratio to curve times level.
    groups
        The batch sizes to which each point belongs; one group if all have the same F.
    pauses
        None if F describes all steps.
    """

    values: FloatArray
    weights: FloatArray
    steps: float
    independent: float
    levels: SizeLevels = NO_LEVELS
    groups: BatchGroups = ALIKE
    pauses: Pauses | None = None

    @cached_property
    def parts(self) -> tuple["StepNoise", ...]:
        """The noise of each group, alone."""
        return tuple(self._only(g, g + 1) for g in range(len(self.groups)))

    @cached_property
    def pooled(self) -> "StepNoise":
        """The noise of all steps, whatever their batch."""
        if len(self.groups) == 1:
            return self
        order = np.argsort(self.values, kind="stable")
        return replace(self, values=self.values[order], weights=self.weights[order], groups=ALIKE)

    def of(self, batch: float) -> "StepNoise":
        """The noise of one batch size."""
        return self.parts[int(self.groups.of(np.array([batch]))[0])]

    def up_to(self, largest: float) -> "StepNoise":
        """The same without the groups that no batch of up to `largest` belongs to."""
        return self._only(0, int(self.groups.of(np.array([largest]))[0]) + 1)

    def mean_ms(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Mean time (n,) of steps of typical time T (n,) ms and so many requests."""
        means = np.array([part.mean for part in self.parts])[self.groups.of(batches)] * T
        return means if self.pauses is None else means + self.pauses.per_step_of(T) * self.pauses.moment(T, 1)

    def mean_square(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Mean square (n,) of the same times."""
        squares = np.array([part._square for part in self.parts])[self.groups.of(batches)] * np.asarray(T) ** 2
        if self.pauses is None:
            return squares
        expected, calm = self.pauses.per_step_of(T), np.array([part.mean for part in self.parts])
        first = expected * self.pauses.moment(T, 1)
        return np.asarray(
            squares + 2 * calm[self.groups.of(batches)] * T * first + first**2 + expected * self.pauses.moment(T, 2)
        )

    def cv(self, T: FloatArray, batches: FloatArray) -> FloatArray:
        """Coefficient of variation (n,) of the same times."""
        return np.asarray(np.sqrt(np.maximum(self.mean_square(T, batches) / self.mean_ms(T, batches) ** 2 - 1, 0.0)))

    @property
    def width(self) -> float:
        """E[F^2] plus the variance of the total pause over T^2, at T = REFERENCE_MS; used to compare phases."""
        square = self._square
        if self.pauses is not None:
            T = np.array([REFERENCE_MS])
            square += float((self.pauses.per_step_of(T) * self.pauses.moment(T, 2))[0]) / REFERENCE_MS**2
        return square

    def padded(self, buckets: Sequence[int]) -> "StepNoise":
        """Return the noise of an engine that pads batches to the next size in `buckets`: F is that of the bucket."""
        return replace(self, groups=self.groups.padded(buckets))

    @cached_property
    def mean(self) -> float:
        """E[F] of all steps."""
        return float(self.weights @ self.values)

    @cached_property
    def _square(self) -> float:
        """E[F^2] of all steps."""
        return float(self.weights @ self.values**2)

    @cached_property
    def reached(self) -> FloatArray:
        """Share of the steps of its group up to each point (n,); the last of a group is 1."""
        sums = [np.cumsum(self.weights[rows]) for rows in self._rows]
        return np.concatenate([each / each[-1] for each in sums])

    def sees(self, share: float) -> bool:
        """Whether the tail beyond a share of the steps was seen: FEWEST_BEYOND independent steps of each group lie
        there."""
        fewest = min(part.independent for part in self.parts)
        return fewest * (1 - share) >= FEWEST_BEYOND * (1 - 1e-9)

    def slow_share(self, T: float) -> float:
        """Share of the mean square of the time of steps of T ms that is due to their slowest hundredth; 0.01 or little
        more where nothing stalls."""
        values, weights = self.pooled.values * T, self.pooled.weights
        if self.pauses is not None:
            often = float(-np.expm1(-self.pauses.per_step_of(np.array([T]))[0]))
            lengths = np.maximum(self.pauses.ms, self.pauses.ratio * T)
            values = np.concatenate([values, self.pooled.mean * T + lengths])
            weights = np.concatenate([(1 - often) * weights, often * self.pauses.weights])
        order = np.argsort(values, kind="stable")
        values, weights = values[order], weights[order]
        beyond = np.clip(np.cumsum(weights) - (1 - MAX_SLOW_SHARE), 0.0, weights)
        return float(beyond @ values**2 / (weights @ values**2))

    def drawn(self, rng: np.random.Generator) -> "StepNoise":
        """A noise that the measured steps allow (see the module)."""
        counts = _bootstrap_counts(self.independent * self.weights, rng)
        counts[[rows.stop - 1 for rows in self._rows]] += rng.standard_exponential(len(self.groups))
        pauses = None if self.pauses is None else self.pauses.drawn(rng)
        return replace(self, weights=np.asarray(counts / counts.sum()), pauses=pauses)

    def to_json(self) -> dict[str, Any]:
        """The points of all groups in rising order, each with the number of its group where there are several."""
        law = self.pooled
        return {
            "steps": self.steps,
            "independent": self.independent,
            "mean": self.mean,
            "mean_square": self._square,
            "values": _short(law.values, 8),
            "weights": _short(law.weights, 10),
            "levels": {
                "sizes": _short(self.levels.sizes, 8),
                "log_level": _short(self.levels.log_level, 8),
                "error": _short(self.levels.error, 8),
            },
            "pauses": None if self.pauses is None else self.pauses.to_json(),
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

    def _only(self, low: int, high: int) -> "StepNoise":
        """Groups low..high - 1 alone."""
        if high - low == len(self.groups):
            return self
        rows = slice(self._rows[low].start, self._rows[high - 1].stop)
        share = float(self.weights[rows].sum())
        return StepNoise(
            self.values[rows],
            self.weights[rows] / share,
            self.steps * share,
            self.independent * share,
            self.levels,
            self.groups.only(low, high),
            self.pauses,
        )


def _bootstrap_counts(counts: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Draw gamma variables with means `counts` (n,) by inverse CDF: a small change of counts changes them little."""
    from scipy.special import gammaincinv

    return np.asarray(gammaincinv(np.maximum(counts, 1e-6), rng.random(len(counts))))


def noise_of(
    values: FloatArray, weights: FloatArray, independent: float | None = None, levels: SizeLevels = NO_LEVELS
) -> StepNoise:
    """The noise of measured ratios (n,), n >= 1, above 0, that stand for weights (n,) steps each. levels: over which
    the ratios are."""
    rising, number = distinct(np.asarray(values, dtype=np.float64))
    count: FloatArray = np.bincount(number, weights=weights).astype(np.float64)
    steps = float(count.sum())
    starts = tail_points(count)
    share = np.add.reduceat(count, starts)
    means = np.add.reduceat(count * rising, starts) / share
    return StepNoise(means, share / steps, steps, steps if independent is None else float(independent), levels)


def tail_points(count: FloatArray) -> IntArray:
    """Return the index of the first value of each tail point. count (n,): steps at each of the rising values."""
    steps = float(count.sum())
    middle = (np.cumsum(count) - count / 2) / steps
    return np.flatnonzero(np.diff(np.searchsorted(_edges(steps), middle), prepend=-1))


def joined_noise(
    laws: Sequence[StepNoise], low: FloatArray, high: FloatArray, pauses: Pauses | None = None
) -> StepNoise:
    """One noise of those of groups of batches low (k,) to high (k,), rising; levels are those of the first."""
    if len(laws) == 1:
        return replace(laws[0], pauses=pauses)
    steps = sum(law.steps for law in laws)
    starts = np.cumsum([0, *(len(law.values) for law in laws[:-1])])
    return StepNoise(
        np.concatenate([law.values for law in laws]),
        np.concatenate([law.weights * (law.steps / steps) for law in laws]),
        steps,
        sum(law.independent for law in laws),
        laws[0].levels,
        BatchGroups(starts, np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)),
        pauses,
    )


def noise_from_json(document: Mapping[str, Any] | None) -> StepNoise | None:
    """The noise that `to_json` wrote; None where there is none. Raises ValueError, TypeError, KeyError for what is no
    noise."""
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
    return StepNoise(
        values[order],
        weights[order],
        float(document["steps"]),
        float(document["independent"]),
        levels_from_json(document.get("levels")),
        groups,
        pauses_from_json(document.get("pauses")),
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
