"""What the residuals say. Tests come from SciPy and statsmodels; a test that cannot be run says why instead of a
number.

Residuals are e = ln(observed/predicted), whatever the fit minimised. Tests in time order use the longest run: order
means something only within a run. Shapiro-Wilk's p-value holds up to 5,000 values, so larger data are tested on a
seeded sample. The floor of lack of fit is what rows of one (B,S) cell differ among themselves: no function of B and S
can do better.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

from latfit.stats import FloatArray, error_metrics
from latfit.trace.table import Trace

SHAPIRO_LIMIT = 5000
LAGS = 10
MIN_ROWS = 20


def diagnose(trace: Trace, predicted: FloatArray, *, free: int, seed: int = 0) -> dict[str, Any]:
    """The `diagnostics` of the JSON contract for clean rows and their latency in ms (n,) as predicted by a model with
    so many free parameters."""
    residuals = np.log(trace.floats("T_ms") / predicted)
    return {
        "normality": _normality(residuals, seed),
        "heteroscedasticity": _heteroscedasticity(trace, residuals),
        **_in_time(trace, residuals),
        "regimes": _regimes(trace, predicted),
        "lack_of_fit": _lack_of_fit(trace, predicted, residuals, free),
    }


def _normality(residuals: FloatArray, seed: int) -> dict[str, Any]:
    if len(residuals) < 8 or np.ptp(residuals) < 1e-12:
        return {"reason": "too few rows, or residuals that do not vary"}
    sample = residuals
    if len(residuals) > SHAPIRO_LIMIT:
        sample = np.random.default_rng(seed).choice(residuals, SHAPIRO_LIMIT, replace=False)
    statistic, p = distributions.shapiro(sample)
    return {
        "test": "Shapiro-Wilk",
        "statistic": float(statistic),
        "p_value": float(p),
        "n": len(sample),
        "skewness": float(distributions.skew(residuals)),
        "excess_kurtosis": float(distributions.kurtosis(residuals)),
    }


def _heteroscedasticity(trace: Trace, residuals: FloatArray) -> dict[str, Any]:
    B, S = (trace.floats(name) / trace.floats(name).max() for name in ("B", "S"))
    columns = [np.ones(len(trace)), B, *([] if np.allclose(B, S) else [S])]
    design = np.stack([column for i, column in enumerate(columns) if i == 0 or np.ptp(column) > 0], axis=1)
    if len(residuals) < MIN_ROWS or design.shape[1] < 2 or np.ptp(residuals) < 1e-12:
        return {"reason": f"needs {MIN_ROWS} rows with residuals, and B or S that vary"}
    from statsmodels.stats.diagnostic import het_breuschpagan

    statistic, p, _, _ = het_breuschpagan(residuals, design)
    return {"test": "Breusch-Pagan", "statistic": float(statistic), "p_value": float(p)}


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
    if len(series) < 3 * LAGS or np.ptp(series) < 1e-12:
        reason = {"reason": f"the longest run has fewer than {3 * LAGS} rows with residuals"}
        return {"autocorrelation": reason, "trend": reason}
    run = {"run": str(names[int(np.argmax(counts))]), "n": len(series)}
    return {"autocorrelation": {**_autocorrelation(series), **run}, "trend": {**_trend(series), **run}}


def _autocorrelation(series: FloatArray) -> dict[str, Any]:
    from statsmodels.stats.diagnostic import acorr_ljungbox
    from statsmodels.stats.stattools import durbin_watson

    table = acorr_ljungbox(series, lags=[LAGS])
    return {
        "test": "Ljung-Box",
        "lags": LAGS,
        "statistic": float(table["lb_stat"].iloc[0]),
        "p_value": float(table["lb_pvalue"].iloc[0]),
        "durbin_watson": float(durbin_watson(series)),
    }


def _trend(series: FloatArray) -> dict[str, Any]:
    """Drift of the residual over the run, with an error that allows for autocorrelation (HAC)."""
    from statsmodels.regression.linear_model import OLS

    position = np.linspace(0.0, 1.0, len(series))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels warns of series it regards as short; the p-value says it better
        fitted = OLS(series, np.stack([np.ones_like(position), position], axis=1)).fit(
            cov_type="HAC", cov_kwds={"maxlags": LAGS}
        )
    return {
        "test": "linear, HAC",
        "relative_drift": float(np.expm1(fitted.params[1])),
        "p_value": float(fitted.pvalues[1]),
    }


def _regimes(trace: Trace, predicted: FloatArray) -> dict[str, Mapping[str, float]]:
    """Errors by phase; where the trace does not name phases, a step with one token a request is decode."""
    decode = trace.floats("S") == trace.floats("B")
    phases = trace["phase"].astype(str) if "phase" in trace else np.where(decode, "decode", "prefill or mixed")
    observed = trace.floats("T_ms")
    return {
        str(phase): error_metrics(observed[phases == phase], predicted[phases == phase]) for phase in np.unique(phases)
    }


def _lack_of_fit(trace: Trace, predicted: FloatArray, residuals: FloatArray, free: int) -> dict[str, Any]:
    table = np.stack([trace.floats("B"), trace.floats("S")], axis=1)
    _, cell, size = np.unique(table, axis=0, return_inverse=True, return_counts=True)
    cell = cell.ravel()
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
    starts = np.flatnonzero(np.diff(cell[order], prepend=-1))
    for rows in np.split(order, starts[1:]):
        n = len(rows)
        if n < 2:
            continue
        x = values[rows]
        rank = np.arange(n)
        lower, upper = (n - 2) // 2, (n - 1) // 2  # the middle ranks once one of n sorted values is taken out
        result[rows] = 0.5 * (x[lower + (rank <= lower)] + x[upper + (rank <= upper)])
    return result
