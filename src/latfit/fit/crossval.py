"""Cross-validation: errors on rows that the fit has not seen, in the way the data were gathered (see `folds`).

The default scheme leaves out whole cells of a designed grid, and contiguous blocks of a log in time order. Beside it
stand harder questions: later rows (expanding window), a region of B and S that was never measured, and more tokens than
were ever measured. All of them give the mean over rows and the spread over folds, and the ratios observed/predicted of
the rows left out, from which `intervals` makes prediction limits.

The loss's scale and every parameter are found anew in each fold; only the start comes from the full fit, which saves
the search and cannot leak, because the optimum does not depend on it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fit.by_row import log_ratios, weights_by_row
from latfit.fit.folds import (
    BY_CELL,
    BY_TIME,
    FOLDS,
    Fold,
    assign_folds,
    beyond_in_tokens,
    by_fold,
    expanding_in_runs,
    in_time,
    regions,
    spread,
)
from latfit.fit.problem import FitOptions, make_problem
from latfit.fit.solve import solve
from latfit.model.features import SOURCES
from latfit.stats import FloatArray, error_metrics
from latfit.trace.cell_rows import WEIGHT
from latfit.trace.table import Trace

LEVELS = (0.5, 0.9, 0.95, 0.99)

__all__ = [
    "BY_CELL",
    "BY_TIME",
    "FOLDS",
    "LEVELS",
    "CrossValidation",
    "HeldOut",
    "assign_folds",
    "cross_validate",
    "further_validation",
    "held_out",
    "scores_of",
]


@dataclass(frozen=True)
class HeldOut:
    """Rows of a trace as they were predicted while left out, in the order of the folds.

    rows: their numbers in the trace (m,).  fold: number of the fold (m,), in time order where the folds are.
    log_ratio: ln(observed/predicted) (m,).  weights: how many steps each stands for (m,).
    """

    rows: NDArray[np.intp]
    fold: NDArray[np.int64]
    log_ratio: FloatArray
    weights: FloatArray

    def among(self, rows: NDArray[np.bool_]) -> "HeldOut":
        """Those of the rows (m,) that are true."""
        return HeldOut(self.rows[rows], self.fold[rows], self.log_ratio[rows], self.weights[rows])


@dataclass(frozen=True)
class CrossValidation:
    """Scores for the JSON contract, and the rows as they were predicted while left out."""

    scores: Mapping[str, Any]
    held_out: HeldOut


def cross_validate(trace: Trace, options: FitOptions, theta: FloatArray) -> CrossValidation | None:
    """K-fold from the full fit's theta as start; None where too little would be left to fit or to test on."""
    scheme, fold = assign_folds(trace, options.seed)
    left_out = held_out(trace, options, theta, by_fold(fold)) if int(fold.max()) > 0 else None
    if left_out is None or len(left_out.rows) < len(trace):
        return None
    return CrossValidation({"scheme": scheme, **scores_of(trace, left_out)}, left_out)


def held_out(trace: Trace, options: FitOptions, theta: FloatArray, folds: Iterable[Fold]) -> HeldOut | None:
    """Fit each fold's training rows from theta as start and predict its test rows; folds whose training rows are too
    few for the free parameters are passed over. None where no fold is left."""
    parts: list[tuple[NDArray[np.intp], int, FloatArray]] = []
    read = Trace({name: trace[name] for name in ("T_ms", *SOURCES, WEIGHT) if name in trace})
    for number, (train, test) in enumerate(folds):
        problem = make_problem(read.select(train), options)
        if problem.rows <= len(problem.free) or len(test) == 0:
            continue
        solution = solve(problem, warm=problem.coordinates(theta))
        parts.append((test, number, log_ratios(problem, problem.theta(solution.z), read.select(test))))
    if not parts:
        return None
    rows = np.concatenate([test for test, _, _ in parts])
    fold = np.repeat([number for _, number, _ in parts], [len(test) for test, _, _ in parts])
    return HeldOut(rows, fold, np.concatenate([ratio for _, _, ratio in parts]), weights_by_row(trace)[rows])


def scores_of(trace: Trace, left_out: HeldOut) -> dict[str, Any]:
    """The errors of a cross-validation: over all rows left out, by fold, and their spread."""
    observed = trace.floats("T_ms")[left_out.rows]
    predicted = observed * np.exp(-left_out.log_ratio)
    whole = error_metrics(observed, predicted, left_out.weights)
    errors = []
    for number in np.unique(left_out.fold):
        inside = left_out.fold == number
        errors.append(error_metrics(observed[inside], predicted[inside], left_out.weights[inside])["mape_pct"])
    return {
        "folds": len(errors),
        **{name: whole[name] for name in ("mape_pct", "median_ape_pct", "p90_ape_pct", "rmse_ms")},
        "mape_pct_by_fold": errors,
        "mape_pct_mean": float(np.mean(errors)),
        "mape_pct_sd": spread(errors),
    }


def further_validation(
    trace: Trace, options: FitOptions, theta: FloatArray, later: HeldOut | None = None
) -> dict[str, Any]:
    """Harder questions than the default scheme, by name: `expanding_window` (later rows), `by_region` (a part of the
    plane of B and S never measured), `extrapolation_S` (more tokens than measured); those that the rows can answer.

    later: the expanding window's rows, where they have been predicted already.
    """
    found: dict[str, Any] = {}
    if in_time(trace):
        later = later or held_out(trace, options, theta, expanding_in_runs(trace))
        if later is not None:
            found["expanding_window"] = scores_of(trace, later)
    named = list(regions(trace))
    if (apart := held_out(trace, options, theta, [fold for _, fold in named])) is not None:
        scores = scores_of(trace, apart)
        used = [named[number][0] for number in np.unique(apart.fold)]
        found["by_region"] = {**scores, "regions": dict(zip(used, scores["mape_pct_by_fold"], strict=True))}
    fold = beyond_in_tokens(trace)
    if fold is not None and (beyond := held_out(trace, options, theta, [fold])) is not None:
        trained = float(trace.floats("S")[fold[0]].max())
        found["extrapolation_S"] = {**scores_of(trace, beyond), "trained_up_to_S": trained}
    return found
