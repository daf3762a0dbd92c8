"""The optimal rule: published optima, a solver of its own with every action, and what the simple rules lose."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.model.saturation import Saturation
from latfit.policies.policy import DispatchTable, Limits, Policy, optimal
from latfit.queueing.batch import batch_mean
from latfit.queueing.dispatch_mdp import optimal_rule, rule_costs
from latfit.queueing.service import ServiceTimes, linear_times, measured_times
from latfit.stats import FloatArray
from tests.unit.policies.asked import QueueView, decision
from tests.unit.queueing.simulation import System, mean
from tests.unit.queueing.test_falling_times import poisson_pmf
from tests.unit.queueing.textbook import best_threshold

# rate, tau, alpha, Bmax: threshold, mean, greedy %, (amortised, %), (total delay, %), all among rules that take all
ROWS = [
    (0.1, 8, 0.05, 64, 1, 10.6704, 0, (1, 0), (1, 0)),
    (0.5, 8, 0.05, 64, 2, 12.2998, 0.339, (2, 0), (4, 1.514)),
    (2, 8, 0.05, 64, 8, 13.3861, 0.002, (4, 0.002), (16, 1.153)),
    (0.3, 4, 1, 32, 1, 9.51967, 0, (1, 0), (2, 5.301)),
    (0.7, 4, 1, 32, 2, 22.6439, 0.008, (2, 0), (3, 0.043)),
    (0.2, 1, 4, 32, 1, 22.6647, 0, (1, 0), (1, 0)),
]


class AllActions:
    """States 0..N, every batch that fits, and waiting; beyond N everything is N. Policies are solved as they stand."""

    def __init__(self, rate: float, T: FloatArray, N: int, weight: float = 0.0, allowed: float = 0.0) -> None:
        self.rate, self.T, self.N = rate, T, N
        n = np.arange(6 * N + 200.0)
        held = n + weight * np.maximum(n - allowed, 0)
        self.P = np.zeros((len(T) + 1, N + 1, N + 1))
        self.cost = np.full((len(T) + 1, N + 1), np.inf)
        self.time = np.append(1 / rate, T)
        self.cost[0, :N] = held[:N] / rate
        self.P[0, np.arange(N), np.arange(1, N + 1)] = 1
        for b, t in enumerate(T.tolist(), start=1):
            law = poisson_pmf(5 * N, rate * t)
            longer = 1 - np.cumsum(law)
            for q in range(b, N + 1):
                self.P[b, q, q - b :] = law[: N + 1 - q + b]
                self.P[b, q, N] += 1 - self.P[b, q].sum()
                self.cost[b, q] = longer @ held[q : q + len(law)] / rate

    def values(self, batch: np.ndarray) -> tuple[float, FloatArray]:
        """Cost a request of a policy, and h with h(0) = 0."""
        states = np.arange(self.N + 1)
        A = np.eye(self.N + 1) - self.P[batch, states]
        A[:, 0] = self.time[batch]
        h = np.linalg.solve(A, self.cost[batch, states])
        gain, h[0] = float(h[0]), 0
        return gain / self.rate, h

    def optimum(self) -> float:
        batch = np.minimum(np.arange(self.N + 1), 1 + int(np.argmax(np.arange(1, len(self.T) + 1) / self.T)))
        for _ in range(60):
            cost, h = self.values(batch)
            value = self.cost - cost * self.rate * self.time[:, None] + self.P @ h
            now = value[batch, np.arange(self.N + 1)]
            better = np.where(value.min(axis=0) < now - 1e-10 * (1 + abs(now)), value.argmin(axis=0), batch)
            if np.array_equal(better, batch):
                return cost
            batch = better
        raise AssertionError("no optimum")

    def of_table(self, table: DispatchTable) -> float:
        batch = np.array([table.takes(q) for q in range(self.N + 1)])
        return self.values(batch)[0]


def states_for(rate: float, T: FloatArray) -> int:
    load = rate * float((T / np.arange(1, len(T) + 1)).min())
    most = rate * float(T.max())
    return int(len(T) + 15 / (1 - load) + most + 8 * math.sqrt(most) + 20)


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
        rule = optimal_rule(rate, measured_times(T))
        one_at_a_time = 1.5 + rate * 1.5**2 / (2 * (1 - rate * 1.5))
        assert one_at_a_time == pytest.approx(2.625)
        assert batch_mean(rate, measured_times(T)) == pytest.approx(9.92, rel=0.005)
        assert [rule.table.takes(q) for q in (0, 1, 2, 7, 8, 100)] == [0, 1, 1, 1, 8, 8]
        assert 0.99 * one_at_a_time < rule.cost_ms < one_at_a_time
        assert rule.cost_ms == pytest.approx(AllActions(rate, T, 80).optimum(), rel=1e-9)

    @pytest.mark.parametrize("seed", range(4))
    def test_random_systems(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 21])
        for _ in range(10):
            T = random_steps(rng)
            rate = float(rng.uniform(0.05, 0.95) * (np.arange(1, len(T) + 1) / T).max())
            weight, tail_ms = (0.0, 0.0) if rng.random() < 0.6 else rng.uniform(0.1, 20, 2)
            solver = AllActions(rate, T, states_for(rate, T), weight, rate * tail_ms)
            rule, best = optimal_rule(rate, measured_times(T), weight, tail_ms), solver.optimum()
            assert rule.cost_ms == pytest.approx(best, rel=1e-8)
            assert solver.of_table(rule.table) == pytest.approx(best, rel=1e-8)

    def test_the_rate_that_small_batches_carry(self) -> None:
        """T(4) is so slow that full batches carry 0.4/ms, pairs 1/ms."""
        T = np.array([1.5, 2.0, 8.0, 10.0])
        costs = rule_costs(0.8, measured_times(T))
        assert costs["optimal"].mean_ms == pytest.approx(AllActions(0.8, T, 300).optimum(), rel=1e-9)
        assert costs["greedy"].mean_ms == costs["amortised"].excess == math.inf
        table = optimal_rule(0.8, measured_times(T)).table
        assert {table.takes(q) for q in range(2, 300)} == {2}
        with pytest.raises(SlaOutOfReach, match=r"1,000/s"):
            optimal_rule(1.01, measured_times(T))

    def test_of_equal_rates_the_smallest_batch(self) -> None:
        table = optimal_rule(0.5, linear_times(0, 1.0, 8)).table
        assert {table.takes(q) for q in range(1, 300)} == {1}

    def test_near_the_limit(self) -> None:
        """At 99.99 %, and at 90 % with steps of one that bring 6,400 requests."""
        times = linear_times(4, 0.1, 32)
        assert optimal_rule(4.444, times).cost_ms == pytest.approx(best_threshold(4.444, times).mean_ms, rel=1e-7)
        slow = measured_times(np.append(1600.0, times.table(2, 32)))
        assert optimal_rule(4.0, slow).cost_ms == pytest.approx(optimal_rule(4.0, times).cost_ms, rel=1e-6)

    def test_simulated_policy(self) -> None:
        """The compiled policy asked at every moment: fewer than wait are served, and some wait alone."""
        T, rate = np.array([6.0, 6.5, 12.0, 12.5, 13.0, 30.0]), 0.28
        rule = optimal_rule(rate, measured_times(T))
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


class TestPublished:
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
    def test_straight_lines(self, row: tuple) -> None:  # type: ignore[type-arg]
        rate, tau, alpha, largest, threshold, best, greedy, amortised, total = row
        times = linear_times(tau, alpha, largest)
        costs, limit = rule_costs(rate, times), best_threshold(rate, times)
        assert limit.threshold == costs["optimal"].threshold == threshold
        assert limit.mean_ms == pytest.approx(best, rel=6e-6)
        excess = {name: 100 * (cost.mean_ms / limit.mean_ms - 1) for name, cost in costs.items()}
        assert excess["greedy"] == pytest.approx(greedy, abs=6e-4)
        assert costs["literal"].threshold == 1
        for name, (stop, share) in (("amortised", amortised), ("total delay", total)):
            assert costs[name].threshold == stop
            assert excess[name] == pytest.approx(share, abs=6e-4)
        # A launch that costs as little as 4 ms beside 1 ms each, or 1 beside 4, is not worth waiting for all.
        assert (excess["optimal"] < -1) == (alpha == 4)
        assert abs(excess["optimal"]) < 1e-4 or alpha == 4
        optimum = AllActions(rate, times.table(1, largest), 150 if largest == 64 else 220).optimum()
        assert costs["optimal"].mean_ms == pytest.approx(optimum, rel=1e-6)

    # The decode diagonal: S = B, T(1) = 4.89, T(4) = 4.51, T(64) = 6.52 ms
    @pytest.mark.parametrize(
        ("rate", "threshold", "best", "greedy", "amortised", "total"),
        [(0.5, 2, 6.72122, 1.62, 0, 4.29), (1, 3, 6.78190, 0.73, 0.31, 3.03), (3, 7, 7.21111, 0.009, 0.009, 3.40)],
    )
    def test_times_that_fall_at_small_batches(
        self, rate: float, threshold: int, best: float, greedy: float, amortised: float, total: float
    ) -> None:
        theta = np.array([4.0, 0.0, 1.0, 60.0, 0.5, 0.05, 0.02, 0.002])
        times = ServiceTimes(lambda b: Saturation().latency_ms(theta, {"B": b, "S": b}), 64)
        assert [times(b) for b in (1, 4, 64)] == pytest.approx([4.89052, 4.51334, 6.51999], rel=2e-6)
        costs = rule_costs(rate, times)
        assert costs["optimal"].threshold == threshold
        assert costs["optimal"].mean_ms == pytest.approx(best, rel=2e-6)
        found = [100 * costs[name].excess for name in ("greedy", "amortised", "total delay")]
        assert found == pytest.approx([greedy, amortised, total], abs=6e-3)

    def test_sweep_of_22_cases(self) -> None:
        worst = dict.fromkeys(("greedy", "amortised", "total delay"), 0.0)
        cases = 0
        for alpha in (0.05, 0.5, 1, 4):
            for load in (0.25, 0.5, 1, 2, 4, 8, 16, 24):
                times = linear_times(8, alpha, 48)
                if load / 8 > 0.9 * times.rate_limit():
                    continue
                cases += 1
                costs, limit = rule_costs(load / 8, times), best_threshold(load / 8, times)
                assert costs["optimal"].mean_ms <= limit.mean_ms * (1 + 1e-9)
                excess = {name: 100 * (cost.mean_ms / limit.mean_ms - 1) for name, cost in costs.items()}
                worst = {name: max(before, excess[name]) for name, before in worst.items()}
        assert cases == 22
        assert list(worst.values()) == pytest.approx([0.339, 0.0326, 1.713], abs=6e-4)


class TestSecondMethod:
    @settings(max_examples=20)
    @given(st.floats(0.5, 10), st.floats(0.002, 0.04), st.integers(2, 24), st.floats(0.05, 0.9))
    def test_the_best_threshold_by_its_own_chain(self, tau: float, share: float, largest: int, load: float) -> None:
        """Where a launch costs more than what fits into a batch, all that wait are taken."""
        times = linear_times(tau, share * tau, largest)
        rate = load * times.rate_limit()
        rule, best = optimal_rule(rate, times), best_threshold(rate, times)
        table = rule.table
        assert all(table.takes(q) == min(q, largest) for q in range(table.threshold, len(table.batches) + largest))
        assert rule.cost_ms == pytest.approx(best.mean_ms, rel=1e-8)
        assert batch_mean(rate, times, rule.threshold) == pytest.approx(best.mean_ms, rel=1e-8)

    def test_simulated_amortised_rule(self) -> None:
        costs = rule_costs(0.5, linear_times(8, 0.05, 64))
        system = System(0.5, lambda b: 8 + 0.05 * b, 64, costs["amortised"].threshold)
        assert system.simulate(mean).agrees(costs["amortised"].mean_ms)

    def test_without_a_largest_batch(self) -> None:
        assert optimal_rule(0.5, linear_times(8, 0.05)).cost_ms == pytest.approx(12.2998, rel=6e-6)


class TestTailCost:
    def test_weight_zero_is_the_mean(self) -> None:
        times = linear_times(8, 0.05, 64)
        assert optimal_rule(0.5, times, 0.0, 20).cost_ms == optimal_rule(0.5, times).cost_ms

    def test_a_linear_penalty_only_scales(self) -> None:
        """With tail_ms 0 the cost is (1 + w) n: the same rule, (1 + w) times the cost."""
        times = linear_times(8, 0.05, 64)
        one, other = optimal_rule(0.5, times), optimal_rule(0.5, times, 3.0)
        assert other.cost_ms == pytest.approx(4 * one.cost_ms, rel=1e-9)
        assert other.table == one.table

    def test_more_weight_costs_more(self) -> None:
        times = linear_times(8, 0.05, 64)
        costs = [optimal_rule(0.5, times, weight, 15).cost_ms for weight in (0, 1, 5)]
        assert costs == sorted(costs)


class TestAlways:
    def test_thresholds_grow_with_the_launch_cost(self) -> None:
        found = [optimal_rule(0.5, linear_times(tau, 0.05, 64)).threshold for tau in (0.5, 1, 2, 4, 8, 16, 32)]
        assert found == sorted(found)
        assert found[-1] > found[0]

    def test_refusals(self) -> None:
        with pytest.raises(SlaOutOfReach, match="unstable"):
            optimal_rule(20, linear_times(8, 0.05, 64))
        with pytest.raises(WrongUsage):
            optimal_rule(0.5, linear_times(8, 0.05, 64), -1)
        with pytest.raises(WrongUsage):
            rule_costs(0, linear_times(8, 0.05, 64))
        with pytest.raises(SlaOutOfReach, match="queue lengths"):
            optimal_rule(4.444, measured_times(np.append(1e5, linear_times(4, 0.1).table(2, 32))))
