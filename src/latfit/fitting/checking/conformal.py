"""Prediction intervals for single steps by split conformal prediction, phase by phase.

The score of a step is s = ln(observed/predicted) where the prediction comes from rows that are not its own: earlier
rows of the run for a log in time order, other cells for a designed grid. The limits are scores of a rank that the
number of independent ones decides (see `scores`).

Phases have limits of their own: over all steps together a limit can hold and fail in every phase. Time order breaks
exchangeability, so the promise is checked as it would have been used: the limit for each part of a log comes from the
parts before it (for a grid: from the other folds), and the share of steps below it is reported, beside the band in
which it lies 99 times of 100.

A phase of a log is said to drift where the share at 90 % lies outside its band, where the scores' level changes, or
where later steps are further from what earlier ones say than steps are from what all others say. Later steps then tell
what became slower and nothing of how it was, so the limits of such a phase are the outer ones of two sets: of later
steps predicted from earlier ones, and of blocks of time predicted from all the others.

Adaptive limits (Gibbs & Candès 2021) follow a drift: alpha_{t+1} = alpha_t + gamma (alpha - miss_t), the limit being
the quantile of the last scores; then |mean miss - alpha| <= (max(alpha, 1-alpha) + gamma) / (gamma n) for any sequence.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from latfit.fitting.checking.autocorrelation import Scores, TimeOrder, clipped, conformal_rank
from latfit.fitting.checking.crossval import HeldOut, expanding_in_runs, held_out
from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.drift import CERTAIN, LEAST_SHIFT, change_point
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray

LEVELS = (0.5, 0.9, 0.95, 0.99)
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


def later_rows(data: FitData, options: FitOptions, theta: FloatArray) -> HeldOut | None:
    """The second half of every run, in parts predicted from all that is earlier; None for a trace without time."""
    return held_out(data, options, theta, expanding_in_runs(data)) if data.in_time else None


def prediction_intervals(
    data: FitData, left_out: HeldOut, *, ordered: bool, blocks: HeldOut | None = None
) -> dict[str, Any]:
    """The `intervals` of the JSON contract from rows that were predicted while left out.

    ordered: the folds follow each other in time, so that limits are checked with earlier folds only.  blocks: rows of
    the whole time, each block predicted from all others; the limits of phases that drift hold for them too.
    """
    named, order = data.phase, TimeOrder.of(data)
    by_phase = {}
    for phase in dict.fromkeys(named[left_out.rows].tolist()):
        inside = left_out.among(named[left_out.rows] == phase)
        whole = blocks.among(named[blocks.rows] == phase) if blocks is not None else None
        scores = Scores.of(data, order, inside, ordered)
        drift = _drift(scores, inside, whole) if ordered else {"drift": False}
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
    """What a phase's scores, or all, say. wider: scores for which the limits hold as well."""
    fewest = min(filter(None, (scores, wider)), key=lambda known: known.independent / max(known.steps, 1))
    found: dict[str, Any] = {
        **_factors(scores, wider),
        "independent_share": fewest.independent / max(fewest.steps, 1),
        "in_time_share": 1 / fewest.in_time.steps_for_one,
        **_checked(scores, ordered),
    }
    if reason := _too_few(fewest):
        found["reason"] = reason
    if sentence := _autocorrelated(fewest):
        found["autocorrelated"] = sentence
    return found


def _factors(scores: Scores, wider: Scores | None) -> dict[str, Factors]:
    found: dict[str, Factors] = {}
    for kind, side in (("ratio_quantiles", 1), ("lower_quantiles", -1)):
        found[kind] = {}
        for level in LEVELS:
            ends = [known.limit(level, side) for known in (scores, wider) if known is not None]
            told = [end for end in ends if end is not None]
            found[kind][f"{level:g}"] = math.exp(side * max(told)) if len(told) == len(ends) else None
    return found


def _drift(scores: Scores, later: HeldOut, blocks: HeldOut | None) -> dict[str, Any]:
    """Whether a phase drifts, and by how much where the level of its later steps changes.

    scores: of its later steps, which are in the order of time.  blocks: its steps of the whole time.
    """
    checked = _checked(scores, ordered=True)
    outside = [level for level, (low, high) in checked["band"].items() if not low <= checked["coverage"][level] <= high]
    change = change_point(later.log_ratio)
    if change is not None and change.p_value < CERTAIN and abs(change.shift) > math.log1p(LEAST_SHIFT):
        return {"drift": True, "relative_shift": math.expm1(change.shift)}
    return {"drift": "0.9" in outside or (blocks is not None and _later_differ(scores, blocks))}


def _later_differ(scores: Scores, blocks: HeldOut) -> bool:
    """Whether later steps are further from what earlier ones say than steps are from what all others say."""
    later, whole = clipped(scores.score), clipped(blocks.log_ratio)
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
        more = f"measure {runs:,} separate runs like {'it' if scores.in_time.runs == 1 else 'them'} or more"
        return f"{_in_a_row(scores)}, too few for an interval at {levels}: {more}"
    return (
        f"{scores.steps:,} steps in {scores.cells:,} cells are worth {scores.independent:.0f} independent ones, too few"
        f" for an interval at {levels}: measure {needed:,} cells or more"
    )


def _in_a_row(scores: Scores) -> str:
    where = "in a row" if scores.in_time.runs == 1 else f"of {scores.in_time.runs:,} runs"
    return (
        f"{scores.steps:,} steps {where} are worth {max(scores.independent, 1):.0f} independent ones (autocorrelation"
        f" {scores.in_time.lag_one:.3g})"
    )


def _autocorrelated(scores: Scores) -> str:
    """What the intervals lose by what steps share with their neighbours in time; empty where that is little."""
    alone = scores.without_time()
    if MATERIAL * scores.independent >= alone.independent:
        return ""
    if lost := [level for level in _silent(scores) if level not in _silent(alone)]:
        levels = " and ".join(f"{100 * (2 * level - 1):g} %" for level in lost)
        return f"{_in_a_row(scores)}, too few for an interval at {levels}"
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
        below, above, seen, calibrated = _hits(parts, level)
        if seen == 0:
            continue
        checked = max(checked, round(seen / scores.independent * scores.steps))
        coverage[f"{level:g}"] = below / seen
        band[f"{level:g}"] = _band(level, seen, calibrated)
        if level > 0.5:
            two_sided[f"{2 * level - 1:g}"] = (below - above) / seen
    return {"coverage": coverage, "two_sided_coverage": two_sided, "band": band, "checked": checked}


def _parts(scores: Scores, ordered: bool) -> list[tuple[Scores, Scores]]:
    """(scores of the other folds, or of earlier ones; scores of the fold) for each fold."""
    folds = np.unique(scores.fold)
    others = [scores.fold < number if ordered else scores.fold != number for number in folds]
    return [
        (scores.among(rest), scores.among(scores.fold == number)) for rest, number in zip(others, folds, strict=True)
    ]


def _hits(parts: Sequence[tuple[Scores, Scores]], level: float) -> tuple[float, float, float, float]:
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
        " say on later ones. Measure again."
    )
