"""The laws of observed over typical time that a fit keeps, of all steps and of each phase (see `model.step_ratios`).

The ratios are those to the fitted curve itself, not to one fitted without the step, about the level of the step's size
where the curve misses it: curve times level times mean ratio is then the mean of the measured steps, which is what a
queue's load goes by. Every measured step counts, marked outliers too: they are part of what happens, unless they were
dropped on purpose (`--drop outlier`). Batch sizes that do not scatter alike have laws of their own: groups of
neighbouring sizes, split only where the measured steps show it.

A set of neighbouring sizes is cut in two where the ratios F of its smaller and its larger batches differ. If they do
not, every way to deal the ratios out to the steps is as likely, which gives the law of each of these, for any cut that
leaves FEWEST independent steps on both sides:

- spread: Mood's scores (u - 1/2)^2 of the mid-ranks u of F, summed over the smaller batches. The sum over n1 of n steps
  has mean n1 m and variance s^2 n1 (n - n1)/(n - 1), m and s^2 those of the scores, and is normal for n1 of some tens
  (Hajek, Sidak & Sen 1999, section 6.1);
- tail: how many of the K slowest steps have small batches, K = 8, 16, 32, ... up to a tenth of all: hypergeometric, so
  that this test is exact for a few pauses.

The smallest p counts times the number of tests (Bonferroni): sizes that scatter alike are split with a probability of
at most LEVEL. Of the cuts the one is taken where all tests together see most, and both sides are looked at again.

A cut has to matter, too: a group of its own knows only its own tail. Where a curve misses some sizes by a few percent,
their ratios are spread more widely, and yet pauses of fifty times decide the second moment of all; cut apart, sizes
that did not happen to pause would be taken never to. So (F - median)^2, summed over the smaller batches, has to lie
MATTERS of its standard deviations from its mean, too: with pauses on both sides it seldom does unless these differ.

A pause takes its time whatever it interrupts. Drawn as the ratio that it was, a second that fell on a step of 18 ms
would stretch one of 100 ms to more than five, and a simulated run would end in a queue that the engine never had. So a
ratio above PAUSE, and further out than SIGMAS of how logarithms scatter, is taken as 1 + (its excess in ms) / (mean
time of the group by the curve), which leaves the mean of the measured times as it was.

Steps that resemble those before them count as fewer: weights and counts are those of independent ones.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.model import MOST_SIZES, joined_ratios, ratios_of, size_levels
from latfit.stats import FloatArray, distinct, mad_sigma, weighted_quantiles

LEVEL = 0.05
FEWEST = 40
"""Independent steps that a group holds at least."""

SLOWEST, MOST_SLOW = 8, 0.1
"""The smallest count of slowest steps that is tested, and the largest as a share of all."""

MATTERS = 2.0
"""Standard deviations by which squares of the smaller batches differ from those of the others."""

LEAST_P = 1e-300

PAUSE = 5.0
SIGMAS = 6.0
"""Ratio from which on a step was interrupted, and standard deviations of its logarithm: what a curve misses and what
steps scatter by is less."""

MOST_ROWS = 200_000
"""Rows that are enough to see how steps scatter."""


def batch_groups(B: FloatArray, ratio: FloatArray, weights: FloatArray) -> NDArray[np.intp]:
    """Number of the group (n,), by rising batch, of steps of B requests (n,) whose time is ratio (n,) of the typical
    one; each row stands for weights (n,) independent steps. Sizes within an eighth of an octave stay together where
    there are more than MOST_SIZES."""
    sizes, number = distinct(B)
    if len(sizes) > MOST_SIZES:
        number = distinct(np.round(8 * np.log2(sizes)))[1][number]
    order = np.argsort(number, kind="stable")
    cuts = np.array(sorted(_cuts(number[order], ratio[order], weights[order])), dtype=np.intp)
    return np.searchsorted(cuts, number, side="right")


def _cuts(number: NDArray[np.intp], ratio: FloatArray, weights: FloatArray) -> list[int]:
    """The sizes, by their rising number (n,), at which a new group begins."""
    cut = _cut(number, ratio, weights)
    if cut is None:
        return []
    at = int(np.searchsorted(number, cut))
    return [
        *_cuts(number[:at], ratio[:at], weights[:at]),
        cut,
        *_cuts(number[at:], ratio[at:], weights[at:]),
    ]


def _cut(number: NDArray[np.intp], ratio: FloatArray, weights: FloatArray) -> int | None:
    """The size at which larger batches begin to scatter otherwise than those below it; None where nothing shows it."""
    known, cell = distinct(number)
    below: FloatArray = np.cumsum(np.bincount(cell, weights=weights))
    total = float(below[-1])
    below = below[:-1]
    off = ratio - weighted_quantiles(ratio, (0.5,), weights)[0]
    enough = (below >= FEWEST) & (total - below >= FEWEST)
    if not enough.any():
        return None
    allowed = enough & (_deviation(cell, off**2, weights, below) >= MATTERS)
    if not allowed.any():
        return None
    u = _mid_ranks(ratio, weights)
    tests = [_spread(cell, u, weights, below)]
    count = SLOWEST
    while count <= MOST_SLOW * total:
        tests.append(_slowest(cell, weights * (u > 1 - count / total), below, total))
        count *= 2
    logs = np.stack(tests)[:, allowed]
    if logs.min() + np.log(len(tests) * enough.sum()) >= np.log(LEVEL):
        return None
    return int(known[1:][allowed][np.argmin(logs.sum(axis=0))])


def _mid_ranks(ratio: FloatArray, weights: FloatArray) -> FloatArray:
    """Share of the steps (n,) below each, half of those that equal it counted."""
    number = distinct(ratio)[1]
    count = np.bincount(number, weights=weights)
    return np.asarray(((np.cumsum(count) - count / 2) / count.sum())[number])


def _deviation(cell: NDArray[np.intp], score: FloatArray, weights: FloatArray, below: FloatArray) -> FloatArray:
    """By how many standard deviations (cuts,) the sum of the scores (n,) of the smaller batches is off its mean."""
    total = float(weights.sum())
    score = score - weights @ score / total
    variance = float(weights @ score**2) / total * below * (total - below) / (total - 1)
    found = np.cumsum(np.bincount(cell, weights=weights * score))[:-1]
    return np.asarray(np.abs(found) / np.sqrt(np.maximum(variance, 1e-300)))


def _spread(cell: NDArray[np.intp], u: FloatArray, weights: FloatArray, below: FloatArray) -> FloatArray:
    """ln p (cuts,) of the two-sided test of spread."""
    from scipy.special import log_ndtr

    z = _deviation(cell, (u - 0.5) ** 2, weights, below)
    return np.asarray(np.minimum(log_ndtr(-z) + np.log(2), 0.0))


def _slowest(cell: NDArray[np.intp], slow: FloatArray, below: FloatArray, total: float) -> FloatArray:
    """ln p (cuts,) of the two-sided test of how many of the slowest steps, slow (n,) of each row, have small
    batches."""
    seen = np.cumsum(np.bincount(cell, weights=slow))
    small = np.asarray(np.round(seen[:-1]), dtype=np.float64)
    return hypergeometric(round(total), round(float(seen[-1])), np.asarray(np.round(below), dtype=np.float64), small)


REACH = 30
"""Standard deviations of a count about its mean beyond which nothing lies."""


def hypergeometric(steps: int, slowest: int, drawn: FloatArray, seen: FloatArray) -> FloatArray:
    """ln p (cuts,), two-sided, of `seen` (cuts,) or more, or fewer, of the slowest among `drawn` (cuts,) of all
    steps."""
    mean, least = drawn * slowest / steps, np.maximum(0, drawn + slowest - steps)
    reach = REACH * max(1.0, math.sqrt(float(np.max(mean * (1 - drawn / steps)))))
    k = np.floor(np.minimum(mean, seen) - reach)[:, None] + np.arange(int(2 * reach + np.max(abs(mean - seen))) + 2)
    possible = (k >= least[:, None]) & (k <= np.minimum(drawn, slowest)[:, None])
    k = np.where(possible, k, least[:, None])
    rest = drawn[:, None] - k
    logs = np.where(possible, 0.0, -np.inf)
    for each in (k, slowest - k, rest, steps - slowest - rest):
        logs -= _log_factorial(np.asarray(each, dtype=np.float64), steps)
    mass = np.exp(logs - logs.max(axis=1, keepdims=True))
    tails = [(mass * side).sum(axis=1) for side in (k >= seen[:, None], k <= seen[:, None])]
    return np.asarray(np.log(np.clip(2 * np.minimum(*tails) / mass.sum(axis=1), LEAST_P, 1.0)))


def _log_factorial(x: FloatArray, most: int) -> FloatArray:
    """ln x! of whole numbers from 0 to `most`, read from a table where that is not far longer than what is asked."""
    from scipy.special import gammaln

    if most > 16 * x.size:
        return np.asarray(gammaln(x + 1))
    return np.asarray(_table(most)[x.astype(np.intp)])


@functools.lru_cache(maxsize=1)
def _table(most: int) -> FloatArray:
    from scipy.special import gammaln

    return np.asarray(gammaln(np.arange(1.0, most + 2)))


def _enough(rows: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Numbers of the rows (n,) that are true, or of as many of them as scatter needs, drawn evenly."""
    found = np.flatnonzero(rows)
    if len(found) <= MOST_ROWS:
        return found
    return found[np.linspace(0, len(found) - 1, MOST_ROWS).astype(np.int64)]


