"""Estimate the noise of single steps, of all and of each phase: docs/theory/fitting.md#noise-and-pauses."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.model import Pauses, StepNoise, by_size, edges_between, ratios_of, size_levels, tail_points
from latfit.stats import FloatArray, mad_sigma, weighted_quantiles

CHANCE = 0.05  # of a first split into groups where the batch size makes no difference
MIN_GROUP = 100  # independent steps; fewer do not show a p99

PAUSE_SIGMA = 5.0  # of log ratios; of log-normal noise one step in 3 million lies beyond
MIN_PAUSE_RATIO = 2.0  # of observed over typical; below, a curve that misses a size or a busy stretch look alike
MAX_PAUSED_SHARE = 0.05  # of all steps; more of them are no rare event
REJECTED_Z = 2.6  # one-sided; a true hypothesis is rejected once in 200 times
HINT_Z = 1.0  # z against the chosen kind of length that hints at pauses of both kinds ...
HINT_SLOPE = 0.2  # ... if the slope of ln length over ln T is as far from 0 (fixed) or 1 (ratios)
MAX_PAUSES_TESTED = 2000  # pauses that enter the pairwise test; so many decide any question


def batch_groups(B: FloatArray, log_ratio: FloatArray, weights: FloatArray) -> NDArray[np.intp]:
    """Return the group (n,) of each step: batch sizes are split where the spread of steps changes beyond chance.

    Spread: distances above and, apart, below the median, capped at their 99th percentile. weights: independent steps
    (n,).
    """
    number = by_size(B)
    group = np.zeros(len(B), dtype=np.intp)
    off = log_ratio - weighted_quantiles(log_ratio, (0.5,), weights)[0]
    up_to = np.cumsum(np.bincount(number, weights=weights))
    tried = (up_to >= MIN_GROUP) & (up_to[-1] - up_to >= MIN_GROUP)
    change = np.zeros(len(up_to))
    for distance in (np.maximum(off, 0.0), np.maximum(-off, 0.0)):
        distance = np.minimum(distance, weighted_quantiles(distance, (0.99,), weights)[0])
        distance -= np.average(distance, weights=weights)
        walk = np.abs(np.cumsum(np.bincount(number, weights=weights * distance)))
        change = np.maximum(change, walk / max(math.sqrt(float(weights @ distance**2)), 1e-300))
    if np.max(change[tried], initial=0.0) <= math.sqrt(math.log(4 / CHANCE) / 2):
        return group
    large = number > np.argmax(np.where(tried, change, 0.0))
    for side in (~large, large):
        group[side] = batch_groups(B[side], log_ratio[side], weights[side])
    group[large] += group[~large].max() + 1
    return group


class Steps(NamedTuple):
    """Typical time in ms (n,), observed time in ms (n,), and the steps that each row stands for."""

    typical: FloatArray
    observed: FloatArray
    weights: FloatArray


def separate_pauses(steps: Steps, share: float) -> tuple[NDArray[np.bool_], Pauses | None]:
    """Find the steps that were paused (n,), and how long and how often; None where F describes all steps.

    Candidates remain in F if they are too few or too many, if their length grows in proportion to T, or if they fall on
    short steps more often than per step, on long ones more often than per ms. share: independent steps per step.
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
    share = _count_apart(np.flatnonzero(paused), 1 / share) / float(paused.sum())
    calm = float(np.average(ratio[~paused], weights=weights[~paused]))
    # A pause of a step of T ms is told from noise if it is longer than hidden * T.
    hidden = limit - calm
    T_paused, length, count = T[paused], (observed - calm * T)[paused], weights[paused]
    order = np.argsort(length, kind="stable")
    T_paused, length, count = T_paused[order], length[order], count[order]
    # A kind is certain if the other is rejected and nothing hints at pauses of both.
    against_fixed = _growth(length, hidden * T_paused, T_paused, share * count)
    against_ratios = -_growth(length / T_paused, np.full(len(length), hidden), T_paused, share * count)
    off = np.log(T_paused) - np.average(np.log(T_paused), weights=count)
    slope = float(count @ (off * np.log(length))) / max(float(count @ off**2), 1e-12)
    if against_fixed > REJECTED_Z and not (against_ratios > HINT_Z and slope < 1 - HINT_SLOPE):
        return none, None
    fixed = against_ratios > REJECTED_Z and not (against_fixed > HINT_Z and slope > HINT_SLOPE)
    exposure = [_exposure(length, steps, hidden, power) for power in (0, 1)]
    # Pauses per step do not prefer longer steps; pauses per ms do, in proportion.
    trends = [_score(np.log(T_paused), share * count, sums) for sums in exposure]
    rates = [count / sums[:, 0] for sums in exposure]
    if trends[0] < -REJECTED_Z or trends[1] > REJECTED_Z:
        return none, None
    between = trends[0] > REJECTED_Z and trends[1] < -REJECTED_Z
    per_step, per_ms = between or trends[0] <= REJECTED_Z, between or trends[1] >= -REJECTED_Z
    rate = rates[0] if per_step else rates[1]
    starts = tail_points(count)
    weight = np.add.reduceat(rate, starts)
    ms, ratios = (np.add.reduceat(rate * each, starts) / weight for each in (length, length / T_paused))
    return paused, Pauses(
        ms,
        np.zeros(len(ms)) if fixed else ratios,
        weight / weight.sum(),
        float(rates[0].sum()) if per_step else 0.0,
        float(rates[1].sum()) if per_ms else 0.0,
        share * float(count.sum()),
    )


