"""The box of the search: scale of each parameter, and the range in which data could show it.

A scale follows from the parameter's unit and the medians of B, S and T, or for the coefficient of a term from the mean
of its column, so that scaled values are of order one for any machine.

Attention per pair of tokens and the dense price of a token are both arithmetic of one machine: their ratio is that of
their operation counts, 2e-5 to 1.3e-4 for models from 70 billion to 3 billion active weights. Every term is
non-negative, so the dense price is at most T/S of any step; hence tau_A <= 2e-4 T/S, which keeps a quadratic from
explaining noise at short prompts and exploding at long ones.
"""

from collections.abc import Mapping

import numpy as np

from latfit.model.separable import Separable
from latfit.model.terms import LatencyModel, Parameter, Steps
from latfit.stats import FloatArray, weighted_quantile

RATE_SPAN = (1e-3, 30.0)
"""A rate k is searched while k x_max >= the first and k x_min <= the second: beyond, its factor no longer changes."""

SPAN = 1e6
"""Other parameters are searched up to this many times (peaks also down to this part of) their scale."""

ATTENTION_PER_TOKEN = 2e-4
SORTED_BELOW = 20_000
LOW_SHARE = 0.05

_POWERS: Mapping[str, tuple[int, int, int]] = {
    "1": (0, 0, 0),
    "ms": (0, 0, 1),
    "tokens": (0, 1, 0),
    "requests": (1, 0, 0),
    "tokens/ms": (0, 1, -1),
    "1/request": (-1, 0, 0),
    "1/token": (0, -1, 0),
    "ms/request": (-1, 0, 1),
    "ms/token": (0, -1, 1),
}
"""Unit of a parameter as powers of B, S and T."""


def scales(
    model: LatencyModel, steps: Steps, observed: FloatArray, weights: FloatArray, given: Mapping[str, float]
) -> FloatArray:
    """Scale of each parameter (p,), above zero; given: parameters that a user fixed."""
    some = slice(None, None, max(len(observed) // SORTED_BELOW, 1))
    medians = [quantile(column[some], 0.5, weights[some]) for column in (steps["B"], steps["S"], observed)]
    means = model.column_means(steps, weights, given) if isinstance(model, Separable) else {}
    found = []
    for parameter in model.parameters:
        mean = means.get(parameter.name, 0.0)
        span = model.span(parameter.name, steps) if parameter.positive else None
        if mean > 0:
            found.append(medians[2] / mean)
        elif span is not None:
            found.append(float(np.sqrt(span[0] * span[1])))
        else:
            powers = _POWERS.get(parameter.unit, (0, 0, 1))
            found.append(float(np.prod([m**power for m, power in zip(medians, powers, strict=True)])))
    return np.array(found)


def natural_range(
    model: LatencyModel, parameter: Parameter, scale: float, steps: Steps, observed: FloatArray, weights: FloatArray
) -> tuple[float, float]:
    """(low, high) within which a parameter is searched, in its unit."""
    column = dict(model.rates).get(parameter.name)
    if column:
        x = steps[column]
        return RATE_SPAN[0] / float(x.max()), RATE_SPAN[1] / float(x.min())
    if (span := model.span(parameter.name, steps)) is not None:
        return span
    if parameter.name == "tau_A":
        return 0.0, ATTENTION_PER_TOKEN * quantile(observed / steps["S"], LOW_SHARE, weights)
    return (scale / SPAN if parameter.positive else 0.0), scale * SPAN


def quantile(values: FloatArray, q: float, weights: FloatArray) -> float:
    """`weighted_quantile`, without a sort where there are rows enough to load compiled code for."""
    if len(values) < SORTED_BELOW:
        return weighted_quantile(values, q, weights)
    from latfit.fit import kernels

    # rows with gaps between them would be compiled for once more
    return float(kernels.weighted_quantile(np.ascontiguousarray(values), np.ascontiguousarray(weights), q))
