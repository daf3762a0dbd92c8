"""The best rule for an idle batch server: a semi-Markov decision process on the number waiting, solved exactly.

State q at an idle server. Waiting takes 1/lambda and leads to q + 1; serving any b of 1..min(q, Bmax) lasts T(b) and
leads to q - b + Poisson(lambda T(b)). To take all that wait is best where T grows slowly with b; where it has steps (an
engine that pads batches to buckets) or grows fast, fewer are. While n are in the system cost runs at rate n, so cost
per time is lambda times the mean response (Little). With `tail_weight` w and `tail_ms` x it runs at n + w (n - lambda
x)^+: what exceeds lambda x in the system is older than x on average, so this stands in for a tail cost (no percentile
is minimised). Within a service E int_0^T c(q + Poisson(lambda t)) dt = sum_k c(q + k) P(Poisson(lambda T) > k)/lambda.

Policy iteration: solve h(q) + g t(q) = c(q) + sum P h up to a constant, improve, until nothing changes. What every b
leads to from every q is one product: sum_j p_b(j) h(q - b + j) depends on q - b only.

Long queues. Let r = max b/T(b), the highest rate that any rule can carry: the queue is stable below it. With h(q) =
A q^2 + ..., the terms in q of h(q) = min_b [c(q, b) + E h(q - b + N) - g T] say 0 = min_b [(1 + w) T - 2 A (b - lambda
T)], so T(b)/b = 1/r decides, A = (1 + w)/(2 (r - lambda)), and among equal rates the terms without q prefer the least
b. A long queue is served by that batch b*, at which the table ends. The terms without q of b* say that h goes on as
A q^2 + C q, C = C_0 - g/(r - lambda), up to modes zeta^q with zeta^b* = e^(lambda T (zeta - 1)), |zeta| < 1, that die
away. So states are kept up to some N, h(N + k) is h(N) and that quadratic, and N grows until the cost stands still.
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.lib.stride_tricks import sliding_window_view

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.policies import RULES, DispatchTable, stopping_batch
from latfit.queueing.batch import batch_mean, solve_unlimited
from latfit.queueing.distribution import poisson, poisson_reach, positive, stable
from latfit.queueing.service import ServiceTimes, measured_times
from latfit.stats import FloatArray, IntArray

MOST_STATES = 2500
MOST_ROUNDS = 100
MOST_IDLE = 12
"""Rounds that do not lower the cost after which none will."""

FIRST_STATES = 60
GROWTH = 1.4
SETTLED = 1e-10
"""Change of the cost, by more states, below which it stands still."""

TIE = 1e-11


@dataclass(frozen=True)
class OptimalRule:
    """cost_ms: the least cost a request (the mean response where tail_weight is 0)."""

    table: DispatchTable
    cost_ms: float
    rounds: int

    @property
    def threshold(self) -> int:
        return self.table.threshold


@dataclass(frozen=True)
class RuleCost:
    """A rule's stopping batch, its exact mean response in ms, and by what share that exceeds the optimum's; both are
    infinite for a rule that always fills its batches, where only smaller ones carry the rate."""

    threshold: int
    mean_ms: float
    excess: float


@dataclass(frozen=True)
class _Problem:
    """States 0..N. Of each batch b = 1..B: `T` (B,), the distribution of its arrivals `p` (B, J), and (B, N + 1) the
    `costs` of starting it with q waiting and, where it leaves l of them, `beyond` and `beyond_gain`: what h is above
    h(N) after it is the first less the gain times the second. `holding` (N + 1,) is the cost rate of n in the
    system."""

    rate: float
    T: FloatArray
    p: FloatArray
    costs: FloatArray
    beyond: FloatArray
    beyond_gain: FloatArray
    holding: FloatArray


@dataclass(frozen=True)
class _Penalty:
    """What is paid beyond one a request in the system: `weight` for each above `allowed`."""

    weight: float = 0.0
    allowed: float = 0.0

    def of(self, n: FloatArray) -> FloatArray:
        return self.weight * np.maximum(n - self.allowed, 0)


def optimal_rule(rate: float, times: ServiceTimes, tail_weight: float = 0.0, tail_ms: float = 0.0) -> OptimalRule:
    """The optimal table for Poisson arrivals at `rate` per ms, below the highest b/T(b). Raises SlaOutOfReach."""
    rate = positive(rate, "rate")
    if tail_weight < 0 or tail_ms < 0:
        raise WrongUsage("tail weight and tail time cannot be negative", where="tail_weight", remedy="Give 0 or more.")
    T, penalty = _with_limit(rate, times), _Penalty(tail_weight, rate * tail_ms)
    best = _for_long_queues(T)
    stable(rate, best / float(T[best - 1]), "the batch queue")
    N = len(T) + math.ceil(penalty.allowed) + poisson_reach(rate * float(T[best - 1])) + FIRST_STATES
    batch, cost, before = np.minimum(np.arange(N + 1), best), math.inf, math.nan
    rounds = 0
    while not abs(cost - before) <= SETTLED * cost:
        batch = np.concatenate([batch, np.full(N + 1 - len(batch), best)])
        before = cost
        cost, batch, more = _iterated(_problem(rate, T, N, penalty), batch)
        rounds, N = rounds + more, math.ceil(GROWTH * N)
    batches = batch.tolist()
    while len(batches) > best + 1 and batches[-1] == best:
        batches.pop()
    return OptimalRule(DispatchTable((*batches, best), rate, len(T)), cost / rate, rounds)


def rule_costs(rate: float, times: ServiceTimes) -> dict[str, RuleCost]:
    """Greedy, the marginal-cost rules and the optimum, by the mean response at `rate`. Raises SlaOutOfReach."""
    best = optimal_rule(rate, times)
    T = _with_limit(rate, times)
    limited = measured_times(T)
    stops = {"greedy": 1} | {name: stopping_batch(name, T.tolist(), rate) for name in RULES}
    carried = rate < limited.rate_limit()
    means = {stop: batch_mean(rate, limited, stop) if carried else math.inf for stop in set(stops.values())}
    # By rounding a rule may come out a hair below the optimum that it is.
    costs = {"optimal": RuleCost(best.threshold, best.cost_ms, 0.0)}
    for name, stop in stops.items():
        costs[name] = RuleCost(stop, means[stop], max(0.0, means[stop] / best.cost_ms - 1))
    return costs


def _with_limit(rate: float, times: ServiceTimes) -> FloatArray:
    """T(1), ... of all batches; without a largest one, of those that greedy batches practically never exceed."""
    if times.max_batch is not None:
        return times.table(1, times.max_batch)
    stable(positive(rate, "rate"), times.rate_limit(), "the batch queue")
    chain = solve_unlimited(rate, times)
    assert chain is not None
    return times.table(1, int(chain.batches[-1]))


def _for_long_queues(T: FloatArray) -> int:
    """The smallest batch with the highest rate b/T(b)."""
    rates = np.arange(1, len(T) + 1) / T
    return int(np.flatnonzero(rates >= rates.max() * (1 - TIE))[0]) + 1


def _problem(rate: float, T: FloatArray, N: int, penalty: _Penalty) -> _Problem:
    J = poisson_reach(rate * float(T.max()))
    if max(N, J // 3) > MOST_STATES:
        raise SlaOutOfReach(
            f"{max(N, J):,} queue lengths are needed for the optimal rule, above {MOST_STATES:,}",
            where="rate",
            remedy="Lower the rate or the largest batch, or take a rule without a table: gpu-only or marginal-cost.",
        )
    counts, q = np.arange(float(J)), np.arange(N + 1.0)
    p, nobody = poisson(counts, rate * T), np.zeros(N + 1)
    costs = q[None, :] * T[:, None] + rate * T[:, None] ** 2 / 2
    if penalty.weight > 0:
        longer = scipy.special.gammainc(counts + 1, rate * T[:, None])  # P(Poisson(rate T_b) > k)
        costs += _ahead(longer, penalty.of(np.arange(float(N + J)))) / rate
    # Long queues: h = curve q^2 + (slope - gain/spare) q.
    best = _for_long_queues(T)
    span, full = float(T[best - 1]), 1 + penalty.weight
    spare, drift = best / span - rate, best - rate * span
    curve = full / (2 * spare)
    slope = (full * rate * span / 2 - penalty.weight * penalty.allowed) / spare
    slope += curve * (drift**2 + rate * span) / drift
    rise = counts[1:] * (curve * (2 * N + counts[1:]) + slope)
    beyond = _ahead(p, np.concatenate([nobody, rise]))
    beyond_gain = _ahead(p, np.concatenate([nobody, counts[1:] / spare]))
    inside = p[:, : N + 1].copy()
    inside[:, -1] += 1 - inside.sum(axis=1)
    return _Problem(rate, T, inside, costs, beyond, beyond_gain, q + penalty.of(q))


def _ahead(weights: FloatArray, values: FloatArray) -> FloatArray:
    """sum_j weights[b, j] values[l + j], (B, l) for every l that `values` allows."""
    return np.asarray(weights @ np.ascontiguousarray(sliding_window_view(values, weights.shape[1]).T))


def _iterated(problem: _Problem, batch: IntArray) -> tuple[float, IntArray, int]:
    """Cost per time, the best batch for each number waiting (0 to wait), and rounds of policy iteration from a rule."""
    least, idle = math.inf, 0
    for rounds in range(1, MOST_ROUNDS + 1):
        gain, h = _values(problem, batch)
        better = _improved(problem, batch, gain, h)
        idle = 0 if gain < least * (1 - TIE) else idle + 1
        least = min(least, gain)
        # Rules that only rounding tells apart may follow each other for ever.
        if np.array_equal(better, batch) or idle > MOST_IDLE:
            return gain, batch, rounds
        batch = better
    raise SlaOutOfReach("policy iteration has not settled", where="rate", remedy="Lower the rate.")


def _values(problem: _Problem, batch: IntArray) -> tuple[float, FloatArray]:
    """Cost per time of a rule, and h (N + 1,)."""
    N, J = len(batch) - 1, problem.p.shape[1]
    serves, waits = np.flatnonzero(batch), np.flatnonzero(batch == 0)
    b = batch[serves]
    wide = np.zeros((N + 1, N + J + 1))
    wide[serves[:, None], (serves - b)[:, None] + np.arange(J)] = problem.p[b - 1]
    wide[waits, waits + 1] = 1
    P = wide[:, : N + 1]
    P[:, N] += wide[:, N + 1 :].sum(axis=1)
    lengths, costs = np.full(N + 1, 1 / problem.rate), problem.holding / problem.rate
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
    """The rule that is best against h; what is as good as before stays."""
    N, J = len(h) - 1, problem.p.shape[1]
    after = _ahead(problem.p, np.concatenate([h, np.full(J - 1, h[-1])]))
    after += problem.beyond - gain * problem.beyond_gain
    value = np.full((len(problem.T) + 1, N + 1), np.inf)
    value[0, :-1] = (problem.holding[:-1] - gain) / problem.rate + h[1:]
    for b, T in enumerate(problem.T, start=1):
        value[b, b:] = problem.costs[b - 1, b:] - gain * T + after[b - 1, : N + 1 - b]
    states = np.arange(N + 1)
    now, best = value[batch, states], value.argmin(axis=0)
    scale = np.abs(problem.costs[0]) + np.abs(h)
    return np.where(value[best, states] < now - TIE * scale, best, batch)
