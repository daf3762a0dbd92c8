"""What else the parameters of a fit could have been, so that what follows from them gets an interval.

A fit keeps up to 200 parameter vectors that its data allow: of its bootstrap where one was asked for, else drawn from
the covariance of its parameters (see `fit.draws`). Everything computed from a fit (a threshold, a capacity) computed
from each of them gives its spread: the 2.5 % and 97.5 % quantiles of B1 over the draws are B1's 95 % interval.

    draws = parameter_draws(fit)                              (n, p), None where a fit keeps none
    T = latency_draws(fit, draws, B, S)                       (n, m) for m steps
    low, high = np.quantile(answer(T), [0.025, 0.975])

Two fits are independent of each other: pair their draws as they come. A draw is a whole curve, so compare steps within
a draw, never quantiles of single steps.
"""

import numpy as np

from latfit.model.result import FitResult
from latfit.stats import FloatArray

KEPT = 200
"""Vectors that a fit keeps."""


def parameter_draws(fit: FitResult, n: int = KEPT, seed: int = 0) -> FloatArray | None:
    """Parameter vectors (n, p) that the data allow, in the order of the model's parameters, held ones as they are.

    The kept ones in an order by the seed, again from the start where more are asked for than are kept. None where the
    fit keeps none: one of an older version, or one that is not usable.
    """
    names, values = fit.draws.get("parameters", ()), np.asarray(fit.draws.get("values", ()), dtype=np.float64)
    if n < 1 or len(values) == 0 or not np.all(np.isfinite(fit.theta)):
        return None
    order = np.random.default_rng(seed).permutation(len(values))
    drawn = np.tile(fit.theta, (n, 1))
    columns = [p.name for p in fit.structure.parameters]
    drawn[:, [columns.index(name) for name in names]] = values[np.resize(order, n)]
    return drawn


def latency_draws(fit: FitResult, draws: FloatArray, B: FloatArray, S: FloatArray, **context: FloatArray) -> FloatArray:
    """Typical latency in ms (n, m) of m steps for each of n parameter vectors (n, p); context as in
    `FitResult.latency_ms`."""
    steps = fit.steps(B, S, **context)
    return np.stack([fit.structure.latency_ms(theta, steps) for theta in draws])
