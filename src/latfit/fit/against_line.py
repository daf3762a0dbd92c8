"""Whether the data tell that the latency bends, by what a straight line predicts of steps left out.

Intervals take the model at its word: what it does not follow they take for noise that cells do not share. In a log the
neighbours in B and in time share it, and over ten thousands of rows a valley then seems to have a bottom, which another
day's log would put elsewhere. So a model that holds the line as a limit has to predict rows left out better than the
line: with e_i and l_i the errors of both on fold i of K, the mean of ln(l_i/e_i) must exceed its standard error
sd/sqrt(K). Where it does not, the line says the same as well:

* what only bends (rates, peaks, the work before the first token) has any value, up to no bend at all: not identified;
* a cost that both have is identified if its interval holds what the line says of it, and so is a combination of costs;
* combinations with what only bends are not named.

Parameters that a user fixed, bounded or knows something of keep what was said of them, and a model whose line a user
took away has no such limit.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.fit.problem import FitProblem
from latfit.fit.uncertainty import Uncertainty
from latfit.model.result import Estimate

LINE = ("tau_0", "tau_B", "tau_S")
WORK = "w_0"


@dataclass(frozen=True)
class Line:
    """A straight line through the same rows: its parameters by name, and its error in percent on each fold."""

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
            estimates[parameter.name] = replace(known, std_error=None, low=None, high=None, identified=False)
            lost.append(parameter.name)
    if not lost:
        return doubt
    joined = [name for group in doubt.unidentified if set(group) - set(LINE) for name in group]
    others = [group for group in doubt.unidentified if not set(group) - set(LINE)]
    return replace(doubt, estimates=estimates, unidentified=[*others, list(dict.fromkeys([*lost, *joined]))])


def told_with_line(report: Mapping[str, Any], line: Line) -> dict[str, Any]:
    """The identifiability of the JSON contract without the combinations that a line would give another value, and with
    `line_as_good`."""
    kept = [
        combination
        for combination in report["combinations"]
        if (value := _of_line(combination["expression"], line.values)) is not None
        and combination["low"] <= value <= combination["high"]
    ]
    return {**report, "combinations": kept, "line_as_good": True}


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
