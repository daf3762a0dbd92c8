"""The batch queue with a largest batch B: how many wait, and the mean.

State q: the requests left behind at a completion. The next batch starts with w = max(q, threshold) waiting, takes
b = min(w, B), leaves r = w - b, and at its end q' = r + Poisson(lambda T(b)). Beyond B the chain is a random walk with
steps Poisson(a) - B, a = lambda T(B), so there pi is a sum of terms z^-q over the roots of e^(a (z - 1)) = z^B with
|z| > 1. The real root is the smallest. The chain is solved on 0..M, with pi_q = pi_M z^-(q-M) for all q > M, M so far
out that the next pair of roots has died away: exact at any load below the limit, with no cut-off tail.

Mean: with w waiting, the integral of the number in system over a service is w T + lambda T^2/2; over the wait for the
threshold it is (q + ... + threshold-1)/lambda; divided by lambda times the mean cycle it is the mean response.
"""

import cmath
import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize

from latfit.errors import SlaOutOfReach
from latfit.queueing.service import ServiceTimes
from latfit.queueing.waits import poisson
from latfit.stats import FloatArray

MOST_STATES = 6000
LOG_NEGLIGIBLE = 50.0
FASTEST = 256.0
"""ln z from which nothing is left of the queue; a few doublings more would overflow e^u."""


@dataclass(frozen=True)
class LimitedChain:
    """pi (M + 1,) of the requests left behind, 0..M, continued by pi_M z^-(q-M); T (B + 1,) with T[0] unused."""

    rate: float
    threshold: int
    T: FloatArray
    pi: FloatArray
    z: float

    @property
    def max_batch(self) -> int:
        return len(self.T) - 1

    @property
    def beyond(self) -> float:
        """Sum over k >= 1 of z^-k."""
        return 1 / (self.z - 1)

    def _sum(self, inner: FloatArray, level: float, slope: float = 0.0) -> float:
        """E[f(q)], f given on 0..M as `inner` and as level + slope (q - M) beyond."""
        geometric = self.beyond * level + self.z * self.beyond**2 * slope
        return float(self.pi @ inner) + float(self.pi[-1]) * geometric

    def _starts(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Left behind, waiting at the next start, and its service time, for q = 0..M."""
        q = np.arange(len(self.pi), dtype=np.float64)
        waiting = np.maximum(q, self.threshold)
        return q, waiting, self.T[np.minimum(waiting, self.max_batch).astype(np.int64)]

    @property
    def requests_per_cycle(self) -> float:
        q, waiting, T = self._starts()
        return self._sum(self.rate * T + waiting - q, self.rate * float(self.T[-1]))

    @property
    def busy_share(self) -> float:
        _, _, T = self._starts()
        return self.rate * self._sum(T, float(self.T[-1])) / self.requests_per_cycle

    @property
    def mean_batch(self) -> float:
        _, waiting, _ = self._starts()
        return self._sum(np.minimum(waiting, self.max_batch), float(self.max_batch))

    @property
    def mean_ms(self) -> float:
        q, waiting, T = self._starts()
        filling = (waiting - q) * (q + waiting - 1) / 2 / self.rate
        cost = waiting * T + self.rate * T**2 / 2 + filling
        last = float(self.T[-1])
        return self._sum(cost, float(cost[-1]), last) / self.requests_per_cycle


def solve_limited(rate: float, times: ServiceTimes, threshold: int = 1) -> LimitedChain:
    """The chain; `times.max_batch` is set, arguments are taken as checked and the load as stable."""
    assert times.max_batch is not None
    B = times.max_batch
    T = np.concatenate([[0.0], times.table(1, B)])
    z = queue_ratio(rate * float(T[-1]), B)
    M = B + _reach(rate * float(T[-1]), B, z)
    if M > MOST_STATES:
        raise SlaOutOfReach(
            f"batches up to {B} need {M} states, above {MOST_STATES}",
            where="max_batch",
            remedy="Lower the largest batch or the rate.",
        )
    P = _transitions(rate, T, threshold, M)
    # Rows beyond M are multiples of row M: fold what they send back to 0..M into it.
    a, k = rate * float(T[-1]), np.arange(1, B + 1)
    columns = np.arange(M + 1 - B, M + 1)
    back = poisson((columns[None, :] - M - k[:, None] + B).ravel().astype(np.float64), np.array([a])).reshape(B, B)
    P[M, M + 1 - B :] += z ** -k.astype(np.float64) @ back
    A = P.T - np.eye(M + 1)
    A[-1] = 1
    A[-1, -1] = 1 + 1 / (z - 1)
    right = np.zeros(M + 1)
    right[-1] = 1
    pi = np.maximum(linalg.solve(A, right, check_finite=False), 0)
    return LimitedChain(rate, threshold, T, np.asarray(pi / (pi.sum() + pi[-1] / (z - 1))), z)


def queue_ratio(a: float, B: int) -> float:
    """z > 1 with e^(a (z - 1)) = z^B, for 0 < a < B: the queue thins out as z^-q."""

    def excess(u: float) -> float:
        return a * math.expm1(u) / u - B

    high = 1.0
    while excess(high) < 0:
        if high > FASTEST:
            return math.exp(high)
        high *= 2
    low = min(high, (B - a) / B)
    while excess(low) >= 0:
        low /= 2
    return math.exp(optimize.brentq(excess, low, high, xtol=1e-15))


def _reach(a: float, B: int, z: float) -> int:
    """States beyond B until the next pair of roots is below e^-50 of the first, or nothing is left at all."""
    whole = math.ceil(LOG_NEGLIGIBLE / math.log(z)) + 10
    if whole <= B:
        return whole
    # The next roots are z = e^w with a (e^w - 1) = B w +- 2 pi i; near the limit w^2 is about 4 pi i/a.
    w = ((B - a) + cmath.sqrt((B - a) ** 2 + 4j * math.pi * a)) / a
    try:
        for _ in range(30):
            w -= (a * (cmath.exp(w) - 1) - B * w - 2j * math.pi) / (a * cmath.exp(w) - B)
        off = abs(a * (cmath.exp(w) - 1) - B * w - 2j * math.pi)
    except OverflowError:
        return whole
    gap = w.real - math.log(z)
    return min(whole, math.ceil(LOG_NEGLIGIBLE / gap) + 10) if off < 1e-6 * B and gap > 0 else whole


def _transitions(rate: float, T: FloatArray, threshold: int, M: int) -> FloatArray:
    """P[q, q'] for q, q' = 0..M; a row's missing mass goes beyond M."""
    B = len(T) - 1
    laws = poisson(np.arange(M + 1.0), rate * T[1:])
    P = np.zeros((M + 1, M + 1))
    for q in range(M + 1):
        waiting = max(q, threshold)
        batch = min(waiting, B)
        left = waiting - batch
        P[q, left:] = laws[batch - 1, : M + 1 - left]
    return P
