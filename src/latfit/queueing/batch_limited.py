"""The batch queue with a largest batch B: how many wait, and the mean.

State q: the requests left behind at a completion. The next batch starts with w = max(q, threshold) waiting, takes
b = min(w, B), leaves r = w - b, and at its end q' = r + Poisson(lambda T(b)). Beyond B the chain is a random walk with
steps Poisson(a) - B, a = lambda T(B). Beyond the most arrivals that any service brings, nothing comes in but by that
walk: there pi is a sum of terms z^-q over the roots of e^(a (z - 1)) = z^B with |z| > 1. The real root is the smallest.
The chain is solved on 0..M, with pi_q = pi_M z^-(q-M) for all q > M, M so far above B and above those most arrivals
that the next pair of roots has died away: exact at any load below the limit, with no cut-off tail. T may fall: a
service of one that lasts as long as thousands arrive is followed by all the full batches that serve them.

What a service of b < B leaves behind are its own arrivals alone, so the chain is watched at the starts of those
services, nb <= B of them. Between two, the walk visits the states from B on, X (states, nb) times on average:
(I - P_hh^T) X = P_lh^T with a banded P_hh, for a walk goes down by B and up by few at a time. What the walk and the
services send below B closes a chain of nb states; its law c gives pi = X c there.

Mean: with w waiting, the integral of the number in system over a service is w T + lambda T^2/2; over the wait for the
threshold it is (q + ... + threshold-1)/lambda; divided by lambda times the mean cycle it is the mean response.
"""

import cmath
import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize, special

from latfit.errors import SlaOutOfReach
from latfit.queueing.censoring import stationary
from latfit.queueing.service import ServiceTimes
from latfit.queueing.waits import poisson, poisson_reach
from latfit.stats import FloatArray

MOST_STATES = 6000
LOST = 1e-12
"""Share of the cycles that may go beyond the states kept."""

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
    """The chain; `times.max_batch` is set, arguments are taken as checked and the load as stable. Raises SlaOutOfReach
    where it needs too many states."""
    assert times.max_batch is not None
    B = times.max_batch
    T = np.concatenate([[0.0], times.table(1, B)])
    z = queue_ratio(rate * float(T[-1]), B)
    came = rate * T[threshold : max(threshold + 1, B)]
    closing = _reach(rate * float(T[-1]), B, z)
    M = max(B, min(poisson_reach(float(came.max())), MOST_STATES - closing)) + closing
    if M > MOST_STATES:
        raise _too_many(B, M)
    walk = _Walk(rate * float(T[-1]), B, z, M)
    X = linalg.solve_banded((walk.up, B), walk.bands(), poisson(np.arange(B, M + 1.0), came).T, check_finite=False)
    land = poisson(np.arange(float(B)), came).T + walk.down() @ X[: walk.low]
    # Below the threshold all wait for the same batch. What goes beyond M is next to nothing, or refused below.
    closed = np.vstack([land[: threshold + 1].sum(axis=0), land[threshold + 1 :]])
    closed[-1] += special.gammainc(M + 1, came)
    c = stationary(closed.T)
    pi = np.maximum(np.concatenate([land @ c, X @ c]), 0)
    total = float(pi.sum() + pi[-1] / (z - 1))
    if float(c @ special.gammainc(M + 1 - closing, came)) > LOST * total:
        raise _too_many(B, max(B, poisson_reach(float(came.max()))) + closing)
    return LimitedChain(rate, threshold, T, np.asarray(pi / total), z)


@dataclass(frozen=True)
class _Walk:
    """Full batches one after the other: states B..M, `a` arrivals in each on average."""

    a: float
    B: int
    z: float
    M: int

    @property
    def up(self) -> int:
        """Most steps up, and lower diagonals of the system."""
        return min(max(0, poisson_reach(self.a) - self.B), self.M - self.B)

    @property
    def low(self) -> int:
        """States from which a batch may leave fewer than B."""
        return min(self.B, self.M + 1 - self.B)

    def bands(self) -> FloatArray:
        """I - P_hh^T (up + B + 1, M + 1 - B) as its diagonals. Rows beyond M are multiples of row M: what they
        send back is folded into it."""
        p = poisson(np.arange(self.up + self.B + 1.0), np.array([self.a]))[0]
        bands = np.repeat(-p[:, None], self.M + 1 - self.B, axis=1)
        bands[self.B] += 1
        bands[1 : self.B + 1, -1] -= np.convolve(p, self.z ** -np.arange(1.0, self.B + 1))[: self.B]
        return bands

    def down(self) -> FloatArray:
        """P_hl^T (B, low), from B + j to what is left below B."""
        law = poisson(np.arange(float(self.B)), np.array([self.a]))[0]
        return np.asarray(linalg.toeplitz(law, np.zeros(self.low)))


def _too_many(B: int, states: int) -> SlaOutOfReach:
    return SlaOutOfReach(
        f"batches up to {B} need {states:,} states, above {MOST_STATES:,}: the load is near its limit, or thousands "
        "arrive in a long step",
        where="max_batch",
        remedy="Lower the largest batch or the rate.",
    )


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
