"""Intervals of parameters, and the parameter vectors that are stored with a fit.

`sandwich` uses the covariance: instant, and right where the cost is a parabola over the interval. `bootstrap` uses
quantiles of refits to resampled data, which include the noise that neighbours in time share; quantiles are widened for
few rows (Hesterberg 2015). `profile` is an older name of `bootstrap`. A cost that ends at zero keeps the one-sided end
of the covariance, because a bootstrap is not consistent at a boundary (Andrews 2000).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from latfit.errors import WrongUsage
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.bootstrap import SCHEMES, ParameterDraws, Progress, bootstrap, from_covariance, kept
from latfit.fitting.uncertainty.covariance import Uncertainty, uncertainty
from latfit.fitting.uncertainty.identifiability import merge
from latfit.stats import FloatArray

METHODS = ("sandwich", "profile", "bootstrap")
LINKED = 0.7
"""Correlation of two parameters' logarithms over resamples from which they are told in combination only."""

RESAMPLES = 1000
"""Resamples of bootstrap intervals where nobody says how many."""


@dataclass(frozen=True)
class DoubtOptions:
    """intervals: see METHODS.  resamples: of a bootstrap, 0 for none.  scheme: of a bootstrap, see `bootstrap.SCHEMES`;
    `auto` takes blocks of time for a trace in time order, else rows.  progress: called with (done, of)."""

    intervals: str = "sandwich"
    resamples: int = 0
    scheme: str = "auto"
    progress: Progress | None = None


@dataclass(frozen=True)
class Doubts:
    """Uncertainty with its estimates by the method asked for, and the `bootstrap` and `draws` of the JSON contract."""

    uncertainty: Uncertainty
    bootstrap: Mapping[str, Any] = field(default_factory=dict)
    draws: Mapping[str, Any] = field(default_factory=dict)


def doubts(problem: FitProblem, solution: Solution, data: FitData, options: DoubtOptions) -> Doubts:
    """Return what the data leave open of a solved problem. Raises WrongUsage for options that cannot be met."""
    check(options)
    found = uncertainty(problem, solution)
    resampled = options.intervals != "sandwich"
    resamples = options.resamples or (RESAMPLES if resampled else 0)
    if not resamples:
        return Doubts(found, draws=kept(problem, from_covariance(problem, solution, found), "covariance"))
    scheme = options.scheme if options.scheme != "auto" else "block" if data.in_time else "rows"
    drawn = bootstrap(problem, solution, data, resamples=resamples, scheme=scheme, progress=options.progress)
    if resampled:
        found = _resampled(problem, found, drawn)
    return Doubts(found, drawn.to_json(), kept(problem, drawn.theta, f"bootstrap, {scheme}"))


def check(options: DoubtOptions) -> None:
    """Raises WrongUsage for a method, a scheme or a number of resamples that there is not."""
    for option, value, known in (
        ("--intervals", options.intervals, METHODS),
        ("--resample", options.scheme, ("auto", *SCHEMES)),
    ):
        if value not in known:
            raise WrongUsage(f"{value!r} is not known", where=option, remedy=f"Choose one of: {', '.join(known)}.")
    if options.resamples < 0 or 0 < options.resamples < 20:
        raise WrongUsage(
            f"{options.resamples} resamples say nothing",
            where="--bootstrap",
            remedy="Give 20 or more, 1000 for intervals.",
        )


def _resampled(problem: FitProblem, found: Uncertainty, drawn: ParameterDraws) -> Uncertainty:
    """The same doubt with percentile intervals of resampled fits."""
    estimates, wide = dict(found.estimates), []
    level = _expanded(problem, found.quantile, drawn.scheme)
    for i, parameter in zip(problem.free, problem.free_parameters, strict=True):
        known = estimates[parameter.name]
        if not known.identified or known.low is None:
            continue
        low, high = drawn.interval(parameter.name, level)
        if known.value == 0:
            estimates[parameter.name] = structs.replace(known, high=max(high, known.high or 0.0))
        elif tells(low, high, known.value, parameter.positive) or not parameter.positive:
            spread = float(np.std(drawn.theta[:, i]))
            estimates[parameter.name] = structs.replace(known, std_error=spread, low=low, high=high)
        else:
            wide.append(i)
            estimates[parameter.name] = structs.replace(known, std_error=None, low=low, high=high, identified=False)
    together = _moving_together(drawn.theta[:, wide])
    names = [problem.model.parameters[i].name for i in wide]
    groups = [*found.unidentified, *([names[i] for i in group] for group in together)]
    return replace(found, estimates=estimates, unidentified=groups)


def _expanded(problem: FitProblem, quantile: float, scheme: str) -> float:
    """Level of the percentile interval that makes up for what resamples of few rows lack in spread; drawn residuals
    lack none, because they are inflated."""
    n, p = problem.rows, len(problem.free)
    narrow = 1.0 if scheme == "residual" or n <= p else math.sqrt(n / (n - p))
    return math.erf(quantile * narrow / math.sqrt(2))


def tells(low: float, high: float, value: float, positive: bool) -> bool:
    """Return whether an interval pins its parameter: within its own size, or e^2 each way for rates and peaks."""
    return high <= low * math.exp(4) if positive else high - low <= 4 * max(value, 1e-300)


def _moving_together(theta: FloatArray) -> list[list[int]]:
    """Groups of columns of positive draws (n, k) whose logarithms are correlated."""
    if theta.shape[1] == 0:
        return []
    groups: list[list[int]] = []
    linked = np.abs(np.atleast_2d(np.corrcoef(np.log(np.maximum(theta, 1e-300)), rowvar=False))) > LINKED
    for i, row in enumerate(linked):
        merge(groups, [i, *np.flatnonzero(row).tolist()])
    return groups
