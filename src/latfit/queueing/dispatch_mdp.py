"""The best rule for an idle batch server: a semi-Markov decision process on the number waiting.

States beyond N have a quadratic value; N grows until the cost converges: docs/theory/planning.md.
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.lib.stride_tricks import sliding_window_view

from latfit.errors import SlaOutOfReach
from latfit.policies import DispatchTable
from latfit.queueing.distribution import require_stable
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray, IntArray

MAX_STATES = 2500
MAX_ROUNDS = 100
MAX_IDLE_ROUNDS = 12  # rounds that do not lower the cost, after which none will
FIRST_STATES = 60
GROWTH = 1.4  # of the number of states
PRECISION = 1e-10  # of the cost, relative, as states are added
TIE = 1e-11


@dataclass(frozen=True)
class OptimalRule:
    table: DispatchTable
    cost_ms: float

    @property
    def threshold(self) -> int:
        return self.table.threshold


@dataclass(frozen=True)
class _Problem:
    """States 0..N, batches b = 1..B; E h above h(N) after a service is `beyond` less the gain times `beyond_gain`."""

    rate: float
    T: FloatArray  # (B,)
    p: FloatArray  # distribution (B, J) of the arrivals during a service
    costs: FloatArray  # (B, N + 1) of starting with q waiting
    beyond: FloatArray  # (B, N + 1) by the requests left over at the start
    beyond_gain: FloatArray


def optimal_rule(rate: float, times: ServiceTimes) -> OptimalRule:
    """Return the table with the least mean response for Poisson arrivals at a rate per ms.

    Raises SlaOutOfReach if the queue is unstable, or needs more than MAX_STATES states.
    """
    T = times.mean_ms
    best = _for_long_queues(T)
    require_stable(rate, best / float(T[best - 1]))
    N = len(T) + _most_arrivals(rate * float(T[best - 1])) + FIRST_STATES
    batch, cost, before = np.minimum(np.arange(N + 1), best), math.inf, math.nan
    while not abs(cost - before) <= PRECISION * cost:
        batch = np.concatenate([batch, np.full(N + 1 - len(batch), best)])
        before = cost
        cost, batch = _iterated(_problem(rate, T, N), batch)
        N = math.ceil(GROWTH * N)
    batches = batch.tolist()
    while len(batches) > best + 1 and batches[-1] == best:
        batches.pop()
    return OptimalRule(DispatchTable((*batches, best), rate, len(T)), cost / rate)


def _for_long_queues(T: FloatArray) -> int:
    rates = np.arange(1, len(T) + 1) / T
    return int(np.flatnonzero(rates >= rates.max() * (1 - TIE))[0]) + 1


def _problem(rate: float, T: FloatArray, N: int) -> _Problem:
    J = _most_arrivals(rate * float(T.max()))
    if max(N, J // 3) > MAX_STATES:
        found = f"{max(N, J):,} queue lengths are needed for the optimal rule, above {MAX_STATES:,}"
        remedy = "Lower the rate or the largest batch, or take a rule without a table: gpu-only or marginal-cost."
        raise SlaOutOfReach(found, where="rate", remedy=remedy)
    counts, q, nobody = np.arange(float(J)), np.arange(N + 1.0), np.zeros(N + 1)
    p = _poisson(counts, rate * T)
    # Long queues: h = curve q^2 + (slope - gain/spare) q.
    best = _for_long_queues(T)
    span = float(T[best - 1])
    spare, drift = best / span - rate, best - rate * span
    curve = 1 / (2 * spare)
    slope = rate * span / 2 / spare + curve * (drift**2 + rate * span) / drift
    rise = counts[1:] * (curve * (2 * N + counts[1:]) + slope)
    beyond = _ahead(p, np.concatenate([nobody, rise]))
    beyond_gain = _ahead(p, np.concatenate([nobody, counts[1:] / spare]))
    inside = p[:, : N + 1].copy()
    inside[:, -1] += 1 - inside.sum(axis=1)
    return _Problem(rate, T, inside, q * T[:, None] + rate * T[:, None] ** 2 / 2, beyond, beyond_gain)


def _poisson(counts: FloatArray, means: FloatArray) -> FloatArray:
    n, mean = counts[None, :], means[:, None]
    return np.asarray(np.exp(scipy.special.xlogy(n, mean) - mean - scipy.special.gammaln(n + 1)))


def _most_arrivals(mean: float) -> int:
    """Return a count that a Poisson variable exceeds with a chance below 1e-16."""
    return int(mean + 9 * math.sqrt(mean) + 25)


def _ahead(weights: FloatArray, values: FloatArray) -> FloatArray:
    """Return sum_j weights[b, j] values[l + j], (B, l)."""
    return np.asarray(weights @ np.ascontiguousarray(sliding_window_view(values, weights.shape[1]).T))


def _iterated(problem: _Problem, batch: IntArray) -> tuple[float, IntArray]:
    """Return the cost per time, and the best batch for each number waiting, by policy iteration."""
    least, idle = math.inf, 0
    for _ in range(MAX_ROUNDS):
        gain, h = _values(problem, batch)
        better = _improved(problem, batch, gain, h)
        idle = 0 if gain < least * (1 - TIE) else idle + 1
        least = min(least, gain)
        # Rules that only rounding tells apart may follow each other for ever.
        if np.array_equal(better, batch) or idle > MAX_IDLE_ROUNDS:
            return gain, batch
        batch = better
    raise SlaOutOfReach("policy iteration has not settled", where="rate", remedy="Lower the rate.")


def _values(problem: _Problem, batch: IntArray) -> tuple[float, FloatArray]:
    """Return the cost per time of a rule, and h (N + 1,)."""
    N, J = len(batch) - 1, problem.p.shape[1]
    serves, waits = np.flatnonzero(batch), np.flatnonzero(batch == 0)
    b = batch[serves]
    wide = np.zeros((N + 1, N + J + 1))
    wide[serves[:, None], (serves - b)[:, None] + np.arange(J)] = problem.p[b - 1]
    wide[waits, waits + 1] = 1
    P = wide[:, : N + 1]
    P[:, N] += wide[:, N + 1 :].sum(axis=1)
    lengths, costs = np.full(N + 1, 1 / problem.rate), np.arange(N + 1.0) / problem.rate
    lengths[serves] = problem.T[b - 1] + problem.beyond_gain[b - 1, serves - b]
    costs[serves] = problem.costs[b - 1, serves] + problem.beyond[b - 1, serves - b]
    A = np.eye(N + 1) - P
    # h is 0 where the queue often is, so that the column there carries the gain, a request.
    often = int(problem.rate * problem.T[_for_long_queues(problem.T) - 1])
    A[:, often] = lengths * problem.rate
    h = np.linalg.solve(A, costs)
    gain, h[often] = float(h[often]) * problem.rate, 0
    return gain, np.asarray(h, dtype=np.float64)


def _improved(problem: _Problem, batch: IntArray, gain: float, h: FloatArray) -> IntArray:
    N, J = len(h) - 1, problem.p.shape[1]
    after = _ahead(problem.p, np.concatenate([h, np.full(J - 1, h[-1])]))
    after += problem.beyond - gain * problem.beyond_gain
    value = np.full((len(problem.T) + 1, N + 1), np.inf)
    value[0, :-1] = (np.arange(float(N)) - gain) / problem.rate + h[1:]
    for b, T in enumerate(problem.T, start=1):
        value[b, b:] = problem.costs[b - 1, b:] - gain * T + after[b - 1, : N + 1 - b]
    states = np.arange(N + 1)
    now, best = value[batch, states], value.argmin(axis=0)
    scale = np.abs(problem.costs[0]) + np.abs(h)
    return np.where(value[best, states] < now - TIE * scale, best, batch)


def solve_optimal(rate: float, T_ms: FloatArray) -> DispatchTable:
    return optimal_rule(rate, ServiceTimes(T_ms)).table
