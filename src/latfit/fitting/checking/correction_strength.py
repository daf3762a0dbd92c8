"""Choice of a correction's strength: as many smoothing rounds, by kind of steps, as held-out rows pay for."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import (
    EXACT,
    PHASE_ROWS_IN_FOLD,
    HeldOut,
    LeftOut,
    assign_folds,
    by_fold,
    fold_rows,
    joined_parts,
    left_out_parts,
)
from latfit.fitting.correction import BANDWIDTHS, KINDS, Smoothed, Smoothing, build_grids, kinds_of
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitOptions
from latfit.model import features_of
from latfit.stats import MAD_TO_SIGMA, FloatArray

MIN_ROWS, MIN_CELLS = 60, 20
MIN_KIND_ROWS = 30
MIN_GAIN_PCT, MIN_GAIN_SHARE = 0.1, 0.02  # A correction has to lower the error by this many points, and by this share


@dataclass(frozen=True)
class ChosenCorrection:
    """A correction that pays, or none, and every row as predicted while left out."""

    smoothing: Smoothing | None
    held_out: HeldOut


@dataclass(frozen=True, eq=False)
class _Fold:
    part: LeftOut
    smoothed: Sequence[Smoothed]
    kind: NDArray[np.int64]  # of the rows left out (m,)
    log_ratio: FloatArray  # ln(observed/predicted) after 0, 1, ... rounds (rounds + 1, m), without the limit of falls
    errors: FloatArray  # mean error in percent by kind (rounds + 1, 3), NaN for kinds with too few rows

    def missed(self, rounds: NDArray[np.intp]) -> FloatArray:
        """Return the log ratios (m,) after these rounds by kind (3,)."""
        return np.asarray(self.log_ratio[rounds[self.kind], np.arange(len(self.kind))])


def choose_correction(
    data: FitData, options: FitOptions, theta: FloatArray, *, always: bool = False
) -> ChosenCorrection | None:
    """Choose the strength of a correction; None with too few rows. always: take the best above zero if none pays.

    Whether it pays is judged by tables with the limit of falls that the stored one has.
    """
    fold = assign_folds(data, options.seed)[1]
    cells = int(data.known_cell.max(initial=-1)) + 1
    if not build_grids(data) or len(data) < MIN_ROWS or cells < MIN_CELLS or int(fold.max()) == 0:
        return None
    features = features_of(data.steps)
    kind = kinds_of(features["D"], features["P"])
    blocks = list(by_fold(fold))
    repeated = _repeated_kinds(data, kind)
    repeats = list(by_fold(fold_rows(data, options.seed))) if repeated.any() else []
    parts = left_out_parts(data, options.of_formula, theta, [*blocks, *repeats])
    if len(parts) < len(blocks) + len(repeats):
        return None
    folds = [_smooth_fold(data, part, kind) for part in parts]
    for each in folds[len(blocks) :]:
        each.errors[:, ~repeated] = np.nan
    errors, count = np.stack([each.errors for each in folds]), np.bincount(kind, minlength=len(KINDS))
    leader = int(np.argmax(count))
    used = np.array([number if count[number] >= MIN_KIND_ROWS else leader for number in KINDS])
    best = _best_rounds(errors)[used]
    pays = np.array([always or _pays(errors[:, 0, each], errors[:, best[each], each]) for each in used])
    noise = MAD_TO_SIGMA * float(np.median(np.abs(np.concatenate([each.missed(best * pays) for each in folds]))))
    smoothing = None
    while pays.any():
        decode, prefill, mixed = (best * pays).tolist()
        tried = Smoothing((decode, prefill, mixed), noise)
        corrected = [each.part.corrected(each.smoothed, tried) for each in folds]
        after = np.stack([_errors(data, part.test, part.log_ratio, kind) for part in corrected])
        still = pays & np.array([always or _pays(errors[:, 0, each], after[:, each]) for each in used])
        if np.array_equal(still, pays):
            smoothing, parts = tried, corrected
            break
        pays = still
    held_out = joined_parts(data, parts[: len(blocks)])
    assert held_out is not None
    return ChosenCorrection(smoothing, held_out)


def _repeated_kinds(data: FitData, kind: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which kinds of steps of a grid have two rows or more of each B and S, on average (3,)."""
    size = data.steps["B"] + 1j * data.steps["S"]
    cells = np.array([np.unique(size[kind == each]).size for each in KINDS])
    rows = np.bincount(kind, minlength=len(KINDS))
    return np.asarray((rows >= np.maximum(2 * cells, MIN_KIND_ROWS)) & (not data.in_time))


def _smooth_fold(data: FitData, part: LeftOut, kind: NDArray[np.int64]) -> _Fold:
    smoothed = part.smoothed(data, len(BANDWIDTHS))
    log_ratio = np.tile(part.log_ratio, (len(BANDWIDTHS) + 1, 1))
    for each in smoothed:
        test = np.flatnonzero(each.grid.rows[part.test])
        for number, table in enumerate(each.tables):
            log_ratio[number, test] -= each.grid.at(table, part.test[test])
    errors = np.array([_errors(data, part.test, missed, kind) for missed in log_ratio])
    return _Fold(part, smoothed, kind[part.test], log_ratio, errors)


def _errors(data: FitData, rows: NDArray[np.intp], log_ratio: FloatArray, kind: NDArray[np.int64]) -> FloatArray:
    """Return the mean errors in percent by kind (3,) of rows (m,); NaN for kinds with too few of them."""
    weights, of = data.weights[rows], kind[rows]
    steps = np.bincount(of, weights, len(KINDS))
    ape = np.bincount(of, weights * 100 * np.abs(np.expm1(-log_ratio)), len(KINDS))
    return np.where(steps >= PHASE_ROWS_IN_FOLD, np.maximum(ape / np.maximum(steps, 1e-300), EXACT), np.nan)


def _best_rounds(errors: FloatArray) -> NDArray[np.intp]:
    """Return the rounds above zero with the least error by kind (3,), from errors (folds, rounds + 1, 3)."""
    logs = np.log(errors)
    known = np.isfinite(logs)
    mean = np.where(known, logs, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    return np.asarray(1 + np.argmin(mean[1:], axis=0))


def _pays(before: FloatArray, after: FloatArray) -> bool:
    """Return whether errors (folds,) fall by enough to be worth a table, and by more than one standard error."""
    known = np.isfinite(before)
    if known.sum() < 2:
        return False
    whole, rest = (float(np.exp(np.mean(np.log(each[known])))) for each in (before, after))
    gain = (before - after)[known]
    error = float(np.std(gain, ddof=1)) / np.sqrt(len(gain))
    return whole - rest > max(MIN_GAIN_PCT, MIN_GAIN_SHARE * whole) and float(gain.mean()) > error
