"""The batch queue without a limit on the batch, by its embedded chain.

A server that becomes idle takes all that wait; if fewer than `threshold` wait it first waits for the missing arrivals
(threshold 1 is the greedy rule). Arrivals in a service of b are N ~ Poisson(lambda T(b)), so the batches form a Markov
chain b' = max(threshold, N) with stationary law pi. All N of them are served together, in T(b'), after a residual of
the service that is uniform on (0, T(b)): the tail of the response is a sum over (b, N), and by renewal and reward

    mean = sum_b pi_b [b T + lambda T^2/2 + sum_(n<threshold) p_n (n + ... + threshold-1)/lambda] / (lambda E[cycle]).

The chain settles near the root of b = lambda T(b) with a spread of about sqrt(b/(1 - c^2)), c = lambda T'(b), so only a
window of states around it is kept; it grows until less than 1e-12 lies at its ends. At high load the window is wide
but pi is smooth on the scale of one Poisson step, sqrt(b), so every h-th state is kept with h at most a quarter of that
(the trapezoid rule on smooth bells converges faster than any power of h).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg, special

from latfit.errors import SlaOutOfReach
from latfit.queueing.service import FAR, ServiceTimes
from latfit.queueing.waits import Idle, Residual, poisson
from latfit.stats import FloatArray

FEW_STATES = 1200
MOST_STATES = 4000
EDGE = 1e-12
TINY = 1e-14
DROPPED = 1e-17
"""Request groups with a smaller share are left out of the tail."""


@dataclass(frozen=True)
class Chain:
    """Stationary law `pi` of the batch sizes `batches`, their times `T`, and p_N (len(batches), len(arrivals))."""

    rate: float
    threshold: int
    batches: FloatArray
    T: FloatArray
    pi: FloatArray
    arrivals: FloatArray
    p: FloatArray

    @property
    def mean_batch(self) -> float:
        return float(self.pi @ self.batches)

    def _missing(self) -> FloatArray:
        """Arrivals that the next batch lacks, for each count of arrivals."""
        return np.maximum(self.threshold - self.arrivals, 0)

    @property
    def requests_per_cycle(self) -> float:
        return float(self.pi @ (self.rate * self.T + self.p @ self._missing()))

    @property
    def busy_share(self) -> float:
        return float(self.pi @ self.T) * self.rate / self.requests_per_cycle

    @property
    def mean_ms(self) -> float:
        short = self._missing()
        # n + (n+1) + ... + (threshold-1) requests wait 1/lambda each while the batch fills.
        filling = short * (self.arrivals + self.threshold - 1) / 2 / self.rate
        cost = self.batches * self.T + self.rate * self.T**2 / 2 + self.p @ filling
        return float(self.pi @ cost) / self.requests_per_cycle

    def residuals(self, spans: FloatArray, times: ServiceTimes) -> Residual:
        """Requests served after a residual that is uniform on (0, span), one span a batch; p_N must match them."""
        weight = self.pi[:, None] * self.p * self.arrivals[None, :] / self.requests_per_cycle
        row, column = np.nonzero(weight > DROPPED)
        missing = self._missing()
        service = self._service_of(times)
        return Residual(weight[row, column], spans[row], missing[column], service[column], self.rate)

    def idle(self, times: ServiceTimes) -> Idle:
        """Requests that arrive at an idle server and fill the batch: one group for each place in the queue."""
        counts = self.pi @ self.p
        place = np.arange(self.threshold)
        short = [float(counts[self.arrivals <= i].sum()) for i in place]
        service = np.full(self.threshold, times(self.threshold))
        missing = (self.threshold - 1 - place).astype(np.float64)
        return Idle(np.array(short) / self.requests_per_cycle, missing, service, self.rate)

    def _service_of(self, times: ServiceTimes) -> FloatArray:
        batch = np.maximum(self.arrivals, self.threshold)
        return np.asarray(times.at(batch), dtype=np.float64)


def solve_unlimited(rate: float, times: ServiceTimes, threshold: int = 1) -> Chain | None:
    """The chain, or None where its states reach beyond `times.max_batch`. Arguments are taken as checked, the load as
    stable. Raises SlaOutOfReach where the load is so near its limit that too many states would be needed.
    """
    top = FAR if times.max_batch is None else times.max_batch
    centre = _balance(rate, times, threshold, top)
    if centre is None:
        if times.max_batch is None:
            raise _too_near(rate, times)
        return None
    steepness = min(max(rate * (times(min(centre + 1, top)) - times(max(centre, 1))), 0.0), 1 - 1e-9)
    spread = math.sqrt(centre / (1 - steepness**2))
    # Nearly a gamma law of this mean and spread (a square-root diffusion); a Poisson step wide of it on either side.
    shape = (centre / spread) ** 2
    margin = 9 * math.sqrt(centre) + 25
    for _ in range(6):
        low = max(threshold, int(centre * special.gammaincinv(shape, TINY) / shape - margin))
        high = int(centre * special.gammainccinv(shape, TINY) / shape + margin)
        if high > top:
            if times.max_batch is None:
                raise _too_near(rate, times)
            if centre + 6 * math.sqrt(centre) + 6 > top:
                return None
            high = top
        chain = _window(rate, times, threshold, low, high)
        ends = float(chain.pi[-1]) + (float(chain.pi[0]) if low > threshold else 0.0)
        if ends < EDGE:
            return chain
        if high == top:
            return None
        margin *= 2
    raise _too_near(rate, times)


def _window(rate: float, times: ServiceTimes, threshold: int, low: int, high: int) -> Chain:
    step = 1
    if high - low > FEW_STATES and low > threshold:
        step = max(1, int(math.sqrt(low) / 4))
    if (high - low) / step > MOST_STATES:
        raise _too_near(rate, times)
    batches = np.arange(float(low), high + 1, step)
    T = times.table(low, high, step)
    first = 0.0 if low == threshold else float(low)
    arrivals = np.arange(first, high + 1, step)
    p = poisson(arrivals, rate * T)
    p /= p.sum(axis=1, keepdims=True)
    lumped = p[:, len(arrivals) - len(batches) :].copy()
    lumped[:, 0] += p[:, : len(arrivals) - len(batches)].sum(axis=1)
    return Chain(rate, threshold, batches, T, stationary(lumped), arrivals, p)


def stationary(P: FloatArray) -> FloatArray:
    """pi (n,) with pi P = pi and sum 1, of a stochastic matrix with one closed class."""
    A = P.T - np.eye(len(P))
    A[-1] = 1
    right = np.zeros(len(P))
    right[-1] = 1
    pi = np.maximum(linalg.solve(A, right, check_finite=False), 0)
    return np.asarray(pi / pi.sum())


def _balance(rate: float, times: ServiceTimes, threshold: int, top: int) -> int | None:
    """Largest b with b = rate T(b), at least `threshold`; None where b < rate T(b) up to `top`."""
    if rate * times(top) >= top:
        return None
    high = top
    while high > threshold and rate * times(high) < high:
        low = max(high // 2, threshold)
        if rate * times(low) >= low:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if rate * times(middle) >= middle else (low, middle)
            return high
        high = low
    return threshold


def _too_near(rate: float, times: ServiceTimes) -> SlaOutOfReach:
    limit = times.rate_limit()
    return SlaOutOfReach(
        f"{rate * 1e3:,.6g}/s is too near the limit of {limit * 1e3:,.6g}/s for the exact law",
        where="rate",
        remedy="Lower the rate by a thousandth, or limit the batch.",
    )
