"""Estimate the noise of single steps for a fit, of all steps and of each phase (see `model.noise`).

Ratios are to the fitted curve times the level of the step's size. Every measured step counts, marked outliers too.
Three questions are put to the data, in this order: which steps were paused, and whether pauses take a fixed time and
come per step or per second (`separate_pauses`); whether some batch sizes have another F (`batch_groups`); what F is.
Steps that resemble those before them count as fewer: weights and counts are those of independent ones. See
docs/theory.md.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.model import MOST_SIZES, Pauses, StepNoise, joined_noise, noise_of, size_levels, tail_points
from latfit.stats import FloatArray, distinct, mad_sigma, weighted_quantiles

LEVEL = 0.05
FEWEST = 40
"""Independent steps that a group holds at least."""

SLOWEST, MOST_SLOW = 8, 0.1
"""The smallest count of slowest steps that is tested, and the largest as a share of all."""

MATTERS = 2.0
"""Fewest standard deviations between the squared deviations of smaller and larger batches for a group to be split."""

LEAST_P = 1e-300

PAUSE_SIGMA = 5.0  # of log ratios; of log-normal noise one step in 3 million lies beyond
MIN_PAUSE_RATIO = 2.0  # of observed over typical; below, a curve that misses a size or a busy stretch look alike
MAX_PAUSED_SHARE = 0.05  # of all steps; more of them are no rare event
MIN_RATE_PAUSES = 5  # independent; with fewer, the question of their rate is not raised, and they come per step
REJECTED_Z = 2.6  # one-sided; a true hypothesis is rejected once in 200 times
MAX_PAUSES_TESTED = 2000  # pairs of pauses are compared; so many decide any question
MAX_CUTS = 64
ROUNDING = 1e-9  # relative; times that differ by less are of one size

MOST_ROWS = 200_000
"""Rows that are enough to see how steps scatter."""


def batch_groups(B: FloatArray, ratio: FloatArray, weights: FloatArray) -> NDArray[np.intp]:
    """Return the group number (n,) of each row; groups rise with batch size.

    B: requests (n,).  ratio: observed over typical time (n,).  weights: independent steps of each row (n,).  With more
    than MOST_SIZES batch sizes, those within an eighth of an octave are not separated.
    """
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
    return log_p_of_counts(small, round(float(seen[-1])), below / total)


def _enough(rows: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Numbers of the rows (n,) that are true, or of as many of them as scatter needs, drawn evenly."""
    found = np.flatnonzero(rows)
    if len(found) <= MOST_ROWS:
        return found
    return found[np.linspace(0, len(found) - 1, MOST_ROWS).astype(np.int64)]


def log_p_of_counts(count: FloatArray, events: int, chance: FloatArray) -> FloatArray:
    """Return ln p (n,), two-sided, of `count` (n,) of so many events where each falls with `chance` (n,): binomial."""
    from scipy.special import bdtr, bdtrc

    fewer, more = bdtr(count, events, chance), np.where(count > 0, bdtrc(count - 1, events, chance), 1.0)
    return np.asarray(np.log(np.clip(2 * np.minimum(fewer, more), LEAST_P, 1.0)))


class Steps(NamedTuple):
    """Measured steps: typical time in ms (n,), observed time in ms (n,), and the steps that each row stands for."""

    typical: FloatArray
    observed: FloatArray
    weights: FloatArray


