"""Cross-validation: errors on held-out rows. Grids are split by cells, logs by blocks of time.

Harder schemes are an expanding window, regions of (ln B, ln S), and extrapolation in S, B and context.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit.fitting.correction import Smoothed, Smoothing, smooth_residuals
from latfit.fitting.data import FitData, Rows
from latfit.fitting.problem import FitOptions, FitProblem, collapsed, formula_of, log_ratios, make_problem
from latfit.fitting.solver.solve import refitted_all
from latfit.model import CONTEXT, CrossValidation, HeldOutErrors, Separable
from latfit.stats import FloatArray, distinct, error_metrics, weighted_quantile, weighted_quantiles

Fold = tuple[NDArray[np.intp], NDArray[np.intp]]

FOLDS = 5
HARDER_ROWS = 3_000  # rows drawn for the harder schemes
CUTS = (0.4, 0.55, 0.7, 0.85)  # shares of the rows, lowest values of a column first, on which extrapolation trains
COLUMN_NAMES = {"S": "S", "B": "B", CONTEXT: "context"}
FEWEST_OUTSIDE = 10  # fewest steps outside the training region for which an error is reported
FEWEST_VALUES = 3  # fewest distinct values in training: two determine a slope, a third checks it
MOST_ROWS, PIECE, RARE_ROWS = 60_000, 1000, 5_000
"""Rows that are split into folds: their uncertainty is far below the error of a fold. Of more rows evenly spread pieces
are kept, which preserve autocorrelation, and phases of up to RARE_ROWS in full."""

BY_CELL = "K-fold over (B,S) cells"
BY_TIME = "K-fold over contiguous blocks of time"


def parts_in_time(data: FitData, parts: int) -> NDArray[np.int64]:
    """Return the part 0..parts-1 of each row (n,): every run is cut into equal parts in time order."""
    part = np.zeros(len(data), dtype=np.int64)
    for rows in data.runs:
        part[rows] = np.arange(len(rows)) * parts // len(rows)
    return part


def assign_folds(data: FitData, seed: int = 0) -> tuple[str, NDArray[np.int64]]:
    """Return (scheme, fold number of each row (n,)); a single fold if there are too few cells or rows."""
    if data.in_time and data.times is not None:
        run = np.zeros(len(data)) if data.run is None else np.unique(data.run, return_inverse=True)[1]
        order = np.lexsort((data.times, run))
        folds = FOLDS if len(data) >= 4 * FOLDS else 1
        fold = np.empty(len(data), dtype=np.int64)
        fold[order] = np.arange(len(data)) * folds // len(data)
        return BY_TIME, fold
    cells = int(data.cell.max(initial=-1)) + 1
    folds = max(1, min(FOLDS, cells // 2))
    return BY_CELL, (np.random.default_rng(seed).permutation(cells) % folds)[data.cell]


def fold_rows(data: FitData, seed: int = 0) -> NDArray[np.int64]:
    """Return a random fold number for each row (n,): repeats of a cell fall into different folds."""
    return np.random.default_rng(seed).permutation(len(data)) % FOLDS


def expanding_in_runs(data: FitData, windows: int = FOLDS) -> Iterator[Fold]:
    """Yield the folds of an expanding window: the first half of every run trains, then equal parts follow."""
    part = parts_in_time(data, 2 * windows)
    for i in range(windows, 2 * windows):
        train, test = np.flatnonzero(part < i), np.flatnonzero(part == i)
        if len(train) and len(test):
            yield train, test


def regions(data: FitData) -> Iterator[tuple[str, Fold]]:
    """Yield (name, fold) with one region of the (B,S) plane, cut at thirds, left out at a time."""
    parts = []
    for name in ("B", "S"):
        column = data.steps[name]
        edges = np.unique(weighted_quantiles(column, (1 / 3, 2 / 3), data.weights))
        ends = [column.min(), *edges[edges < column.max()], column.max()]
        number = np.searchsorted(ends[1:-1], column, side="left")
        labels = [f"{name} {low:g}..{high:g}" for low, high in itertools.pairwise(ends)]
        parts.append([(label, number == i) for i, label in enumerate(labels)])
    for (of_B, some), (of_S, others) in itertools.product(*parts):
        inside = some & others
        if inside.any() and not inside.all():
            yield f"{of_B}, {of_S}", (np.flatnonzero(~inside), np.flatnonzero(inside))


def beyond(data: FitData, column: str, share: float = 0.7) -> Fold | None:
    """Return the fold that trains on the lowest share of a column; None with too few values."""
    values = data.steps[column]
    limit = weighted_quantile(values, share, data.weights)
    if limit >= values.max():
        limit = float(np.max(values[values < limit], initial=-np.inf))
    train, test = np.flatnonzero(values <= limit), np.flatnonzero(values > limit)
    return (train, test) if len(test) and len(distinct(values[train])[0]) >= FEWEST_VALUES else None


def by_fold(fold: NDArray[np.int64]) -> Iterator[Fold]:
    for i in range(int(fold.max()) + 1):
        yield np.flatnonzero(fold != i), np.flatnonzero(fold == i)


@dataclass(frozen=True)
class HeldOut:
    """Predictions of held-out rows, in the order of the folds, (m,) each."""

    rows: NDArray[np.intp]  # row numbers in the trace
    fold: NDArray[np.int64]  # fold number of each row, in time order for folds in time
    log_ratio: FloatArray  # ln(observed/predicted)
    weights: FloatArray  # steps that each row represents

    def among(self, rows: NDArray[np.bool_]) -> "HeldOut":
        return HeldOut(self.rows[rows], self.fold[rows], self.log_ratio[rows], self.weights[rows])


def cross_validate(
    data: FitData, options: FitOptions, theta: FloatArray, left_out: HeldOut | None = None
) -> tuple[CrossValidation, HeldOut | None]:
    """Cross-validate in K folds from the full fit's theta, or score rows that were left out; empty with too few."""
    scheme, fold = assign_folds(data, options.seed)
    if left_out is None and int(fold.max()) > 0:
        left_out = held_out(data, options, theta, by_fold(fold))
    if left_out is None or len(np.unique(left_out.fold)) <= int(fold.max()):
        return CrossValidation(), None
    return CrossValidation(scheme, scores_of(data, left_out)), left_out


