"""A GPU that serves batches greedily, with waiting cut off at T_cut: who still waits then goes to the AMX queue.

System: Poisson(lambda) arrivals; GPU first come first served with deterministic T(b); a request that still waits at age
T_cut moves to the AMX, which serves one at a time, FCFS, Exp(mu). p_o is the share that overflows.

GPU side. Whatever survives to a completion arrived in its last min(T_cut, T(b)) ms, so the batches are the chain
b' = max(1, Poisson(lambda min(T_cut, T(b)))), i.i.d. where T_cut <= T(b) for every b, and
p_o = sum pi_b lambda (T(b) - T_cut)^+ / sum pi_b (lambda T(b) + p_0). T_cut -> 0 gives Erlang's loss. This needs a
largest batch that does not bind.

AMX side, three answers of different standing:
- customary: overflow taken as Poisson(lambda p_o), R ~ T_cut + Exp(mu - lambda p_o). Not a bound in either direction:
  overflow comes in bursts (Poisson(lambda) inside windows of a GPU service), and requests served by the GPU may be the
  slower ones. For large t it always underestimates the AMX-served tail.
- proved, lambda < mu, any largest batch: attach the AMX service to every arrival; the AMX workload is non-decreasing in
  the set of arrivals it gets, so its sojourn is below the one it would have in M/M/1(lambda, mu):
  P(overflow, sojourn > y) <= min(p_o, e^(-(mu - lambda) y)).
- proved, lambda p_o < mu, i.i.d. batches: backwards in time e^(theta (work - elapsed)) times a function of the phase is
  a martingale for the theta with E[e^(kappa ON) omega] = 1, kappa = theta (lambda/(mu - theta) - 1), ON = T(b) - T_cut,
  omega = e^(-theta T_cut), times lambda/(lambda + theta) if the GPU was left empty. Optional stopping gives
  P(sojourn > y | overflow) <= K e^(-theta y) + (1 - K) e^(-mu y), K = (1 - E omega)/(kappa E[ON] h),
  h = e^(-theta T_cut) lambda/(lambda + theta). The exact law decays at this theta.
The exact law is in `cutoff_law`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from latfit.errors import SlaOutOfReach
from latfit.queueing.batch_unlimited import MOST_STATES, Chain
from latfit.queueing.censoring import stationary
from latfit.queueing.law import percentile_of, positive
from latfit.queueing.service import ServiceTimes
from latfit.queueing.waits import Idle, Residual, poisson, poisson_reach
from latfit.stats import FloatArray

NEXT_TO_NOTHING = 1e-10
"""Load of the AMX below which the bound's root lies closer to mu than numbers tell."""
BINDING = 1e-7
"""Chance of more survivors than the largest batch from which on it binds."""


@dataclass(frozen=True)
class OverflowBound:
    """P(AMX sojourn > y | overflow) <= K e^(-decay y) + (1 - K) e^(-mu y)."""

    decay: float
    K: float
    amx_rate: float

    def tail(self, y: float) -> float:
        y = max(y, 0.0)
        return min(1.0, self.K * math.exp(-self.decay * y) + (1 - self.K) * math.exp(-self.amx_rate * y))


@dataclass(frozen=True)
class CutoffQueue:
    """The GPU side solved, with what the AMX side needs. Rates per ms; `windows` (b,) are min(T_cut, T(b))."""

    rate: float
    cutoff_ms: float
    amx_rate: float
    chain: Chain
    windows: FloatArray
    served_later: Residual
    served_idle: Idle

    @property
    def overflow_share(self) -> float:
        on = self.chain.T - self.windows
        return self.rate * float(self.chain.pi @ on) / self.chain.requests_per_cycle

    @property
    def overflow_rate(self) -> float:
        return self.rate * self.overflow_share

    @property
    def independent_batches(self) -> bool:
        return bool(np.all(self.windows == self.cutoff_ms))

    def gpu_tail(self, x: float) -> float:
        """P(served by the GPU and R > x)."""
        return self.served_later.tail(x) + self.served_idle.tail(x)

    def with_amx(self, sojourn_tail: Callable[[float], float]) -> Callable[[float], float]:
        """P(R > x) over all requests, from y -> P(AMX sojourn > y | overflow)."""
        share = self.overflow_share

        def tail(x: float) -> float:
            y = x - self.cutoff_ms
            return min(1.0, self.gpu_tail(x) + share * (sojourn_tail(y) if y > 0 else 1.0))

        return tail

    def customary_percentile(self, q: float) -> float:
        """T_cut + ln(1/(1 - q))/(mu - lambda p_o), the formula in circulation. It is not a bound (see the module)."""
        spare = self.amx_rate - self.overflow_rate
        return self.cutoff_ms - math.log1p(-q) / spare if spare > 0 else math.inf

    def customary_tail(self, x: float) -> float:
        """The customary Poisson overflow for the AMX, with the GPU's tail added; an approximation."""
        spare = self.amx_rate - self.overflow_rate
        return self.with_amx(lambda y: math.exp(-spare * y))(x) if spare > 0 else 1.0

    def proved_tail(self) -> Callable[[float], float]:
        """x -> upper bound on P(R > x): the smaller of the two proved bounds. Where neither applies it stays at p_o."""
        bound, share = overflow_bound(self), self.overflow_share
        spare = self.amx_rate - self.rate

        def sojourn(y: float) -> float:
            best = bound.tail(y) if bound is not None else 1.0
            if spare > 0 and share > 0:
                best = min(best, math.exp(-spare * y) / share)
            return best

        return self.with_amx(sojourn)

    def proved_percentile(self, q: float) -> float:
        return percentile_of(self.proved_tail(), q)


