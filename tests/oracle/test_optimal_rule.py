"""The optimal rule: published optima, and a solver of its own with every action."""

import math

import numpy as np
import pytest

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.policies.policy import Limits, Policy, optimal
from latfit.queueing.dispatch_mdp import optimal_rule
from latfit.queueing.service import ServiceTimes, linear_times
from latfit.stats import FloatArray
from tests.oracle.queueing_reference import AllActions, states_for
from tests.unit.policies.asked import QueueView, decision

# rate, tau, alpha, largest: threshold, mean
PUBLISHED = [
    (0.1, 8, 0.05, 64, 1, 10.6704),
    (0.5, 8, 0.05, 64, 2, 12.2998),
    (2, 8, 0.05, 64, 8, 13.3861),
    (0.3, 4, 1, 32, 1, 9.51967),
    (0.7, 4, 1, 32, 2, 22.6439),
]


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_optima(row: tuple[float, ...]) -> None:
    rate, tau, alpha, largest, threshold, mean = row
    found = optimal_rule(rate, linear_times(tau, alpha, int(largest)))
    assert found.threshold == threshold
    # The last entry stands for all longer queues, so no two of them are the same.
    assert len(found.table.batches) == largest + 2 or len(set(found.table.batches[-2:])) == 2
    assert found.cost_ms == pytest.approx(mean, rel=6e-6)


def random_steps(rng: np.random.Generator) -> FloatArray:
    """Padded to random buckets, any, falling, or bent upwards."""
    largest, kind = int(rng.integers(2, 11)), int(rng.integers(5))
    b = np.arange(1.0, largest + 1)
    if kind <= 1:
        buckets = np.unique(np.append(rng.integers(1, largest + 1, int(rng.integers(1, 4))), largest))
        return np.asarray(rng.uniform(0, 3) + rng.uniform(0.1, 2) * buckets[np.searchsorted(buckets, b)])
    if kind == 2:
        return rng.uniform(1, 10, largest)
    if kind == 3:
        return np.asarray(rng.uniform(0.5, 2) + rng.uniform(5, 40) / b)
    return np.asarray(rng.uniform(0.1, 2) + rng.uniform(0.1, 1) * b ** rng.uniform(1, 2))


class TestEveryBatch:
    def test_one_at_a_time_where_engines_pad(self) -> None:
        """Buckets 1 and 8, 0.5 ms and 1 ms a slot: one at a time has M/D/1's 2.625 ms, taking all that wait 9.92."""
        T, rate = np.array([1.5] + 7 * [8.5]), 0.4
        rule = optimal_rule(rate, ServiceTimes(T))
        one_at_a_time = 1.5 + rate * 1.5**2 / (2 * (1 - rate * 1.5))
        assert one_at_a_time == pytest.approx(2.625)
        assert AllActions(rate, T, 80).of_threshold(1) == pytest.approx(9.92, rel=0.005)
        assert [rule.table.takes(q) for q in (0, 1, 2, 7, 8, 100)] == [0, 1, 1, 1, 8, 8]
        assert 0.99 * one_at_a_time < rule.cost_ms < one_at_a_time
        assert rule.cost_ms == pytest.approx(AllActions(rate, T, 80).optimum(), rel=1e-9)

    @pytest.mark.parametrize("seed", range(4))
    def test_random_systems(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 21])
        for _ in range(10):
            T = random_steps(rng)
            rate = float(rng.uniform(0.05, 0.95) * (np.arange(1, len(T) + 1) / T).max())
            solver = AllActions(rate, T, states_for(rate, T))
            rule, best = optimal_rule(rate, ServiceTimes(T)), solver.optimum()
            assert rule.cost_ms == pytest.approx(best, rel=1e-8)
            assert solver.of_table(rule.table) == pytest.approx(best, rel=1e-8)

    def test_the_rate_that_small_batches_carry(self) -> None:
        """T(4) is so slow that full batches carry 0.4/ms, pairs 1/ms."""
        T = np.array([1.5, 2.0, 8.0, 10.0])
        rule = optimal_rule(0.8, ServiceTimes(T))
        assert rule.cost_ms == pytest.approx(AllActions(0.8, T, 300).optimum(), rel=1e-9)
        assert {rule.table.takes(q) for q in range(2, 300)} == {2}
        with pytest.raises(SlaOutOfReach, match=r"1,000/s"):
            optimal_rule(1.01, ServiceTimes(T))

    def test_of_equal_rates_the_smallest_batch(self) -> None:
        table = optimal_rule(0.5, linear_times(0, 1.0, 8)).table
        assert {table.takes(q) for q in range(1, 300)} == {1}

    def test_simulated_policy(self) -> None:
        """The compiled policy asked at every moment: fewer than wait are served, and some wait alone."""
        T, rate = np.array([6.0, 6.5, 12.0, 12.5, 13.0, 30.0]), 0.28
        rule = optimal_rule(rate, ServiceTimes(T))
        assert rule.threshold == 2
        assert rule.table.takes(3) == 2
        policy = optimal(rule.table, Limits(6))
        means = [simulated(policy, T, rate, seed) for seed in range(12)]
        error = 4.5 * float(np.std(means, ddof=1)) / math.sqrt(12)
        assert np.mean(means) == pytest.approx(AllActions(rate, T, 200).optimum(), abs=error)


def simulated(policy: Policy, T: FloatArray, rate: float, seed: int, n: int = 6000) -> float:
    """Mean response of all but the first tenth."""
    arrive = np.cumsum(np.random.default_rng([seed, 5]).exponential(1 / rate, n)).tolist()
    times = np.vstack([np.append(0.0, T), np.full(len(T) + 1, np.inf)])
    now, first, last, response = 0.0, 0, 0, []
    while first < n:
        while last < n and arrive[last] <= now:
            last += 1
        decided = decision(policy, QueueView(now, last - first, arrive[first]), times)
        if decided.action == "wait":
            if last == n:
                break
            now = arrive[last]
            continue
        now += float(T[decided.take - 1])
        response += [now - arrive[i] for i in range(first, first + decided.take)]
        first += decided.take
    return float(np.mean(response[n // 10 :]))


class TestAlways:
    def test_thresholds_grow_with_the_launch_cost(self) -> None:
        found = [optimal_rule(0.5, linear_times(tau, 0.05, 64)).threshold for tau in (0.5, 2, 8, 32)]
        assert found == sorted(found)
        assert found[-1] > found[0]

    def test_refusals(self) -> None:
        with pytest.raises(SlaOutOfReach, match="unstable"):
            optimal_rule(20, linear_times(8, 0.05, 64))
        with pytest.raises(WrongUsage):
            optimal_rule(0, linear_times(8, 0.05, 64))
        with pytest.raises(SlaOutOfReach, match="queue lengths"):
            optimal_rule(4.444, ServiceTimes(np.append(1e5, linear_times(4, 0.1, 32).mean_ms[1:])))
