"""Intervals of parameters, and the parameter vectors that are stored with a fit.

A cost at zero keeps the one-sided end of the covariance: a bootstrap is not consistent at a boundary (Andrews 2000).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs

from latfit.errors import WrongUsage
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.bootstrap import SCHEMES, Progress, bootstrap, from_covariance, kept
from latfit.fitting.uncertainty.covariance import LEVEL, Uncertainty, uncertainty
from latfit.stats import FloatArray

METHODS = ("sandwich", "profile", "bootstrap")
MAX_SPAN = math.exp(4)  # of the interval of an identified rate or peak: a factor of e^2 each way
RESAMPLES = 1000  # resamples of bootstrap intervals where nobody says how many


@dataclass(frozen=True)
class DoubtOptions:
    intervals: str = "sandwich"  # see METHODS
    resamples: int = 0  # of a bootstrap, 0 for none
    scheme: str = "auto"  # see `bootstrap.SCHEMES`; `auto`: blocks of time for a trace in time order, else rows
    progress: Progress | None = None  # called with (done, of)


def doubts(
    problem: FitProblem, solution: Solution, data: FitData, options: DoubtOptions
) -> tuple[Uncertainty, Mapping[str, Any], Mapping[str, Any]]:
    """Return the uncertainty of a solved problem, and the `bootstrap` and `draws` of its file. Raises WrongUsage."""
    check(options)
    found = uncertainty(problem, solution)
    resampled = options.intervals != "sandwich"
    resamples = options.resamples or (RESAMPLES if resampled else 0)
    if not resamples:
        return found, {}, kept(problem, from_covariance(problem, solution, found), "covariance")
    scheme = options.scheme if options.scheme != "auto" else "block" if data.in_time else "rows"
    theta = bootstrap(problem, solution, data, resamples=resamples, scheme=scheme, progress=options.progress)
    facts = {
        "scheme": scheme,
        "resamples": len(theta),
        "seed": problem.options.seed,
        "level": LEVEL,
        "parameters": {
            p.name: list(_percentile_interval(theta[:, i], LEVEL))
            for i, p in enumerate(problem.model.parameters)
            if p.fixed is None
        },
    }
    found = _resampled(problem, found, theta) if resampled else found
    return found, facts, kept(problem, theta, f"bootstrap, {scheme}")


def check(options: DoubtOptions) -> None:
    for option, value, known in (
        ("--set intervals", options.intervals, METHODS),
        ("--set resample", options.scheme, ("auto", *SCHEMES)),
    ):
        if value not in known:
            raise WrongUsage(f"{value!r} is not known", where=option, remedy=f"Choose one of: {', '.join(known)}.")
    if options.resamples < 0 or 0 < options.resamples < 20:
        raise WrongUsage(
            f"{options.resamples} resamples say nothing",
            where="--bootstrap",
            remedy="Give 20 or more, 1000 for intervals.",
        )


def _percentile_interval(values: FloatArray, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _resampled(problem: FitProblem, found: Uncertainty, theta: FloatArray) -> Uncertainty:
    """Return the uncertainty with percentile intervals of refits (resamples, p), at a level corrected for few rows."""
    estimates, groups = dict(found.estimates), [*found.unidentified]
    n, p = problem.rows, len(problem.free)
    level = math.erf(found.quantile * math.sqrt(n / max(n - p, 1)) / math.sqrt(2))
    for i, parameter in zip(problem.free, problem.free_parameters, strict=True):
        known = estimates[parameter.name]
        if not known.identified or known.low is None:
            continue
        low, high = _percentile_interval(theta[:, i], level)
        spread: float | None = float(np.std(theta[:, i]))
        identified = not parameter.positive or high <= MAX_SPAN * low
        if known.value == 0:
            low, high, spread = 0.0, max(high, known.high or 0.0), known.std_error
        elif not identified:
            spread = None
            groups.append([parameter.name])
        estimates[parameter.name] = structs.replace(known, std_error=spread, low=low, high=high, identified=identified)
    return replace(found, estimates=estimates, unidentified=groups)