def held_out(data: FitData, options: FitOptions, theta: FloatArray, folds: Iterable[Fold]) -> HeldOut | None:
    """Fit each fold with enough training rows from theta and predict its test rows; None if no fold is left."""
    parts = left_out_parts(data, options.of_formula, theta, folds)
    if options.correction is not None:
        rounds = max(options.correction.rounds)
        parts = [part.corrected(part.smoothed(data, rounds), options.correction) for part in parts]
    return joined_parts(data, parts)


def joined_parts(data: Rows, parts: Sequence["LeftOut"]) -> HeldOut | None:
    if not parts:
        return None
    left_out = np.concatenate([part.test for part in parts])
    fold = np.repeat([part.number for part in parts], [len(part.test) for part in parts])
    return HeldOut(left_out, fold, np.concatenate([part.log_ratio for part in parts]), data.weights[left_out])


@dataclass(frozen=True)
class LeftOut:
    """A fold and the fit of its training rows. log_ratio: ln(observed/predicted) of the test rows."""

    number: int
    train: NDArray[np.intp]
    test: NDArray[np.intp]
    log_ratio: FloatArray
    problem: FitProblem
    theta: FloatArray

    def smoothed(self, data: Rows, rounds: int) -> list[Smoothed]:
        """Return what the training rows' residuals teach, by grid."""
        missed = log_ratios(self.problem, self.theta, data.at(self.train))
        return list(smooth_residuals(data, self.train, missed, rounds, formula_of(self.problem, self.theta)))

    def corrected(self, smoothed: Sequence[Smoothed], smoothing: Smoothing) -> "LeftOut":
        log_ratio = self.log_ratio.copy()
        for each in smoothed:
            own = each.grid.rows[self.test]
            log_ratio[own] -= each.grid.at(each.at_strength(smoothing), self.test[own])
        return replace(self, log_ratio=log_ratio)


