"""Textbook results that the laws of latfit are held against: M/D/1, Inoue's bound and the tail of batch queues, a bound
for any largest batch under a cut-off, the best threshold by trying each. Times in ms, rates per ms.

M/D/1: Crommelin's alternating sum loses all digits at large t. Franx (2001) has the same law as a sum of positive
terms: for (k-1) D <= t < k D, P(W <= t) = sum_j Q_(k-1-j) Poisson(j; lambda (kD - t)), where Q_n is the chance of at
most n + 1 in the system. Those chances follow from level crossings, again with positive terms only:
pi_n a_0 = pi_0 P(A >= n) + sum_(0<k<n) pi_k P(A > n - k), A ~ Poisson(lambda D).
"""

import math

import numpy as np
from scipy import optimize, special

from latfit.queueing.batch import batch_mean
from latfit.queueing.dispatch_mdp import RuleCost
from latfit.queueing.distribution import percentile_of
from latfit.queueing.overflow import CutoffLaw
from latfit.queueing.service import ServiceTimes
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
        return percentile_of(self.tail, q)


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


def inoue_bound(rate: float, tau: float, alpha: float) -> float:
    """Upper bound in ms on the mean response of the greedy queue without limit, T(b) = tau + alpha b (Inoue 2021)."""
    x = rate * alpha
    phi0 = (alpha + tau) / (2 * (1 - x)) * (1 + 2 * rate * tau + (1 - rate * tau) / (1 + x))
    phi1 = 1.5 * tau / (1 - x) + alpha / 2 * (x + 2) / (1 - x * x)
    return min(phi0, phi1)


def tail_decay(rate: float, times: ServiceTimes) -> float:
    """theta per ms with P(wait > t) ~ c e^(-theta t) for the queue with a largest batch: e^(theta T(Bmax)) =
    (1 + theta/rate)^Bmax. The queue length thins out by 1 + theta/rate a request."""
    assert times.max_batch is not None
    T, B = times(times.max_batch), times.max_batch

    def excess(theta: float) -> float:
        return theta * T - B * math.log1p(theta / rate)

    high = 1 / T
    while excess(high) < 0:
        high *= 2
    low = high / 2
    while excess(low) >= 0:
        low /= 2
    root: float = optimize.brentq(excess, low, high, xtol=1e-15)
    return root


def best_threshold(rate: float, times: ServiceTimes, most: int = 4096) -> RuleCost:
    """The best of the rules that take all that wait, from some number on: by the exact chain of each, at any load. The
    optimum where none but those is as good, as with a T(b) that grows slowly.

    The mean is taken to fall, then rise with the threshold, as in every case computed; the search stops where
    it has risen, and goes on where it does not move.
    """
    top = min(most, times.max_batch or most)
    best, mean = 1, batch_mean(rate, times, 1)
    for threshold in range(2, top + 1):
        other = batch_mean(rate, times, threshold)
        if other > mean * (1 + 1e-9):
            break
        if other < mean * (1 - 1e-13):
            best, mean = threshold, other
    return RuleCost(best, mean, 0.0)


def any_batch_percentile(rate: float, cutoff_ms: float, times: ServiceTimes, cpu_rate: float, q: float) -> float:
    """Proved upper bound in ms on the q-quantile of all responses for any largest batch, binding or not:
    max(T_cut + T(Bmax), T_cut + ln(1/(1 - q))/(mu - lambda)); infinite unless rate < cpu_rate. Needs a max_batch."""
    if times.max_batch is None or rate >= cpu_rate:
        return math.inf
    slowest = float(times.table(1, times.max_batch).max())
    return cutoff_ms + max(slowest, -math.log1p(-q) / (cpu_rate - rate))


def amx_percentile(law: CutoffLaw, q: float) -> float:
    """q-quantile in ms of the response, T_cut included, of the requests that the AMX serves."""
    return law.cutoff_ms + percentile_of(law.sojourn.tail, q)
