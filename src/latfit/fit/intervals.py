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

Phases have limits of their own: over all steps together a limit can hold and fail in every phase. Time order breaks
exchangeability, so the promise is checked as it would have been used: the limit for each part of a log comes from the
parts before it (for a grid: from the other folds), and the share of steps below it is reported, beside the band in
which it lies 99 times of 100. A phase is said to drift where the share at 90 % lies outside the band of a log, or
where the scores' level changes.

Adaptive limits (Gibbs & Candès 2021) follow a drift: alpha_{t+1} = alpha_t + gamma (alpha - miss_t), the limit being
the quantile of the last scores; then |mean miss - alpha| <= (max(alpha, 1-alpha) + gamma) / (gamma n) for any sequence.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fit.by_row import numbered
from latfit.fit.crossval import LEVELS, HeldOut, held_out
from latfit.fit.drift import CERTAIN, LEAST_SHIFT, change_point, clipped
from latfit.fit.folds import expanding_in_runs, in_time
from latfit.fit.problem import FitOptions
from latfit.stats import FloatArray
from latfit.trace.phases import phases
from latfit.trace.table import Trace

BY_TIME = "split conformal by phase, each part of the time predicted from earlier parts, observed/predicted"
BY_CELL = "split conformal by phase on cells left out, observed/predicted"

REACH = 30
"""Standard deviations of a count about its mean beyond which nothing lies."""

Factors = dict[str, float | None]


def later_rows(trace: Trace, options: FitOptions, theta: FloatArray) -> HeldOut | None:
    """The second half of every run, in parts predicted from all that is earlier; None for a trace without time."""
    return held_out(trace, options, theta, expanding_in_runs(trace)) if in_time(trace) else None


def prediction_intervals(trace: Trace, left_out: HeldOut, *, ordered: bool) -> dict[str, Any]:
    """The `intervals` of the JSON contract from rows that were predicted while left out.

    ordered: the folds follow each other in time, so that limits are checked with earlier folds only.
    """
    named = phases(trace).astype(str)[left_out.rows]
    by_phase = {}
    for phase in dict.fromkeys(named.tolist()):
        rows = named == phase
        by_phase[phase] = _one_phase(
            _Scores.of(trace, left_out, rows, ordered), left_out.log_ratio[rows] if ordered else None
        )
    everything = _Scores.of(trace, left_out, np.ones(len(named), dtype=bool), ordered)
    return {
        "method": BY_TIME if ordered else BY_CELL,
        **_factors(everything),
        "by_phase": by_phase,
        **_checked(everything, ordered),
        "drift": _drift_sentence(by_phase),
        **({"reason": reason} if (reason := _too_few(everything)) else {}),
    }


@dataclass(frozen=True)
class _Scores:
    """Scores (m,) in rising order, with the fold of each and how many independent ones it is worth; steps and (B,S)
    cells that they come from."""

    score: FloatArray
    fold: NDArray[np.int64]
    weight: FloatArray
    steps: int
    cells: int

    @staticmethod
    def of(trace: Trace, left_out: HeldOut, rows: NDArray[np.bool_], ordered: bool) -> "_Scores":
        cell = numbered([trace.floats(name)[left_out.rows[rows]] for name in ("B", "S")])
        score, weight = left_out.log_ratio[rows], left_out.weights[rows]
        steps, cells = round(float(weight.sum())), int(cell.max(initial=-1)) + 1
        if not ordered and cells:
            weight = weight * worth(score, weight, cell)
        rising = np.argsort(score, kind="stable")
        return _Scores(score[rising], left_out.fold[rows][rising], weight[rising], steps, cells)

    def among(self, rows: NDArray[np.bool_]) -> "_Scores":
        return _Scores(self.score[rows], self.fold[rows], self.weight[rows], self.steps, self.cells)

    @property
    def independent(self) -> float:
        return float(self.weight.sum())

    @cached_property
    def _sides(self) -> Mapping[int, tuple[FloatArray, FloatArray]]:
        """By side: side times the scores (m,) in order, and how many independent ones there are up to each (m,)."""
        return {1: (self.score, np.cumsum(self.weight)), -1: (-self.score[::-1], np.cumsum(self.weight[::-1]))}

    def limit(self, level: float, side: int = 1) -> float | None:
        """The limit that side times a new score stays below."""
        return _limit_of(*self._sides[side], level)


def worth(score: FloatArray, weight: FloatArray, cell: NDArray[np.intp]) -> FloatArray:
    """How many independent scores one of the steps in each row (m,) is worth, between 1/(steps of its cell) and 1.

    score (m,) of rows that stand for weight steps each (m,), in cells (m,).
    """
    size = np.bincount(cell, weights=weight)
    n, cells = float(weight.sum()), len(size)
    if n - cells < 1 or cells < 2:
        return np.asarray(1.0 / size[cell])
    x = clipped(score)
    mean = np.bincount(cell, weights=weight * x) / size
    within = float(weight @ (x - mean[cell]) ** 2) / (n - cells)
    between = float(size @ (mean - float(weight @ x) / n) ** 2) / (cells - 1)
    typical = (n - float(size @ size) / n) / (cells - 1)
    shared = max(between - within, 0.0) / max(between + (typical - 1) * within, 1e-300)
    return np.asarray(1.0 / (1.0 + np.maximum(size - 1.0, 0.0) * min(shared, 1.0)))[cell]


