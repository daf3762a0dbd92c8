"""Parameters that bend the curve are identified only where the model predicts held-out rows better than a line."""

import math
from dataclasses import replace

import numpy as np
from msgspec import structs

from latfit.fitting.problem import FitProblem
from latfit.fitting.uncertainty.covariance import Uncertainty
from latfit.model import HeldOutErrors, LatencyModel

LINE = {"tau_0", "tau_B", "tau_S"}
MIN_GAIN = 0.005  # share of a line's error by which a model has to be better: folds are fitted no more exactly


def line_as_good(problem: FitProblem, own: HeldOutErrors | None, line: HeldOutErrors | None) -> bool:
    """Return whether a line predicts held-out rows as well as the problem's model, which contains it as a limit."""
    names, bends = {p.name for p in problem.model.parameters}, _bends(problem.model)
    is_extended_line = LINE <= names <= bends | LINE and not bends.isdisjoint(p.name for p in problem.free_parameters)
    if own is None or line is None or not is_extended_line or LINE & problem.options.constrained:
        return False
    errors, baseline = own.mape_pct_by_fold, line.mape_pct_by_fold
    if len(errors) != len(baseline) or len(errors) < 2:
        return False
    gains = np.log(np.maximum(baseline, 1e-9) / np.maximum(errors, 1e-9))
    return float(gains.mean()) <= max(float(np.std(gains, ddof=1)) / math.sqrt(len(gains)), MIN_GAIN)


def without_bends(problem: FitProblem, doubt: Uncertainty) -> Uncertainty:
    """Return the uncertainty with all parameters that bend the curve as one group that is not identified."""
    free = [p.name for p in problem.free_parameters if p.name in _bends(problem.model)]
    lost = [name for name in free if name not in problem.options.constrained]
    estimates = dict(doubt.estimates)
    for name in lost:
        estimates[name] = structs.replace(estimates[name], std_error=None, low=None, high=None, identified=False)
    joined = [name for group in doubt.unidentified if set(group) - LINE for name in group]
    others = [group for group in doubt.unidentified if not set(group) - LINE]
    return replace(doubt, estimates=estimates, unidentified=[*others, list(dict.fromkeys([*lost, *joined]))])


def _bends(model: LatencyModel) -> set[str]:
    return {p.name for p in model.parameters if p.positive} | {*model.outer, "w_0"}
