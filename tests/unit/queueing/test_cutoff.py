"""Waiting cut off at T_cut: published rows, a simulation, other ways to the same law, bounds that stay above."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.batch import batch_queue
from latfit.queueing.overflow import (
    cutoff_queue,
    exact_distribution,
    feasible_cutoffs,
    not_above_zero,
    overflow_bound,
)
from latfit.queueing.service import linear_times
from tests.unit.queueing.simulation import System
from tests.unit.queueing.textbook import amx_percentile, any_batch_percentile

GPU = linear_times(8, 0.05, 256)

# rate, mu, T_cut: p_o, exact p99, exact p99 of the AMX-served, textbook, theta, K, proved p99, any largest batch
ROWS = [
    (0.2, 0.5, 2, 0.530772, 12.9053, 14.6266, 13.6928, 0.373719, 3.36285, 15.5075, 22.8),
    (0.4, 0.5, 2, 0.659983, 20.8056, 22.6470, 21.5129, 0.225826, 1.82539, 23.2114, 48.0517),
    (0.4, 0.5, 5, 0.367878, 15.9662, 18.9104, 18.0514, 0.350002, 4.98443, 19.6231, 51.0517),
    (0.6, 0.5, 5, 0.382794, 19.3290, 22.9337, 22.0358, 0.269477, 3.04682, 22.6169, math.inf),
    (1, 0.5, 5, 0.393643, 40.3401, 49.1154, 48.2990, 0.106243, 1.45989, 43.1317, math.inf),
    (1, 0.5, 7, 0.161664, 16.3435, 22.0512, 20.6112, 0.336770, 5.48515, 20.0121, math.inf),
    (0.5, 2, 2, 0.689265, 10.0120, 4.95835, 4.78196, 1.63303, 30.2700, 10.0120, 22.8),
    (2, 2, 3, 0.638464, 11.3286, 10.1571, 9.36890, 0.722739, 4.86334, 11.4167, math.inf),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
class TestPublishedRows:
    def test_shares_and_percentiles(self, row: tuple[float, ...]) -> None:
        rate, mu, cutoff, *expected = row
        queue = cutoff_queue(rate, cutoff, GPU, mu)
        law, bound = exact_distribution(queue), overflow_bound(queue)
        assert bound is not None
        found = [
            queue.overflow_share,
            law.percentile(0.99),
            amx_percentile(law, 0.99),
            queue.textbook_percentile(0.99),
            bound.decay,
            bound.K,
            queue.proved_percentile(0.99),
            any_batch_percentile(rate, cutoff, GPU, mu, 0.99),
        ]
        assert found == pytest.approx(expected, rel=6e-6)

    def test_the_textbook_formula_is_below_the_amx_served(self, row: tuple[float, ...]) -> None:
        queue = cutoff_queue(row[0], row[2], GPU, row[1])
        assert queue.textbook_percentile(0.99) < amx_percentile(exact_distribution(queue), 0.99)

    def test_the_bound_decays_like_the_exact_law(self, row: tuple[float, ...]) -> None:
        queue = cutoff_queue(row[0], row[2], GPU, row[1])
        bound = overflow_bound(queue)
        assert bound is not None
        assert max(0, row[1] - row[0]) < bound.decay < row[1] - queue.overflow_rate
        y1, y2 = 16 / bound.decay, 18 / bound.decay
        tails = [exact_distribution(queue).tail(row[2] + y) for y in (y1, y2)]
        if tails[1] > 1e-11:  # below, the GPU's rounding is all that is left
            assert math.log(tails[0] / tails[1]) / (y2 - y1) == pytest.approx(bound.decay, rel=0.03)


class TestSimulation:
    @pytest.mark.parametrize(
        ("rate", "mu", "cutoff", "tau", "alpha"),
        [
            (0.4, 0.5, 2, 8, 0.05),
            (1, 0.5, 7, 8, 0.05),
            (2, 2, 3, 8, 0.05),
            (1, 0.5, 9, 8, 0.5),
            (0.4, 0.3, 13, 12, 0.5),
        ],
    )
    def test_shares_means_and_percentiles(
        self, rate: float, mu: float, cutoff: float, tau: float, alpha: float
    ) -> None:
        law = exact_distribution(cutoff_queue(rate, cutoff, linear_times(tau, alpha), mu))
        system = System(rate, lambda b: tau + alpha * b, 200, 1, cutoff, mu)
        assert system.simulate(lambda r, f: float(f.mean())).agrees(law.overflow_share)
        assert system.simulate(lambda r, f: float(r.mean())).agrees(law.mean_ms)
        assert system.simulate(lambda r, f: float(np.quantile(r, 0.99))).agrees(law.percentile(0.99))
        assert system.simulate(lambda r, f: float(np.quantile(r[f], 0.9))).agrees(amx_percentile(law, 0.9))

    def test_the_textbook_cutoff_misses_its_promise(self) -> None:
        """SLA 20 ms: at the largest T_cut that the textbook formula admits, p99 is above 20."""
        for rate, cutoff, missed in ((0.1, 10.6136, 22.57), (0.2, 10.2051, 22.24), (0.3, 9.33272, 21.43)):
            system = System(rate, lambda b: 12 + 0.05 * b, 256, 1, cutoff, 0.5)
            found = system.simulate(lambda r, f: float(np.quantile(r, 0.99)))
            assert found.value - 4.5 * found.error > 20
            assert found.value == pytest.approx(missed, rel=0.005)
            law = exact_distribution(cutoff_queue(rate, cutoff, linear_times(12, 0.05, 256), 0.5))
            assert found.agrees(law.percentile(0.99))


class TestSecondMethod:
    def test_overflow_share_with_dependent_batches(self) -> None:
        queue = cutoff_queue(1, 9, linear_times(8, 0.5), 0.5)
        assert queue.overflow_share == pytest.approx(0.280032, rel=2e-6)
        assert not queue.independent_batches
        assert overflow_bound(queue) is None

    def test_no_patience_is_erlangs_loss(self) -> None:
        queue = cutoff_queue(1, 1e-9, linear_times(8, 0.05), 2)
        assert queue.overflow_share == pytest.approx(8.05 / 9.05, rel=1e-8)

    def test_endless_patience_is_the_batch_queue(self) -> None:
        law, alone = (
            exact_distribution(cutoff_queue(2, 60, linear_times(4, 0.1), 0.5)),
            batch_queue(2, linear_times(4, 0.1)),
        )
        assert law.overflow_share < 1e-12
        assert law.mean_ms == pytest.approx(alone.mean_ms, rel=1e-9)
        assert law.percentile(0.99) == pytest.approx(alone.percentile(0.99), rel=1e-9)

    def test_everyone_is_served_somewhere(self) -> None:
        for rate, cutoff in ((0.4, 3), (1.5, 8.5), (0.7, 30)):
            queue = cutoff_queue(rate, cutoff, GPU, 2)
            assert queue.gpu_tail(0) + queue.overflow_share == pytest.approx(1, abs=1e-12)

    def test_the_mean_is_the_integral_of_the_tail(self) -> None:
        law = exact_distribution(cutoff_queue(0.6, 5, GPU, 0.5))
        t = np.linspace(0, law.percentile(1 - 1e-9), 8001)
        area = sum(law.tail(x) for x in (t[1:] + t[:-1]) / 2) * t[1]
        assert abs(area - law.mean_ms) <= t[1] / 2


class TestBoundsHold:
    @given(st.floats(0.05, 3), st.floats(0.1, 3), st.floats(0.05, 0.999), st.floats(1, 15), st.floats(0.001, 0.5))
    def test_proved_tail_is_above_the_exact_one(
        self, rate: float, mu: float, share: float, tau: float, alpha: float
    ) -> None:
        times = linear_times(tau, alpha)
        queue = cutoff_queue(rate, share * (tau + alpha), times, mu)
        assume(queue.overflow_rate < 0.97 * mu)
        law, proved = exact_distribution(queue), queue.proved_tail()
        for q in (0.5, 0.9, 0.99, 0.999, 0.99999):
            x = law.percentile(q)
            assert proved(x) >= law.tail(x) * (1 - 1e-7) - 1e-11
        bound = overflow_bound(queue)
        assert bound is not None
        assert bound.decay <= mu - queue.overflow_rate + 1e-9

    @settings(max_examples=25)
    @given(st.floats(0.05, 1), st.floats(1.05, 4), st.floats(0.5, 20))
    def test_the_bound_for_any_largest_batch(self, rate: float, ratio: float, cutoff: float) -> None:
        law = exact_distribution(cutoff_queue(rate, cutoff, GPU, ratio * rate))
        assert any_batch_percentile(rate, cutoff, GPU, ratio * rate, 0.99) >= law.percentile(0.99) * (1 - 1e-9)

    def test_a_binding_batch_is_bounded_too(self) -> None:
        times = replace(GPU, max_batch=3)
        with pytest.raises(SlaOutOfReach, match="bind"):
            cutoff_queue(0.8, 6, times, 1)
        found = System(0.8, lambda b: 8 + 0.05 * b, 3, 1, 6, 1).simulate(lambda r, f: float(np.quantile(r, 0.99)))
        assert found.value < any_batch_percentile(0.8, 6, times, 1, 0.99)

    def test_little_overflow_needs_no_amx_law(self) -> None:
        """With p_o <= 1 % the 99th percentile is at most T_cut + T(Bmax), however slow the AMX."""
        queue = cutoff_queue(0.4, 8.3, GPU, 0.02)
        assert 0 < queue.overflow_share <= 0.01
        assert queue.proved_percentile(0.99) <= 8.3 + 8 + 0.05 * 256


class TestSearch:
    # SLA 20 ms, AMX 0.5/ms, T = 12 + 0.05 b: the smallest (None: the start of the search) and largest T_cut
    SETS = (
        (0.1, "poisson", None, 10.6136, 2e-5),
        (0.2, "poisson", None, 10.2051, 2e-5),
        (0.3, "poisson", None, 9.33272, 2e-5),
        (0.1, "exact", None, 8.056, 1e-4),
        (0.2, "exact", None, 7.969, 1e-4),
        (0.3, "exact", None, 7.895, 1e-4),
        (0.4, "exact", 6.028, 7.792, 2e-4),
        (0.1, "rigorous", None, 7.93732, 2e-5),
        (0.2, "rigorous", None, 4.94466, 2e-5),
        (0.3, "rigorous", None, 1.03384, 2e-5),
        (0.1, "poisson with GPU", None, 8.06132, 2e-5),
        (0.2, "poisson with GPU", None, 7.97980, 2e-5),
        (0.3, "poisson with GPU", None, 7.91854, 2e-5),
        (0.4, "poisson with GPU", 4.90365, 7.84986, 2e-5),
    )

    @pytest.mark.parametrize(("rate", "method", "low", "high", "tolerance"), SETS)
    def test_published_sets(self, rate: float, method: str, low: float | None, high: float, tolerance: float) -> None:
        found = feasible_cutoffs(rate, linear_times(12, 0.05, 256), 0.5, 20, 0.99, method)  # type: ignore[arg-type]
        assert len(found.ranges) == 1
        assert found.method == method
        assert found.largest == pytest.approx(high, rel=tolerance)
        assert found.smallest == pytest.approx(0.02 if low is None else low, rel=tolerance)

    @pytest.mark.parametrize("method", ["poisson", "rigorous"])
    def test_none_where_a_formula_finds_none(self, method: str) -> None:
        found = feasible_cutoffs(0.4, linear_times(12, 0.05, 256), 0.5, 20, 0.99, method)  # type: ignore[arg-type]
        assert found.ranges == ()
        assert found.smallest is found.largest is None

    def test_the_ends_meet_the_sla_exactly(self) -> None:
        times = linear_times(12, 0.05, 256)
        found = feasible_cutoffs(0.4, times, 0.5, 20)
        assert found.smallest is not None
        assert found.largest is not None
        for end in (found.smallest, found.largest):
            assert exact_distribution(cutoff_queue(0.4, end, times, 0.5)).percentile(0.99) == pytest.approx(
                20, rel=1e-4
            )
        assert 7 in found
        assert 5 not in found

    def test_every_crossing_of_two_curves_is_found(self) -> None:
        """Where the AMX beats the GPU: up to 4.10 on straight lines, from 10.1 to 33.3 where its curve saturates."""
        grid = np.arange(1.0, 400)
        lines = not_above_zero(lambda B: 2 * B - (8 + 0.05 * B), grid)
        assert lines[0] == pytest.approx((1, 4.10256), rel=2e-6)
        curve = not_above_zero(lambda B: 0.5 + 8 / (1 - math.exp(-0.25 * B)) + 0.06 * B - (9.5 + 0.03 * B), grid)
        assert len(lines) == len(curve) == 1
        assert curve[0] == pytest.approx((10.0950, 33.2682), rel=3e-6)


class TestRefusals:
    def test_an_overloaded_amx(self) -> None:
        with pytest.raises(SlaOutOfReach, match="larger T_cut"):
            exact_distribution(cutoff_queue(2, 1, GPU, 0.5))
        assert cutoff_queue(2, 1, GPU, 0.5).textbook_percentile(0.99) == math.inf
        assert overflow_bound(cutoff_queue(2, 1, GPU, 0.5)) is None
        assert cutoff_queue(2, 1, GPU, 0.5).proved_percentile(0.99) == math.inf

    @pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (math.nan, 1, 1), (1, math.inf, 1)])
    def test_arguments(self, wrong: tuple[float, float, float]) -> None:
        with pytest.raises(WrongUsage):
            cutoff_queue(wrong[0], wrong[1], GPU, wrong[2])

    def test_search_arguments(self) -> None:
        with pytest.raises(WrongUsage, match="percentile"):
            feasible_cutoffs(0.1, GPU, 0.5, 20, 99)
        with pytest.raises(WrongUsage, match="SLA"):
            feasible_cutoffs(0.1, GPU, 0.5, math.nan)
