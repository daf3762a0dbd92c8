"""How the intervals of parameters are made, and the parameter vectors that stay with a fit.

`sandwich` is the covariance of `uncertainty`: instant, and right where the cost is a parabola over the interval.
`profile` follows the cost itself (see `profile`): right for bent valleys and open ends, some forty refits a parameter.
`bootstrap` takes the 2.5 % and 97.5 % quantiles of resampled fits (see `bootstrap`): it sees what neighbours in time
share, which the other two do not. What is not identified stays so whatever the method.

A cost whose profile is open at zero begins there; another open end leaves the parameter without that end and not
identified, because the data do not say where it stops.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.fit.bootstrap import SCHEMES, ParameterDraws, Progress, bootstrap
from latfit.fit.draws import from_covariance, kept
from latfit.fit.folds import in_time
from latfit.fit.problem import FitProblem
from latfit.fit.profile import profile_interval
from latfit.fit.solve import Solution
from latfit.fit.uncertainty import Uncertainty, uncertainty
from latfit.fit.verdict import verified
from latfit.model.result import Estimate
from latfit.trace.table import Trace

METHODS = ("sandwich", "profile", "bootstrap")
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


def doubts(problem: FitProblem, solution: Solution, trace: Trace, options: DoubtOptions) -> Doubts:
    """What the data leave open of a solved problem. Raises WrongUsage for options that cannot be met."""
    check(options)
    found = verified(problem, solution, uncertainty(problem, solution))
    if options.intervals == "profile":
        found = _profiled(problem, solution, found, options.progress)
    resamples = options.resamples or (RESAMPLES if options.intervals == "bootstrap" else 0)
    if not resamples:
        return Doubts(found, draws=kept(problem, from_covariance(problem, solution, found), "covariance"))
    scheme = options.scheme if options.scheme != "auto" else "block" if in_time(trace) else "rows"
    drawn = bootstrap(
        problem,
        solution,
        trace,
        resamples=resamples,
        scheme=scheme,
        seed=problem.options.seed,
        progress=options.progress if options.intervals != "profile" else None,
    )
    if options.intervals == "bootstrap":
        found = replace(found, estimates=_resampled(problem, found, drawn))
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


def _profiled(problem: FitProblem, solution: Solution, found: Uncertainty, progress: Progress | None) -> Uncertainty:
    estimates, groups = dict(found.estimates), list(found.unidentified)
    for done, parameter in enumerate(problem.free_parameters, start=1):
        known = estimates[parameter.name]
        if known.identified and known.low is not None:
            interval = profile_interval(problem, solution, parameter.name)
            low = 0.0 if interval.low is None and not parameter.positive else interval.low
            told = low is not None and interval.high is not None
            estimates[parameter.name] = replace(known, low=low, high=interval.high, identified=told)
            groups += [] if told else [[parameter.name]]
        if progress:
            progress(done, len(problem.free))
    return replace(found, estimates=estimates, unidentified=groups)


def _resampled(problem: FitProblem, found: Uncertainty, drawn: ParameterDraws) -> dict[str, Estimate]:
    estimates = dict(found.estimates)
    for i, parameter in zip(problem.free, problem.free_parameters, strict=True):
        known = estimates[parameter.name]
        if known.identified and known.low is not None:
            low, high = drawn.interval(parameter.name)
            spread = float(np.std(drawn.theta[:, i]))
            estimates[parameter.name] = replace(known, std_error=spread, low=low, high=high)
    return estimates
