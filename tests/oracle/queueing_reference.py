"""M/D/1 in closed form, and the batch queue as a truncated Markov decision process. Times in ms, rates per ms.

M/D/1: Crommelin's alternating sum loses all digits at large t. Franx (2001) has the same distribution as a sum of
positive terms: for (k-1) D <= t < k D, P(W <= t) = sum_j Q_(k-1-j) Poisson(j; lambda (kD - t)), where Q_n is the chance
of at most n + 1 in the system, by level crossings.
"""

import math

import numpy as np
from scipy import optimize, special, stats

from latfit.policies import DispatchTable
from latfit.stats import FloatArray

NEGLIGIBLE = 1e-16


class MD1:
    """Poisson arrivals at `rate`, every service takes `service_ms`. rate * service_ms < 1."""

    def __init__(self, rate: float, service_ms: float) -> None:
        self.rate, self.service_ms = rate, service_ms
        self.wait_ms = rate * service_ms**2 / (2 * (1 - rate * service_ms))
        self.mean_ms = self.wait_ms + service_ms
        self.at_most = np.cumsum(_numbers_in_system(rate * service_ms))

    def wait_tail(self, t: float) -> float:
        """P(W > t) of the wait in queue."""
        if t < 0:
            return 1.0
        k = math.floor(t / self.service_ms) + 1
        mean = self.rate * (k * self.service_ms - t)
        j = np.arange(min(k, int(mean + 12 * math.sqrt(mean) + 40)))
        known = self.at_most[np.minimum(k - j, len(self.at_most) - 1)]
        poisson = np.exp(special.xlogy(j, mean) - mean - special.gammaln(j + 1))
        return max(0.0, 1 - float(known @ poisson))

    def tail(self, t: float) -> float:
        """P(R > t) of the response."""
        return self.wait_tail(t - self.service_ms)

    def percentile(self, q: float) -> float:
        return float(optimize.brentq(lambda t: self.tail(t) - (1 - q), self.service_ms, 1e4 * self.service_ms))


def _numbers_in_system(rho: float) -> FloatArray:
    """P(N = n) in the system of M/D/1, n = 0, 1, ..., until 1e-16 is left."""
    slack = math.log(1 / NEGLIGIBLE) / _log_ratio(rho)
    counts = np.arange(int(rho + 12 * math.sqrt(rho) + 40))
    at_least = special.gammainc(np.maximum(counts, 1), rho)  # P(A >= n) for n >= 1
    more_than = at_least[1:]  # [i] = P(A > i), i = 0, 1, ...
    size = int(slack) + 50
    pi = np.zeros(size)
    pi[0] = 1 - rho
    for n in range(1, size):
        reach = min(n - 1, len(more_than) - 1)  # k = n - reach ... n - 1 contribute P(A > n - k)
        flow = float(pi[n - reach : n] @ more_than[reach:0:-1]) if reach else 0.0
        start = pi[0] * at_least[n] if n < len(at_least) else 0.0
        pi[n] = (start + flow) * math.exp(rho)
    return pi


def _log_ratio(rho: float) -> float:
    """ln z > 0 with rho (z - 1) = ln z: the queue of M/D/1 thins out as z^-n."""
    high = 1.0
    while rho * math.expm1(high) < high:
        high *= 2
    low = min(1e-9, (1 - rho) / 10)
    root: float = optimize.brentq(lambda u: rho * math.expm1(u) / u - 1, low, high)
    return root


class AllActions:
    """States 0..N, every batch that fits, and waiting; beyond N everything is N. Policies are solved as they stand."""

    def __init__(self, rate: float, T: FloatArray, N: int) -> None:
        self.rate, self.T, self.N = rate, T, N
        held = np.arange(6 * N + 200.0)
        self.P = np.zeros((len(T) + 1, N + 1, N + 1))
        self.cost = np.full((len(T) + 1, N + 1), np.inf)
        self.time = np.append(1 / rate, T)
        self.cost[0, :N] = held[:N] / rate
        self.P[0, np.arange(N), np.arange(1, N + 1)] = 1
        for b, t in enumerate(T.tolist(), start=1):
            law = stats.poisson.pmf(np.arange(5 * N), rate * t)
            longer = 1 - np.cumsum(law)
            for q in range(b, N + 1):
                self.P[b, q, q - b :] = law[: N + 1 - q + b]
                self.P[b, q, N] += 1 - self.P[b, q].sum()
                self.cost[b, q] = longer @ held[q : q + len(law)] / rate

    def values(self, batch: np.ndarray) -> tuple[float, FloatArray]:
        """Cost a request of a policy, and h with h(0) = 0."""
        states = np.arange(self.N + 1)
        A = np.eye(self.N + 1) - self.P[batch, states]
        A[:, 0] = self.time[batch]
        h = np.linalg.solve(A, self.cost[batch, states])
        gain, h[0] = float(h[0]), 0
        return gain / self.rate, h

    def optimum(self) -> float:
        batch = np.minimum(np.arange(self.N + 1), 1 + int(np.argmax(np.arange(1, len(self.T) + 1) / self.T)))
        for _ in range(60):
            cost, h = self.values(batch)
            value = self.cost - cost * self.rate * self.time[:, None] + self.P @ h
            now = value[batch, np.arange(self.N + 1)]
            better = np.where(value.min(axis=0) < now - 1e-10 * (1 + abs(now)), value.argmin(axis=0), batch)
            if np.array_equal(better, batch):
                return cost
            batch = better
        raise AssertionError("no optimum")

    def of_threshold(self, threshold: int) -> float:
        """Mean response of taking all that wait, from a threshold on."""
        q = np.arange(self.N + 1)
        return self.values(np.where(q >= threshold, np.minimum(q, len(self.T)), 0))[0]

    def of_table(self, table: DispatchTable) -> float:
        batch = np.array([table.takes(q) for q in range(self.N + 1)])
        return self.values(batch)[0]


def states_for(rate: float, T: FloatArray) -> int:
    load = rate * float((T / np.arange(1, len(T) + 1)).min())
    most = rate * float(T.max())
    return int(len(T) + 15 / (1 - load) + most + 8 * math.sqrt(most) + 20)
