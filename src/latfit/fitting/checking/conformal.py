"""Prediction intervals for single steps: split conformal prediction, phase by phase.

The score of a step is ln(observed/predicted) on held-out rows: later rows of a log, other cells of a grid. Ranks count
independent samples only, because repeats of a cell and neighbours in time share noise. Phases that drift get wider
limits. Derivation: docs/theory/fitting.md, "Prediction intervals" and "Independent samples".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.autocorrelation import Persistence, by_run, clipped, persistence
from latfit.fitting.checking.crossval import HeldOut, expanding_in_runs, held_out
from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.drift import CERTAIN, LEAST_SHIFT, change_point
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray, by_group, distinct

LEVELS = (0.5, 0.9, 0.95, 0.99)
ROUNDING = 1e-9  # added to a limit in ln T, so that a step exactly on the limit lies inside
BY_TIME = "split conformal by phase, each part of the time predicted from earlier parts, observed/predicted"
BY_CELL = "split conformal by phase on cells left out, observed/predicted"

DRIFTS = (
    "The latency of {} steps drifts: intervals from earlier steps cover fewer of the later ones than stated."
    " Measure again."
)
STANDARD_ERRORS = 3.0  # later steps that differ from earlier ones by more standard errors have drifted
MATERIAL = 3.0  # report autocorrelation if it reduces the independent samples by more than this factor

Factors = dict[str, float | None]


@dataclass(frozen=True)
class Scores:
    """Held-out scores (m,) in rising order. steps, cells: number of steps and of (B, S) cells."""

    score: FloatArray  # ln(observed/predicted) (m,)
    weight: FloatArray  # independent samples that each score is worth (m,)
    steps: int
    cells: int
    in_time: Persistence  # autocorrelation of the scores of a log

    @staticmethod
    def of(data: FitData, left_out: HeldOut, ordered: bool) -> "Scores":
        """Score held-out rows of a trace. ordered: the rows are in time order (a log), not cells of a grid."""
        cell = distinct(data.cell[left_out.rows])[1]
        score, weight, in_time = left_out.log_ratio + data.dither[left_out.rows], left_out.weights, Persistence()
        if ordered and data.single:
            in_time = persistence(by_run(data, left_out.rows, score))
        count = weight / in_time.steps_for_one if ordered or not len(cell) else weight * worth(score, weight, cell)
        rising = np.argsort(score, kind="stable")
        steps, cells = round(float(weight.sum())), int(cell.max(initial=-1)) + 1
        return Scores(score[rising], count[rising], steps, cells, in_time)

    @property
    def independent(self) -> float:
        """Number of independent samples."""
        return float(self.weight.sum())

    @property
    def independent_share(self) -> float:
        return self.independent / max(self.steps, 1)

    def limit(self, level: float, side: int = 1) -> float | None:
        """Return the limit of side times a new score at a one-sided level; None if there are too few samples."""
        return upper_limit(side * self.score, level, self.weight)

    @property
    def silent(self) -> list[float]:
        """One-sided levels of the two-sided intervals for which there are too few samples."""
        return [level for level in LEVELS if level > 0.5 and self.limit(level) is None]


def worth(score: FloatArray, weight: FloatArray, cell: NDArray[np.intp]) -> FloatArray:
    """Return the independent samples that one step of each row is worth (m,), by the intraclass correlation of cells.
    weight: steps that each row represents (m,); cell: cell number of each row (m,)."""
    x = clipped(score, weight)
    found = by_group(x, cell, weight)
    size, n, cells = found.size, found.values, len(found.size)
    if found.freedom < 1 or cells < 2:
        return np.asarray(1.0 / size[cell])
    between = float(size @ (found.mean - float(weight @ x) / n) ** 2) / (cells - 1)
    by_cell = max(between - found.within, 0.0)
    shared = min(by_cell / max(by_cell + found.typical_size * found.within, 1e-300), 1.0)
    return np.asarray(1.0 / (shared * np.maximum(size, 1.0) + 1 - shared))[cell]


def upper_limit(scores: FloatArray, level: float, weights: FloatArray | None = None) -> float | None:
    """Return the upper conformal limit of scores (n,) at a one-sided level; None if there are too few samples. weights:
    independent samples that each score is worth (n,), by default 1."""
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(np.ones(len(scores)) if weights is None else weights[order])
    n = float(reached[-1]) if len(reached) else 0.0
    rank = (n + 1) * level
    if n <= 0 or rank > n + 1e-9:
        return None
    return float(scores[order[min(int(np.searchsorted(reached, rank - 1e-9 * n)), len(order) - 1)]])


def later_rows(data: FitData, options: FitOptions, theta: FloatArray) -> HeldOut | None:
    """Predict the second half of every run, part by part, from all earlier rows; None for a trace without time."""
    return held_out(data, options, theta, expanding_in_runs(data)) if data.in_time else None


def prediction_intervals(
    data: FitData,
    left_out: HeldOut,
    *,
    ordered: bool,
    blocks: HeldOut | None = None,
) -> dict[str, Any]:
    """Return the `intervals` section of a fit's JSON from held-out rows. data, left_out: the rows, and those predicted
    while left out. ordered: whether folds follow each other in time. blocks: rows of the whole time range, each block
    predicted from all others; limits of drifting phases cover them too."""
    by_phase = {}
    blocks = blocks if ordered else None

    def scores_of(rows: HeldOut) -> Scores:
        return Scores.of(data, rows, ordered)

    for phase, rows in data.by_phase.items():
        inside = left_out.among(rows[left_out.rows])
        if len(inside.rows):
            scores, drift, limits = scores_of(inside), {"drift": False}, []
            whole = blocks.among(rows[blocks.rows]) if blocks is not None else None
            if ordered:
                drift = _drift(data, scores, inside, whole)
            if drift["drift"] and whole is not None:
                limits = [scores_of(whole)]
            by_phase[phase] = {"n": scores.steps, "cells": scores.cells, **_limits([scores, *limits]), **drift}
    drifting = [phase for phase, found in by_phase.items() if found["drift"]]
    limits = [scores_of(left_out), *([scores_of(blocks)] if drifting and blocks is not None else [])]
    return {
        "method": BY_TIME if ordered else BY_CELL,
        **_limits(limits),
        "by_phase": by_phase,
        "drift": DRIFTS.format(" and ".join(drifting)) if drifting else "",
    }


def _limits(known: Sequence[Scores]) -> dict[str, Any]:
    """Return limits and independent shares of one phase, or of all steps. known: scores that the limits must cover."""
    fewest = min(known, key=lambda scores: scores.independent_share)
    found: dict[str, Any] = {
        **_factors(known),
        "independent_share": fewest.independent_share,
        "in_time_share": 1 / fewest.in_time.steps_for_one,
    }
    if not (silent := fewest.silent):
        return found
    alone = fewest.independent * fewest.in_time.steps_for_one
    needed = math.ceil(1 / (1 - max(silent)) - 1 - 1e-9)
    lost = [level for level in silent if (alone + 1) * level <= alone]
    carried = f"{fewest.steps:,} steps in {fewest.cells:,} cells carry {fewest.independent:.0f} independent samples"
    measure = f"measure at least {needed:,} cells"
    if lost and MATERIAL * fewest.independent < alone:
        runs = fewest.in_time.runs
        where = "in a row" if runs == 1 else f"of {runs:,} runs"
        carried = (
            f"{fewest.steps:,} steps {where} carry {max(fewest.independent, 1):.0f} independent samples"
            f" ({fewest.in_time.why})"
        )
        found["autocorrelated"] = f"{carried}, too few for intervals at {_levels(lost)}"
        measure = f"measure at least {max(math.ceil(needed * runs / fewest.independent), runs + 1):,} such runs"
    return {**found, "reason": f"{carried}, too few for intervals at {_levels(silent)}: {measure}"}


def _levels(one_sided: Sequence[float]) -> str:
    return " and ".join(f"{100 * (2 * level - 1):g} %" for level in one_sided)


def _factors(known: Sequence[Scores]) -> dict[str, Factors]:
    found: dict[str, Factors] = {}
    for kind, side in (("ratio_quantiles", 1), ("lower_quantiles", -1)):
        found[kind] = {}
        for level in LEVELS:
            ends = [scores.limit(level, side) for scores in known]
            told = [end for end in ends if end is not None]
            found[kind][f"{level:g}"] = math.exp(side * (max(told) + ROUNDING)) if len(told) == len(ends) else None
    return found


def _drift(data: FitData, scores: Scores, later: HeldOut, blocks: HeldOut | None) -> dict[str, Any]:
    """Return whether a phase drifts, and the relative shift if its level changes. scores, later: the later steps, in
    time order. blocks: steps of the whole time range, predicted from all others, from which steps predicted by earlier
    ones differ if the level rises slowly."""
    change = change_point(later.log_ratio + data.dither[later.rows])
    if change is not None and change.p_value < CERTAIN and abs(change.shift) > math.log1p(LEAST_SHIFT):
        return {"drift": True, "relative_shift": math.expm1(change.shift)}
    if blocks is None:
        return {"drift": False}
    own = clipped(scores.score)
    shift = abs(float(own.mean() - clipped(blocks.log_ratio + data.dither[blocks.rows]).mean()))
    error = STANDARD_ERRORS * float(own.std()) / math.sqrt(scores.independent)
    return {"drift": shift > max(math.log1p(LEAST_SHIFT), error)}
