"""What the data say about the parameters: identified, identified in combination, or neither, and what to measure.

Intervals take the model at its word: misfit that neighbours in B or time share counts as noise. So a model that
contains the linear baseline as a limit must predict held-out rows better than it, by more than the standard error over
folds. Otherwise parameters that only bend the curve are not identified, and shared costs only where the line agrees.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.levenberg_marquardt import Objective, minimise
from latfit.fitting.solver.loss import score_factor
from latfit.fitting.solver.objective import by_cell, remembered
from latfit.fitting.solver.solve import RACERS, SEARCH_ROWS, Solution, sample_rows
from latfit.fitting.solver.variable_projection import searched_points
from latfit.fitting.uncertainty.covariance import CHI2_95, Uncertainty
from latfit.fitting.uncertainty.identifiability import combinations, log_condition
from latfit.fitting.uncertainty.what_to_measure import measurements
from latfit.model import Estimate, Identifiability, decode_only

LINE = ("tau_0", "tau_B", "tau_S")
WORK = "w_0"
MIN_GAIN = 0.005
"""Share of a line's error by which a model has to be better, at least: folds are fitted no more exactly."""


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
    return float(gains.mean()) <= max(float(np.std(gains, ddof=1)) / math.sqrt(len(gains)), MIN_GAIN)


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


def check_shared_costs(problem: FitProblem, solution: Solution, doubt: Uncertainty) -> Uncertainty:
    """Return the uncertainty with costs not identified that the fit can do without.

    Where rates or peaks are not identified, the curvature misses bent valleys: all of tau_S can go into w_1/P_max, say.
    So each cost that a line has is held at zero; if the others make up for it, within the 95 % likelihood ratio, it is
    not identified, together with those.
    """
    weak = {name for group in doubt.unidentified for name in group}
    if not weak & {name for name, _ in problem.model.rates}:
        return doubt
    estimates, groups = dict(doubt.estimates), [list(group) for group in doubt.unidentified]
    here = problem.theta(solution.z)
    score = score_factor(problem.options.loss, problem.residuals(solution.z), solution.f_scale)
    variance = float(problem.weights @ (score * problem.residuals(solution.z)) ** 2) / max(problem.rows - len(here), 1)
    for name in LINE:
        known = estimates[name]
        if name in problem.fixed or not known.identified or known.value == 0:
            continue
        without = problem.without(name)
        few = remembered(sample_rows(without, SEARCH_ROWS))
        objective = Objective(by_cell(remembered(without)), solution.f_scale)
        ends = [minimise(objective, start) for start in searched_points(few, solution.f_scale, RACERS[2])]
        best = min(ends, key=lambda end: end.cost)
        if 2 * (best.cost - solution.cost) > CHI2_95 * variance:
            continue
        estimates[name] = structs.replace(known, std_error=None, low=None, high=None, identified=False)
        there = without.theta(best.z)
        moved = np.abs(there - here) > 0.5 * np.maximum(np.abs(here), 1e-300)
        names = {p.name for p, changed in zip(problem.model.parameters, moved, strict=True) if changed}
        joined = next((group for group in groups if set(group) & names), None)
        if joined is not None:
            joined.append(name)
        else:
            groups.append([name])
    return replace(doubt, estimates=estimates, unidentified=groups)


def tells(low: float | None, high: float | None, value: float, positive: bool) -> bool:
    """Whether an interval pins its parameter: within its own size, or a factor of e^2 each way for rates and peaks."""
    if low is None or high is None:
        return False
    if positive:
        return high <= low * math.exp(4)
    return high - low <= 4 * max(value, 1e-300)