def _count_apart(places: NDArray[np.intp], gap: float) -> int:
    """Count places (k,) in rising order, leaving out those closer than `gap` to the last counted one."""
    count, free = 0, 0.0
    for place in places.tolist():
        if place >= free:
            count, free = count + 1, place + gap
    return count


def _growth(length: FloatArray, shortest: FloatArray, T: FloatArray, weights: FloatArray) -> float:
    """Return z of Cox's score test: are lengths (k,) larger on longer steps T? Each is seen only above `shortest`."""
    chosen = np.unique(np.linspace(0, len(length) - 1, MAX_PAUSES_TESTED).astype(np.int64))
    length, shortest, x, w = length[chosen], shortest[chosen], np.log(T[chosen]), weights[chosen]
    # At risk at a length: pauses at least as long that would have been seen there.
    risk = (shortest[None, :] < length[:, None]) & (length[None, :] >= length[:, None])
    return -_score(x, w, risk @ np.stack([w, w * x, w * x**2], axis=1))


def _exposure(length: FloatArray, steps: Steps, hidden: float, power: int) -> FloatArray:
    """Return sums (k, 3) of w, w x, w x^2 over steps on which a pause of each length shows; x = ln T, w ~ T^power."""
    order = np.argsort(steps.typical, kind="stable")
    T = steps.typical[order]
    w, x = steps.weights[order] * T**power, np.log(T)
    sums = np.cumsum(np.stack([w, w * x, w * x**2], axis=1), axis=0)
    return np.asarray(sums[np.maximum(np.searchsorted(hidden * T, length, side="left") - 1, 0)])


def _score(x: FloatArray, w: FloatArray, at_risk: FloatArray) -> float:
    """Return z: do events lie at larger x (k,) than those at risk? at_risk (k, 3): their sums of w, w x and w x^2."""
    mean, square = at_risk[:, 1] / at_risk[:, 0], at_risk[:, 2] / at_risk[:, 0]
    variance = float(w @ np.maximum(square - mean**2, 0.0))
    return float(w @ (x - mean)) / math.sqrt(variance) if variance > 1e-12 else 0.0


def with_noise(intervals: Mapping[str, Any], data: FitData, log_ratio: FloatArray) -> Mapping[str, Any]:
    ratio = np.exp(log_ratio)

    def noise(asked: NDArray[np.bool_], entry: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the noise of these steps. entry: their intervals, with `in_time_share`, independent steps per step."""
        if not asked.any():
            return None
        steps = Steps((data.observed / ratio)[asked], data.observed[asked], data.weights[asked])
        return noise_of_steps(data.B[asked], data.S[asked], steps, float(entry.get("in_time_share", 1.0))).to_json()

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
    group = batch_groups(B, np.log(ratio), share * weights)
    parts = [group == g for g in range(int(group.max()) + 1)]
    return StepNoise(
        tuple(ratios_of(ratio[of], weights[of], share) for of in parts),
        edges_between(*(np.array([end(B[of]) for of in parts]) for end in (np.min, np.max))),
        levels,
        pauses,
    )
