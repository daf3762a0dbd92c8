"""How long a batch queue takes from empty, as after a restart, until it is as it will be.

The requests left behind at completions are the chain of `batch_limited`: with w = max(q, threshold) waiting, b =
min(w, B) go, w - b + Poisson(lambda T(b)) are left, and the step lasts T(b) + (w - q)/lambda on average. v_n is its
distribution at the n-th completion, v_0 that of an empty queue. The queue counts as settled at the first n for which
two successive completions, taken in equal shares, are within total variation 0.1 of the stationary distribution pi:
two, since at low load a T(b) that falls makes services short and long in turns, which is a phase and no state of the
queue. That distance never grows, so the time is the sum over k < n of v_k times the mean lengths.

A queue with two states that hardly ever change (a T that falls or has steps) comes near pi by one slow mode:
v_n - pi ~ rho^n d. Once a step moves the distribution straight at pi, v_(n+1) - v_n = -(1 - rho) (v_n - pi), n follows
from the logarithm of rho, and the time from the sum of the geometric series. Where nothing moves any more, to 1e-13,
and the distribution is not pi, it never will be.
"""

import math
from dataclasses import dataclass

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.queueing.batch import Chain, LimitedChain, checked_load, solve_limited, solve_unlimited
from latfit.queueing.distribution import poisson, poisson_reach
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray

NEAR = 0.1
"""Total variation from the stationary distribution at which the queue counts as settled."""

MOST_ENTRIES = 2_000_000
MOST_PRODUCTS = 300_000_000
"""Multiplications that may be spent: some tenths of a second."""

BEYOND = 1e-4
"""Share of the stationary distribution that may lie above the states kept."""

STRAIGHT = 1e-3
"""Share of a step's change that may lie beside its direction to the stationary distribution for the slow mode to be
alone."""

ROUNDING = 1e-13


@dataclass(frozen=True)
class _Steps:
    """States 0..M: `law` (M + 1,) stationary, `lasts` (M + 1,) in ms; distributions of the arrivals (nb, M + 1) in
    services of threshold, ... , and of full batches (arrivals,)."""

    law: FloatArray
    lasts: FloatArray
    threshold: int
    own: FloatArray
    full: FloatArray
    largest: int

    def onward(self, v: FloatArray) -> FloatArray:
        """The distribution after one more service; what goes beyond M is kept at M."""
        few = np.zeros(len(self.own))
        few[: self.largest - self.threshold] = v[self.threshold : self.largest]
        few[0] += v[: self.threshold].sum()
        new: FloatArray = few @ self.own
        if len(v) > self.largest:
            more = np.convolve(v[self.largest :], self.full)
            fits = min(len(more), len(v))
            new[:fits] += more[:fits]
            new[-1] += more[fits:].sum()
        new[-1] += max(0.0, 1 - float(new.sum()))
        return new


def settling_ms(rate: float, times: ServiceTimes, threshold: int = 1) -> float | None:
    """ms from empty until the queue is in its stationary state (see the module); infinite where it will never be.

    rate per ms, below `times.rate_limit()`; every service takes T(b). None where the chain has too many states, or
    comes to its distribution too slowly, to be followed cheaply.
    """
    rate = checked_load(rate, times, threshold)
    try:
        chain = solve_unlimited(rate, times, threshold) or solve_limited(rate, times, threshold)
    except SlaOutOfReach:
        return None
    steps = _limited(chain) if isinstance(chain, LimitedChain) else _unlimited(chain, times)
    return None if steps is None else _followed(steps)


def _followed(steps: _Steps) -> float | None:
    v = np.zeros(len(steps.law))
    v[0] = 1
    after = steps.onward(v)
    spent = 0.0
    each = steps.own.size + len(steps.law) * len(steps.full)
    for _ in range(MOST_PRODUCTS // each):
        both, later = (v + after) / 2, steps.onward(after)
        distance = float(np.abs(both - steps.law).sum()) / 2
        if distance <= NEAR:
            return spent
        moved = (later - v) / 2
        shrinks = float(np.abs(moved).sum()) / 2 / distance
        if shrinks < ROUNDING:
            return math.inf
        if (
            shrinks < 1
            and float(np.abs(moved + shrinks * (both - steps.law)).sum()) / 2 < STRAIGHT * shrinks * distance
        ):
            more = math.log(NEAR / distance) / math.log1p(-shrinks)
            off = float((v - steps.law) @ steps.lasts)
            return spent + more * float(steps.law @ steps.lasts) + off * (1 - NEAR / distance) / shrinks
        spent += float(v @ steps.lasts)
        v, after = after, later
    return None


def _limited(chain: LimitedChain) -> _Steps | None:
    above = chain.pi[-1] * chain.beyond
    more = max(0, math.ceil(math.log(above / BEYOND) / math.log(chain.z))) if above > 0 else 0
    law = np.concatenate([chain.pi, chain.pi[-1] * chain.z ** -np.arange(1.0, more + 1)])
    return _steps(chain.rate, chain.threshold, chain.T, law)


def _unlimited(chain: Chain, times: ServiceTimes) -> _Steps | None:
    """As a queue whose largest batch is above all that arrive."""
    high = int(chain.batches[-1])
    if len(chain.batches) < high - int(chain.batches[0]) + 1 or (high + 1) ** 2 > MOST_ENTRIES:
        return None
    law = chain.pi @ poisson(np.arange(high + 1.0), chain.rate * chain.T)
    return _steps(chain.rate, chain.threshold, np.concatenate([[0.0], times.table(1, high)]), law)


def _steps(rate: float, threshold: int, T: FloatArray, law: FloatArray) -> _Steps | None:
    largest, M = len(T) - 1, len(law) - 1
    services = rate * T[threshold : max(threshold + 1, largest)]
    if len(services) * (M + 1) > MOST_ENTRIES:
        return None
    q = np.arange(M + 1)
    waiting = np.maximum(q, threshold)
    lasts = T[np.minimum(waiting, largest)] + (waiting - q) / rate
    full = poisson(np.arange(float(poisson_reach(rate * float(T[-1])))), rate * T[-1:])[0]
    own = poisson(np.arange(M + 1.0), services)
    return _Steps(law / law.sum(), lasts, threshold, own, full, largest)