def left_out_parts(data: FitData, options: FitOptions, theta: FloatArray, folds: Iterable[Fold]) -> list[LeftOut]:
    """Fit every fold that has enough training rows, all together in the coordinates of the full problem."""
    whole, kept = make_problem(data, options), _kept_rows(data)
    rows, fitted = collapsed(data, whole.model), []
    weights, upper = [], []
    for number, (train, test) in enumerate((train[kept[train]], test[kept[test]]) for train, test in folds):
        held = _held(data, whole, train)
        counts = np.asarray(np.bincount(rows.row_of[train], data.weights[train], len(rows.counts)), dtype=np.float64)
        if round(float(counts.sum())) > len(whole.free) - len(held) and len(test):
            weights.append(whole.weights * counts / rows.counts)
            upper.append(np.where([p.name in held for p in whole.free_parameters], 0.0, whole.upper))
            fitted.append((number, train, test))
    thetas = np.tile(theta, (len(fitted), 1))
    if fitted and whole.free:
        used = np.flatnonzero(np.any(weights, axis=0))
        start, part = whole.coordinates(theta), whole.rows_at(used)
        thetas = whole.theta(refitted_all(part, start, np.array(weights)[:, used], np.array(upper)))
    return [
        LeftOut(number, train, test, log_ratios(whole, own, data.at(test)), whole, own)
        for own, (number, train, test) in zip(thetas, fitted, strict=True)
    ]


