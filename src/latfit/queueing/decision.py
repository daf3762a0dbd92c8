"""The best rule for an idle batch server: a semi-Markov decision process on the number waiting, solved exactly.

State q at an idle server. Waiting takes 1/lambda and leads to q + 1; dispatching takes b = min(q, Bmax), lasts T(b) and
leads to q - b + Poisson(lambda T(b)). While n are in the system cost runs at rate n, so cost per time is lambda times
the mean response (Little). With `tail_weight` w and `tail_ms` x it runs at n + w (n - lambda x)^+: what exceeds
lambda x in the system is older than x on average, so this stands in for a tail cost (no percentile is
minimised).
Within a service E int_0^T c(q + Poisson(lambda t)) dt = sum_k c(q + k) P(Poisson(lambda T) > k)/lambda.

Policy iteration: solve h(q) + g t(q) = c(q) + sum P h with h(0) = 0, improve, until nothing changes. For the mean a
control limit (dispatch from a threshold on) was optimal in every case computed (Deb and Serfozo 1973 prove it under
conditions); the table says if not. The queue is cut where z^-q has fallen by e^-30.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, special

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.batch_limited import queue_ratio
from latfit.queueing.batch_service import batch_mean
from latfit.queueing.batch_unlimited import solve_unlimited
from latfit.queueing.law import positive, stable
from latfit.queueing.service import ServiceTimes
from latfit.queueing.waits import poisson, poisson_reach
from latfit.scheduling.marginal_cost import RULES, stopping_batch
from latfit.scheduling.optimal import DispatchTable
from latfit.stats import FloatArray

BoolArray = NDArray[np.bool_]

MOST_STATES = 2500
MOST_ROUNDS = 60
LOG_NEGLIGIBLE = 30.0


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
    """A rule's stopping batch, its exact mean response in ms, and by what share that exceeds the optimum's."""

    threshold: int
    mean_ms: float
    excess: float


@dataclass(frozen=True)
class _Problem:
    """States 0..N: dispatch rows (N+1, N+1), their times and costs, and the cost rate of n in system."""

    rate: float
    rows: FloatArray
    times: FloatArray
    costs: FloatArray
    holding: FloatArray


def optimal_rule(rate: float, times: ServiceTimes, tail_weight: float = 0.0, tail_ms: float = 0.0) -> OptimalRule:
    """The optimal table for Poisson arrivals at `rate` per ms, below `times.rate_limit()`."""
    rate = positive(rate, "rate")
    if tail_weight < 0 or tail_ms < 0:
        raise WrongUsage("tail weight and tail time cannot be negative", where="tail_weight", remedy="Give 0 or more.")
    stable(rate, times.rate_limit(), "the batch queue")
    limited = _with_limit(rate, times)
    assert limited.max_batch is not None
    problem = _problem(rate, limited, tail_weight, tail_ms)
    dispatch: BoolArray = np.arange(len(problem.times)) > 0
    for rounds in range(1, MOST_ROUNDS + 1):
        gain, better = _improve(problem, dispatch)
        if np.array_equal(better, dispatch):
            table = DispatchTable(tuple(bool(d) for d in dispatch), rate, limited.max_batch)
            return OptimalRule(table, gain / rate, rounds)
        dispatch = better
    raise SlaOutOfReach("policy iteration has not settled", where="rate", remedy="Lower the rate.")


def rule_costs(rate: float, times: ServiceTimes) -> dict[str, RuleCost]:
    """Greedy, the marginal-cost rules and the optimum, by the mean response at `rate`; times with a largest batch."""
    limited = _with_limit(positive(rate, "rate"), times)
    assert limited.max_batch is not None
    best = optimal_rule(rate, limited)
    T = limited.table(1, limited.max_batch).tolist()
    stops = {"optimal": best.threshold, "greedy": 1} | {name: stopping_batch(name, T, rate) for name in RULES}
    means = {stop: batch_mean(rate, limited, stop) for stop in set(stops.values())}
    # A table that is no control limit is better than any threshold.
    floor = min(best.cost_ms, *means.values())
    means_of = {name: best.cost_ms if name == "optimal" else means[stop] for name, stop in stops.items()}
    return {name: RuleCost(stops[name], mean, max(0.0, mean / floor - 1)) for name, mean in means_of.items()}


def best_threshold(rate: float, times: ServiceTimes, most: int = 4096) -> RuleCost:
    """The control limit with the least mean, by the exact chain of each; a second way to the optimum, at any load.

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


def _with_limit(rate: float, times: ServiceTimes) -> ServiceTimes:
    """Without a largest batch, one that greedy batches practically never reach."""
    if times.max_batch is not None:
        return times
    stable(rate, times.rate_limit(), "the batch queue")
    chain = solve_unlimited(rate, times)
    assert chain is not None
    return replace(times, max_batch=int(chain.batches[-1]))


def _problem(rate: float, times: ServiceTimes, tail_weight: float, tail_ms: float) -> _Problem:
    assert times.max_batch is not None
    B = times.max_batch
    T = times.table(1, B)
    a = rate * float(T[-1])
    N = B + max(math.ceil(LOG_NEGLIGIBLE / math.log(queue_ratio(a, B))), poisson_reach(rate * float(T.max())))
    if N > MOST_STATES:
        raise SlaOutOfReach(
            f"{N} queue lengths are needed for the optimal rule, above {MOST_STATES}",
            where="rate",
            remedy="Lower the rate or the largest batch; near the limit every rule is as good as greedy.",
        )
    counts = np.arange(N + 1.0)
    laws = poisson(counts, rate * T)
    longer = special.gammainc(counts + 1, rate * T[:, None])  # P(Poisson(rate T_b) > k)
    holding = np.arange(2 * N + 2.0)
    holding = holding + tail_weight * np.maximum(holding - rate * tail_ms, 0)
    rows, costs, lengths = np.zeros((N + 1, N + 1)), np.zeros(N + 1), np.ones(N + 1)
    for q in range(1, N + 1):
        b = min(q, B)
        rows[q, q - b :] = laws[b - 1, : N + 1 - q + b]
        rows[q, -1] += max(0.0, 1 - float(rows[q].sum()))
        costs[q] = float(longer[b - 1] @ holding[q : q + N + 1]) / rate
        lengths[q] = T[b - 1]
    return _Problem(rate, rows, lengths, costs, holding[: N + 1])


def _improve(problem: _Problem, dispatch: BoolArray) -> tuple[float, BoolArray]:
    """Cost per time of a policy, and the policy that is best against its values."""
    N = len(problem.times) - 1
    P = np.where(dispatch[:, None], problem.rows, 0)
    waits = np.flatnonzero(~dispatch)
    P[waits, np.minimum(waits + 1, N)] = 1
    cost = np.where(dispatch, problem.costs, problem.holding / problem.rate)
    time = np.where(dispatch, problem.times, 1 / problem.rate)
    A = np.eye(N + 1) - P
    A[:, 0] = time * problem.rate  # h(0) = 0, so its column carries the gain, a request
    solution = linalg.solve(A, cost, check_finite=False)
    gain, h = float(solution[0]) * problem.rate, np.concatenate([[0.0], solution[1:]])
    waiting = (problem.holding - gain) / problem.rate + np.concatenate([h[1:], [np.inf]])
    sending = problem.costs - gain * problem.times + problem.rows @ h
    better: BoolArray = sending <= waiting + 1e-10 * np.maximum(np.abs(waiting), 1)
    better[0] = False
    return gain, better
