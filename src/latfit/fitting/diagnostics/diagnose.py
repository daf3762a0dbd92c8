"""What the residuals say: tests, errors by phase, the floor that repeats set, influence of cells, drift, error parts.

Residuals are e = ln(observed/predicted), whatever the fit minimised. Rows of a trace made from cells are written out
before they are tested, up to WRITTEN_OUT of them: of more steps an even sample is taken, every k-th in the order of the
rows. A test that cannot be run gives the reason instead of a number; tests in time order use the longest run, because
order means something only within a run. What to know of each:

* Shapiro-Wilk's p-value holds up to 5,000 values (Royston 1995), so larger data are tested on a seeded sample; with
  thousands of values any real trace is rejected, and skewness and kurtosis say how far it matters. Anderson-Darling
  looks at the tails more.
* Breusch-Pagan in Koenker's form: n R^2 of e^2 on (1, B, S) is chi^2 where the spread does not depend on B and S.
* Durbin-Watson is 2 (1 - r_1) up to its ends; its tables are not for nonlinear fits. Ljung-Box tests the first lags
  together: Q = n (n+2) sum_k r_k^2/(n-k) is chi^2.
* The trend's p-value allows for autocorrelation (Newey-West standard errors): without, neighbours that share their
  noise look like a trend.

The floor of lack of fit is what rows of one (B,S) cell differ among themselves: no function of B and S can do better.

The mean square of ln(observed/predicted) on held-out rows has three parts that add up: the noise of the measurement,
which rows of one cell show among themselves; the uncertainty of the parameters, from their covariance; and the rest,
which is what the model's structure misses. A cell here agrees in everything that the trace knows of a step, whether
the model reads it or not. Where no cell was measured twice, noise and structure cannot be told apart.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from latfit.fitting.checking.crossval import HeldOut
from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.drift import drift
from latfit.fitting.diagnostics.influence import influence
from latfit.fitting.diagnostics.residual_tests import (
    anderson_darling,
    breusch_pagan,
    durbin_watson,
    ljung_box,
    moments,
    shapiro_wilk,
    slope_in_time,
)
from latfit.fitting.problem import FitProblem, steps_by_row
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.covariance import Uncertainty, relative_error_at
from latfit.model import Diagnostics, Errors
from latfit.stats import FloatArray, by_group, distinct, error_metrics

SHAPIRO_LIMIT = 5000
LAGS = 10
MIN_ROWS = 20
FEW = 8
STILL = 1e-12


def normality(residuals: FloatArray, seed: int = 0) -> dict[str, Any]:
    """Shapiro-Wilk and Anderson-Darling of residuals (n,), with skewness and excess kurtosis."""
    if len(residuals) < FEW or np.ptp(residuals) < STILL:
        return {"reason": "too few rows, or residuals that do not vary"}
    sample = residuals
    if len(residuals) > SHAPIRO_LIMIT:
        sample = np.random.default_rng(seed).choice(residuals, SHAPIRO_LIMIT, replace=False)
    if np.ptp(sample) < STILL:
        return {"reason": "residuals that hardly vary"}
    statistic, p = shapiro_wilk(sample)
    anderson, anderson_p = anderson_darling(sample)
    skewness, kurtosis = moments(residuals)
    found = {
        "test": "Shapiro-Wilk",
        "statistic": statistic,
        "p_value": p,
        "n": len(sample),
        "anderson_darling": _finite(anderson),
        "anderson_darling_p_value": _finite(anderson_p),
        "skewness": skewness,
        "excess_kurtosis": kurtosis,
    }
    if len(residuals) > SHAPIRO_LIMIT:
        found["note"] = (
            f"a sample of {SHAPIRO_LIMIT:,} of {len(residuals):,} residuals; so many always reject: skewness and"
            " kurtosis say how far it matters"
        )
    return found


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def heteroscedasticity(B: FloatArray, S: FloatArray, residuals: FloatArray) -> dict[str, Any]:
    """Breusch-Pagan of residuals (n,) on B and S (n,)."""
    B, S = B / B.max(), S / S.max()
    columns = [np.ones_like(B), B, *([] if np.allclose(B, S) else [S])]
    design = np.stack([column for i, column in enumerate(columns) if i == 0 or np.ptp(column) > 0], axis=1)
    if len(residuals) < MIN_ROWS or design.shape[1] < 2 or np.ptp(residuals**2) < STILL:
        return {"reason": f"needs {MIN_ROWS} rows with residuals, and B or S that vary"}
    statistic, p = breusch_pagan(residuals, design)
    return {"test": "Breusch-Pagan", "statistic": statistic, "p_value": p}


def autocorrelation(series: FloatArray) -> dict[str, Any]:
    """Ljung-Box over ten lags and Durbin-Watson of residuals in time order (n,)."""
    if len(series) < 3 * LAGS or np.ptp(series) < STILL:
        return {"reason": f"fewer than {3 * LAGS} rows with residuals"}
    statistic, p = ljung_box(series, LAGS)
    return {
        "test": "Ljung-Box",
        "lags": LAGS,
        "statistic": statistic,
        "p_value": p,
        "durbin_watson": durbin_watson(series),
    }


def trend(series: FloatArray) -> dict[str, Any]:
    """Drift of residuals in time order (n,) from first to last, with an error that allows for autocorrelation."""
    if len(series) < 3 * LAGS or np.ptp(series) < STILL:
        return {"reason": f"fewer than {3 * LAGS} rows with residuals"}
    rise, p = slope_in_time(series, LAGS)
    return {
        "test": "linear, HAC",
        "relative_drift": float(np.expm1(rise)),
        "slope_per_row": rise / (len(series) - 1),
        "p_value": p if np.isfinite(p) else None,
    }


def error_parts(
    problem: FitProblem, solution: Solution, doubt: Uncertainty, data: FitData, left_out: HeldOut
) -> dict[str, Any]:
    """Shares of the mean squared error on rows left out: `model_structure`, `parameter_uncertainty`,
    `measurement_noise` (the first and last as `structure_and_noise` where they cannot be told apart)."""
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


WRITTEN_OUT = 200_000


def diagnose(
    problem: FitProblem,
    solution: Solution,
    doubt: Uncertainty,
    data: FitData,
    log_ratio: FloatArray,
    left_out: HeldOut | None,
) -> Diagnostics:
    """Everything that the residuals say of a solved problem. log_ratio: ln(observed/predicted) of all rows (n,);
    left_out: rows that were predicted while left out."""
    hangs_on, drifts = influence(problem, solution, data), drift(data, log_ratio)
    rows = _written_out(data)
    residuals = log_ratio[rows]
    return Diagnostics(
        normality(residuals, problem.options.seed),
        heteroscedasticity(data.B[rows], data.S[rows], residuals),
        *_in_time(data, rows, residuals),
        regimes=_regimes(data, log_ratio),
        lack_of_fit=lack_of_fit(data.observed[rows], data.cell[rows], residuals, len(problem.free))
        | ({} if (floor := noise_floor(data)) is None else {"noise_floor_pct": floor}),
        influence=hangs_on,
        drift=drifts,
        error_parts=None if left_out is None else error_parts(problem, solution, doubt, data, left_out),
    )


def _written_out(data: FitData) -> NDArray[np.intp]:
    """Row numbers, each as often as it stands for a step, or in that proportion where there are too many steps."""
    if data.single:
        return np.arange(len(data))
    reached = np.cumsum(data.weights)
    steps = round(float(reached[-1]))
    taken = min(steps, WRITTEN_OUT)
    return np.searchsorted(reached, (np.arange(taken) + 0.5) * steps / taken)


def _in_time(data: FitData, written: NDArray[np.intp], residuals: FloatArray) -> tuple[dict[str, Any], dict[str, Any]]:
    """Autocorrelation and trend of the longest run of the rows that were written out, with their residuals (n,)."""
    if data.times is None:
        reason = {"reason": "the trace has no column t_s"}
        return reason, reason
    runs = np.full(len(written), "0.0") if data.run is None else data.run[written]
    names, which, counts = np.unique(runs, return_inverse=True, return_counts=True)
    rows = np.flatnonzero(which == int(np.argmax(counts)))
    rows = rows[np.argsort(data.times[written[rows]], kind="stable")]
    series = residuals[rows]
    run = {"run": str(names[int(np.argmax(counts))]), "n": len(series)}
    return {**autocorrelation(series), **run}, {**trend(series), **run}


def _regimes(data: FitData, log_ratio: FloatArray) -> dict[str, Errors]:
    observed, weights, predicted = data.observed, data.weights, data.observed * np.exp(-log_ratio)
    rows_of = dict(sorted(data.by_phase.items()))
    found = {phase: error_metrics(observed[rows], predicted[rows], weights[rows]) for phase, rows in rows_of.items()}
    return {phase: Errors.from_json(errors) for phase, errors in found.items()}


def lack_of_fit(observed: FloatArray, cell: NDArray[np.intp], residuals: FloatArray, free: int) -> dict[str, Any]:
    """How far the model is from what rows of one cell differ by. observed: T in ms, cell: of each row, residuals:
    ln(observed/predicted), each (n,); free: parameters that were fitted."""
    cell = distinct(cell)[1]
    if len(cell) > WRITTEN_OUT:
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


MANY = 100_000
REPEATED = 0.2
"""Share of the rows that have others like them from which these speak for all."""


def noise_floor(data: FitData) -> float | None:
    """Mean error in percent of a step predicted by the median of the others that agree in all that is known of them:
    no model can do better. None where too few steps are repeated to tell."""
    return data.once("noise floor", lambda: _noise_floor(data))


def _noise_floor(data: FitData) -> float | None:
    rows = _written_out(data)
    repeated = rows[np.bincount(data.known_cell[rows])[data.known_cell[rows]] > 1]
    if len(repeated) < max(MIN_ROWS, REPEATED * len(rows)):
        return None
    cell = distinct(data.known_cell[repeated])[1]
    if len(repeated) > MANY:
        some = _of_some_cells(cell)
        repeated, cell = repeated[some], distinct(cell[some])[1]
    T = data.observed[repeated]
    middle = np.exp(_leave_one_out_medians(np.log(T), cell))
    return float(np.mean(np.abs(middle - T) / T) * 100)


def _of_some_cells(cell: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which rows (n,) belong to some of the cells, drawn evenly in the order of their sizes: a few large ones may hold
    most of the rows. About MANY rows do."""
    size = np.bincount(cell)
    kept = np.zeros(len(size), dtype=bool)
    kept[np.argsort(size, kind="stable")[:: len(cell) // MANY + 1]] = True
    return np.asarray(kept[cell])


def _leave_one_out_medians(values: FloatArray, cell: NDArray[np.intp]) -> FloatArray:
    """For each row the median of the other rows of its cell (its own value where it is alone)."""
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
