"""What the data say about the parameters: identified, identified in combination, or neither, and what to measure.

Intervals take the model at its word: misfit that neighbours in B or time share counts as noise. So a model that
contains the linear baseline as a limit must predict held-out rows better than it, by more than the standard error over
folds. Otherwise the parameters that bend the curve are not identified.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.covariance import Uncertainty
from latfit.fitting.uncertainty.identifiability import combinations, log_condition
from latfit.fitting.uncertainty.what_to_measure import measurements
from latfit.model import Identifiability, decode_only

LINE = {"tau_0", "tau_B", "tau_S"}
WORK = "w_0"
MIN_GAIN = 0.005
"""Share of a line's error by which a model has to be better, at least: folds are fitted no more exactly."""


def line_as_good(problem: FitProblem, by_fold: Sequence[float], line: Sequence[float]) -> bool:
    """Return whether a line predicts held-out rows as well as the problem's model, which contains it as a limit.
    by_fold, line: errors of the model and of the line in percent on each fold (K,)."""
    names = {p.name for p in problem.model.parameters}
    if not _bends(problem) or not LINE <= names <= _all_bends(problem) | LINE or LINE & _constrained(problem):
        return False
    if len(by_fold) != len(line) or len(by_fold) < 2:
        return False
    gains = np.log(np.maximum(line, 1e-9) / np.maximum(by_fold, 1e-9))
    return float(gains.mean()) <= max(float(np.std(gains, ddof=1)) / math.sqrt(len(gains)), MIN_GAIN)


def without_bends(problem: FitProblem, doubt: Uncertainty) -> Uncertainty:
    """Return the uncertainty with all parameters that bend the curve as one group that is not identified."""
    lost = [name for name in _bends(problem) if name not in _constrained(problem)]
    estimates = dict(doubt.estimates)
    for name in lost:
        estimates[name] = structs.replace(estimates[name], std_error=None, low=None, high=None, identified=False)
    joined = [name for group in doubt.unidentified if set(group) - LINE for name in group]
    others = [group for group in doubt.unidentified if not set(group) - LINE]
    return replace(doubt, estimates=estimates, unidentified=[*others, list(dict.fromkeys([*lost, *joined]))])


def of_line(report: Identifiability) -> Identifiability:
    """Return the report where a line is as good: only combinations of the line's parameters."""
    kept = [each for each in report.combinations if set(re.findall(r"[A-Za-z]\w*", each.expression)) <= LINE]
    return structs.replace(report, combinations=kept, line_as_good=True)


def _all_bends(problem: FitProblem) -> set[str]:
    model = problem.model
    return {p.name for p in model.parameters if p.positive} | {*model.outer, WORK}


def _bends(problem: FitProblem) -> list[str]:
    """Return the free parameters that bend the curve."""
    return [p.name for p in problem.free_parameters if p.name in _all_bends(problem)]


def _constrained(problem: FitProblem) -> set[str]:
    """Return the parameters that the user fixed, bounded or gave a prior."""
    return {*problem.options.fixed, *problem.options.bounds, *problem.options.priors}


def identifiability_report(problem: FitProblem, solution: Solution, doubt: Uncertainty) -> Identifiability:
    """Return what the data say of the parameters of a solved problem."""
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