def _kept_rows(data: FitData) -> NDArray[np.bool_]:
    """Return which rows (n,) are split into folds: spread pieces of a long trace, all of its rare phases."""
    kept = np.ones(len(data), dtype=bool)
    if len(data) > MOST_ROWS:
        pieces = np.linspace(0, len(data) // PIECE, MOST_ROWS // PIECE).astype(np.intp)
        kept = np.isin(np.arange(len(data)) // PIECE, pieces)
        for rows in data.by_phase.values():
            kept |= rows & (rows.sum() <= RARE_ROWS)
    return kept


def _held(data: Rows, whole: FitProblem, train: NDArray[np.intp]) -> set[str]:
    """Return the costs that all rows identify, but not the training rows."""
    if not isinstance(whole.model, Separable):
        return set()
    options, part = whole.options, data.at(train)
    held = whole.model.held(part.steps, part.weights / part.observed**2, options.fixed, known=whole.fixed)
    costs = {term.parameter.name for term in whole.model.terms}
    return (held.keys() & costs) - {*whole.fixed, *options.bounds, *options.priors}


PHASE_ROWS = 30  # fewest steps of a phase that is judged separately
PHASE_ROWS_IN_FOLD = PHASE_ROWS // FOLDS  # in a fold with fewer its mean error is luck


def errors_by_phase(data: FitData, rows: NDArray[np.intp], ape: FloatArray) -> dict[str, float]:
    """Return the mean of ape (k,) of rows (k,) by phase with PHASE_ROWS steps in data, PHASE_ROWS_IN_FOLD in rows."""
    found = {}
    for name, inside in data.by_phase.items():
        some = inside[rows]
        weights = data.weights[rows[some]]
        if weights.sum() >= PHASE_ROWS_IN_FOLD and data.weights[inside].sum() >= PHASE_ROWS:
            found[name] = max(float(np.average(ape[some], weights=weights)), EXACT)
    return found


def mean_error(data: FitData, rows: NDArray[np.intp], ape: FloatArray) -> float:
    """Return the geometric mean of `errors_by_phase`: a few steps with prefill count as much as many decode steps."""
    errors = list(errors_by_phase(data, rows, ape).values())
    errors = errors or [max(float(np.average(ape, weights=data.weights[rows])), EXACT)]
    return float(np.exp(np.mean(np.log(errors))))


EXACT = 1e-6  # error in percent below which a prediction counts as exact


def scores_of(data: FitData, left_out: HeldOut) -> HeldOutErrors:
    observed, weights, fold = data.observed[left_out.rows], left_out.weights, distinct(left_out.fold)[1]
    ape = 100 * np.abs(np.expm1(-left_out.log_ratio))
    whole = error_metrics(observed, observed * np.exp(-left_out.log_ratio), weights)
    errors = np.bincount(fold, weights * ape) / np.bincount(fold, weights)
    phases = errors_by_phase(data, left_out.rows, ape)
    return HeldOutErrors(
        len(errors),
        whole["mape_pct"],
        whole["median_ape_pct"],
        whole["p90_ape_pct"],
        whole["rmse_ms"],
        mape_pct_by_fold=errors.tolist(),
        mape_pct_mean=float(errors.mean()),
        mape_pct_sd=float(errors.std(ddof=1)) if len(errors) > 1 else None,
        by_phase=phases if len(phases) > 1 else None,
    )


def further_validation(
    data: FitData,
    options: FitOptions,
    theta: FloatArray,
    scores: CrossValidation | None = None,
    later: HeldOut | None = None,
) -> CrossValidation:
    """Add the harder schemes to the scores of the default one; those outside the data go without a correction."""
    window = scores_of(data, later) if later is not None else None
    plain, data = options.of_formula, data.draw(HARDER_ROWS, options.seed)
    named = list(regions(data))
    region = unlike = None
    if (apart := held_out(data, plain, theta, [fold for _, fold in named])) is not None:
        used = [named[number][0] for number in np.unique(apart.fold)]
        region = scores_of(data, apart)
        region = structs.replace(region, regions=dict(zip(used, region.mape_pct_by_fold, strict=True)))
        unlike = _unlike(data, [fold for _, fold in named], apart)
    tokens, requests, context = (_beyond(data, plain, theta, column) for column in COLUMN_NAMES)
    return structs.replace(
        scores or CrossValidation(),
        expanding_window=window,
        by_region=region,
        extrapolation_S=tokens,
        extrapolation_B=requests,
        extrapolation_context=context,
        outside_support=unlike,
    )


def _unlike(data: FitData, folds: Sequence[Fold], apart: HeldOut) -> HeldOutErrors | None:
    far = np.zeros(len(data))
    for number in np.unique(apart.fold):
        train, test = folds[number][0], apart.rows[apart.fold == number]
        far[test] = data.outside_by(data.support(train), test)
    outside = apart.among((far[apart.rows] > 0) & np.isfinite(far[apart.rows]))
    if len(outside.rows) < FEWEST_OUTSIDE:
        return None
    typical = weighted_quantile(far[outside.rows], 0.5, outside.weights)
    return structs.replace(scores_of(data, outside), by_phase=None, distance=typical)


def _beyond(data: FitData, options: FitOptions, theta: FloatArray, column: str) -> HeldOutErrors | None:
    """Return the errors of extrapolation in a column, for the cut where they grow fastest."""
    if column not in data.steps:
        return None
    values, found = data.steps[column], []
    cuts = [of_known_phases(data, fold) for share in CUTS if (fold := beyond(data, column, share)) is not None]
    cuts = [fold for fold in cuts if len(fold[1])]
    if (left_out := held_out(data, options, theta, cuts)) is None:
        return None
    for number in np.unique(left_out.fold).tolist():
        errors = scores_of(data, left_out.among(left_out.fold == number))
        trained = float(values[cuts[number][0]].max())
        distance = max(math.log(float(values.max()) / trained), math.log(2)) if trained > 0 else math.inf
        ends: dict[str, Any] = {f"trained_up_to_{COLUMN_NAMES[column]}": trained}
        found.append((math.log1p(errors.p90_ape_pct / 100) / distance, structs.replace(errors, **ends)))
    return max(found, key=lambda each: each[0])[1]


def of_known_phases(data: FitData, fold: Fold) -> Fold:
    """Return the fold without test rows of phases that are rare in training, where a fit refuses to predict."""
    train, test = fold
    known = [inside for inside in data.by_phase.values() if data.weights[train[inside[train]]].sum() >= PHASE_ROWS]
    return train, test[np.any([inside[test] for inside in known], axis=0)] if known else test[:0]
