"""Intervals of parameters, and the parameter vectors that are stored with a fit.

`sandwich` uses the covariance, `bootstrap` (also called `profile`) quantiles of refits to resampled data, which include
the noise that neighbours in time share. A cost at zero keeps the one-sided end of the covariance, because a bootstrap
is not consistent at a boundary (Andrews 2000).
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

METHODS = ("sandwich", "profile", "bootstrap")
MAX_SPAN = math.exp(4)  # of the interval of an identified rate or peak: a factor of e^2 each way

RESAMPLES = 1000  # resamples of bootstrap intervals where nobody says how many


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
        ("--set intervals", options.intervals, METHODS),
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
    """Return the uncertainty with percentile intervals of resampled fits. Their level makes up for the spread that
    resamples of few rows lack."""
    estimates, groups = dict(found.estimates), [*found.unidentified]
    n, p = problem.rows, len(problem.free)
    level = math.erf(found.quantile * math.sqrt(n / max(n - p, 1)) / math.sqrt(2))
    for i, parameter in zip(problem.free, problem.free_parameters, strict=True):
        known = estimates[parameter.name]
        if not known.identified or known.low is None:
            continue
        low, high = drawn.interval(parameter.name, level)
        spread: float | None = float(np.std(drawn.theta[:, i]))
        identified = not parameter.positive or high <= MAX_SPAN * low
        if known.value == 0:
            low, high, spread = 0.0, max(high, known.high or 0.0), known.std_error
        elif not identified:
            spread = None
            groups.append([parameter.name])
        estimates[parameter.name] = structs.replace(known, std_error=spread, low=low, high=high, identified=identified)
    return replace(found, estimates=estimates, unidentified=groups)