def conformal_rank(n: int, level: float) -> int | None:
    """k = ceil((n+1) level), the rank among n scores that a new one stays below with that probability; None where n is
    too small to tell."""
    k = math.ceil((n + 1) * level - 1e-9)
    return k if 1 <= k <= n else None


def coverage_law(n: int, level: float) -> tuple[float, float] | None:
    """(k, n+1-k) of the Beta law that the coverage of a limit from n scores has, given the scores."""
    k = conformal_rank(n, level)
    return None if k is None else (float(k), float(n + 1 - k))


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


def _factors(scores: _Scores) -> dict[str, Factors]:
    upper = {level: scores.limit(level) for level in LEVELS}
    lower = {level: scores.limit(level, -1) for level in LEVELS}
    return {
        "ratio_quantiles": {f"{level:g}": None if s is None else math.exp(s) for level, s in upper.items()},
        "lower_quantiles": {f"{level:g}": None if s is None else math.exp(-s) for level, s in lower.items()},
    }


def _one_phase(scores: _Scores, time_order: FloatArray | None) -> dict[str, Any]:
    """time_order: the scores in the order of time, where the folds follow each other in it."""
    ordered = time_order is not None
    checked = _checked(scores, ordered)
    outside = [level for level, (low, high) in checked["band"].items() if not low <= checked["coverage"][level] <= high]
    change = change_point(time_order) if time_order is not None else None
    moved = change is not None and change.p_value < CERTAIN and abs(change.shift) > math.log1p(LEAST_SHIFT)
    drifts = ordered and (moved or "0.9" in outside)
    found: dict[str, Any] = {**_factors(scores), "n": scores.steps, "cells": scores.cells, **checked, "drift": drifts}
    if moved and change is not None:
        found["relative_shift"] = math.expm1(change.shift)
    if reason := _too_few(scores):
        found["reason"] = reason
    return found


def _too_few(scores: _Scores) -> str:
    """Which two-sided levels the scores cannot tell, and what could; empty where they tell all."""
    silent = [
        level for level in LEVELS if level > 0.5 and (scores.limit(level) is None or scores.limit(level, -1) is None)
    ]
    if not silent:
        return ""
    levels = " and ".join(f"{100 * (2 * level - 1):g} %" for level in silent)
    return (
        f"{scores.steps:,} steps in {scores.cells:,} cells are worth {scores.independent:.0f} independent ones, too few"
        f" for an interval at {levels}: measure {math.ceil(1 / (1 - max(silent)) - 1 - 1e-9):,} cells or more"
    )


def _checked(scores: _Scores, ordered: bool) -> dict[str, Any]:
    """Share of scores below their limit by level, how many steps were checked, the 99 % band of a calibrated limit."""
    coverage: dict[str, float] = {}
    band: dict[str, tuple[float, float]] = {}
    two_sided: dict[str, float] = {}
    checked = 0
    parts = _parts(scores, ordered)
    for level in LEVELS:
        below, above, seen, calibrated = _hits(parts, level)
        if seen == 0:
            continue
        checked = max(checked, round(seen / scores.independent * scores.steps))
        coverage[f"{level:g}"] = below / seen
        band[f"{level:g}"] = _band(level, seen, calibrated)
        if level > 0.5:
            two_sided[f"{2 * level - 1:g}"] = (below - above) / seen
    return {"coverage": coverage, "two_sided_coverage": two_sided, "band": band, "checked": checked}


def _parts(scores: _Scores, ordered: bool) -> list[tuple[_Scores, _Scores]]:
    """(scores of the other folds, or of earlier ones; scores of the fold) for each fold."""
    folds = np.unique(scores.fold)
    others = [scores.fold < number if ordered else scores.fold != number for number in folds]
    return [
        (scores.among(rest), scores.among(scores.fold == number)) for rest, number in zip(others, folds, strict=True)
    ]


def _hits(parts: Sequence[tuple[_Scores, _Scores]], level: float) -> tuple[float, float, float, float]:
    """(scores at or below their upper limit, scores below their lower limit, scores checked, mean number of calibration
    scores), all counted as independent ones."""
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
    return below, above, seen, calibrated / seen if seen else 0.0


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
        f"The latency of {' and '.join(drifting)} steps drifts: limits from earlier steps did not hold as often as they"
        " say on later ones. Measure again, or use adaptive limits."
    )


def adaptive_limits(
    scores: Sequence[float] | FloatArray, level: float, *, window: int = 500, gamma: float = 0.005
) -> tuple[FloatArray, FloatArray]:
    """(limit for each score from the `window` before it (n-window,), whether the score exceeded it (n-window,)).

    The level is steered so that the share of misses tends to 1 - level under any drift. A limit is infinite where the
    steering asks for every step, minus infinite where it asks for none.
    """
    target = 1.0 - level
    alpha = target
    recent = sorted(float(s) for s in scores[:window])
    n = len(scores)
    limits, missed = np.empty(max(n - window, 0)), np.zeros(max(n - window, 0), dtype=bool)
    for i in range(window, n):
        rank = math.ceil((len(recent) + 1) * (1 - alpha) - 1e-9)
        if alpha <= 0 or rank > len(recent):
            limit = math.inf
        elif alpha >= 1 or rank < 1:
            limit = -math.inf
        else:
            limit = recent[rank - 1]
        score = float(scores[i])
        miss = score > limit
        limits[i - window], missed[i - window] = limit, miss
        alpha += gamma * (target - miss)
        recent.pop(bisect_left(recent, float(scores[i - window])))
        insort(recent, score)
    return limits, missed.astype(np.float64)
