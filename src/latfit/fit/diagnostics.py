"""What the residuals say: tests, errors by phase, the floor that repeats set, influence of cells, drift, error parts.

Tests in time order use the longest run: order means something only within a run. The floor of lack of fit is what rows
of one (B,S) cell differ among themselves: no function of B and S can do better. Rows of a trace made from cells are
written out before they are tested, up to WRITTEN_OUT of them: of more steps an even sample is taken, every k-th in the
order of the rows.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

from latfit.fit.by_row import log_ratios, numbered
from latfit.fit.crossval import HeldOut
from latfit.fit.drift import drift
from latfit.fit.error_parts import error_parts
from latfit.fit.influence import influence
from latfit.fit.problem import FitProblem
from latfit.fit.residual_tests import autocorrelation, heteroscedasticity, normality, trend
from latfit.fit.solve import Solution
from latfit.fit.uncertainty import Uncertainty
from latfit.stats import FloatArray, error_metrics
from latfit.trace.cell_rows import row_weights
from latfit.trace.phases import phases
from latfit.trace.table import Trace

WRITTEN_OUT = 200_000


def diagnose(trace: Trace, predicted: FloatArray, *, free: int, seed: int = 0) -> dict[str, Any]:
    """The `diagnostics` of the JSON contract for clean rows and their latency in ms (n,) as predicted by a model with
    so many free parameters."""
    regimes = _regimes(trace, predicted)
    rows = _written_out(row_weights(trace), len(trace))
    trace, predicted = trace.select(rows), predicted[rows]
    residuals = np.log(trace.floats("T_ms") / predicted)
    return {
        "normality": normality(residuals, seed),
        "heteroscedasticity": heteroscedasticity(trace.floats("B"), trace.floats("S"), residuals),
        **_in_time(trace, residuals),
        "regimes": regimes,
        "lack_of_fit": _lack_of_fit(trace, predicted, residuals, free),
    }


def explain(
    problem: FitProblem, solution: Solution, doubt: Uncertainty, trace: Trace, left_out: HeldOut | None
) -> dict[str, Any]:
    """More of the `diagnostics`: `influence` of cells, dated `drift`, and `error_parts` from rows left out."""
    found = {
        "influence": influence(problem, solution, trace),
        "drift": drift(trace, log_ratios(problem, problem.theta(solution.z), trace)),
    }
    if left_out is not None:
        found["error_parts"] = error_parts(problem, solution, doubt, trace, left_out)
    return found


def _written_out(weights: FloatArray | None, rows: int) -> NDArray[np.intp]:
    """Row numbers, each as often as it stands for a step, or in that proportion where there are too many steps."""
    if weights is None:
        return np.arange(rows)
    reached = np.cumsum(weights)
    steps = round(float(reached[-1]))
    taken = min(steps, WRITTEN_OUT)
    return np.searchsorted(reached, (np.arange(taken) + 0.5) * steps / taken)


def _in_time(trace: Trace, residuals: FloatArray) -> dict[str, Any]:
    """Autocorrelation and trend of the longest run."""
    if "t_s" not in trace:
        reason = {"reason": "the trace has no column t_s"}
        return {"autocorrelation": reason, "trend": reason}
    runs = trace["run"] if "run" in trace else np.zeros(len(trace))
    names, which, counts = np.unique(runs.astype(str), return_inverse=True, return_counts=True)
    rows = np.flatnonzero(which == int(np.argmax(counts)))
    rows = rows[np.argsort(trace.floats("t_s")[rows], kind="stable")]
    series = residuals[rows]
    run = {"run": str(names[int(np.argmax(counts))]), "n": len(series)}
    return {"autocorrelation": {**autocorrelation(series), **run}, "trend": {**trend(series), **run}}


def _regimes(trace: Trace, predicted: FloatArray) -> dict[str, Mapping[str, float]]:
    named, observed, given = phases(trace).astype(str), trace.floats("T_ms"), row_weights(trace)
    weights = np.ones(len(trace)) if given is None else given
    regimes = {str(phase): named == phase for phase in np.unique(named)}
    return {phase: error_metrics(observed[rows], predicted[rows], weights[rows]) for phase, rows in regimes.items()}


def _lack_of_fit(trace: Trace, predicted: FloatArray, residuals: FloatArray, free: int) -> dict[str, Any]:
    cell = numbered([trace.floats("B"), trace.floats("S")])
    size = np.bincount(cell)
    repeated = size[cell] > 1
    cells, rows = len(size), len(residuals)
    if not repeated.any():
        return {"reason": "no (B,S) cell was measured twice"}
    observed = trace.floats("T_ms")
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
    mean = np.bincount(cell, weights=residuals) / size
    within = float(np.sum((residuals - mean[cell]) ** 2)) / (rows - cells)
    if cells > free and within > 0:
        ratio = float(size @ mean**2) / (cells - free) / within
        result |= {"test": "F, between cells against within", "statistic": ratio}
        result["p_value"] = float(distributions.f.sf(ratio, cells - free, rows - cells))
    return result


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
