"""Prediction intervals for single steps: split conformal prediction, phase by phase.

Scores are ln(observed/predicted) of later rows of a log, or other cells of a grid: docs/theory/fitting.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import HeldOut, expanding_in_runs, held_out
from latfit.fitting.checking.drift import CERTAIN, LEAST_SHIFT, Persistence, by_run, change_point, clipped, persistence
from latfit.fitting.checking.step_noise import batch_groups
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitOptions
from latfit.model import MAX_RATIO, edges_between
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
MATERIAL = 3.0  # steps per independent sample from which autocorrelation is the reason for missing limits


@dataclass(frozen=True)
class Scores:
    """Held-out scores (m,) in rising order, and the numbers of steps and of (B, S) cells."""

    score: FloatArray  # ln(observed/predicted) (m,)
    weight: FloatArray  # independent samples that each score is worth (m,)
    steps: int
    cells: int
    in_time: Persistence  # autocorrelation of the scores of a log

    @staticmethod
    def of(data: FitData, left_out: HeldOut, ordered: bool) -> "Scores":
        """Score held-out rows. ordered: they are in time order (a log), not cells of a grid."""
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
        return float(self.weight.sum())


def worth(score: FloatArray, weight: FloatArray, cell: NDArray[np.intp]) -> FloatArray:
    """Return the independent samples that a step of each row is worth (m,), by the intraclass correlation of cells."""
    x = clipped(score, weight)
    found = by_group(x, cell, weight)
    size, n, cells = found.size, found.values, len(found.size)
    if found.freedom < 1 or cells < 2:
        return np.asarray(1.0 / size[cell])
    between = float(size @ (found.mean - float(weight @ x) / n) ** 2) / (cells - 1)
    by_cell = max(between - found.within, 0.0)
    shared = min(by_cell / max(by_cell + found.typical_size * found.within, 1e-300), 1.0)
    return np.asarray(1.0 / (shared * np.maximum(size, 1.0) + 1 - shared))[cell]


def upper_limit(scores: FloatArray, level: float, weights: FloatArray) -> float | None:
    """Return the upper conformal limit at a one-sided level; None with too few samples (`weights`, by score)."""
    order = np.argsort(scores, kind="stable")
    reached = np.cumsum(weights[order])
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
    """Return the `intervals` of a fit's JSON from held-out rows; ordered: folds follow each other in time.

    blocks: rows of the whole time range, predicted from all others; limits of drifting phases cover them too.
    """
    by_phase = {}
    for phase, rows in data.by_phase.items():
        inside = left_out.among(rows[left_out.rows])
        if len(inside.rows):
            whole = blocks.among(rows[blocks.rows]) if blocks is not None else None
            scores = Scores.of(data, inside, ordered)
            drift = _drift(data, scores, inside, whole) if ordered else {"drift": False}
            known = [inside, *([whole] if drift["drift"] and whole is not None else [])]
            limits = _limits([scores, *(Scores.of(data, each, ordered) for each in known[1:])])
            groups = _by_batch(data, known, limits, ordered)
            by_phase[phase] = {"n": scores.steps, "cells": scores.cells, **limits, **groups, **drift}
    drifting = [phase for phase, found in by_phase.items() if found["drift"]]
    every = [left_out, *([blocks] if drifting and blocks is not None else [])]
    return {
        "method": BY_TIME if ordered else BY_CELL,
        **_limits([Scores.of(data, rows, ordered) for rows in every]),
        "by_phase": by_phase,
        "drift": DRIFTS.format(" and ".join(drifting)) if drifting else "",
    }


def _by_batch(data: FitData, known: Sequence[HeldOut], limits: Mapping[str, Any], ordered: bool) -> dict[str, Any]:
    """Return the limits of groups of batch sizes whose scores spread differently; a level they lack is the phase's."""
    B = data.B[known[0].rows]
    independent = known[0].weights * limits["independent_share"]
    group = batch_groups(B, known[0].log_ratio, independent)
    spans = [(float(B[group == g].min()), float(B[group == g].max())) for g in range(int(group.max()) + 1)]
    edges = edges_between(*np.array(spans).T)
    found = []
    for g, (low, high) in enumerate(spans if len(edges) else []):
        parts = [rows.among(np.searchsorted(edges, data.B[rows.rows]) == g) for rows in known]
        own = _factors([Scores.of(data, part, ordered) for part in parts if len(part.rows)])
        for side, widest, last in (("ratio_quantiles", max, 0.0), ("lower_quantiles", min, math.inf)):
            for level, factor in own[side].items():
                if (stated := limits[side][level] if factor is None else factor) is not None:
                    own[side][level] = last = float(widest(last, stated))
        found.append({"low": low, "high": high, **own})
    return {"by_batch": found} if found else {}


def _limits(known: Sequence[Scores]) -> dict[str, Any]:
    share, fewest = min(((one.independent / max(one.steps, 1), one) for one in known), key=lambda each: each[0])
    found: dict[str, Any] = {
        **_factors(known),
        "independent_share": share,
        "in_time_share": 1 / fewest.in_time.steps_for_one,
    }
    silent = [level for level in LEVELS if level > 0.5 and found["ratio_quantiles"][f"{level:g}"] is None]
    if not silent:
        return found
    needed, independent = [math.ceil(1 / (1 - level) - 1 - 1e-9) for level in silent], fewest.independent
    steps, unit = f"{fewest.steps:,} steps in {fewest.cells:,} cells", "cells"
    if fewest.in_time.steps_for_one > MATERIAL:
        runs = fewest.in_time.runs
        steps, unit = f"{fewest.steps:,} steps {'in a row' if runs == 1 else f'of {runs:,} runs'}", "such runs"
        needed = [max(math.ceil(each * runs / independent), runs + 1) for each in needed]
    levels = " and ".join(f"{100 * (2 * level - 1):g} %" for level in silent)
    measure = f"measure at least {' and '.join(f'{each:,}' for each in needed)} {unit}"
    reason = f"{steps} carry {independent:.0f} independent samples, too few for intervals at {levels}: {measure}"
    return {**found, "reason": reason}


def _factors(known: Sequence[Scores]) -> dict[str, dict[str, float | None]]:
    found: dict[str, dict[str, float | None]] = {}
    for kind, side in (("ratio_quantiles", 1), ("lower_quantiles", -1)):
        found[kind] = {}
        for level in LEVELS:
            ends = [upper_limit(side * scores.score, level, scores.weight) for scores in known]
            stated = [end for end in ends if end is not None and abs(end) < math.log(MAX_RATIO)]
            found[kind][f"{level:g}"] = math.exp(side * (max(stated) + ROUNDING)) if len(stated) == len(ends) else None
    return found


def _drift(data: FitData, scores: Scores, later: HeldOut, blocks: HeldOut | None) -> dict[str, Any]:
    """Return whether a phase drifts: its level changes, or later steps differ from blocks of the whole time."""
    change = change_point(later.log_ratio + data.dither[later.rows])
    if change is not None and change.p_value < CERTAIN and abs(change.shift) > math.log1p(LEAST_SHIFT):
        return {"drift": True, "relative_shift": math.expm1(change.shift)}
    if blocks is None:
        return {"drift": False}
    own = clipped(scores.score)
    shift = abs(float(own.mean() - clipped(blocks.log_ratio + data.dither[blocks.rows]).mean()))
    error = STANDARD_ERRORS * float(own.std()) / math.sqrt(scores.independent)
    return {"drift": shift > max(math.log1p(LEAST_SHIFT), error)}