def separate_pauses(steps: Steps, share: float) -> tuple[NDArray[np.bool_], Pauses | None]:
    """Find the steps that were paused, and how long and how often.

    A step is a candidate if its ratio exceeds the median by PAUSE_SIGMA standard deviations of the log ratio and by the
    factor MIN_PAUSE_RATIO. Candidates remain in F if they are fewer than one independent step or more than
    MAX_PAUSED_SHARE of all, if their length grows with T, or if neither a rate per step nor per ms fits.

    Parameters
    ----------
    share
        Independent steps per step.

    Returns
    -------
    paused : (n,) whether F leaves the step out.
    pauses : None where F describes all steps.
    """
    T, observed, weights = steps
    ratio = observed / T
    middle = weighted_quantiles(ratio, (0.5,), weights)[0]
    sigma = mad_sigma(np.log(ratio / middle), weights)
    limit = middle * max(MIN_PAUSE_RATIO, math.exp(min(PAUSE_SIGMA * sigma, 100.0)))
    paused = ratio > limit
    none = np.zeros(len(T), dtype=bool)
    events = float(weights[paused].sum())
    if share * events < 1 or events > MAX_PAUSED_SHARE * weights.sum():
        return none, None
    calm = float(np.average(ratio[~paused], weights=weights[~paused]))
    # A pause of a step of T ms is told from noise if it is longer than hidden * T.
    hidden = limit - calm
    at, length, count = T[paused], (observed - calm * T)[paused], weights[paused]
    order = np.argsort(length, kind="stable")
    at, length, count = at[order], length[order], count[order]
    if _growth(length, hidden * at, at, share * count) > REJECTED_Z:
        return none, None
    fixed = _growth(length / at, np.full(len(at), hidden), at, share * count) < -REJECTED_Z
    rates = [_rates(length, count, steps, hidden, power) for power in (0, 1)]
    expected = [_expected(rate, steps, (length, hidden, power)) for power, rate in enumerate(rates)]
    fits = [_falls_as(each, steps, paused, share) for each in (*expected, (expected[0] + expected[1]) / 2)]
    if not any(fits):
        return none, None
    # Pauses per step would not prefer longer steps; pauses per ms would, in proportion.
    trends = [_trend(length, at, share * count, steps, (hidden, power)) for power in (0, 1)]
    per_step, per_ms = fits[0] and trends[0] <= REJECTED_Z, fits[1] and trends[1] >= -REJECTED_Z
    if not per_step and not per_ms:
        per_step = per_ms = True
    if share * count.sum() < MIN_RATE_PAUSES:
        per_step, per_ms = True, False
    rate = rates[0] if per_step else rates[1]
    starts = tail_points(count)
    weight = np.add.reduceat(rate, starts)
    ms, ratios = (np.add.reduceat(rate * each, starts) / weight for each in (length, length / at))
    return paused, Pauses(
        ms,
        np.zeros(len(ms)) if fixed else ratios,
        weight / weight.sum(),
        float(rates[0].sum()) if per_step else 0.0,
        float(rates[1].sum()) if per_ms else 0.0,
        share * float(count.sum()),
    )


def _growth(length: FloatArray, shortest: FloatArray, at: FloatArray, weights: FloatArray) -> float:
    """Return z of the score test (Cox) that rising lengths (k,) are larger where the typical time `at` (k,) is, each
    seen only above `shortest` (k,). Positive where they grow."""
    chosen = np.unique(np.linspace(0, len(length) - 1, MAX_PAUSES_TESTED).astype(np.int64))
    length, shortest, x, w = length[chosen], shortest[chosen], np.log(at[chosen]), weights[chosen]
    # At risk at a length: pauses at least as long that would have been seen there.
    risk = (shortest[None, :] < length[:, None]) & (length[None, :] >= length[:, None])
    return -_score(x, w, risk @ np.stack([w, w * x, w * x**2], axis=1))


def _trend(length: FloatArray, at: FloatArray, weights: FloatArray, steps: Steps, how: tuple[float, int]) -> float:
    """Return z of the score test that paused steps are longer than a rate proportional to T^power predicts.

    Each pause is compared with the steps on which its length would be detected. how: (hidden, power).
    """
    hidden, power = how
    order = np.argsort(steps.typical, kind="stable")
    T = steps.typical[order]
    w, x = steps.weights[order] * T**power, np.log(T)
    sums = np.cumsum(np.stack([w, w * x, w * x**2], axis=1), axis=0)
    return _score(np.log(at), weights, sums[_last_seen(T, length, hidden)])


def _score(x: FloatArray, w: FloatArray, at_risk: FloatArray) -> float:
    """Return z of the sum of x (k,) over its mean at risk; at_risk (k, 3): sums of weight, weight x, weight x^2."""
    mean, square = at_risk[:, 1] / at_risk[:, 0], at_risk[:, 2] / at_risk[:, 0]
    variance = float(w @ np.maximum(square - mean**2, 0.0))
    return float(w @ (x - mean)) / math.sqrt(variance) if variance > 1e-12 else 0.0


