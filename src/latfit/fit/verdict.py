"""The `identifiability` of the JSON contract: what is told, what only in combination, and what to measure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from latfit.fit.combinations import combinations
from latfit.fit.identifiability import ILL_CONDITIONED, log_condition
from latfit.fit.problem import FitProblem
from latfit.fit.profile import CHI2_95, Held, deviance_unit, profile_interval
from latfit.fit.separating import measurements
from latfit.fit.solve import Solution
from latfit.fit.uncertainty import Uncertainty
from latfit.model.features import decode_only

PROFILE_VALUES = 400_000
"""A profile refits the model some twenty times an end, so problems with a larger Jacobian go without."""


def identifiability_report(problem: FitProblem, solution: Solution, doubt: Uncertainty) -> dict[str, Any]:
    """condition_number, condition_number_log, singular_values, unidentified, combinations, measure; and `prefill`,
    whether the data say anything of steps that hold some."""
    report: dict[str, Any] = {
        "condition_number": doubt.condition_number,
        "unidentified": doubt.unidentified,
        "prefill": not decode_only(problem.steps, problem.weights),
    }
    if doubt.directions is None or doubt.root is None:
        return {**report, "combinations": [], "measure": []}
    theta = problem.theta(solution.z)
    names = [p.name for p in problem.free_parameters]
    groups = [[names.index(name) for name in group] for group in doubt.unidentified]
    told = combinations(problem, theta, doubt.root, doubt.directions, groups, doubt.quantile)
    return {
        **report,
        "condition_number_log": log_condition(problem, theta),
        "singular_values": doubt.directions.singular.tolist(),
        "combinations": [asdict(combination) for combination in told],
        "measure": [wanted.to_json() for wanted in measurements(problem, solution, doubt.unidentified)],
    }


def verified(problem: FitProblem, solution: Solution, doubt: Uncertainty) -> Uncertainty:
    """The same doubt, its intervals checked against the cost where the data are weak.

    An interval from the curvature at the optimum is blind to a valley beyond it: tau_S seems certain where all its cost
    could as well be w_1/P_max. So twice as far out as the interval reaches the cost must have risen; where it has not,
    the profile decides. Rates that are not identified get the end that their profile has: "k_S is below 8e-5".
    """
    safe = not doubt.unidentified and doubt.condition_number < ILL_CONDITIONED
    if (
        doubt.directions is None
        or doubt.root is None
        or safe
        or len(problem.observed) * len(problem.free) > PROFILE_VALUES
    ):
        return doubt
    estimates, groups = dict(doubt.estimates), [list(group) for group in doubt.unidentified]
    rates = {rate for rate, _ in problem.model.rates}
    for position, parameter in enumerate(problem.free_parameters):
        known = estimates[parameter.name]
        if not math.isfinite(known.value) or doubt.directions.lengths[position] == 0:
            continue
        moved = _beyond(problem, solution, doubt, position) if known.identified and known.std_error else None
        if moved is None and (known.identified or parameter.name not in rates):
            continue
        interval = profile_interval(problem, solution, parameter.name)
        if moved is not None and tells(interval.low, interval.high, interval.value, parameter.positive):
            estimates[parameter.name] = replace(known, low=interval.low, high=interval.high)
            continue
        estimates[parameter.name] = replace(
            known, std_error=None, low=interval.low, high=interval.high, identified=False
        )
        if moved is not None:
            _join(groups, parameter.name, moved)
    return replace(doubt, estimates=estimates, unidentified=groups)


def _beyond(problem: FitProblem, solution: Solution, doubt: Uncertainty, position: int) -> list[str] | None:
    """Parameters that make up for this one at twice the reach of its interval, where the cost hardly rises there."""
    assert doubt.root is not None
    reach = 2 * doubt.quantile * float(np.linalg.norm(doubt.root[:, position]))
    unit = deviance_unit(problem, solution, position)
    start = float(solution.z[position])
    for x in (start - reach, start + reach):
        inside = min(max(x, float(problem.lower[position])), float(problem.upper[position]))
        if abs(inside - start) < 0.75 * reach:
            continue  # the range ends before the interval could be wrong
        held = Held(problem, solution, position)
        if 2 * (held.cost(inside, solution.cost + 0.5 * CHI2_95 * unit) - solution.cost) <= CHI2_95 * unit:
            there = problem.theta(held.full(inside))[problem.free]
            here = problem.theta(solution.z)[problem.free]
            names = [p.name for p in problem.free_parameters]
            share = np.abs(there - here) > 0.5 * np.maximum(np.abs(here), 1e-300)
            return [name for name, changed in zip(names, share, strict=True) if changed]
    return None


def tells(low: float | None, high: float | None, value: float, positive: bool) -> bool:
    """Whether an interval pins its parameter: within its own size, or a factor of e^2 each way for rates and peaks."""
    if low is None or high is None:
        return False
    if positive:
        return high <= low * math.exp(4)
    return high - low <= 4 * max(value, 1e-300)


def _join(groups: list[list[str]], name: str, moved: Sequence[str]) -> None:
    """Add a parameter to the group of those that make up for it, or as one of its own."""
    for group in groups:
        if set(group) & set(moved):
            group.append(name)
            return
    groups.append([name])
