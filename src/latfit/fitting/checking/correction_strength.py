"""Choice of a correction's strength: as many smoothing rounds, by kind of steps, as held-out rows pay for."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import (
    EXACT,
    HeldOut,
    LeftOut,
    assign_folds,
    by_fold,
    fold_rows,
    joined_parts,
    left_out_parts,
)
from latfit.fitting.correction import BANDWIDTHS, KINDS, Grid, Smoothing, build_grids, kinds_of, smooth_in_rounds
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
class _Path:
    part: LeftOut
    log_ratio: FloatArray  # ln(observed/predicted) of the rows left out (rounds + 1, m)
    kind: NDArray[np.int64]  # of these rows (m,)
    errors: FloatArray  # mean error in percent (rounds + 1, 3), NaN for kinds with too few rows

    def at(self, rounds: tuple[int, int, int]) -> FloatArray:
        return np.asarray(self.log_ratio[np.array(rounds)[self.kind], np.arange(len(self.kind))])


def choose_correction(
    data: FitData, options: FitOptions, theta: FloatArray, *, always: bool = False
) -> ChosenCorrection | None:
    """Choose the strength of a correction; None with too few rows. always: take the best above zero if none pays."""
    fold = assign_folds(data, options.seed)[1]
    cells = int(data.known_cell.max(initial=-1)) + 1
    grids = build_grids(data)
    if not grids or len(data) < MIN_ROWS or cells < MIN_CELLS or int(fold.max()) == 0:
        return None
    features = features_of(data.steps)
    kind = kinds_of(features["D"], features["P"])
    blocks = list(by_fold(fold))
    repeated = _repeated_kinds(data, kind)
    repeats = list(by_fold(fold_rows(data, options.seed))) if repeated.any() else []
    every = left_out_parts(data, options.of_formula, theta, [*blocks, *repeats])
    if len(every) < len(blocks) + len(repeats):
        return None
    all_paths = [_smooth_fold(data, grids, part, kind) for part in every]
    for path in all_paths[len(blocks) :]:
        path.errors[:, ~repeated] = np.nan
    rounds, smoothing = _best_rounds(all_paths, always), None
    corrected = every[: len(blocks)]
    if any(rounds):
        corrected = [replace(path.part, log_ratio=path.at(rounds)) for path in all_paths[: len(blocks)]]
        off = np.abs(np.concatenate([path.at(rounds) for path in all_paths]))
        smoothing = Smoothing(rounds, MAD_TO_SIGMA * float(np.median(off)))
    held_out = joined_parts(data, corrected)
    assert held_out is not None
    return ChosenCorrection(smoothing, held_out)


def _repeated_kinds(data: FitData, kind: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which kinds of steps of a grid have two rows or more of each B and S, on average (3,)."""
    size = data.steps["B"] + 1j * data.steps["S"]
    cells = np.array([np.unique(size[kind == each]).size for each in KINDS])
    rows = np.bincount(kind, minlength=len(KINDS))
    return np.asarray((rows >= np.maximum(2 * cells, MIN_KIND_ROWS)) & (not data.in_time))


def _smooth_fold(data: FitData, grids: list[Grid], part: LeftOut, kind: NDArray[np.int64]) -> _Path:
    missed = np.zeros(len(data))
    missed[part.train] = part.missed(data)
    log_ratio = np.tile(part.log_ratio, (len(BANDWIDTHS) + 1, 1))
    for grid in grids:
        train, test = part.train[grid.rows[part.train]], np.flatnonzero(grid.rows[part.test])
        for number, table in enumerate(smooth_in_rounds(grid, train, missed, data.weights, len(BANDWIDTHS)), start=1):
            log_ratio[number, test] -= grid.at(table, part.test[test])
    own = kind[part.test]
    return _Path(part, log_ratio, own, np.array([_errors(data, part, each, own) for each in log_ratio]))


def _errors(data: FitData, part: LeftOut, log_ratio: FloatArray, kind: NDArray[np.int64]) -> FloatArray:
    weights = data.weights[part.test]
    ape = 100 * np.abs(np.expm1(-log_ratio))
    with np.errstate(invalid="ignore"):
        return np.maximum(np.bincount(kind, weights * ape, len(KINDS)) / np.bincount(kind, weights, len(KINDS)), EXACT)


def _best_rounds(paths: list[_Path], always: bool) -> tuple[int, int, int]:
    """Return the rounds of each kind of steps with the least error; kinds with few rows have those of the largest."""
    count = np.bincount(np.concatenate([path.kind for path in paths]), minlength=len(KINDS))
    found = [_best_of_kind(paths, number, always) if count[number] >= MIN_KIND_ROWS else None for number in KINDS]
    common = found[int(np.argmax(count))] or 0
    decode, prefill, mixed = (common if each is None else each for each in found)
    return decode, prefill, mixed


def _best_of_kind(paths: list[_Path], kind: int, always: bool) -> int | None:
    errors = np.array([path.errors[:, kind] for path in paths])
    errors = errors[np.isfinite(errors[:, 0])]
    if len(errors) < 2:
        return None
    mean = np.exp(np.mean(np.log(errors), axis=0))
    best = 1 + int(np.argmin(mean[1:]))
    gain = errors[:, 0] - errors[:, best]
    error = float(np.std(gain, ddof=1) / np.sqrt(len(gain)))
    pays = mean[0] - mean[best] > max(MIN_GAIN_PCT, MIN_GAIN_SHARE * mean[0]) and float(np.mean(gain)) > error
    return best if always or pays else 0
