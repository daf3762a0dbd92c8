"""What the residuals show: errors by phase, the noise floor, drift, and parts of the held-out error."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import HeldOut
from latfit.fitting.checking.drift import drift
from latfit.fitting.covariance import Uncertainty, relative_error_at
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem, steps_by_row
from latfit.model import Diagnostics, Errors
from latfit.stats import FloatArray, by_group, error_metrics

MAX_REPEATS = 200_000  # steps that weighted rows are written out as, at most
MIN_REPEATED_ROWS, MIN_REPEATED_SHARE = 20, 0.2  # of the rows, from which repeats speak for all


def diagnose(
    problem: FitProblem,
    theta: FloatArray,
    doubt: Uncertainty,
    data: FitData,
    log_ratio: FloatArray,
    left_out: HeldOut | None,
) -> Diagnostics:
    observed, predicted, weights = data.observed, data.observed * np.exp(-log_ratio), data.weights
    return Diagnostics(
        regimes={
            phase: Errors.from_json(error_metrics(observed[rows], predicted[rows], weights[rows]))
            for phase, rows in sorted(data.by_phase.items())
        },
        lack_of_fit=lack_of_fit(data, log_ratio),
        drift=drift(data, log_ratio),
        error_parts=None if left_out is None else error_parts(problem, theta, doubt, data, left_out),
    )


def error_parts(
    problem: FitProblem, theta: FloatArray, doubt: Uncertainty, data: FitData, left_out: HeldOut
) -> dict[str, Any]:
    """Return shares of the squared held-out error; without repeats, structure and noise are one part."""
    whole = float(np.average(left_out.log_ratio**2, weights=left_out.weights))
    if not np.isfinite(whole) or whole <= 1e-20:
        return {"reason": "the rows left out are predicted without error"}
    errors = relative_error_at(problem, theta, doubt, steps_by_row(problem, data))[left_out.rows]
    uncertain = min(float(np.average(errors**2, weights=left_out.weights)) / whole, 1.0)
    parts = {"rms_pct": 100 * float(np.sqrt(whole)), "parameter_uncertainty": uncertain}
    cells = by_group(np.log(data.observed), data.known_cell, data.weights)
    if cells.freedom < 1:
        return {**parts, "structure_and_noise": 1 - uncertain}
    noise = min(cells.within / whole, 1 - uncertain)
    return {**parts, "measurement_noise": noise, "model_structure": 1 - uncertain - noise}


def lack_of_fit(data: FitData, log_ratio: FloatArray) -> dict[str, Any]:
    """Compare the model's error with that of medians of other steps of the same cell (B, S, or all known columns)."""
    ape, rows = _errors_of_repeats(data, data.cell)
    if not len(rows):
        return {"reason": "no (B,S) cell was measured twice"}
    own = 100 * np.abs(np.expm1(-log_ratio[rows]))
    found = {"floor_mape_pct": float(ape.mean()), "model_mape_pct": float(own.mean())}
    ape, rows = _errors_of_repeats(data, data.known_cell)
    if len(rows) >= MIN_REPEATED_ROWS and len(np.unique(rows)) >= MIN_REPEATED_SHARE * len(data):
        found["noise_floor_pct"] = float(ape.mean())
    return found


def _errors_of_repeats(data: FitData, cell: NDArray[np.intp]) -> tuple[FloatArray, NDArray[np.intp]]:
    """Return errors in percent (k,) of predicting steps by the median of other steps of their cell, and their rows."""
    share = min(MAX_REPEATS / float(data.weights.sum()), 1.0)
    count = np.ones(len(data)) if data.single else np.maximum(np.round(share * data.weights), 1)
    rows = np.repeat(np.arange(len(data)), count.astype(np.intp))
    order = rows[np.lexsort((data.observed[rows], cell[rows]))]
    x, sizes = np.log(data.observed[order]), np.bincount(cell[rows])
    n, start = np.repeat(sizes, sizes), np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank, more = np.arange(len(x)) - start, n > 1
    # The middle ranks once one of n sorted values is taken out.
    lower, upper = (np.where(more, start + middle + (rank <= middle), 0) for middle in ((n - 2) // 2, (n - 1) // 2))
    return 100 * np.abs(np.expm1(0.5 * (x[lower] + x[upper]) - x))[more], order[more]