def _last_seen(T: FloatArray, length: FloatArray, hidden: float) -> NDArray[np.intp]:
    """The last of the rising times T on which a pause of each length is told from noise."""
    return np.maximum(np.searchsorted(hidden * T, length, side="left") - 1, 0)


def _rates(length: FloatArray, count: FloatArray, steps: Steps, hidden: float, power: int) -> FloatArray:
    """Return the rate (k,) that each pause stands for, per step (power 0) or per ms (1): its count over the steps, or
    their time, on which such a pause would have been seen."""
    order = np.argsort(steps.typical, kind="stable")
    T = steps.typical[order]
    exposed = np.cumsum(steps.weights[order] * T**power)
    return np.asarray(count / exposed[_last_seen(T, length, hidden)])


def _expected(rate: FloatArray, steps: Steps, how: tuple[FloatArray, float, int]) -> FloatArray:
    """Return how many pauses (n,) a rate would show in each step. how: (length (k,), hidden, power)."""
    length, hidden, power = how
    beyond = np.concatenate([np.cumsum(rate[::-1])[::-1], [0.0]])
    T = steps.typical
    return np.asarray(steps.weights * T**power * beyond[np.searchsorted(length, hidden * T, side="right")])


def _falls_as(expected: FloatArray, steps: Steps, paused: NDArray[np.bool_], share: float) -> bool:
    """Whether the pauses up to any typical time are as many as expected."""
    order = np.argsort(steps.typical, kind="stable")
    T, expected = steps.typical[order], np.cumsum(expected[order])
    seen = np.cumsum((steps.weights * paused)[order])
    ends = np.flatnonzero(np.diff(T) > ROUNDING * T[:-1])
    ends = ends[np.unique(np.linspace(0, len(ends) - 1, MAX_CUTS).astype(np.int64))] if len(ends) else ends
    if not len(ends):
        return True
    events = max(round(share * float(seen[-1])), 1)
    found = log_p_of_counts(np.round(share * seen[ends]), events, np.clip(expected[ends] / expected[-1], 0.0, 1.0))
    return bool(found.min() + math.log(len(ends)) >= math.log(LEVEL / 5))


def with_noise(intervals: Mapping[str, Any], data: FitData, log_ratio: FloatArray) -> Mapping[str, Any]:
    """The `intervals` of the JSON contract, with the noise of all steps and of every phase in them; log_ratio:
    ln(observed/predicted) (n,)."""
    ratio = np.exp(log_ratio)

    def noise(asked: NDArray[np.bool_], entry: Mapping[str, Any]) -> dict[str, Any] | None:
        """entry: the intervals of the phase; its `in_time_share` is the number of independent steps per step."""
        if not asked.any():
            return None
        rows = _enough(asked)
        observed = data.observed[rows]
        steps = Steps(observed / ratio[rows], observed, data.weights[rows])
        share = float(entry.get("in_time_share", 1.0))
        return noise_of_steps(data.B[rows], data.S[rows], steps, share).to_json()

    by_phase = {
        phase: {**entry, "ratios": noise(data.by_phase[phase], entry)}
        for phase, entry in intervals.get("by_phase", {}).items()
    }
    return {**intervals, "by_phase": by_phase, "ratios": noise(np.ones(len(ratio), dtype=bool), intervals)}


def noise_of_steps(B: FloatArray, S: FloatArray, steps: Steps, share: float) -> StepNoise:
    """Return the noise of steps (n,) of one phase. share: independent steps per step."""
    levels = size_levels(S, steps.observed / steps.typical, steps.weights, 1 / share)
    about = steps._replace(typical=steps.typical * levels.factors(S))
    paused, pauses = separate_pauses(about, share)
    B, ratio, weights = B[~paused], (about.observed / about.typical)[~paused], steps.weights[~paused]
    group = batch_groups(B, ratio, share * weights)
    parts = [group == g for g in range(int(group.max()) + 1)]
    return joined_noise(
        [noise_of(ratio[of], weights[of], share * float(weights[of].sum()), levels) for of in parts],
        np.array([B[of].min() for of in parts]),
        np.array([B[of].max() for of in parts]),
        pauses,
    )