def cutoff_queue(rate: float, cutoff_ms: float, times: ServiceTimes, amx_rate: float) -> CutoffQueue:
    """Solve the GPU side. rate and amx_rate per ms; amx_rate is 1 / mean AMX service time, taken as exponential.

    Raises SlaOutOfReach where the largest batch binds (more than 1e-7 of the services leave more survivors).
    """
    rate, cutoff = positive(rate, "rate"), positive(cutoff_ms, "T_cut", "in ms")
    mu = positive(amx_rate, "AMX rate")
    top = poisson_reach(rate * cutoff)
    if times.max_batch is not None and top > times.max_batch:
        top = times.max_batch
        if float(special.gammainc(top + 1, rate * cutoff)) > BINDING:
            raise _binding(rate, cutoff, top)
    if top > MOST_STATES:
        raise SlaOutOfReach(
            f"{top} requests may wait within T_cut: too many for the exact law",
            where="T_cut",
            remedy="Lower T_cut or the rate.",
        )
    batches, arrivals = np.arange(1.0, top + 1), np.arange(0.0, top + 1)
    T = times.table(1, top)
    windows = np.minimum(cutoff, T)
    p = poisson(arrivals, rate * windows)
    p /= p.sum(axis=1, keepdims=True)
    lumped = p[:, 1:].copy()
    lumped[:, 0] += p[:, 0]
    pi = lumped[0] if np.all(windows == cutoff) else stationary(lumped)
    chain = Chain(rate, 1, batches, T, pi, arrivals, p)
    return CutoffQueue(rate, cutoff, mu, chain, windows, chain.residuals(windows, times), chain.idle(times))


def overflow_bound(queue: CutoffQueue) -> OverflowBound | None:
    """The exponential bound on the AMX sojourn of overflow; None where batches are not i.i.d. or lambda p_o >= mu, or
    so little arrives that the root is beyond what numbers tell."""
    if not queue.independent_batches or queue.overflow_rate >= queue.amx_rate:
        return None
    rate, mu, cutoff = queue.rate, queue.amx_rate, queue.cutoff_ms
    if rate < NEXT_TO_NOTHING * mu:
        return None
    p = queue.chain.p[0]
    on = np.concatenate([queue.chain.T[:1], queue.chain.T]) - cutoff
    empty = np.arange(len(p)) == 0
    log_p = np.log(np.maximum(p, 1e-300))

    def kappa(theta: float) -> float:
        return theta * (rate / (mu - theta) - 1)

    def log_omega(theta: float) -> FloatArray:
        return np.asarray(-theta * cutoff + np.where(empty, -math.log1p(theta / rate), 0.0))

    def log_mean(theta: float) -> float:
        return float(special.logsumexp(log_p + kappa(theta) * on + log_omega(theta)))

    floor = max(0.0, mu - rate)
    step = (mu - floor) / 2
    while log_mean(floor + step) >= 0:
        step /= 2
        if step < 1e-9 * mu:
            return None
    if log_mean(mu * (1 - 1e-12)) <= 0:
        return None
    theta = float(optimize.brentq(log_mean, floor + step, mu * (1 - 1e-12), xtol=1e-14))
    mean_omega = float(p @ np.exp(log_omega(theta)))
    h = math.exp(-theta * cutoff - math.log1p(theta / rate))
    scale = kappa(theta) * float(p @ on) * h
    return OverflowBound(theta, (1 - mean_omega) / scale, mu) if scale != 0 else None


def any_batch_percentile(rate: float, cutoff_ms: float, times: ServiceTimes, amx_rate: float, q: float) -> float:
    """Proved upper bound in ms on the q-quantile of all responses for any largest batch, binding or not:
    max(T_cut + T(Bmax), T_cut + ln(1/(1 - q))/(mu - lambda)); infinite unless rate < amx_rate. Needs a max_batch."""
    positive(rate, "rate"), positive(cutoff_ms, "T_cut", "in ms"), positive(amx_rate, "AMX rate")
    if times.max_batch is None or rate >= amx_rate:
        return math.inf
    slowest = float(times.table(1, times.max_batch).max())
    return cutoff_ms + max(slowest, -math.log1p(-q) / (amx_rate - rate))


def _binding(rate: float, cutoff: float, top: int) -> SlaOutOfReach:
    return SlaOutOfReach(
        f"{rate * cutoff:.4g} requests arrive within T_cut on average: batches of {top} bind, and the law assumes not",
        where="max_batch",
        remedy="Raise the largest batch, lower T_cut, or take any_batch_percentile or a simulation.",
    )
