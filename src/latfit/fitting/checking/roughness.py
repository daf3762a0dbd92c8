"""How much of a correction the held-out rows pay for.

The folds are those that the formula is chosen on: whole cells or blocks of time, and where steps of a grid are repeated
also rows drawn freely, of which most have repeats among those that train. In each, g is learnt from what the training
rows' own fit misses, at every roughness, and asked for the rows left out. Steps that decode, that are nothing but
prefill, and that do both lie apart on the grid, so each kind with 30 rows and more has a roughness of its own: the one
with the least mean absolute relative error over the folds, by their geometric mean. Values are tried from smooth to
rough, until no kind has gained from the last two; beside drawn rows all of them, since the roughest remember a cell
without a word on its neighbours.

T may fall by the noise as work grows. While values are compared it may not at all, since only the best of them tells
the noise; but of repeated cells, whose own means fall, that is what decides, so there it is the least noise that the
values before left.

A correction has to pay: a kind has one where it is better than the formula alone by more than a tenth of a point, 2 %
of its error, and the standard error of their paired difference; and what it remembers of measured cells may cost cells
that were not no more than a tenth of a point, in both means over their folds, the geometric and the arithmetic one.

Nothing is scored on what chose it: the rows of a cell or block are predicted at the roughness that the others choose,
and that may be none. Drawn rows have a say in that where they are of others; none of them is scored.
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
    drawn_folds,
    joined_parts,
    left_out_parts,
)
from latfit.fitting.correction import KINDS, Grid, Part, Smoothing, by_kind, finished, grid_of, kinds, slack, smoothed
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitOptions
from latfit.model import features_of
from latfit.stats import MAD_TO_SIGMA, FloatArray

ROUGHNESS = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
OF_REPEATS = (1.0, 1e-2, 1e-4, 1e-6, 1e-8)
"""Where steps are repeated: down to where what holds unmeasured nodes at zero outweighs all (see `correction`)."""
PATIENCE = 2
LEAST_ROWS, LEAST_CELLS = 60, 20
KIND_ROWS = 30
PAYS_PCT, PAYS_SHARE = 0.1, 0.02


Roughness = tuple[float, float, float]


@dataclass(frozen=True)
class Chosen:
    """smoothing: of the correction; None where none pays.  held_out: every row as predicted while left out, by what
    the other folds choose.  before, after: error in percent of the kinds of steps, by the formula and corrected."""

    smoothing: Smoothing | None
    held_out: HeldOut
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a trace: of which kind each is (n,); 1 for kinds with rows enough to count, NaN for others (3,)."""

    data: FitData
    kind: NDArray[np.int64]
    counted: FloatArray

    @classmethod
    def of(cls, data: FitData) -> "_Rows":
        features = features_of(data.steps)
        kind = kinds(features["D"], features["P"])
        many = np.bincount(kind, data.weights, len(KINDS)) >= KIND_ROWS
        return cls(data, kind, np.where(many, 1.0, np.nan))

    def errors(self, test: NDArray[np.intp], log_ratio: FloatArray) -> FloatArray:
        """Mean error in percent (3,) of each kind among some rows (k,), NaN for those that do not count or have
        none."""
        kind, weights = self.kind[test], self.data.weights[test]
        ape = 100 * np.abs(np.expm1(-log_ratio))
        with np.errstate(invalid="ignore"):
            mean = np.bincount(kind, weights * ape, len(KINDS)) / np.bincount(kind, weights, len(KINDS))
        return self.counted * np.maximum(mean, EXACT)


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
    """A fold: the grids, of which kind its test rows are, whether they are drawn freely; errors in percent (3,) of each
    kind of rows left out, by roughness, NaN where there are too few; off: their log ratios to the formula with g."""

    part: LeftOut
    grids: Sequence[_Learnt]
    kind: NDArray[np.int64]
    drawn: bool = False
    off: dict[float, FloatArray] = field(default_factory=dict)
    errors: dict[float, FloatArray] = field(default_factory=dict)


