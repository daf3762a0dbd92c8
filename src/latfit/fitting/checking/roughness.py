"""How much of a correction the held-out rows pay for.

The folds are those that the formula is checked on. In each, g is learnt from what the training rows' own fit misses, at
every roughness, and asked for the rows left out. Steps that decode, that are nothing but prefill, and that do both lie
apart on the grid, so each kind with 30 rows and more has a roughness of its own: the one with the least mean absolute
relative error over the folds, by their geometric mean. Values are tried from smooth to rough, until no kind has gained
from the last two. A correction has to pay: a kind has one where it is better than
the formula alone by more than a tenth of a point, 2 % of its error, and the standard error of their paired difference.

Nothing is scored on what chose it: the rows of a fold are predicted at the roughness that the other folds choose, and
that may be none.

Whether measured steps keep what they have of their own (see `repeats`) is asked of a grid's visits, each left out in
turn and predicted by the others of its step, as far as T must not fall: a kind of steps keeps it where that gains more
than the same tenth of a point, 2 %, and its standard error over steps. What is told of the fit, its error and its
intervals, is of whole cells left out, which gain nothing by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.crossval import (
    EXACT,
    HeldOut,
    LeftOut,
    assign_folds,
    by_fold,
    joined_parts,
    left_out_parts,
)
from latfit.fitting.correction import (
    KINDS,
    Grid,
    Part,
    Smoothing,
    by_kind,
    finished,
    grid_of,
    held_from_falling,
    kinds,
    own_of_kinds,
    slack,
    smooth_tables,
    smoothed,
)
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitOptions, formula_of, log_ratios, make_problem
from latfit.model import features_of
from latfit.stats import MAD_TO_SIGMA, FloatArray

ROUGHNESS = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
PATIENCE = 2
LEAST_ROWS, LEAST_CELLS = 60, 20
KIND_ROWS = 30
PAYS_PCT, PAYS_SHARE = 0.1, 0.02


Roughness = tuple[float, float, float]


@dataclass(frozen=True)
class Chosen:
    """smoothing: of the correction; None where none pays.  held_out: every row as predicted while left out, by what
    the other folds choose.  before, after: error in percent of the kinds of steps, by the formula and corrected.  own:
    the same of repeats left out, without and with what their steps have of their own; None where nothing is kept."""

    smoothing: Smoothing | None
    held_out: HeldOut
    before: float
    after: float
    own: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class _Learnt:
    """A grid in a fold: what the training rows measure of it, where the test rows lie on it, how far g may fall; g at
    the nodes for every roughness."""

    grid: Grid
    measured: Part
    asked: Part
    allowed: Sequence[FloatArray]
    nodes: dict[float, FloatArray] = field(default_factory=dict)

    def learn(self, log_ratio: FloatArray, weights: FloatArray, rough: float) -> FloatArray:
        """g at the nodes from the training rows (k,)."""
        rows, before = self.measured.rows, next(reversed(self.nodes.values()), None)
        self.nodes[rough] = smoothed(self.measured, log_ratio[rows], weights[rows], rough, before)
        return self.nodes[rough]

    def correct(self, off: FloatArray, g: FloatArray, noise: float) -> None:
        """Take off what the table of g says from the log ratios of the test rows."""
        off[self.asked.rows] -= self.asked.X @ finished(self.measured, g, noise, self.allowed).values.ravel()


@dataclass(frozen=True, eq=False)
class _Tried:
    """A fold: the grids, of which kind its test rows are; errors in percent (3,) of each kind of rows left out, by
    roughness, NaN where there are too few; off: their log ratios to the formula with g."""

    part: LeftOut
    grids: Sequence[_Learnt]
    kind: NDArray[np.int64]
    off: dict[float, FloatArray] = field(default_factory=dict)
    errors: dict[float, FloatArray] = field(default_factory=dict)


def chosen_correction(
    data: FitData, options: FitOptions, theta: FloatArray, *, asked: bool = False, whole: FitData | None = None
) -> Chosen | None:
    """The correction that pays on a formula fitted with theta, None where the rows are too few to tell. asked: the best
    one, whether it pays or not.  whole: the rows that it will be learnt from, where these are a sample of them."""
    fold = assign_folds(data, options.seed)[1]
    cells = int(data.known_cell.max(initial=-1)) + 1
    grid = grid_of(data)
    if grid is None or len(data) < LEAST_ROWS or cells < LEAST_CELLS or int(fold.max()) == 0:
        return None
    parts = left_out_parts(data, options.of_formula, theta, by_fold(fold))
    if len(parts) < int(fold.max()) + 1:
        return None
    features = features_of(data.steps)
    kind = kinds(features["D"], features["P"])
    counted = np.where(np.bincount(kind, data.weights, len(KINDS)) >= KIND_ROWS, 1.0, np.nan)
    tried = [_prepared(data, grid, part, kind) for part in parts]
    for rough in (0.0, *ROUGHNESS):
        for each in tried:
            _try(data, each, rough, counted, kind)
        if _past_the_best(tried):
            break
    best = _best(tried, asked)
    nested = [_nested(tried, i, asked) for i in range(len(tried))]
    left_out = joined_parts(data, nested)
    assert left_out is not None
    before = _mean([each.errors[0.0] for each in tried])
    after = _mean([counted * _errors(data, part, part.log_ratio, kind) for part in nested])
    smoothing = Smoothing(best, _noise(tried, best))
    own = _own(data, options, theta, smoothing, whole or data)
    kept = Smoothing(best, smoothing.noise, *([] if own is None else [own.kinds]))
    errors = None if own is None else (own.before, own.after)
    return Chosen(kept if any(best) or own else None, left_out, before, after, errors)


@dataclass(frozen=True)
class _Kept:
    """Which kinds of steps keep what they have of their own, and the error in percent of their repeats left out."""

    kinds: tuple[bool, bool, bool]
    before: float
    after: float


def _own(data: FitData, options: FitOptions, theta: FloatArray, smoothing: Smoothing, whole: FitData) -> _Kept | None:
    """What measured steps of a grid keep beside a correction; None where nothing pays, or the grid of all rows has no
    room for it. Rows of a log, and those that stand for many steps, have no visits that could be left out."""
    if data.in_time or not data.single:
        return None
    learning = grid_of(whole)
    assert learning is not None
    room = {kind for grid in learning.all if grid.halved is not None for kind in grid.kinds}
    problem = make_problem(data, options.of_formula)
    log_ratio, rows, formula = log_ratios(problem, theta, data), np.arange(len(data)), formula_of(problem, theta)
    tables = list(smooth_tables(data, rows, log_ratio, smoothing))
    plain, every = (
        held_from_falling(data, rows, log_ratio, tables, replace(smoothing, own=kept), formula)
        for kept in (Smoothing.own, (True, True, True))
    )
    gains = {}
    for grid, _, table in tables:
        for kind, some, g, own in own_of_kinds(data, rows, grid, table, log_ratio):
            steps = data.steps.at(some)
            gain = own.gain(plain.of_steps(steps) - g, every.of_steps(steps) - g - own.value)
            if kind in room and gain.before - gain.after > max(PAYS_PCT, PAYS_SHARE * gain.before, gain.error):
                gains[kind] = gain
    if not gains:
        return None
    decode, prefill, both = (kind in gains for kind in KINDS)
    visits = [gain.visits for gain in gains.values()]
    before, after = (
        float(np.average(errors, weights=visits))
        for errors in ([gain.before for gain in gains.values()], [gain.after for gain in gains.values()])
    )
    return _Kept((decode, prefill, both), before, after)


def _prepared(data: FitData, grid: Grid, part: LeftOut, kind: NDArray[np.int64]) -> _Tried:
    known = tuple(data.steps)
    grids = [
        _Learnt(each, each.part(part.train), each.part(part.test), slack(each, part.formula, known))
        for each in grid.all
    ]
    return _Tried(part, grids, kind[part.test])


def _try(data: FitData, fold: _Tried, rough: float, counted: FloatArray, kind: NDArray[np.int64]) -> None:
    """One roughness, 0 for the formula alone, on one fold."""
    fold.off[rough] = fold.part.log_ratio.copy()
    if rough > 0:
        missed, weights = fold.part.missed(data), data.weights[fold.part.train]
        for each in fold.grids:
            each.correct(fold.off[rough], each.learn(missed, weights, rough), 0.0)
    fold.errors[rough] = counted * _errors(data, fold.part, fold.off[rough], kind)


def _past_the_best(tried: Sequence[_Tried]) -> bool:
    """Whether the last two values of roughness are best for no kind of steps."""
    values = list(tried[0].errors)
    means = [_means(tried, number) for number in KINDS]
    known = [[mean[rough] for rough in values] for mean in means if mean]
    return len(values) > PATIENCE + 1 and all(int(np.argmin(each)) < len(values) - PATIENCE for each in known)


def _means(tried: Sequence[_Tried], number: int) -> dict[float, float]:
    """Geometric mean over the folds of a kind's error, by roughness; empty where fewer than two folds know it."""
    errors = {rough: np.array([each.errors[rough][number] for each in tried]) for rough in tried[0].errors}
    known = np.isfinite(errors[0.0])
    if known.sum() < 2:
        return {}
    return {rough: float(np.exp(np.mean(np.log(each[known])))) for rough, each in errors.items()}


