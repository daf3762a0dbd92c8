"""Where the error of a prediction comes from.

The mean square of ln(observed/predicted) on rows left out has three parts that add up: the noise of the measurement,
which rows of one cell show among themselves; the uncertainty of the parameters, from their covariance; and the rest,
which is what the model's structure misses. A cell here agrees in everything that the trace knows of a step, whether
the model reads it or not. Where no cell was measured twice, noise and structure cannot be told apart.
"""

from typing import Any

import numpy as np

from latfit.fit.by_row import cells_by_row, steps_by_row, weights_by_row
from latfit.fit.crossval import HeldOut
from latfit.fit.problem import FitProblem
from latfit.fit.solve import Solution
from latfit.fit.uncertainty import Uncertainty, relative_error_at
from latfit.trace.table import Trace


def error_parts(
    problem: FitProblem, solution: Solution, doubt: Uncertainty, trace: Trace, left_out: HeldOut
) -> dict[str, Any]:
    """Shares of the mean squared error on rows left out: `model_structure`, `parameter_uncertainty`,
    `measurement_noise` (the first and last as `structure_and_noise` where they cannot be told apart)."""
    w = left_out.weights
    whole = float(w @ left_out.log_ratio**2) / float(w.sum())
    if not np.isfinite(whole) or whole <= 1e-20:
        return {"reason": "the rows left out are predicted without error"}
    theta = problem.theta(solution.z)
    doubted = relative_error_at(problem, theta, doubt, steps_by_row(problem, trace))[left_out.rows]
    uncertain = min(float(w @ doubted**2) / float(w.sum()), whole)
    result: dict[str, Any] = {"rms_pct": 100 * float(np.sqrt(whole)), "parameter_uncertainty": uncertain / whole}
    noise = _noise(trace)
    if noise is None:
        return {**result, "structure_and_noise": 1 - uncertain / whole}
    noise = min(noise, whole - uncertain)
    result |= {"measurement_noise": noise / whole, "model_structure": (whole - uncertain - noise) / whole}
    return {**result, "sentence": _sentence(result)}


def _noise(trace: Trace) -> float | None:
    """Variance of ln T within cells; None where none was measured twice."""
    w, cell, logs = weights_by_row(trace), cells_by_row(trace), np.log(trace.floats("T_ms"))
    size = np.bincount(cell, weights=w)
    freedom = float(w.sum()) - len(size)
    if freedom < 1:
        return None
    mean = np.bincount(cell, weights=w * logs) / size
    return float(w @ (logs - mean[cell]) ** 2) / freedom


def _sentence(parts: dict[str, Any]) -> str:
    names = {
        "measurement_noise": ("noise of the measurement", "no model could remove it"),
        "model_structure": ("what the model does not follow", "another model or another column could"),
        "parameter_uncertainty": ("parameters that are not well known", "more measurements would help"),
    }
    largest = max(names, key=lambda name: float(parts[name]))
    what, remedy = names[largest]
    return f"{100 * parts[largest]:.0f} % of the squared error is {what}: {remedy}."
