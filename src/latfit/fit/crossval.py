"""Cross-validation, in the way the data were gathered.

A designed grid (no time, or repetitions of cells) is split by cells: all rows of one (B,S) leave together, so that a
repeat never predicts itself. A log in time order is split into contiguous blocks: neighbours in time share their noise,
and a log's cells are as unequal as the load was, so leaving out whole cells would ask for points the load never
leaves out.

It gives two things: errors on rows that the fit has not seen, and the ratios observed/predicted there, whose order
statistics are upper factors for a step's latency. With n ratios the k-th smallest, k = ceil((n+1) level), is not
exceeded by a new step with at least that probability when steps are exchangeable (split conformal prediction,
Vovk et al. 2005); where k > n the data cannot tell that level.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fit.problem import FitOptions, make_problem
from latfit.fit.solve import solve
from latfit.stats import FloatArray, error_metrics
from latfit.trace.table import Trace

FOLDS = 5
LEVELS = (0.5, 0.9, 0.95, 0.99)

BY_CELL = "K-fold over (B,S) cells"
BY_TIME = "K-fold over contiguous blocks of time"


@dataclass(frozen=True)
class CrossValidation:
    """Scores for the JSON contract, and the ratio observed/predicted of every row when it was left out (n,)."""

    scores: Mapping[str, Any]
    ratios: FloatArray


def cross_validate(trace: Trace, options: FitOptions, theta: FloatArray) -> CrossValidation | None:
    """K-fold from the full fit's theta as start; None where too little would be left to fit or to test on."""
    scheme, fold = assign_folds(trace, options.seed)
    folds = int(fold.max()) + 1
    free = len(make_problem(trace, options).free)
    if folds < 2 or min(int((fold != i).sum()) for i in range(folds)) <= free:
        return None
    observed = trace.floats("T_ms")
    predicted = np.empty(len(trace))
    errors = []
    for left_out in range(folds):
        problem = make_problem(trace.select(fold != left_out), options)
        part = solve(problem, warm=problem.coordinates(theta))
        test = fold == left_out
        steps = {name: trace.floats(name)[test] for name in problem.steps}
        predicted[test] = problem.model.latency_ms(problem.theta(part.z), steps)
        errors.append(error_metrics(observed[test], predicted[test])["mape_pct"])
    whole = error_metrics(observed, predicted)
    scores = {name: whole[name] for name in ("mape_pct", "median_ape_pct", "p90_ape_pct", "rmse_ms")}
    spread = {"mape_pct_by_fold": errors, "mape_pct_sd": float(np.std(errors, ddof=1))}
    return CrossValidation({"scheme": scheme, "folds": folds, **scores, **spread}, observed / predicted)


def assign_folds(trace: Trace, seed: int = 0) -> tuple[str, NDArray[np.int64]]:
    """(scheme, fold number of each row (n,)); a single fold where there are fewer than four cells or rows."""
    if "t_s" in trace and "rep" not in trace:
        runs = trace["run"].astype(str) if "run" in trace else np.zeros(len(trace))
        order = np.lexsort((trace.floats("t_s"), np.unique(runs, return_inverse=True)[1]))
        folds = FOLDS if len(trace) >= 4 * FOLDS else 1
        fold = np.empty(len(trace), dtype=np.int64)
        fold[order] = np.arange(len(trace)) * folds // len(trace)
        return BY_TIME, fold
    table = np.stack([trace.floats("B"), trace.floats("S")], axis=1)
    cells, cell = np.unique(table, axis=0, return_inverse=True)
    folds = max(1, min(FOLDS, len(cells) // 2))
    return BY_CELL, (np.random.default_rng(seed).permutation(len(cells)) % folds)[cell.ravel()]


def ratio_quantiles(ratios: FloatArray) -> dict[str, float | None]:
    """Factors by level such that a share `level` of new steps stays below factor x typical latency."""
    ordered = np.sort(ratios)
    ranks = {level: math.ceil((len(ordered) + 1) * level - 1e-9) for level in LEVELS}
    return {f"{level:g}": float(ordered[rank - 1]) if rank <= len(ordered) else None for level, rank in ranks.items()}
