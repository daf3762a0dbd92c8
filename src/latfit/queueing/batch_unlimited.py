"""The batch queue without a limit on the batch, by its embedded chain.

A server that becomes idle takes all that wait; if fewer than `threshold` wait it first waits for the missing arrivals
(threshold 1 is the greedy rule). Arrivals in a service of b are N ~ Poisson(lambda T(b)), so the batches form a Markov
chain b' = max(threshold, N) with stationary law pi. All N of them are served together, in T(b'), after a residual of
the service that is uniform on (0, T(b)): the tail of the response is a sum over (b, N), and by renewal and reward

    mean = sum_b pi_b [b T + lambda T^2/2 + sum_(n<threshold) p_n (n + ... + threshold-1)/lambda] / (lambda E[cycle]).

The chain is solved on a window of states, first around the root of b = lambda T(b) with a spread of about
sqrt(b/(1 - c^2)), c = lambda T'(b). It grows until it holds all that matters: a service leads out of it with a chance
below 1e-12, so that a long step of a small batch brings in the states that its arrivals reach; and outside it the queue
drifts back, lambda T(b) >= b + 1 below and lambda T(b) < b above, so that no second balance is left out (a T that falls
or has steps may have several). At high load the window is wide but pi is smooth on the scale of one Poisson step,
sqrt(b), so every h-th state is kept with h at most a quarter of that (the trapezoid rule on smooth bells converges
faster than any power of h), if T is smooth on that scale too.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

from latfit.errors import SlaOutOfReach
from latfit.queueing.censoring import stationary
from latfit.queueing.service import FAR, ServiceTimes
from latfit.queueing.waits import Idle, Residual, poisson
from latfit.stats import FloatArray

FEW_STATES = 1200
MOST_STATES = 4000
MOST_WINDOWS = 16
PROBED = 3000
"""Batches above the window at which its drift is looked at."""

EDGE = 1e-12
TINY = 1e-14
LEAST = 1e-200
SMOOTH = 1e-6
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
    """The chain, or None where its states reach beyond `times.max_batch`, or are too many below it. Arguments are taken
    as checked, the load as stable. Raises SlaOutOfReach where there is no largest batch and too many states are needed:
    the load is too near its limit, or T has steps so high that the queue may settle at more than one batch.
    """
    top = FAR if times.max_batch is None else times.max_batch
    centre = _balance(rate, times, threshold, top)
    chain = None
    if centre is not None and (times.max_batch is None or centre + 6 * math.sqrt(centre) + 6 <= top):
        chain = _settled(rate, times, threshold, centre)
    if chain is None and times.max_batch is None:
        raise _too_near(rate, times)
    return chain


def _settled(rate: float, times: ServiceTimes, threshold: int, centre: int) -> Chain | None:
    """The chain on a window that holds all states that matter; None where there is none, or too many are needed."""
    top = FAR if times.max_batch is None else times.max_batch
    steepness = min(max(rate * (times(min(centre + 1, top)) - times(max(centre, 1))), 0.0), 1 - 1e-9)
    spread = math.sqrt(centre / (1 - steepness**2))
    # Nearly a gamma law of this mean and spread (a square-root diffusion); a Poisson step wide of it on either side.
    shape = (centre / spread) ** 2
    margin = 9 * math.sqrt(centre) + 25
    low = max(threshold, int(centre * special.gammaincinv(shape, TINY) / shape - margin))
    high = min(top, int(centre * special.gammainccinv(shape, TINY) / shape + margin))
    for _ in range(MOST_WINDOWS):
        low, high = _to_turning_points(rate, times, threshold, low, high)
        chain = _window(rate, times, threshold, low, high)
        if chain is None:
            return None
        below = float(chain.pi @ special.gammaincc(low, rate * chain.T)) if low > threshold else 0.0
        above = float(chain.pi @ special.gammainc(high + 1, rate * chain.T))
        if max(below, above) < EDGE:
            return chain
        if above >= EDGE and high == top:
            return None
        width = high - low + 25
        low = max(threshold, low - width // 2) if below >= EDGE else low
        high = min(top, high + width // 2) if above >= EDGE else high
    return None


def _to_turning_points(rate: float, times: ServiceTimes, threshold: int, low: int, high: int) -> tuple[int, int]:
    """The window, down to the bottom unless all below drifts up, and up to the last batch that does not drift down."""
    top = FAR if times.max_batch is None else times.max_batch
    if low > threshold and np.any(rate * times.table(threshold, low - 1) < np.arange(threshold, low) + 1):
        low = threshold
    if high < top:
        above = np.unique(np.geomspace(high + 1, top, PROBED).astype(np.int64)).astype(np.float64)
        stays = np.flatnonzero(rate * np.asarray(times.at(above), dtype=np.float64) >= above)
        high = high if not len(stays) else min(top, int(above[stays[-1]] + 9 * math.sqrt(above[stays[-1]])) + 25)
    return low, high


def _window(rate: float, times: ServiceTimes, threshold: int, low: int, high: int) -> Chain | None:
    step = 1
    if high - low > FEW_STATES and low > threshold:
        step = max(1, int(math.sqrt(low) / 4))
        while step > 1 and not _smooth(rate, times, low, high, step):
            step //= 2
    if (high - low) / step > MOST_STATES:
        return None
    batches = np.arange(float(low), high + 1, step)
    T = times.table(low, high, step)
    first = 0.0 if low == threshold else float(low)
    arrivals = np.arange(first, high + 1, step)
    p = poisson(arrivals, rate * T)
    p /= np.maximum(p.sum(axis=1, keepdims=True), LEAST)
    lumped = p[:, len(arrivals) - len(batches) :].copy()
    lumped[:, 0] += p[:, : len(arrivals) - len(batches)].sum(axis=1)
    # What leads out above ends at the edge. (Not 1 - sum: its rounding would join states that nothing joins.)
    lumped[:, -1] += special.gammainc(high + 1, rate * T)
    return Chain(rate, threshold, batches, T, stationary(lumped), arrivals, p)


def _smooth(rate: float, times: ServiceTimes, low: int, high: int, step: int) -> bool:
    """Whether T between every `step`-th batch is what a cubic through those says, as arrivals, to 1e-6."""
    cells = (high - low) // step
    T = rate * times.table(low, low + cells * step).astype(np.float64)
    at, between = T[::step], T[:-1].reshape(cells, step)[1:-1]
    x = np.arange(step) / step
    weights = [-x * (x - 1) * (x - 2) / 6, (x * x - 1) * (x - 2) / 2, -x * (x + 1) * (x - 2) / 2, x * (x * x - 1) / 6]
    cubic = sum(np.outer(at[i : cells - 2 + i], weight) for i, weight in enumerate(weights))
    return bool(np.all(np.abs(between - cubic) < SMOOTH * low))


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
        f"{rate * 1e3:,.6g}/s is too near the limit of {limit * 1e3:,.6g}/s for the exact law,"
        " or T(b) has steps at which batches may settle",
        where="rate",
        remedy="Lower the rate by a thousandth, or limit the batch.",
    )
