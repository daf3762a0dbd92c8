"""How single steps scatter: the law of F = observed time / typical time, as measured, tail and all.

A quantile function known at a few levels says nothing beyond the last of them, and there a queue's waits are decided:
if one step in 200 takes fifty times as long, the mean service grows by a quarter, its second moment more than tenfold,
and the 99th percentile of a step sees none of it. So the law is kept as weighted points that resolve each decade of the
tail alike: up to RESOLUTION points below the 99th percentile, as many between it and the 99.9th, and so on; a step
beyond them all is a point of its own. A point is the mean of the steps that it stands for, so the mean of the law is
that of the sample, exactly, and what is lost of its second moment is the variance inside points of next to equal steps.

What n independent steps leave open is drawn by the Bayesian bootstrap (Rubin 1981): the weights of the points become
Gamma(n w_i) variables over their sum. To them one more step is added at the longest one seen, with a weight of
Gamma(1): a count of k exceedances then has the upper limit Gamma(k + 1), that of the exact (Clopper-Pearson) interval
of a rare event's rate, and not Gamma(k), which has none for k = 0.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from latfit.stats import FloatArray

RESOLUTION = 200
"""Points of each decade of the tail."""

DECADES = (0.99, 0.999, 0.9999, 0.99999)
FEWEST_BEYOND = 1
"""Independent steps beyond a percentile from which its tail counts as seen, as in the ranks of `fit.intervals`."""


@dataclass(frozen=True, eq=False)
class StepRatios:
    """values (n,) of F, rising, and the share of the steps that each stands for, weights (n,), summing to 1.

    steps: how many were measured.  independent: how many independent ones these are worth.
    """

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
    def cv(self) -> float:
        """Coefficient of variation."""
        return math.sqrt(max(self.mean_square / self.mean**2 - 1, 0.0))

    @cached_property
    def reached(self) -> FloatArray:
        """Share of the steps up to each point (n,); the last is 1."""
        sums = np.cumsum(self.weights)
        return np.asarray(sums / sums[-1])

    def quantile(self, share: float) -> float:
        """The smallest value that a share of the steps does not exceed."""
        return float(self.values[min(int(np.searchsorted(self.reached, share - 1e-12)), len(self.values) - 1)])

    def sees(self, share: float) -> bool:
        """Whether the tail beyond a share of the steps was seen: FEWEST_BEYOND independent steps lie there."""
        return self.independent * (1 - share) >= FEWEST_BEYOND * (1 - 1e-9)

    @property
    def slow_share(self) -> float:
        """Share of E[F^2] that is due to the slowest hundredth of the steps; 0.01 or little more where nothing
        stalls."""
        beyond = np.clip(self.reached - 0.99, 0.0, self.weights)
        return float(beyond @ self.values**2) / self.mean_square

    def scaled(self) -> "StepRatios":
        """The law of F/E[F], whose mean is 1."""
        return StepRatios(self.values / self.mean, self.weights, self.steps, self.independent)

    def damped(self, share: float) -> "StepRatios":
        """The law of a time of which a share scatters so and the rest does not; of mean 1 where this one is."""
        return StepRatios(1 + share * (self.values - 1), self.weights, self.steps, self.independent)

    def drawn(self, rng: np.random.Generator) -> "StepRatios":
        """A law that the measured steps allow (see the module)."""
        counts = rng.standard_gamma(np.maximum(self.independent * self.weights, 1e-9))
        counts[-1] += rng.standard_exponential()
        return StepRatios(self.values, np.asarray(counts / counts.sum()), self.steps, self.independent)

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "independent": self.independent,
            "mean": self.mean,
            "mean_square": self.mean_square,
            "values": self.values.tolist(),
            "weights": self.weights.tolist(),
        }


def step_ratios(values: FloatArray, weights: FloatArray, independent: float | None = None) -> StepRatios:
    """The law of measured ratios (n,), n >= 1, above 0, that stand for weights (n,) steps each."""
    order = np.argsort(values, kind="stable")
    rising, count = np.asarray(values, dtype=np.float64)[order], np.asarray(weights, dtype=np.float64)[order]
    steps = float(count.sum())
    middle = (np.cumsum(count) - count / 2) / steps
    point = np.searchsorted(_edges(steps), middle)
    starts = np.flatnonzero(np.diff(point, prepend=-1))
    share = np.add.reduceat(count, starts)
    means = np.add.reduceat(count * rising, starts) / share
    return StepRatios(means, share / steps, steps, steps if independent is None else float(independent))


def ratios_from_json(document: Mapping[str, Any] | None) -> StepRatios | None:
    """The law that `to_json` wrote; None where there is none. Raises ValueError, TypeError, KeyError for what is no
    law."""
    if not document:
        return None
    values = np.asarray(document["values"], dtype=np.float64)
    weights = np.asarray(document["weights"], dtype=np.float64)
    known = len(values) > 0 and values.shape == weights.shape and values.ndim == 1
    if not known or not np.all(np.isfinite(values) & (values > 0) & (weights >= 0)) or np.any(np.diff(values) < 0):
        raise ValueError("ratios are not rising values above zero with a weight each")
    if not abs(float(weights.sum()) - 1) < 1e-6:
        raise ValueError("weights of ratios do not add up to 1")
    return StepRatios(values, weights, float(document["steps"]), float(document["independent"]))


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
