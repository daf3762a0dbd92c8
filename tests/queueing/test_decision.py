"""The optimal rule: published optima, a second solver, and what the simple rules lose against it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.model.saturation import Saturation
from latfit.queueing.batch_service import batch_mean
from latfit.queueing.decision import best_threshold, optimal_rule, rule_costs
from latfit.queueing.service import ServiceTimes, linear_times
from latfit.queueing.waits import poisson
from latfit.stats import FloatArray
from tests.queueing.simulation import System, mean

# rate, tau, alpha, Bmax: threshold, mean, greedy %, (amortised, %), (total delay, %)
ROWS = [
    (0.1, 8, 0.05, 64, 1, 10.6704, 0, (1, 0), (1, 0)),
    (0.5, 8, 0.05, 64, 2, 12.2998, 0.339, (2, 0), (4, 1.514)),
    (2, 8, 0.05, 64, 8, 13.3861, 0.002, (4, 0.002), (16, 1.153)),
    (0.3, 4, 1, 32, 1, 9.51967, 0, (1, 0), (2, 5.301)),
    (0.7, 4, 1, 32, 2, 22.6439, 0.008, (2, 0), (3, 0.043)),
    (0.2, 1, 4, 32, 1, 22.6647, 0, (1, 0), (1, 0)),
]


class TestPublished:
    @pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
    def test_straight_lines(self, row: tuple) -> None:  # type: ignore[type-arg]
        rate, tau, alpha, largest, threshold, best, greedy, amortised, total = row
        costs = rule_costs(rate, linear_times(tau, alpha, largest))
        assert costs["optimal"].threshold == threshold
        assert costs["optimal"].mean_ms == pytest.approx(best, rel=6e-6)
        assert 100 * costs["greedy"].excess == pytest.approx(greedy, abs=6e-4)
        assert costs["literal"].threshold == 1
        for name, (stop, excess) in (("amortised", amortised), ("total delay", total)):
            assert costs[name].threshold == stop
            assert 100 * costs[name].excess == pytest.approx(excess, abs=6e-4)

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
                costs = rule_costs(load / 8, times)
                assert optimal_rule(load / 8, times).table.is_control_limit
                worst = {name: max(excess, 100 * costs[name].excess) for name, excess in worst.items()}
        assert cases == 22
        assert list(worst.values()) == pytest.approx([0.339, 0.0326, 1.713], abs=6e-4)


def value_iteration(rate: float, T: FloatArray, N: int) -> float:
    """Relative value iteration after Schweitzer's transform; cost per time over the rate."""
    q = np.arange(N + 1.0)
    b = np.minimum(np.arange(N + 1), len(T))
    length = T[np.maximum(b, 1) - 1]
    rows = np.zeros((N + 1, N + 1))
    for i in range(1, N + 1):
        rows[i, i - b[i] :] = poisson(np.arange(N + 1.0 - i + b[i]), np.array([rate * length[i]]))[0]
        rows[i, -1] += 1 - rows[i].sum()
    cost, eta, h = q * length + rate * length**2 / 2, 0.9 * min(1 / rate, T.min()), np.zeros(N + 1)
    for _ in range(200_000):
        wait = q + eta * rate * (np.append(h[1:], h[-1]) - h)
        send = cost / length + eta / length * (rows @ h - h)
        wait[-1], send[0] = np.inf, np.inf
        change = np.minimum(wait, send)
        h = h + change - change[0] - h[0]
        if np.ptp(change) < 1e-9:
            break
    return float(change.max() + change.min()) / 2 / rate


class TestSecondMethod:
    def test_value_iteration(self) -> None:
        T = 8 + 0.05 * np.arange(1.0, 65)
        assert value_iteration(0.5, T, 120) == pytest.approx(optimal_rule(0.5, linear_times(8, 0.05, 64)).cost_ms, 1e-7)

    @settings(max_examples=20, deadline=None)
    @given(st.floats(0.5, 10), st.floats(0.05, 2), st.integers(2, 24), st.floats(0.05, 0.9))
    def test_the_best_threshold_by_its_own_chain(self, tau: float, alpha: float, largest: int, load: float) -> None:
        times = linear_times(tau, alpha, largest)
        rate = load * times.rate_limit()
        rule, best = optimal_rule(rate, times), best_threshold(rate, times)
        assert rule.table.is_control_limit
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
            optimal_rule(4.444, linear_times(4, 0.1, 32))
