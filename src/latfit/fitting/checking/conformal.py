"""Prediction intervals for single steps by split conformal prediction, phase by phase.

The score of a step is s = ln(observed/predicted) where the prediction comes from rows that are not its own: earlier
rows of the run for a log in time order, other cells for a designed grid. With n scores and k = ceil((n+1) level), the
k-th smallest is not exceeded by a new step with probability at least `level`, and at most 1/(n+1) more, whatever the
model and the noise, while steps are exchangeable (Vovk et al. 2005). Given the scores, the coverage is Beta(k, n+1-k).
Where k > n the data cannot tell that level. Below, the k-th largest does the same. A two-sided interval at level c
takes the lower and the upper factor at (1+c)/2.

The repeats of a cell of a grid share what the model misses there: five repeats of seven cells are not 35 scores. With r
the intraclass correlation of the scores (analysis of variance), m repeats of a cell are worth m/(1 + (m-1) r)
independent scores (Kish 1965): each counts 1/(1 + (m-1) r), and n is what they count together. So where the noise of
single steps decides (r = 0) every step counts, and where the cell decides (r = 1) every cell.

Neighbours in time share their noise too: f steps in a row are worth one (see `autocorrelation`), and each counts 1/f.
In a grid only the share 1 - r of the variance that is a step's own can be shared in time. The variance of the mean of
all scores is the sum of both parts, so a step of a cell counts 1/(r m + (1 - r) f). Steps of one visit to a cell share
both: time alone makes cells differ as if v of their steps were one, v being f, or the steps of a visit where these are
fewer. So v times the variance within cells is taken off that between them before r is found. f is the likely one here;
all steps together count at most what they count without regard to cells, by the f that allows for its error.

The number of independent scores is n in every rank and every band; where it is too small for a level, there is no
limit. New steps are those of a fresh run: the next few of the same run resemble its last ones.

Phases have limits of their own: over all steps together a limit can hold and fail in every phase. Time order breaks
exchangeability, so the promise is checked as it would have been used: the limit for each part of a log comes from the
parts before it (for a grid: from the other folds), and the share of steps below it is reported, beside the band in
which it lies 99 times of 100.

Clocks of whole milliseconds record many steps with the same time. A limit that lies on such a time by one fold's fit
may leave all of them out by the final one, a thousandth away, so limits hold for the same steps about the final fit
too. Nor can the share below a limit be told more exactly than the clock tells times: it lies outside its band only
where the share below a limit half a tick lower, or higher, does so too.

A phase of a log is said to drift where the share at 90 % lies outside its band, where the scores' level changes, or
where later steps are further from what earlier ones say than steps are from what all others say. Later steps then tell
what became slower and nothing of how it was, so the limits of such a phase are the outer ones of two sets: of later
steps predicted from earlier ones, and of blocks of time predicted from all the others.
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
"""Of a limit in ln T: a step on it is within."""
BY_TIME = "split conformal by phase, each part of the time predicted from earlier parts, observed/predicted"
BY_CELL = "split conformal by phase on cells left out, observed/predicted"

REACH = 30
"""Standard deviations of a count about its mean beyond which nothing lies."""

STANDARD_ERRORS = 3.0
"""Further than that, later steps differ from earlier ones."""
MATERIAL = 3.0
"""So many steps for one that would be independent but for time are worth a word, where intervals suffer."""
WIDER = 1.1
"""How much wider an interval must become to suffer."""

Factors = dict[str, float | None]


@dataclass(frozen=True)
class Scores:
    """Scores (m,) in rising order, with what the clock cannot tell of each (tick), its row, its fold and how many
    independent ones it is worth, with regard to what neighbours in time share (weight) and without (by_cell); steps and
    (B,S) cells that they come from; in_time: what was found of neighbours in time."""

    score: FloatArray
    tick: FloatArray
    row: NDArray[np.intp]
    fold: NDArray[np.int64]
    weight: FloatArray
    by_cell: FloatArray
    steps: int
    cells: int
    in_time: Persistence

    @staticmethod
    def of(data: FitData, order: TimeOrder, left_out: HeldOut, ordered: bool) -> "Scores":
        """Of rows of a trace that were left out. ordered: they are rows of a log rather than cells of a grid."""
        cell = distinct(data.cell[left_out.rows])[1]
        score, weight, tick = left_out.log_ratio, left_out.weights, data.tick[left_out.rows]
        told = persistence(order.series(left_out.rows, score))
        if ordered or not len(cell):
            counts, by_cell = weight / told.steps_for_one, weight
        else:
            counts, by_cell = (weight * worth(score, weight, cell, known, tick) for known in (told, None))
        rising = np.argsort(score, kind="stable")
        steps, cells = round(float(weight.sum())), int(cell.max(initial=-1)) + 1
        rows, fold = left_out.rows[rising], left_out.fold[rising]
        return Scores(score[rising], tick[rising], rows, fold, counts[rising], by_cell[rising], steps, cells, told)

    def among(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "Scores":
        """Those of the scores (m,) that are true, or have these places."""
        return replace(
            self,
            score=self.score[rows],
            tick=self.tick[rows],
            row=self.row[rows],
            fold=self.fold[rows],
            weight=self.weight[rows],
            by_cell=self.by_cell[rows],
        )

    def about(self, log_ratio: FloatArray) -> "Scores":
        """The same steps about a fit of all of them. log_ratio: ln(observed/predicted) (n,) of all rows."""
        score = log_ratio[self.row]
        rising = np.argsort(score, kind="stable")
        return replace(self.among(rising), score=score[rising])

    def without_time(self) -> "Scores":
        """The same as if steps shared nothing with their neighbours in time."""
        return replace(self, weight=self.by_cell, in_time=Persistence())

    @property
    def independent(self) -> float:
        """How many independent scores they are worth."""
        return float(self.weight.sum())

    @cached_property
    def _sides(self) -> Mapping[int, tuple[FloatArray, FloatArray]]:
        """By side: side times the scores (m,) in order, and how many independent ones there are up to each (m,)."""
        return {1: (self.score, np.cumsum(self.weight)), -1: (-self.score[::-1], np.cumsum(self.weight[::-1]))}

    def limit(self, level: float, side: int = 1) -> float | None:
        """The limit that side times a new score stays below."""
        return _limit_of(*self._sides[side], level)


def worth(
    score: FloatArray,
    weight: FloatArray,
    cell: NDArray[np.intp],
    in_time: Persistence | None = None,
    tick: FloatArray | float = 0.0,
) -> FloatArray:
    """How many independent scores one of the steps in each row (m,) is worth, at most 1.

    score (m,) of rows that stand for weight steps each (m,), in cells (m,).  in_time: what of a step's own part of the
    score its neighbours in time share.  tick: what a clock cannot tell of each (m,).
    """
    told = in_time or Persistence()
    x = clipped(score, weight, tick)
    found = by_group(x, cell, weight)
    size, n, cells = found.size, found.values, len(found.size)
    if found.freedom < 1 or cells < 2:
        return np.asarray(1.0 / np.maximum(size[cell], told.steps_for_one))
    between = float(size @ (found.mean - float(weight @ x) / n) ** 2) / (cells - 1)
    by_cell = max(between - told.in_visit * found.within, 0.0)
    shared = min(by_cell / max(by_cell + found.typical_size * found.within, 1e-300), 1.0)
    worth_one = 1.0 / (shared * np.maximum(size, 1.0) + (1 - shared) * told.likely)
    return np.asarray(worth_one * min(1.0, n / told.steps_for_one / float(size @ worth_one)))[cell]


def conformal_rank(n: int, level: float) -> int | None:
    """k = ceil((n+1) level), the rank among n scores that a new one stays below with that probability; None where n is
    too small to tell."""
    k = math.ceil((n + 1) * level - 1e-9)
    return k if 1 <= k <= n else None


def upper_limit(scores: FloatArray, level: float, weights: FloatArray | None = None) -> float | None:
    """The score (n,) that a new one stays below with probability `level`; None where n cannot tell.

    weights: how many independent scores each stands for (n,).
    """
    weights = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(scores, kind="stable")
    return _limit_of(scores[order], np.cumsum(weights[order]), level)


def _limit_of(rising: FloatArray, reached: FloatArray, level: float) -> float | None:
    """The same of scores (n,) that are in order, with the sum of weights up to each (n,)."""
    n = float(reached[-1]) if len(reached) else 0.0
    rank = (n + 1) * level
    if n <= 0 or rank > n + 1e-9:
        return None
    return float(rising[min(int(np.searchsorted(reached, rank - 1e-9 * n)), len(rising) - 1)])


def later_rows(data: FitData, options: FitOptions, theta: FloatArray) -> HeldOut | None:
    """The second half of every run, in parts predicted from all that is earlier; None for a trace without time."""
    return held_out(data, options, theta, expanding_in_runs(data)) if data.in_time else None


def prediction_intervals(
    data: FitData,
    left_out: HeldOut,
    *,
    ordered: bool,
    blocks: HeldOut | None = None,
    fitted: FloatArray | None = None,
) -> dict[str, Any]:
    """The `intervals` of the JSON contract from rows that were predicted while left out.

    ordered: the folds follow each other in time, so that limits are checked with earlier folds only.  blocks: rows of
    the whole time, each block predicted from all others; the limits of phases that drift hold for them too.  fitted:
    ln(observed/predicted) (n,) of all rows by the final fit, whose limits hold where a clock's ticks show.
    """
    fitted = fitted if data.ticks else None
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
        by_phase[phase] = {"n": scores.steps, "cells": scores.cells, **_limits(scores, wider, ordered, fitted), **drift}
    drifts = any(found["drift"] for found in by_phase.values())
    wider = Scores.of(data, order, blocks, ordered) if drifts and blocks is not None else None
    return {
        "method": BY_TIME if ordered else BY_CELL,
        **_limits(Scores.of(data, order, left_out, ordered), wider, ordered, fitted),
        "by_phase": by_phase,
        "drift": _drift_sentence(by_phase),
    }


def _limits(scores: Scores, wider: Scores | None, ordered: bool, fitted: FloatArray | None) -> dict[str, Any]:
    """What a phase's scores, or all, say. wider: scores for which the limits hold as well, and for these steps about
    the final fit, of which fitted is ln(observed/predicted) (n,)."""
    left_out = [scores] if wider is None else [scores, wider]
    fewest = min(left_out, key=lambda known: known.independent / max(known.steps, 1))
    found: dict[str, Any] = {
        **_factors(left_out if fitted is None else [*left_out, scores.about(fitted)]),
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
    """Whether a phase drifts, and by how much where the level of its later steps changes.

    scores: of its later steps, which are in the order of time.  blocks: its steps of the whole time.
    """
    change = change_point(later.log_ratio, data.tick[later.rows])
    if change is not None and change.p_value < CERTAIN and abs(change.shift) > math.log1p(LEAST_SHIFT):
        return {"drift": True, "relative_shift": math.expm1(change.shift)}
    differ = blocks is not None and _later_differ(scores, blocks, data.tick[blocks.rows])
    return {"drift": differ or _outside_band(scores, 0.9)}


def _outside_band(scores: Scores, level: float) -> bool:
    """Whether the share of scores below their limit, in the order of time, is too large or too small however the clock
    rounded."""
    parts = _parts(scores, ordered=True)
    fewest, most = (_hits(parts, level, half) for half in (-0.5, 0.5))
    if not fewest.seen:
        return False
    low, high = _band(level, fewest.seen, fewest.calibrated)
    return most.below < low * most.seen or fewest.below > high * fewest.seen


def _later_differ(scores: Scores, blocks: HeldOut, tick: FloatArray) -> bool:
    """Whether later steps are further from what earlier ones say than steps are from what all others say, of which a
    clock cannot tell ticks (m,)."""
    later, whole = clipped(scores.score, tick=scores.tick), clipped(blocks.log_ratio, tick=tick)
    shift = abs(float(later.mean() - whole.mean()))
    return shift > max(math.log1p(LEAST_SHIFT), STANDARD_ERRORS * float(later.std()) / math.sqrt(scores.independent))


def _silent(scores: Scores) -> list[float]:
    """One-sided levels of the two-sided intervals that the scores cannot tell."""
    return [
        level for level in LEVELS if level > 0.5 and (scores.limit(level) is None or scores.limit(level, -1) is None)
    ]


def _too_few(scores: Scores) -> str:
    """Which two-sided levels the scores cannot tell, and what could; empty where they tell all."""
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
    """What the intervals lose by what steps share with their neighbours in time; empty where that is little."""
    alone = scores.without_time()
    if MATERIAL * scores.independent >= alone.independent:
        return ""
    if lost := [level for level in _silent(scores) if level not in _silent(alone)]:
        levels = " and ".join(f"{100 * (2 * level - 1):g} %" for level in lost)
        return f"{_in_a_row(scores)}, too few for intervals at {levels}"
    widths = [(_width(scores, level), _width(alone, level)) for level in LEVELS]
    wider = max((wide / narrow for wide, narrow in widths if narrow > 0), default=1.0)
    return f"{_in_a_row(scores)}, and intervals are up to {100 * (wider - 1):.0f} % wider" if wider > WIDER else ""


def _width(scores: Scores, level: float) -> float:
    """Of the two-sided interval, in ln T; 0 where there is none."""
    high, low = scores.limit(level), scores.limit(level, -1)
    return max(high + low, 0.0) if level > 0.5 and high is not None and low is not None else 0.0


def _checked(scores: Scores, ordered: bool) -> dict[str, Any]:
    """Share of scores below their limit by level, how many steps were checked, the 99 % band of a calibrated limit."""
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
    """(scores of the other folds, or of earlier ones; scores of the fold) for each fold."""
    folds = np.unique(scores.fold)
    others = [scores.fold < number if ordered else scores.fold != number for number in folds]
    return [
        (scores.among(rest), scores.among(scores.fold == number)) for rest, number in zip(others, folds, strict=True)
    ]


class Hits(NamedTuple):
    """How many scores are at or below their upper limit, below their lower limit, and checked; calibrated: mean number
    of scores that limits are made of. All counted as independent ones."""

    below: float
    above: float
    seen: float
    calibrated: float


def _hits(parts: Sequence[tuple[Scores, Scores]], level: float, ticks: float = 0.0) -> Hits:
    """How the limits from some scores hold for others. ticks: how many are added to the limits."""
    below = above = seen = calibrated = 0.0
    for others, test in parts:
        high, low = others.limit(level), others.limit(level, -1)
        if high is None or low is None:
            continue
        steps = float(test.weight.sum())
        shift = ticks * test.tick
        below += float(test.weight[test.score <= high + shift].sum())
        above += float(test.weight[test.score < shift - low].sum())
        seen += steps
        calibrated += steps * others.independent
    return Hits(below, above, seen, calibrated / seen if seen else 0.0)


def _band(level: float, seen: float, calibrated: float) -> tuple[float, float]:
    """99 % range of the share below a limit: binomial given the limit, whose own coverage is Beta (beta-binomial)."""
    n, m = max(round(seen), 1), max(round(calibrated), 1)
    k = min(max(conformal_rank(m, level) or m, 1), m)
    low, high = beta_binomial_quantiles((0.005, 0.995), n, k, m + 1 - k)
    return low / n, high / n


def beta_binomial_quantiles(levels: Sequence[float], n: int, a: float, b: float) -> list[int]:
    """The smallest counts of n that the given probabilities are reached at, for a share that is Beta(a, b), a, b >= 1.

    The probabilities of counts are summed within 30 standard deviations of the mean: such a law is log-concave, and
    less than e^(1-30) lies beyond.
    """
    from scipy.special import betaln, gammaln

    mean = n * a / (a + b)
    sd = math.sqrt(n * a * b * (a + b + n) / (a + b + 1)) / (a + b)
    j = np.arange(max(math.floor(mean - REACH * sd), 0), min(math.ceil(mean + REACH * sd), n) + 1, dtype=np.float64)
    logs = gammaln(n + 1) - gammaln(j + 1) - gammaln(n - j + 1) + betaln(j + a, n - j + b) - betaln(a, b)
    reached = np.cumsum(np.exp(logs))
    at = np.searchsorted(reached / reached[-1], levels)
    return [int(j[i]) for i in at]


def _drift_sentence(by_phase: Mapping[str, Mapping[str, Any]]) -> str:
    drifting = [phase for phase, found in by_phase.items() if found["drift"]]
    if not drifting:
        return ""
    return (
        f"The latency of {' and '.join(drifting)} steps drifts: intervals from earlier steps cover fewer of the later"
        " ones than stated. Measure again."
    )
