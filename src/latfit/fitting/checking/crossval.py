"""Cross-validation: errors on held-out rows, left out in the way the data were gathered.

Which rows are left out together: the default scheme is one of the first two, the others are harder questions.

* Cells: a designed grid (no time, or repetitions of cells) is split by cells, so that a repeat never predicts itself.
* Blocks of time: a log in time order is split into contiguous blocks, because neighbours in time share their noise.
* Expanding window: the first half of every run trains, then equal parts of the rest are each predicted from all that
  is earlier.
* Regions: the plane of ln B and ln S is cut at weighted thirds, and each of the up to nine regions is left out in turn.
* Extrapolation: rows with few tokens train, rows with many test; and the same for requests. Rows of fewer than three
  different values tell no slope, so then nothing is said.

A fold is a pair of index arrays (train, test) into the rows. The loss's scale and every parameter are found anew in
each fold; only the start and the ranges that parameters are searched in come from the full fit, which saves the search
and cannot leak, because the optimum does not depend on them. Every scheme gives the mean over rows and the spread over
folds, and the ratios observed/predicted of the held-out rows, from which `conformal` makes prediction limits.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit.fitting.correction import Smoothing, smooth_residuals
from latfit.fitting.data import FitData, Rows
from latfit.fitting.problem import FitOptions, FitProblem, collapsed, log_ratios, make_problem
from latfit.fitting.solver.solve import refitted_all, solve
from latfit.model import CONTEXT, CrossValidation, HeldOutErrors, Separable, StepTable
from latfit.stats import FloatArray, distinct, error_metrics, weighted_quantile, weighted_quantiles

Fold = tuple[NDArray[np.intp], NDArray[np.intp]]

FOLDS = 5
HARDER_ROWS = 3_000
"""Rows that are enough to answer harder questions on, drawn evenly."""
CUTS = (0.4, 0.55, 0.7, 0.85)
"""Shares of the rows, from the lowest value of a column on, that train where more is predicted."""
COLUMN_NAMES = {"S": "S", "B": "B", CONTEXT: "context"}
FEWEST_OUTSIDE = 10
"""Steps unlike those that trained from which their errors say something."""
FEWEST_VALUES = 3
"""Different values from which rows tell a slope, and one more by which to doubt it."""
TRAINED = 50_000
"""Rows that are enough to train on, drawn evenly: what they leave open is far below what a fold shows."""

TESTED, TOGETHER = 40_000, 1000
"""Rows of a fold, in the mean over folds, that are enough to test on, and how many of them stay neighbours, so that it
is still seen what those share."""

BY_CELL = "K-fold over (B,S) cells"
BY_TIME = "K-fold over contiguous blocks of time"


def parts_in_time(data: FitData, parts: int) -> NDArray[np.int64]:
    """Number of the part 0..parts-1 that each row (n,) is in: every run is cut into equal parts in its time order."""
    part = np.zeros(len(data), dtype=np.int64)
    for rows in data.runs:
        part[rows] = np.arange(len(rows)) * parts // len(rows)
    return part


def assign_folds(data: FitData, seed: int = 0) -> tuple[str, NDArray[np.int64]]:
    """(scheme, fold number of each row (n,)); a single fold where there are fewer than four cells or rows."""
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
    """Return a fold number for each row (n,), drawn freely: repeats of a cell fall into different folds."""
    return np.random.default_rng(seed).permutation(len(data)) % FOLDS


def expanding_in_runs(data: FitData, windows: int = FOLDS) -> Iterator[Fold]:
    """The expanding window over all runs at once: the first half of every run trains, then equal parts follow."""
    part = parts_in_time(data, 2 * windows)
    for i in range(windows, 2 * windows):
        train, test = np.flatnonzero(part < i), np.flatnonzero(part == i)
        if len(train) and len(test):
            yield train, test


def regions(data: FitData) -> Iterator[tuple[str, Fold]]:
    """(name, fold) with one region of the (B,S) plane left out at a time; regions without rows are passed over."""
    labels, numbers = [], []
    for name in ("B", "S"):
        column = data.steps[name]
        edges = np.unique(weighted_quantiles(column, (1 / 3, 2 / 3), data.weights))
        edges = edges[edges < column.max()]
        numbers.append(np.searchsorted(edges, column, side="left"))
        ends = [column.min(), *edges, column.max()]
        labels.append([f"{name} {low:g}..{high:g}" for low, high in itertools.pairwise(ends)])
    for b, label_b in enumerate(labels[0]):
        for s, label_s in enumerate(labels[1]):
            inside = (numbers[0] == b) & (numbers[1] == s)
            if inside.any() and not inside.all():
                yield f"{label_b}, {label_s}", (np.flatnonzero(~inside), np.flatnonzero(inside))


def beyond(data: FitData, column: str, share: float = 0.7) -> Fold | None:
    """Train on rows up to the S (or B) that a share of the rows stays at or below, test on the rest; None where the
    former have too few different values to tell how the latency grows."""
    values = data.steps[column]
    limit = weighted_quantile(values, share, data.weights)
    if limit >= values.max():
        limit = float(np.max(values[values < limit], initial=-np.inf))
    train, test = np.flatnonzero(values <= limit), np.flatnonzero(values > limit)
    return (train, test) if len(test) and len(distinct(values[train])[0]) >= FEWEST_VALUES else None


def by_fold(fold: NDArray[np.int64]) -> Iterator[Fold]:
    """(train, test) for each number in an assignment of rows to folds (n,)."""
    for i in range(int(fold.max()) + 1):
        yield np.flatnonzero(fold != i), np.flatnonzero(fold == i)


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
class Validated:
    """Errors of the default scheme, and the rows as they were predicted while left out."""

    scores: CrossValidation
    held_out: HeldOut


def cross_validate(
    data: FitData, options: FitOptions, theta: FloatArray, left_out: HeldOut | None = None
) -> Validated | None:
    """Cross-validate in K folds, starting from the full fit's theta.

    left_out: the rows as predicted while left out, where they are known. Returns None where too little would be left to
    fit or to test on.
    """
    scheme, fold = assign_folds(data, options.seed)
    if left_out is None and int(fold.max()) > 0:
        left_out = held_out(data, options, theta, by_fold(fold))
    if left_out is None or len(np.unique(left_out.fold)) <= int(fold.max()):
        return None
    return Validated(CrossValidation(scheme, scores_of(data, left_out)), left_out)


def held_out(data: Rows, options: FitOptions, theta: FloatArray, folds: Iterable[Fold]) -> HeldOut | None:
    """Fit each fold's training rows from theta as start and predict its test rows; folds whose training rows are too
    few for the free parameters are passed over. None where no fold is left."""
    parts = left_out_parts(data, options.of_formula, theta, folds)
    if options.correction is not None:
        parts = [part.corrected(data, options.correction) for part in parts]
    return joined_parts(data, parts)


def joined_parts(data: Rows, parts: Sequence["LeftOut"]) -> HeldOut | None:
    """The rows of all folds; None where there are none."""
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

    def missed(self, data: Rows) -> FloatArray:
        """ln(observed/predicted) of the training rows."""
        return log_ratios(self.problem, self.theta, data.at(self.train))

    def corrected(self, data: Rows, smoothing: Smoothing) -> "LeftOut":
        """Return the fold with the smoothed residuals of its training rows taken off."""
        log_ratio = self.log_ratio.copy()
        for grid, table in smooth_residuals(data, self.train, self.missed(data), smoothing):
            own = grid.rows[self.test]
            log_ratio[own] -= grid.at(table, self.test[own])
        return replace(self, log_ratio=log_ratio)


def left_out_parts(data: Rows, options: FitOptions, theta: FloatArray, folds: Iterable[Fold]) -> list[LeftOut]:
    """Every fold that its training rows are enough for, with the fit of them."""
    numbered_folds = _with_enough([(number, *fold) for number, fold in enumerate(folds)])
    whole = make_problem(data, options)
    rows = collapsed(data, whole.model)
    if rows.row_of is None or options.loss == "tukey" or len(whole.free) == 0:
        parts = [_alone(data, options, theta, fold) for fold in numbered_folds]
    else:
        parts = _together(data, whole, theta, numbered_folds)
    return [part for part in parts if part is not None]


_Numbered = tuple[int, NDArray[np.intp], NDArray[np.intp]]


def _with_enough(folds: Sequence[_Numbered]) -> list[_Numbered]:
    """The folds with all their test rows, or where these are more than enough, with the same share of each fold's in
    pieces that are spread evenly: a mean over rows weighs the folds as before."""
    most, rows = TESTED * len(folds), sum(len(test) for _, _, test in folds)
    if rows <= most:
        return list(folds)

    def some(test: NDArray[np.intp]) -> NDArray[np.intp]:
        pieces = math.ceil(len(test) / TOGETHER)
        kept = np.linspace(0, pieces - 1, max(1, round(pieces * most / rows))).astype(np.int64)
        return test[np.isin(np.arange(len(test)) // TOGETHER, kept)]

    return [(number, train, some(test)) for number, train, test in folds]


def _alone(data: Rows, options: FitOptions, theta: FloatArray, fold: _Numbered) -> LeftOut | None:
    """A fold by a problem of its own."""
    number, train, test = fold
    if len(train) > TRAINED:
        train = train[np.linspace(0, len(train) - 1, TRAINED).astype(np.int64)]
    problem = make_problem(data.at(train), options)
    if problem.rows <= len(problem.free) or len(test) == 0:
        return None
    found = problem.theta(solve(problem, warm=problem.coordinates(theta)).z)
    return LeftOut(number, train, test, log_ratios(problem, found, data.at(test)), problem, found)


def _together(data: Rows, whole: FitProblem, theta: FloatArray, folds: Sequence[_Numbered]) -> list[LeftOut | None]:
    """The same of several folds at once, in the coordinates and search ranges of all rows."""
    rows, parts = collapsed(data, whole.model), dict[int, LeftOut | None]()
    assert rows.row_of is not None
    weights, upper, kept = [], [], []
    for fold in folds:
        number, train, test = fold
        held = _held(data, whole, train)
        if held is None:
            parts[number] = _alone(data, whole.options, theta, fold)
            continue
        counts = np.asarray(np.bincount(rows.row_of[train], data.weights[train], len(rows.counts)), dtype=np.float64)
        if round(float(counts.sum())) <= len(whole.free) - len(held) or len(test) == 0:
            continue
        ends = whole.upper.copy()
        ends[[i for i, p in enumerate(whole.free_parameters) if p.name in held]] = 0.0
        weights.append(rows.counted(counts, whole.options.weights))
        upper.append(ends)
        kept.append(fold)
    if kept:
        found = refitted_all(whole, whole.coordinates(theta), np.array(weights), np.array(upper))
        by_row = {name: column[rows.row_of] for name, column in whole.steps.items()}
        for z, (number, train, test) in zip(found, kept, strict=True):
            steps = StepTable({name: column[test] for name, column in by_row.items()})
            predicted = np.maximum(whole.model.latency_ms(whole.theta(z), steps), 1e-300)
            ratio = np.log(data.observed[test]) - np.log(predicted)
            parts[number] = LeftOut(number, train, test, ratio, whole, whole.theta(z))
    return [parts.get(number) for number, _, _ in folds]


def _held(data: Rows, whole: FitProblem, train: NDArray[np.intp]) -> set[str] | None:
    """Costs that the training rows cannot tell although all rows can; None where the rows tell other things than all
    rows do."""
    if not isinstance(whole.model, Separable):
        return set()
    options = whole.options
    part = data.at(train)
    held = whole.model.held(part.steps, part.weights / part.observed**2, options.fixed)
    own = {name for name in held if name not in options.bounds and name not in options.priors}
    costs = {term.parameter.name for term in whole.model.terms}
    if {name for name in whole.fixed if name in costs and name not in options.fixed} - own:
        return None
    return (own & costs) - set(whole.fixed)


PHASE_ROWS = 30
"""Steps from which a phase counts by itself."""


def counted_phases(data: FitData) -> dict[str, NDArray[np.bool_]]:
    """Whether each row (n,) is of a phase, of those with rows enough to count by themselves."""
    return {name: rows for name, rows in data.by_phase.items() if data.weights[rows].sum() >= PHASE_ROWS}


def error_by_phase(data: FitData, rows: NDArray[np.intp], ape: FloatArray) -> float:
    """Geometric mean over the phases of the mean error of rows (k,), ape (k,): so that a few steps with prefill count
    as much as many that decode."""
    weights = data.weights[rows]
    held = [inside[rows] for inside in counted_phases(data).values()]
    some = [inside for inside in held if inside.any()] or [np.ones(len(rows), dtype=bool)]
    means = [max(float(np.average(ape[inside], weights=weights[inside])), EXACT) for inside in some]
    return float(np.exp(np.mean(np.log(means))))


EXACT = 1e-6
"""Error in percent below which a prediction counts as exact."""


def scores_of(data: Rows, left_out: HeldOut) -> HeldOutErrors:
    """The errors of a cross-validation: over all rows left out, by fold, by phase, and their spread."""
    observed = data.observed[left_out.rows]
    predicted = observed * np.exp(-left_out.log_ratio)
    whole = error_metrics(observed, predicted, left_out.weights)
    errors = []
    for number in np.unique(left_out.fold):
        inside = left_out.fold == number
        errors.append(error_metrics(observed[inside], predicted[inside], left_out.weights[inside])["mape_pct"])
    return HeldOutErrors(
        len(errors),
        whole["mape_pct"],
        whole["median_ape_pct"],
        whole["p90_ape_pct"],
        whole["rmse_ms"],
        mape_pct_by_fold=errors,
        mape_pct_mean=float(np.mean(errors)),
        mape_pct_sd=float(np.std(errors, ddof=1)) if len(errors) > 1 else None,
        by_phase=_by_phase(data, left_out),
    )


def _by_phase(data: Rows, left_out: HeldOut) -> dict[str, float] | None:
    """Mean error in percent of the rows left out of each phase; None where all are of one."""
    phases = counted_phases(data) if isinstance(data, FitData) else {}
    ape, found = 100 * np.abs(np.expm1(-left_out.log_ratio)), {}
    for name, inside in phases.items():
        if (rows := inside[left_out.rows]).any():
            found[name] = float(np.average(ape[rows], weights=left_out.weights[rows]))
    return found if len(found) > 1 else None


def further_validation(
    data: FitData,
    options: FitOptions,
    theta: FloatArray,
    scores: CrossValidation | None = None,
    later: HeldOut | None = None,
) -> CrossValidation:
    """Add harder questions to the scores of the default scheme, as far as the rows can answer them.

    Regions and rows beyond the others are predicted by the parametric model, which predicts alone where nothing was
    measured. later: rows of the expanding window as predicted from earlier ones, for a log.
    """
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
    """Errors of those rows of left-out regions that lie where few or none of their kind trained; None where these are
    too few to tell."""
    far = np.zeros(len(data))
    for number in np.unique(apart.fold):
        train, test = folds[number][0], apart.rows[apart.fold == number]
        far[test] = data.spots.outside_by(data.spots.support(data.weights, train), test)
    outside = apart.among((far[apart.rows] > 0) & np.isfinite(far[apart.rows]))
    if len(outside.rows) < FEWEST_OUTSIDE:
        return None
    typical = weighted_quantile(far[outside.rows], 0.5, outside.weights)
    return structs.replace(scores_of(data, outside), by_phase=None, distance=typical)


def _beyond(data: FitData, options: FitOptions, theta: FloatArray, column: str) -> HeldOutErrors | None:
    """Return the errors on rows with more of a column than trained, of the cut where they grow fastest."""
    if column not in data.steps:
        return None
    values = data.steps[column]
    cuts = [of_known_phases(data, fold) for share in CUTS if (fold := beyond(data, column, share)) is not None]
    left_out = held_out(data, options, theta, [fold for fold in cuts if len(fold[1])])
    if left_out is None:
        return None
    found = []
    for number in np.unique(left_out.fold):
        errors = scores_of(data, left_out.among(left_out.fold == number))
        trained = float(values[[fold for fold in cuts if len(fold[1])][number][0]].max())
        distance = max(math.log(float(values.max()) / trained), math.log(2)) if trained > 0 else math.inf
        told: dict[str, Any] = {f"trained_up_to_{COLUMN_NAMES[column]}": trained}
        found.append((math.log1p(errors.p90_ape_pct / 100) / distance, structs.replace(errors, **told)))
    return max(found, key=lambda each: each[0])[1]


def of_known_phases(data: FitData, fold: Fold) -> Fold:
    """Return the fold without test rows of phases that hardly any training row is of: predictions there are refused."""
    train, test = fold
    known = [inside for inside in data.by_phase.values() if data.weights[train[inside[train]]].sum() >= PHASE_ROWS]
    return train, test[np.any([inside[test] for inside in known], axis=0)] if known else test[:0]