def _errors(data: FitData, part: LeftOut, log_ratio: FloatArray, kind: NDArray[np.int64]) -> FloatArray:
    """Mean error in percent (3,) of each kind of a fold's rows, NaN where it has none."""
    own, weights = kind[part.test], data.weights[part.test]
    ape = 100 * np.abs(np.expm1(-log_ratio))
    with np.errstate(invalid="ignore"):
        mean = np.bincount(own, weights * ape, len(KINDS)) / np.bincount(own, weights, len(KINDS))
    return np.maximum(mean, EXACT)


def _nested(tried: Sequence[_Tried], i: int, asked: bool) -> LeftOut:
    """Fold i at the roughness that the others choose."""
    others = [each for number, each in enumerate(tried) if number != i]
    own, each = _best(others, asked), tried[i]
    if not any(own):
        return each.part
    off, noise = each.part.log_ratio.copy(), _noise(others, own)
    for known in each.grids:
        known.correct(off, by_kind(known.grid, known.nodes, own), noise)
    return replace(each.part, log_ratio=off)


def _best(tried: Sequence[_Tried], asked: bool) -> Roughness:
    """The roughness of each kind of steps with the least error over the folds, 0 where the formula alone does as
    well; kinds with too few rows have that of the kind with the most."""
    found = [_best_of(tried, number, asked) for number in KINDS]
    count = np.sum([np.bincount(each.kind, minlength=len(KINDS)) for each in tried], axis=0)
    common = found[int(np.argmax(count))] or 0.0
    decode, prefill, both = (common if each is None else each for each in found)
    return decode, prefill, both


def _best_of(tried: Sequence[_Tried], number: int, asked: bool) -> float | None:
    mean = _means(tried, number)
    if not mean:
        return None
    best = min((rough for rough in mean if rough > 0), key=lambda rough: mean[rough])
    gain = np.array([each.errors[0.0][number] - each.errors[best][number] for each in tried])
    gain = gain[np.isfinite(gain)]
    doubt = float(np.std(gain, ddof=1) / np.sqrt(len(gain)))
    pays = mean[0.0] - mean[best] > max(PAYS_PCT, PAYS_SHARE * mean[0.0]) and float(np.mean(gain)) > doubt
    return best if asked or pays else 0.0


def _noise(tried: Sequence[_Tried], roughness: Roughness) -> float:
    """Relative scatter of rows left out about a correction."""
    off = [each.off[rough][each.kind == number] for each in tried for number, rough in enumerate(roughness)]
    return MAD_TO_SIGMA * float(np.median(np.abs(np.concatenate(off))))


def _mean(errors: Sequence[FloatArray]) -> float:
    """Geometric mean over folds and kinds of those that are known."""
    found = np.concatenate(errors)
    return float(np.exp(np.mean(np.log(found[np.isfinite(found)])))) if np.isfinite(found).any() else np.nan
