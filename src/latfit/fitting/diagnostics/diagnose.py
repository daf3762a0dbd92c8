"""What the residuals ln(observed/predicted) show: errors by phase, the noise floor, influence, drift, error parts.

The mean square error on held-out rows has three parts: the noise of the measurement, which repeats of a cell show; the
uncertainty of the parameters, from their covariance; and lack of fit, which is the rest. See docs/theory/fitting.md.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from latfit.fitting.checking.crossval import HeldOut
from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.drift import drift
from latfit.fitting.diagnostics.influence import influence
from latfit.fitting.problem import FitProblem, steps_by_row
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.covariance import Uncertainty, relative_error_at
from latfit.model import Diagnostics, Errors
from latfit.stats import FloatArray, by_group, distinct, error_metrics

MAX_WRITTEN_ROWS = 200_000  # an even sample of the steps that weighted rows stand for
MAX_FLOOR_ROWS = 100_000
MIN_REPEATED_ROWS, MIN_REPEATED_SHARE = 20, 0.2  # of the rows, from which repeats speak for all


def error_parts(
    problem: FitProblem, solution: Solution, doubt: Uncertainty, data: FitData, left_out: HeldOut
) -> dict[str, Any]:
    """Return the shares of the mean squared error on held-out rows.

    `model_structure`, `parameter_uncertainty` and `measurement_noise`; without repeats of a cell the first and the last
    are one, `structure_and_noise`.
    """
    w = left_out.weights
    whole = float(w @ left_out.log_ratio**2) / float(w.sum())
    if not np.isfinite(whole) or whole <= 1e-20:
        return {"reason": "the rows left out are predicted without error"}
    theta = problem.theta(solution.z)
    doubted = relative_error_at(problem, theta, doubt, steps_by_row(problem, data))[left_out.rows]
    uncertain = min(float(w @ doubted**2) / float(w.sum()), whole)
    result: dict[str, Any] = {"rms_pct": 100 * float(np.sqrt(whole)), "parameter_uncertainty": uncertain / whole}
    noise = _noise(data)
    if noise is None:
        return {**result, "structure_and_noise": 1 - uncertain / whole}
    noise = min(noise, whole - uncertain)
    result |= {"measurement_noise": noise / whole, "model_structure": (whole - uncertain - noise) / whole}
    return {**result, "sentence": _sentence(result)}


def _noise(data: FitData) -> float | None:
    """Variance of ln T within cells; None where none was measured twice."""
    found = by_group(np.log(data.observed), data.known_cell, data.weights)
    return found.within if found.freedom >= 1 else None


def _sentence(parts: dict[str, Any]) -> str:
    names = {
        "measurement_noise": ("noise of the measurement", "no model could remove it"),
        "model_structure": ("what the model does not follow", "another model or another column could"),
        "parameter_uncertainty": ("parameters that are not well known", "more measurements would help"),
    }
    largest = max(names, key=lambda name: float(parts[name]))
    what, remedy = names[largest]
    return f"{100 * parts[largest]:.0f} % of the squared error is {what}: {remedy}."


def diagnose(
    problem: FitProblem,
    solution: Solution,
    doubt: Uncertainty,
    data: FitData,
    log_ratio: FloatArray,
    left_out: HeldOut | None,
) -> Diagnostics:
    """Return the diagnostics of a solved problem. log_ratio: ln(observed/predicted) of all rows (n,)."""
    rows = _written_out(data)
    residuals = log_ratio[rows]
    return Diagnostics(
        regimes=_regimes(data, log_ratio),
        lack_of_fit=lack_of_fit(data.observed[rows], data.cell[rows], residuals, len(problem.free))
        | ({} if (floor := noise_floor(data)) is None else {"noise_floor_pct": floor}),
        influence=influence(problem, solution, data),
        drift=drift(data, log_ratio),
        error_parts=None if left_out is None else error_parts(problem, solution, doubt, data, left_out),
    )


def _written_out(data: FitData) -> NDArray[np.intp]:
    """Return row numbers, each as often as it stands for a step, or in that proportion of too many steps."""
    if data.single:
        return np.arange(len(data))
    reached = np.cumsum(data.weights)
    steps = round(float(reached[-1]))
    taken = min(steps, MAX_WRITTEN_ROWS)
    return np.searchsorted(reached, (np.arange(taken) + 0.5) * steps / taken)


def _regimes(data: FitData, log_ratio: FloatArray) -> dict[str, Errors]:
    observed, weights, predicted = data.observed, data.weights, data.observed * np.exp(-log_ratio)
    rows_of = dict(sorted(data.by_phase.items()))
    found = {phase: error_metrics(observed[rows], predicted[rows], weights[rows]) for phase, rows in rows_of.items()}
    return {phase: Errors.from_json(errors) for phase, errors in found.items()}


def lack_of_fit(observed: FloatArray, cell: NDArray[np.intp], residuals: FloatArray, free: int) -> dict[str, Any]:
    """Compare the model's error with that of the median of other rows of the same (B, S) cell.

    Parameters
    ----------
    observed, cell, residuals
        T in ms, number of the cell, and ln(observed/predicted), each (n,).
    free
        Number of fitted parameters.
    """
    cell = distinct(cell)[1]
    if len(cell) > MAX_WRITTEN_ROWS:
        some = _of_some_cells(cell)
        observed, residuals, cell = observed[some], residuals[some], distinct(cell[some])[1]
    size = np.bincount(cell)
    repeated = size[cell] > 1
    cells, rows = len(size), len(residuals)
    if not repeated.any():
        return {"reason": "no (B,S) cell was measured twice"}
    predicted = observed * np.exp(-residuals)
    floor = _leave_one_out_medians(np.log(observed), cell)
    ape = np.abs(np.exp(floor) - observed)[repeated] / observed[repeated] * 100
    result: dict[str, Any] = {
        "floor_mape_pct": float(ape.mean()),
        "model_mape_pct": float(np.mean(np.abs(predicted - observed)[repeated] / observed[repeated]) * 100),
        "repeated_rows": int(repeated.sum()),
        "cells": cells,
    }
    floor_pct = result["floor_mape_pct"]
    result["sentence"] = f"No function of B and S can do better than {floor_pct:.2g} % here."
    found = by_group(residuals, cell, np.ones(rows))
    if cells > free and found.within > 0:
        ratio = float(found.size @ found.mean**2) / (cells - free) / found.within
        result |= {"test": "F, between cells against within", "statistic": ratio}
        result["p_value"] = float(fdtrc(cells - free, rows - cells, ratio))
    return result


def noise_floor(data: FitData) -> float | None:
    """Return the mean error in percent of predicting a step by the median of its repeats: no model can do better.

    None where too few steps are repeated.
    """
    return data.once("noise floor", lambda: _noise_floor(data))


def _noise_floor(data: FitData) -> float | None:
    rows = _written_out(data)
    repeated = rows[np.bincount(data.known_cell[rows])[data.known_cell[rows]] > 1]
    if len(repeated) < max(MIN_REPEATED_ROWS, MIN_REPEATED_SHARE * len(rows)):
        return None
    cell = distinct(data.known_cell[repeated])[1]
    if len(repeated) > MAX_FLOOR_ROWS:
        some = _of_some_cells(cell)
        repeated, cell = repeated[some], distinct(cell[some])[1]
    T = data.observed[repeated]
    middle = np.exp(_leave_one_out_medians(np.log(T), cell))
    return float(np.mean(np.abs(middle - T) / T) * 100)


def _of_some_cells(cell: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return which rows (n,) belong to a sample of cells with about MAX_FLOOR_ROWS rows, even in the cells' sizes."""
    size = np.bincount(cell)
    kept = np.zeros(len(size), dtype=bool)
    kept[np.argsort(size, kind="stable")[:: len(cell) // MAX_FLOOR_ROWS + 1]] = True
    return np.asarray(kept[cell])


def _leave_one_out_medians(values: FloatArray, cell: NDArray[np.intp]) -> FloatArray:
    """Return for each row the median of the other rows of its cell; its own value where it is alone."""
    result = values.copy()
    order = np.lexsort((values, cell))
    x, sizes = values[order], np.bincount(cell)
    n = np.repeat(sizes, sizes)
    start = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank = np.arange(len(x)) - start
    more = n > 1
    # The middle ranks once one of n sorted values is taken out.
    lower, upper = (np.where(more, start + middle + (rank <= middle), 0) for middle in ((n - 2) // 2, (n - 1) // 2))
    result[order[more]] = 0.5 * (x[lower] + x[upper])[more]
    return result
