"""What the data tell of the parameters: which are identified, which only in combination, and what to measure.

Intervals from the curvature are checked against the cost where the data are weak (`verified`), and against what a
linear baseline predicts of held-out steps. Intervals take the model at its word: what it does not follow they take for
noise that cells do not share. In a log the neighbours in B and in time share it, and over ten thousands of rows a
valley then seems to have a bottom, which another day's log would put elsewhere. So a model that holds the line as a
limit has to predict rows left out better than the line: with e_i and l_i the errors of both on fold i of K, the mean of
ln(l_i/e_i) must exceed its standard error sd/sqrt(K). Where it does not, the line says the same as well:

* what only bends (rates, peaks, the work before the first token) has any value, up to no bend at all: not identified;
* a cost that both have is identified if its interval holds what the line says of it, and so is a combination of costs;
* combinations with what only bends are not named.

Parameters that a user fixed, bounded or knows something of keep what was said of them, and a model whose line a user
took away has no such limit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.covariance import CHI2_95, Uncertainty
from latfit.fitting.uncertainty.identifiability import ILL_CONDITIONED, combinations, log_condition
from latfit.fitting.uncertainty.profile_likelihood import Held, deviance_unit, profile_interval
from latfit.fitting.uncertainty.what_to_measure import measurements
from latfit.model import Estimate, Identifiability, decode_only

LINE = ("tau_0", "tau_B", "tau_S")
WORK = "w_0"


@dataclass(frozen=True)
class Line:
    """A linear baseline through the same rows: its parameters by name, and its error in percent on each fold."""

    values: Mapping[str, float]
    by_fold: Sequence[float]


def as_good(problem: FitProblem, by_fold: Sequence[float], line: Line) -> bool:
    """Whether a line predicts rows left out as well as the problem's model, which holds it as a limit. by_fold: the
    model's error in percent on each fold (K,)."""
    if not _holds_a_line(problem) or len(by_fold) != len(line.by_fold) or len(by_fold) < 2:
        return False
    gains = np.log(np.maximum(line.by_fold, 1e-9) / np.maximum(by_fold, 1e-9))
    return float(gains.mean()) <= float(np.std(gains, ddof=1)) / math.sqrt(len(gains))


def as_the_line_says(problem: FitProblem, doubt: Uncertainty, line: Line) -> Uncertainty:
    """The doubt about parameters where a line predicts as well."""
    spoken = _spoken(problem)
    estimates, lost = dict(doubt.estimates), []
    for parameter in problem.free_parameters:
        known = estimates[parameter.name]
        if known.identified and parameter.name not in spoken and not _agrees(known, line.values.get(parameter.name)):
            estimates[parameter.name] = structs.replace(known, std_error=None, low=None, high=None, identified=False)
            lost.append(parameter.name)
    if not lost:
        return doubt
    joined = [name for group in doubt.unidentified if set(group) - set(LINE) for name in group]
    others = [group for group in doubt.unidentified if not set(group) - set(LINE)]
    return replace(doubt, estimates=estimates, unidentified=[*others, list(dict.fromkeys([*lost, *joined]))])


def told_with_line(report: Identifiability, line: Line) -> Identifiability:
    """The report without the combinations that a line would give another value, and with
    `line_as_good`."""
    kept = [
        combination
        for combination in report.combinations
        if (value := _of_line(combination.expression, line.values)) is not None
        and combination.low <= value <= combination.high
    ]
    return structs.replace(report, combinations=kept, line_as_good=True)


def _holds_a_line(problem: FitProblem) -> bool:
    model = problem.model
    bends = {p.name for p in model.parameters if p.positive} | {*model.outer, WORK}
    names = {p.name for p in model.parameters}
    return bool(bends & {p.name for p in problem.free_parameters}) and (
        {*LINE} <= names <= bends | {*LINE} and not {*LINE} & _spoken(problem)
    )


def _spoken(problem: FitProblem) -> set[str]:
    """Parameters that a user said something of."""
    return {*problem.options.fixed, *problem.options.bounds, *problem.options.priors}


def _agrees(known: Estimate, line: float | None) -> bool:
    if line is None:
        return False
    return known.low is not None and known.high is not None and known.low <= line <= known.high


def _of_line(expression: str, values: Mapping[str, float]) -> float | None:
    """What a sum of costs, each with a number before it or none, is for a line; None for any other expression."""
    total = 0.0
    for part in expression.split(" + "):
        number, _, name = part.rpartition("*")
        if name not in values or "*" in number or number in values:
            return None
        total += float(number or 1) * values[name]
    return total


PROFILE_VALUES = 400_000
"""A profile refits the model some twenty times an end, so problems with a larger Jacobian go without."""


def identifiability_report(problem: FitProblem, solution: Solution, doubt: Uncertainty) -> Identifiability:
    """What the data tell of the parameters of a solved problem."""
    prefill = not decode_only(problem.steps, problem.weights)
    report = Identifiability(doubt.condition_number, doubt.unidentified, prefill)
    if doubt.directions is None or doubt.root is None:
        return report
    theta = problem.theta(solution.z)
    names = [p.name for p in problem.free_parameters]
    groups = [[names.index(name) for name in group] for group in doubt.unidentified]
    return structs.replace(
        report,
        combinations=combinations(problem, theta, doubt.root, doubt.directions, groups, doubt.quantile),
        measure=measurements(problem, solution, doubt.unidentified),
        condition_number_log=log_condition(problem, theta),
        singular_values=doubt.directions.singular.tolist(),
    )


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
            estimates[parameter.name] = structs.replace(known, low=interval.low, high=interval.high)
            continue
        estimates[parameter.name] = structs.replace(
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