def without_scale(ratio: FloatArray, curve: FloatArray, weights: FloatArray) -> FloatArray:
    """Ratios (n,) to the curve (n,), in ms, with those of pauses as they would be on a step of mean length."""
    paused = ratio > max(PAUSE, math.exp(min(SIGMAS * mad_sigma(np.log(ratio), weights), 100.0)))
    if not paused.any():
        return ratio
    mean = float(np.average(curve, weights=weights))
    return np.where(paused, 1 + (ratio - 1) * curve / mean, ratio)


def with_ratios(intervals: Mapping[str, Any], data: FitData, log_ratio: FloatArray) -> Mapping[str, Any]:
    """The `intervals` of the JSON contract, with `ratios` of all steps and of every phase in them; log_ratio:
    ln(observed/predicted) (n,)."""
    ratio = np.exp(log_ratio)
    weights, B, S = data.weights, data.B, data.S

    def law(asked: NDArray[np.bool_], entry: Mapping[str, Any]) -> dict[str, Any] | None:
        """entry: the phase's limits, which know for how many independent steps those count that follow each other."""
        if not asked.any():
            return None
        share = float(entry.get("in_time_share", 1.0))
        rows = _enough(asked)
        levels = size_levels(S[rows], ratio[rows], weights[rows], 1 / share)
        about = ratio[rows] / levels.factors(S[rows])
        group = batch_groups(B[rows], about, share * weights[rows])
        laws, low, high = [], [], []
        for g in range(int(group.max()) + 1):
            of = group == g
            steps = weights[rows][of]
            curve = data.observed[rows][of] / about[of]
            laws.append(ratios_of(without_scale(about[of], curve, steps), steps, share * float(steps.sum()), levels))
            low.append(float(B[rows][of].min()))
            high.append(float(B[rows][of].max()))
        return joined_ratios(laws, np.array(low), np.array(high)).to_json()

    by_phase = {
        phase: {**entry, "ratios": law(data.by_phase[phase], entry)}
        for phase, entry in intervals.get("by_phase", {}).items()
    }
    return {**intervals, "by_phase": by_phase, "ratios": law(np.ones(len(ratio), dtype=bool), intervals)}
