"""A second method: the queues request by request. Quantiles come from independent replications, so correlated data
still give an honest standard error."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit

from latfit.stats import FloatArray


@njit
def batch_times(arrive, T, threshold, cutoff, amx):  # type: ignore[no-untyped-def]
    """Response (n,) and whether the AMX served (n,). T[b] for b = 0..Bmax; amx (n,) service times, one a request."""
    n, largest = len(arrive), len(T) - 1
    response, flushed = np.zeros(n), np.zeros(n, np.bool_)
    first, gpu_free, amx_free = 0, 0.0, 0.0
    while first + threshold <= n:
        start = max(gpu_free, arrive[first + threshold - 1])
        if arrive[first] + cutoff < start:
            moved = arrive[first] + cutoff
            amx_free = max(amx_free, moved) + amx[first]
            response[first], flushed[first] = amx_free - arrive[first], True
            first += 1
            continue
        last = first
        while last < n and last - first < largest and arrive[last] <= start:
            last += 1
        gpu_free = start + T[last - first]
        for i in range(first, last):
            response[i] = gpu_free - arrive[i]
        first = last
    return response[:first], flushed[:first]


@dataclass(frozen=True)
class Simulated:
    """A statistic with its standard error over replications."""

    value: float
    error: float

    def agrees(self, exact: float) -> bool:
        """Within 4.5 standard errors: 1 in 10,000 by chance with 15 replications (Student's t)."""
        return abs(self.value - exact) <= 4.5 * self.error + 1e-9


@dataclass(frozen=True)
class System:
    rate: float
    T: Callable[[FloatArray], FloatArray]
    max_batch: int
    threshold: int = 1
    cutoff: float = math.inf
    cpu_rate: float = 1.0

    def simulate(
        self, statistic: Callable[[FloatArray, FloatArray], float], n: int = 150_000, replications: int = 15
    ) -> Simulated:
        """statistic: (response, flushed) -> number; the first tenth of each replication is left out."""
        T = np.concatenate([[0.0], self.T(np.arange(1.0, self.max_batch + 1))])
        values = []
        for seed in range(replications):
            rng = np.random.default_rng([seed, 77])
            arrive = np.cumsum(rng.exponential(1 / self.rate, n))
            amx = rng.exponential(1 / self.cpu_rate, n)
            response, flushed = batch_times(arrive, T, self.threshold, self.cutoff, amx)
            values.append(statistic(response[n // 10 :], flushed[n // 10 :]))
        return Simulated(float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(replications)))


def mean(response: FloatArray, flushed: FloatArray) -> float:
    return float(response.mean())


def p99(response: FloatArray, flushed: FloatArray) -> float:
    return float(np.quantile(response, 0.99))
