"""A proved bound on the response with waiting cut off at T_cut. Derivation: docs/theory/planning.md.

It holds for Poisson arrivals, a GPU that takes T(b), an exponential CPU service, T_cut at most the fastest step, and
overflow that stays in the CPU's queue. The `cutoff` policy leaves requests to the GPU that it ends sooner.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

from latfit.queueing.capacity import bisect
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray

MAX_CHANCE_OF_FULL_BATCH = 1e-7  # above it the largest batch binds, and batches are not independent
MIN_LOAD = 1e-10  # of the CPU, below which the decay rate cannot be told from mu
PRECISION = 1e-12


@dataclass(frozen=True)
class CutoffBound:
    """Upper bound on the response: P(response > x) <= tail(x). idle_ms: T(1)."""

    tail: Callable[[float], float]
    overflow_share: float
    idle_ms: float

    def percentile(self, q: float) -> float:
        """Return an upper bound on the q-quantile of the response in ms."""
        high = self.idle_ms
        while self.tail(high) > 1 - q:
            high *= 2
        return bisect(lambda x: self.tail(x) <= 1 - q, high, 0.0, PRECISION)


def cutoff_bound(rate: float, cutoff_ms: float, times: ServiceTimes, cpu_rate: float) -> CutoffBound | None:
    """Return the bound, None where its conditions do not hold. rate, cpu_rate (1/mean service) per ms."""
    cutoff, mu = cutoff_ms, cpu_rate
    mean = rate * cutoff
    top = min(int(mean + 9 * math.sqrt(mean) + 25), times.max_batch)
    full = float(scipy.special.gammainc(top + 1, mean))
    n = np.arange(top + 1.0)
    T = np.concatenate([times.mean_ms[:1], times.mean_ms[:top]])  # of the batch that n survivors make
    if full > MAX_CHANCE_OF_FULL_BATCH or float(T.min()) < cutoff or rate < MIN_LOAD * mu:
        return None
    p = np.exp(scipy.special.xlogy(n, mean) - mean - scipy.special.gammaln(n + 1))
    p /= p.sum()
    requests = rate * float(p @ T) + float(p[0])  # of a cycle
    overflow = rate * (float(p @ T) - cutoff) / requests
    found = None if rate * overflow >= mu else _decay(rate, cutoff, mu, p, T - cutoff)
    if found is None:
        return None
    decay, factor = found  # of the sojourn at the CPU
    weight, idle = n[1:] * p[1:] / requests, float(p[0]) / requests  # shares that wait for a batch, and that find none

    def tail(x: float) -> float:
        waits = 1 - np.clip((x - T[1:]) / cutoff, 0, 1)
        gpu = float(weight @ waits) + (idle if x < T[0] else 0.0)
        y = max(x - cutoff, 0.0)
        late = overflow * min(factor * math.exp(-decay * y) + (1 - factor) * math.exp(-mu * y), 1.0)
        if mu > rate:  # as if every request went to the CPU
            late = min(late, math.exp(-(mu - rate) * y))
        return min(gpu + late, 1.0)

    return CutoffBound(tail, overflow, float(T[0]))


def _decay(rate: float, cutoff: float, mu: float, p: FloatArray, on: FloatArray) -> tuple[float, float] | None:
    """Decay rate and factor of the sojourn at the CPU. p, on (n,): chance of n survivors, and ms of overflow then."""
    empty = np.arange(len(p)) == 0
    log_p = np.log(np.maximum(p, 1e-300))

    def kappa(theta: float) -> float:
        return theta * (rate / (mu - theta) - 1)

    def log_omega(theta: float) -> FloatArray:
        return np.asarray(-theta * cutoff + np.where(empty, -math.log1p(theta / rate), 0.0))

    def log_mean(theta: float) -> float:
        return float(scipy.special.logsumexp(log_p + kappa(theta) * on + log_omega(theta)))

    floor = max(0.0, mu - rate)
    step, top = (mu - floor) / 2, mu * (1 - PRECISION)
    while log_mean(floor + step) >= 0:
        step /= 2
        if step < 1e-9 * mu:
            return None
    if log_mean(top) <= 0:
        return None
    theta = bisect(lambda x: log_mean(x) <= 0, floor + step, top, PRECISION)
    h = math.exp(-theta * cutoff - math.log1p(theta / rate))
    scale = kappa(theta) * float(p @ on) * h
    return (theta, (1 - float(p @ np.exp(log_omega(theta)))) / scale) if scale != 0 else None