def chosen_correction(data: FitData, options: FitOptions, theta: FloatArray, *, asked: bool = False) -> Chosen | None:
    """The correction that pays on a formula fitted with theta, None where the rows are too few to tell. asked: the best
    one, whether it pays or not."""
    schemes = [assign_folds(data, options.seed)[1], *drawn_folds(data, options.seed)]
    cells = int(data.known_cell.max(initial=-1)) + 1
    grid = grid_of(data)
    if grid is None or len(data) < LEAST_ROWS or cells < LEAST_CELLS or int(schemes[0].max()) == 0:
        return None
    left_out = [left_out_parts(data, options.of_formula, theta, by_fold(fold)) for fold in schemes]
    if any(len(parts) <= int(fold.max()) for parts, fold in zip(left_out, schemes, strict=True)):
        return None
    rows = _Rows.of(data)
    folds = [_prepared(rows, grid, part, drawn=parts is not left_out[0]) for parts in left_out for part in parts]
    tried, repeated, noise = [each for each in folds if not each.drawn], len(schemes) > 1, np.inf
    for rough in (0.0, *(OF_REPEATS if repeated else ROUGHNESS)):
        for each in folds:
            _try(rows, each, rough, noise if repeated else 0.0)
        noise = min(noise, _noise(tried, (rough, rough, rough)))
        if not repeated and _past_the_best(folds):
            break
    best = _best(folds, asked)
    nested = [_nested(_apart(rows, folds, each), each, asked) for each in tried]
    joined = joined_parts(data, nested)
    assert joined is not None
    before = _mean([each.errors[0.0] for each in tried])
    after = _mean([rows.errors(part.test, part.log_ratio) for part in nested])
    smoothing = Smoothing(best, _noise(tried, best)) if any(best) else None
    return Chosen(smoothing, joined, before, after)


def _prepared(rows: _Rows, grid: Grid, part: LeftOut, drawn: bool) -> _Tried:
    known = tuple(rows.data.steps)
    grids = [
        _Learnt(each, each.part(part.train), each.part(part.test), slack(each, part.formula, known))
        for each in grid.all
    ]
    return _Tried(part, grids, rows.kind[part.test], drawn)


def _try(rows: _Rows, fold: _Tried, rough: float, noise: float) -> None:
    """One roughness, 0 for the formula alone, on one fold. noise: by how much latency may fall."""
    fold.off[rough] = fold.part.log_ratio.copy()
    if rough > 0:
        missed, weights = fold.part.missed(rows.data), rows.data.weights[fold.part.train]
        for each in fold.grids:
            each.correct(fold.off[rough], each.learn(missed, weights, rough), noise)
    fold.errors[rough] = rows.errors(fold.part.test, fold.off[rough])


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


def _apart(rows: _Rows, folds: Sequence[_Tried], fold: _Tried) -> list[_Tried]:
    """All other folds, of drawn ones the rows that are not of this."""
    found = []
    for each in folds:
        if each.drawn:
            other = np.isin(each.part.test, fold.part.test, invert=True)
            errors = {rough: rows.errors(each.part.test[other], off[other]) for rough, off in each.off.items()}
            found.append(replace(each, errors=errors))
        elif each is not fold:
            found.append(each)
    return found


def _nested(others: Sequence[_Tried], fold: _Tried, asked: bool) -> LeftOut:
    """A fold at the roughness that others choose."""
    own = _best(others, asked)
    if not any(own):
        return fold.part
    off, noise = fold.part.log_ratio.copy(), _noise([each for each in others if not each.drawn], own)
    for learnt in fold.grids:
        learnt.correct(off, by_kind(learnt.grid, learnt.nodes, own), noise)
    return replace(fold.part, log_ratio=off)


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
    some = [rough for rough in mean if rough > 0]
    harmless = [rough for rough in some if _harmless(tried, number, rough)]
    if not harmless and not asked:
        return 0.0
    best = min(harmless or some, key=lambda rough: mean[rough])
    gain, doubt = _gain(tried, number, best)
    pays = mean[0.0] - mean[best] > max(PAYS_PCT, PAYS_SHARE * mean[0.0]) and gain > doubt
    return best if asked or pays else 0.0


def _harmless(tried: Sequence[_Tried], number: int, rough: float) -> bool:
    """Whether a kind's cells that are left out lose nothing by what drawn rows gain."""
    apart = [each for each in tried if not each.drawn]
    if len(apart) == len(tried):
        return True
    mean = _means(apart, number)
    return not mean or (mean[rough] <= mean[0.0] + PAYS_PCT and _gain(apart, number, rough)[0] >= -PAYS_PCT)


def _gain(tried: Sequence[_Tried], number: int, rough: float) -> tuple[float, float]:
    """By how many points a kind's error is below that of the formula in the mean of the folds, and its standard
    error."""
    gain = np.array([each.errors[0.0][number] - each.errors[rough][number] for each in tried])
    gain = gain[np.isfinite(gain)]
    if len(gain) < 2:
        return 0.0, 0.0
    return float(np.mean(gain)), float(np.std(gain, ddof=1) / np.sqrt(len(gain)))


def _noise(tried: Sequence[_Tried], roughness: Roughness) -> float:
    """Relative scatter of rows left out about a correction."""
    off = [each.off[rough][each.kind == number] for each in tried for number, rough in enumerate(roughness)]
    return MAD_TO_SIGMA * float(np.median(np.abs(np.concatenate(off))))


def _mean(errors: Sequence[FloatArray]) -> float:
    """Geometric mean over folds and kinds of those that are known."""
    found = np.concatenate(errors)
    return float(np.exp(np.mean(np.log(found[np.isfinite(found)])))) if np.isfinite(found).any() else np.nan
