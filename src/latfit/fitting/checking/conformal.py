"""Prediction intervals for single steps: split conformal prediction, phase by phase.

The score of a step is ln(observed/predicted) on held-out rows: later rows of a log, other cells of a grid. Ranks count
independent samples only, because repeats of a cell and neighbours in time share noise. Coverage is checked on later
rows, and phases that drift get wider limits. Derivation: docs/theory/fitting.md, "Prediction intervals" and
"Independent samples".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.autocorrelation import Persistence, TimeOrder, clipped, persistence
from latfit.fitting.checking.crossval import HeldOut, expanding_in_runs, held_out
from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.drift import CERTAIN, LEAST_SHIFT, change_point
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray, by_group, distinct

LEVELS = (0.5, 0.9, 0.95, 0.99)
ROUNDING = 1e-9
"""Added to a limit in ln T, so that a step exactly on the limit lies inside."""
BY_TIME = "split conformal by phase, each part of the time predicted from earlier parts, observed/predicted"
BY_CELL = "split conformal by phase on cells left out, observed/predicted"

Z_99 = 2.5758

STANDARD_ERRORS = 3.0
"""Later steps that differ from earlier ones by more standard errors have drifted."""
MATERIAL = 3.0
"""Report autocorrelation if it reduces the independent samples by more than this factor."""

Factors = dict[str, float | None]


@dataclass(frozen=True)
class Scores:
    """Held-out scores (m,) in rising order.

    Attributes
    ----------
    score
        ln(observed/predicted) (m,).
    fold
        Fold number (m,).
    weight
        Independent samples that each score is worth (m,), with autocorrelation.
    by_cell
        The same without autocorrelation (m,).
    steps, cells
        Number of steps and of (B, S) cells.
    in_time
        Autocorrelation of the scores.
    """

    score: FloatArray
    fold: NDArray[np.int64]
    weight: FloatArray
    by_cell: FloatArray
    steps: int
    cells: int
    in_time: Persistence

    @staticmethod
    def of(data: FitData, order: TimeOrder, left_out: HeldOut, ordered: bool) -> "Scores":
        """Score held-out rows of a trace. ordered: the rows are in time order (a log), not cells of a grid."""
        cell = distinct(data.cell[left_out.rows])[1]
        score, weight = left_out.log_ratio + data.dither[left_out.rows], left_out.weights
        told = persistence(order.series(left_out.rows, score))
        if ordered or not len(cell):
            counts, by_cell = weight / told.steps_for_one, weight
        else:
            counts, by_cell = (weight * worth(score, weight, cell, known) for known in (told, None))
        rising = np.argsort(score, kind="stable")
        steps, cells = round(float(weight.sum())), int(cell.max(initial=-1)) + 1
        fold = left_out.fold[rising]
        return Scores(score[rising], fold, counts[rising], by_cell[rising], steps, cells, told)

    def among(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "Scores":
        """Return the scores selected by a mask or by positions."""
        return replace(
            self,
            score=self.score[rows],
            fold=self.fold[rows],
            weight=self.weight[rows],
            by_cell=self.by_cell[rows],
        )

    def without_time(self) -> "Scores":
        """Return the scores as if steps were not autocorrelated."""
        return replace(self, weight=self.by_cell, in_time=Persistence())

    @property
    def independent(self) -> float:
        """Number of independent samples."""
        return float(self.weight.sum())

    @cached_property
    def _sides(self) -> Mapping[int, tuple[FloatArray, FloatArray]]:
        """By side: side times the scores (m,) in rising order, and the cumulative independent samples (m,)."""
        return {1: (self.score, np.cumsum(self.weight)), -1: (-self.score[::-1], np.cumsum(self.weight[::-1]))}

    def limit(self, level: float, side: int = 1) -> float | None:
        """Return the limit of side times a new score at a one-sided level; None if there are too few samples."""
        return _limit_of(*self._sides[side], level)


def worth(
    score: FloatArray,
    weight: FloatArray,
    cell: NDArray[np.intp],
    in_time: Persistence | None = None,
) -> FloatArray:
    """Return the independent samples that one step of each row is worth (m,), at most 1.

    Parameters
    ----------
    score
        ln(observed/predicted) of each row (m,).
    weight
        Steps that each row represents (m,).
    cell
        Cell number of each row (m,).
    in_time
        Autocorrelation of the scores; None for none.
    """
    told = in_time or Persistence()
    x = clipped(score, weight)
    found = by_group(x, cell, weight)
    size, n, cells = found.size, found.values, len(found.size)
    if found.freedom < 1 or cells < 2:
        return np.asarray(1.0 / np.maximum(size[cell], told.steps_for_one))
    between = float(size @ (found.mean - float(weight @ x) / n) ** 2) / (cells - 1)
    by_cell = max(between - told.in_visit * found.within, 0.0)
    shared = min(by_cell / max(by_cell + found.typical_size * found.within, 1e-300), 1.0)
    worth_one = 1.0 / (shared * np.maximum(size, 1.0) + (1 - shared) * told.likely)
    return np.asarray(worth_one * min(1.0, n / told.steps_for_one / float(size @ worth_one)))[cell]


def upper_limit(scores: FloatArray, level: float, weights: FloatArray | None = None) -> float | None:
    """Return the upper conformal limit of scores (n,) at a one-sided level; None if there are too few samples.

    weights: independent samples that each score is worth (n,), by default 1.
    """
    weights = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(scores, kind="stable")
    return _limit_of(scores[order], np.cumsum(weights[order]), level)


def _limit_of(rising: FloatArray, reached: FloatArray, level: float) -> float | None:
    """Return the conformal limit of scores (n,) in rising order, with the cumulative weights (n,)."""
    n = float(reached[-1]) if len(reached) else 0.0
    rank = (n + 1) * level
    if n <= 0 or rank > n + 1e-9:
        return None
    return float(rising[min(int(np.searchsorted(reached, rank - 1e-9 * n)), len(rising) - 1)])


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
    """Return the `intervals` section of a fit's JSON from held-out rows.

    Parameters
    ----------
    data, left_out
        The rows, and those predicted while left out.
    ordered
        Whether folds follow each other in time; limits are then checked against earlier folds only.
    blocks
        Rows of the whole time range, each block predicted from all others; limits of drifting phases cover them too.
    """
    order, by_phase = TimeOrder.of(data), {}
    of_phase = {phase: rows[left_out.rows] for phase, rows in data.by_phase.items()}
    for phase in sorted(
        (name for name, rows in of_phase.items() if rows.any()), key=lambda name: of_phase[name].argmax()
    ):
        inside = left_out.among(of_phase[phase])
        whole = blocks.among(data.by_phase[phase][blocks.rows]) if blocks is not None else None
        scores = Scores.of(data, order, inside, ordered)
        drift = _drift(data, scores, inside, whole) if ordered else {"drift": False}
        wider = Scores.of(data, order, whole, ordered) if drift["drift"] and whole is not None else None
        by_phase[phase] = {"n": scores.steps, "cells": scores.cells, **_limits(scores, wider, ordered), **drift}
    drifts = any(found["drift"] for found in by_phase.values())
    wider = Scores.of(data, order, blocks, ordered) if drifts and blocks is not None else None
    return {
        "method": BY_TIME if ordered else BY_CELL,
        **_limits(Scores.of(data, order, left_out, ordered), wider, ordered),
        "by_phase": by_phase,
        "drift": _drift_sentence(by_phase),
    }


def _limits(scores: Scores, wider: Scores | None, ordered: bool) -> dict[str, Any]:
    """Return limits, independent shares and checked coverage of one phase, or of all steps.

    wider: further scores that the limits must cover.
    """
    left_out = [scores] if wider is None else [scores, wider]
    fewest = min(left_out, key=lambda known: known.independent / max(known.steps, 1))
    found: dict[str, Any] = {
        **_factors(left_out),
        "independent_share": fewest.independent / max(fewest.steps, 1),
        "in_time_share": 1 / fewest.in_time.steps_for_one,
        **_checked(scores, ordered),
    }
    if reason := _too_few(fewest):
        found["reason"] = reason
    if sentence := _autocorrelated(fewest):
        found["autocorrelated"] = sentence
    return found


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
    """Return whether a phase drifts, and the relative shift if its level changes.

    scores, later: the later steps, in time order. blocks: steps of the whole time range, predicted from all others,
    from which steps predicted by earlier ones differ if the level rises slowly.
    """
    change = change_point(later.log_ratio + data.dither[later.rows])
    if change is not None and change.p_value < CERTAIN and abs(change.shift) > math.log1p(LEAST_SHIFT):
        return {"drift": True, "relative_shift": math.expm1(change.shift)}
    if blocks is None:
        return {"drift": False}
    own = clipped(scores.score)
    shift = abs(float(own.mean() - clipped(blocks.log_ratio + data.dither[blocks.rows]).mean()))
    error = STANDARD_ERRORS * float(own.std()) / math.sqrt(scores.independent)
    return {"drift": shift > max(math.log1p(LEAST_SHIFT), error)}


def _silent(scores: Scores) -> list[float]:
    """Return the one-sided levels of the two-sided intervals for which there are too few samples."""
    return [
        level for level in LEVELS if level > 0.5 and (scores.limit(level) is None or scores.limit(level, -1) is None)
    ]


def _too_few(scores: Scores) -> str:
    """Return which two-sided levels lack samples and what to measure; empty if none does."""
    silent = _silent(scores)
    if not silent:
        return ""
    levels = " and ".join(f"{100 * (2 * level - 1):g} %" for level in silent)
    needed = math.ceil(1 / (1 - max(silent)) - 1 - 1e-9)
    alone = scores.without_time()
    lost = len(_silent(alone)) < len(silent)
    if lost and (not _silent(alone) or MATERIAL * scores.independent < alone.independent):
        runs = max(math.ceil(needed * scores.in_time.runs / scores.independent), scores.in_time.runs + 1)
        return f"{_in_a_row(scores)}, too few for intervals at {levels}: measure at least {runs:,} such runs"
    return (
        f"{scores.steps:,} steps in {scores.cells:,} cells carry {scores.independent:.0f} independent samples, too few"
        f" for intervals at {levels}: measure at least {needed:,} cells"
    )


def _in_a_row(scores: Scores) -> str:
    where = "in a row" if scores.in_time.runs == 1 else f"of {scores.in_time.runs:,} runs"
    return (
        f"{scores.steps:,} steps {where} carry {max(scores.independent, 1):.0f} independent samples"
        f" ({scores.in_time.why})"
    )


def _autocorrelated(scores: Scores) -> str:
    """Return what autocorrelation costs the intervals, in a sentence; empty if that is little."""
    alone = scores.without_time()
    if MATERIAL * scores.independent >= alone.independent:
        return ""
    lost = [level for level in _silent(scores) if level not in _silent(alone)]
    levels = " and ".join(f"{100 * (2 * level - 1):g} %" for level in lost)
    return f"{_in_a_row(scores)}, too few for intervals at {levels}" if lost else ""


def _checked(scores: Scores, ordered: bool) -> dict[str, Any]:
    """Return the share of scores below their limit by level, its 99 % band, and the number of checked steps."""
    coverage: dict[str, float] = {}
    band: dict[str, tuple[float, float]] = {}
    two_sided: dict[str, float] = {}
    checked = 0
    parts = _parts(scores, ordered)
    for level in LEVELS:
        hits = _hits(parts, level)
        if hits.seen == 0:
            continue
        checked = max(checked, round(hits.seen / scores.independent * scores.steps))
        coverage[f"{level:g}"] = hits.below / hits.seen
        band[f"{level:g}"] = _band(level, hits.seen, hits.calibrated)
        if level > 0.5:
            two_sided[f"{2 * level - 1:g}"] = (hits.below - hits.above) / hits.seen
    return {"coverage": coverage, "two_sided_coverage": two_sided, "band": band, "checked": checked}


def _parts(scores: Scores, ordered: bool) -> list[tuple[Scores, Scores]]:
    """Return (calibration scores, test scores) of each fold: earlier folds calibrate if ordered, else all others."""
    folds = np.unique(scores.fold)
    others = [scores.fold < number if ordered else scores.fold != number for number in folds]
    return [
        (scores.among(rest), scores.among(scores.fold == number)) for rest, number in zip(others, folds, strict=True)
    ]


class Hits(NamedTuple):
    """Independent samples at or below their upper limit, below their lower limit, and checked.

    calibrated: mean number of samples behind a limit.
    """

    below: float
    above: float
    seen: float
    calibrated: float


def _hits(parts: Sequence[tuple[Scores, Scores]], level: float) -> Hits:
    """Count how limits from calibration scores hold for test scores."""
    below = above = seen = calibrated = 0.0
    for others, test in parts:
        high, low = others.limit(level), others.limit(level, -1)
        if high is None or low is None:
            continue
        steps = float(test.weight.sum())
        below += float(test.weight[test.score <= high].sum())
        above += float(test.weight[test.score < -low].sum())
        seen += steps
        calibrated += steps * others.independent
    return Hits(below, above, seen, calibrated / seen if seen else 0.0)


def _band(level: float, seen: float, calibrated: float) -> tuple[float, float]:
    """Return the 99 % range of the share below a limit: both the limit and the share are sampled."""
    reach = Z_99 * math.sqrt(level * (1 - level) * (1 / seen + 1 / calibrated))
    return max(level - reach, 0.0), min(level + reach, 1.0)


def _drift_sentence(by_phase: Mapping[str, Mapping[str, Any]]) -> str:
    drifting = [phase for phase, found in by_phase.items() if found["drift"]]
    if not drifting:
        return ""
    return (
        f"The latency of {' and '.join(drifting)} steps drifts: intervals from earlier steps cover fewer of the later"
        " ones than stated. Measure again."
    )
