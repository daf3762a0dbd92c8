"""The batch queue: published values, limits that are known queues, a simulation, and what must hold at any load."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.batch import (
    BatchDistribution,
    batch_mean,
    batch_queue,
    response_tail,
    solve_limited,
)
from latfit.queueing.service import ServiceTimes, linear_times, measured_times
from tests.unit.queueing.simulation import System, mean, p99
from tests.unit.queueing.textbook import MD1, inoue_bound, tail_decay


def integral(law: BatchDistribution) -> tuple[float, float]:
    """The mean by the tail, a second derivation of what the law gives by costs a cycle; and how far off it can be: the
    midpoint rule on a function that falls from 1 to 0 is within half a step."""
    t = np.linspace(0, law.percentile(1 - 1e-7), 301)
    step = float(t[1])
    return float(sum(law.tail(x) for x in (t[1:] + t[:-1]) / 2) * step), step / 2 + 1e-5 * float(t[-1])


class TestPublished:
    @pytest.mark.parametrize(
        ("rate", "mean_ms", "p50", "p99_ms", "batch", "phi"),
        [
            (0.1, 4.90124, 4.10000, 8.14107, 1.07390, 4.95740),
            (0.5, 6.29874, 6.30152, 8.63003, 2.23294, 6.41855),
            (2, 7.61457, 7.59999, 10.5834, 10.0001, 7.61458),
            (5, 12.1667, 12.1000, 17.6356, 40.0000, 12.1667),
            (9, 60.7632, 60.1111, 91.7083, 360.000, 60.7632),
        ],
    )
    def test_greedy_without_limit(
        self, rate: float, mean_ms: float, p50: float, p99_ms: float, batch: float, phi: float
    ) -> None:
        law = batch_queue(rate, linear_times(4, 0.1))
        found = [law.mean_ms, law.percentile(0.5), law.percentile(0.99), law.mean_batch]
        assert found == pytest.approx([mean_ms, p50, p99_ms, batch], rel=6e-6)
        assert inoue_bound(rate, 4, 0.1) == pytest.approx(phi, rel=6e-6)

    @pytest.mark.parametrize(
        ("rate", "largest", "limit", "mean_ms", "p50", "p99_ms"),
        [(2, 16, 2.85714, 7.64882, 7.63136, 10.7977), (4, 32, 4.44444, 10.4265, 10.3582, 16.0343)],
    )
    def test_greedy_with_a_largest_batch(
        self, rate: float, largest: int, limit: float, mean_ms: float, p50: float, p99_ms: float
    ) -> None:
        law = batch_queue(rate, linear_times(4, 0.1, largest))
        found = [law.rate_limit, law.mean_ms, law.percentile(0.5), law.percentile(0.99)]
        assert found == pytest.approx([limit, mean_ms, p50, p99_ms], rel=6e-6)

    def test_tail_of_the_limited_queue(self) -> None:
        times = linear_times(4, 0.1, 32)
        assert tail_decay(4, times) == pytest.approx(0.920651, rel=1e-5)
        chain = solve_limited(4, times)
        assert chain.z == pytest.approx(1.23016, rel=1e-5)
        assert (chain.pi[100] / chain.pi[120]) ** (1 / 20) == pytest.approx(chain.z, rel=1e-6)
        law = batch_queue(4, times)
        assert math.log(law.tail(28) / law.tail(32)) / 4 == pytest.approx(0.920651, rel=2e-3)

    def test_batching_moves_the_limit_and_keeps_the_tail(self) -> None:
        times = linear_times(8, 0.05, 256)
        assert linear_times(8, 0.05, 1).rate_limit() == pytest.approx(0.124224, rel=1e-5)
        assert times.rate_limit() == pytest.approx(12.3077, rel=1e-5)
        law = batch_queue(4, times)
        assert [law.mean_ms, law.percentile(0.99), law.mean_batch] == pytest.approx([15.0573, 20.3030, 40], rel=5e-6)

    def test_a_fixed_batch_is_slow_when_the_load_is_low(self) -> None:
        law = batch_queue(0.1, linear_times(8, 0.05, 32), 32)
        assert law.mean_ms == pytest.approx(164.600, rel=1e-6)
        assert law.percentile(0.99) == pytest.approx(392, rel=3e-3)

    def test_replicas_with_a_largest_batch(self) -> None:
        """p99 at 20/ms over n replicas; the limit of 64 matters only at n = 4."""
        found = [batch_queue(20 / n, linear_times(4, 0.1, 64)).percentile(0.99) for n in (4, 5, 6, 7, 8)]
        assert found == pytest.approx([17.6356, 14.5228, 12.9579, 12.0123, 11.3802], rel=2e-4)


class TestKnownQueues:
    @pytest.mark.parametrize("rate", [0.01, 0.1, 0.2, 0.2435])
    def test_batches_of_one_are_md1(self, rate: float) -> None:
        law, other = batch_queue(rate, linear_times(4, 0.1, 1)), MD1(rate, 4.1)
        assert law.mean_ms == pytest.approx(other.mean_ms, rel=1e-9)
        for t in (4.05, 5, 9, 20, 60):
            assert law.tail(t) == pytest.approx(other.tail(t), abs=1e-10)

    def test_a_limit_never_met_changes_nothing(self) -> None:
        """The limited and the unlimited chain are different code; between them lies only Bmax."""
        for threshold in (1, 5):
            free = batch_queue(2, linear_times(4, 0.1), threshold)
            chain = solve_limited(2, linear_times(4, 0.1, 48), threshold)
            assert chain.mean_ms == pytest.approx(free.mean_ms, rel=1e-9)
            tail = response_tail(chain)
            for t in (3, 5, 8, 9.5, 11):
                assert tail(t) == pytest.approx(free.tail(t), abs=1e-9)

    @pytest.mark.parametrize("rate", [9.5, 9.9])
    def test_keeping_every_hth_state_loses_nothing(self, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
        from latfit.queueing import batch as batch_unlimited

        times = linear_times(4, 0.1)
        coarse = batch_queue(rate, times)
        if rate < 9.8:
            monkeypatch.setattr(batch_unlimited, "FEW_STATES", 10_000)
            fine = batch_queue(rate, times)
            assert coarse.percentile(0.99) == pytest.approx(fine.percentile(0.99), rel=1e-7)
        # At this load the bound is the mean to ten digits.
        assert coarse.mean_ms == pytest.approx(inoue_bound(rate, 4, 0.1), rel=1e-9)

    @pytest.mark.parametrize("spare", [1e-4, 1e-6])
    def test_near_the_limit_the_closure_is_exact(self, spare: float) -> None:
        """At 99.99 % the wait is nearly exponential with the decay of the tail; nearer, more so."""
        times = linear_times(4, 0.1, 32)
        rate = (1 - spare) * 32 / 7.2
        law = batch_queue(rate, times)
        assert law.utilisation == pytest.approx(1 - spare)
        decay = tail_decay(rate, times)
        between = law.percentile(0.99) - law.percentile(0.9)
        assert between * decay == pytest.approx(math.log(10), rel=10 * spare)
        assert law.mean_ms == pytest.approx(1 / decay, abs=2 * 7.2)

    @pytest.mark.parametrize(("largest", "threshold", "load"), [(1, 1, 0.97), (3, 2, 0.95), (16, 1, 0.96)])
    def test_places_far_back_sum_up(
        self, largest: int, threshold: int, load: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In closed form, and every place written out."""
        from latfit.queueing import batch as batch_positions

        times = linear_times(3, 0.4, largest)
        chain = solve_limited(load * times.rate_limit(), times, threshold)
        far = batch_positions._far(chain)
        assert far is not None
        summed = response_tail(chain)
        monkeypatch.setattr(batch_positions, "_far", lambda chain: None)
        written = response_tail(chain)
        for t in np.linspace(0, 3 * far.first * far.service, 31).tolist():
            assert summed(t) == pytest.approx(written(t), abs=1e-11)


class TestSimulation:
    @pytest.mark.parametrize(
        ("rate", "largest", "threshold"),
        [(0.5, 64, 1), (4.2, 32, 1), (2, 16, 6), (2.6, 16, 16), (0.1, 8, 8), (3, 64, 20)],
    )
    def test_mean_and_p99(self, rate: float, largest: int, threshold: int) -> None:
        law = batch_queue(rate, linear_times(4, 0.1, largest), threshold)
        system = System(rate, lambda b: 4 + 0.1 * b, largest, threshold)
        assert system.simulate(mean).agrees(law.mean_ms)
        assert system.simulate(p99).agrees(law.percentile(0.99))

    def test_times_that_fall_and_rise(self) -> None:
        T = np.array([6.0, 5.0, 4.5, 4.5, 5.0, 5.6, 6.4, 7.6])
        law = batch_queue(0.9, measured_times(T), 2)
        system = System(0.9, lambda b: T[b.astype(int) - 1], 8, 2)
        assert system.simulate(mean).agrees(law.mean_ms)
        assert system.simulate(p99).agrees(law.percentile(0.99))


class TestAlways:
    @settings(max_examples=30)
    @given(st.floats(0.1, 20), st.floats(0.01, 2), st.floats(0.02, 0.97))
    def test_inoue_is_above_the_mean(self, tau: float, alpha: float, load: float) -> None:
        rate = load / alpha
        assume(rate * tau < 400)
        assert batch_mean(rate, linear_times(tau, alpha)) <= inoue_bound(rate, tau, alpha) * (1 + 1e-9)

    @settings(max_examples=12)
    @given(st.floats(0.5, 10), st.floats(0.02, 1), st.integers(1, 16), st.floats(0.02, 0.98), st.integers(1, 16))
    def test_the_tail_integrates_to_the_mean(
        self, tau: float, alpha: float, largest: int, load: float, threshold: int
    ) -> None:
        assume(threshold <= largest)
        times = linear_times(tau, alpha, largest)
        law = batch_queue(load * times.rate_limit(), times, threshold)
        assert law.tail(0) == pytest.approx(1, abs=1e-9)
        area, doubt = integral(law)
        assert abs(area - law.mean_ms) <= doubt
        t = np.linspace(0, law.percentile(0.9999), 60)
        assert np.all(np.diff([law.tail(x) for x in t]) <= 1e-9)

    @settings(max_examples=25)
    @given(st.floats(0.5, 10), st.floats(0.02, 1), st.integers(2, 64), st.floats(0.05, 0.9), st.floats(1.01, 1.08))
    def test_more_load_is_slower(self, tau: float, alpha: float, largest: int, load: float, more: float) -> None:
        times = linear_times(tau, alpha, largest)
        calm, busy = (batch_queue(x * times.rate_limit(), times) for x in (load, load * more))
        assert calm.mean_ms < busy.mean_ms
        assert calm.percentile(0.99) <= busy.percentile(0.99) + 1e-6

    def test_little_counts_what_the_chain_counts(self) -> None:
        """Served per cycle over the cycle's length is the rate: requests are neither lost nor made."""
        for threshold in (1, 4):
            chain = solve_limited(2.5, linear_times(4, 0.1, 16), threshold)
            assert chain.mean_batch == pytest.approx(chain.requests_per_cycle, rel=1e-9)


class TestServiceTimes:
    def test_refused(self) -> None:
        for times in ([1.0, math.nan], [0.0, 1.0], []):
            with pytest.raises(WrongUsage):
                measured_times(np.array(times))
        with pytest.raises(WrongUsage, match="largest batch"):
            linear_times(1, 1, 0)


class TestRefusals:
    def test_unstable_load_names_the_limit_and_a_better_cap(self) -> None:
        with pytest.raises(SlaOutOfReach, match=r"4,444\.44/s"):
            batch_queue(4.5, linear_times(4, 0.1, 32))
        times = ServiceTimes(lambda b: 4 + 0.02 * b**2, 32)
        with pytest.raises(SlaOutOfReach, match="Batches of at most 14 would carry"):
            batch_queue(1.5, times)
        assert batch_queue(1.5, replace(times, max_batch=14)).utilisation < 1

    def test_without_limit(self) -> None:
        with pytest.raises(SlaOutOfReach, match="10,000/s"):
            batch_queue(10, linear_times(4, 0.1))
        with pytest.raises(SlaOutOfReach, match="too near"):
            batch_queue(10 * (1 - 1e-7), linear_times(4, 0.1))

    @pytest.mark.parametrize("rate", [0.0, math.nan, -2.0])
    def test_rate(self, rate: float) -> None:
        with pytest.raises(WrongUsage, match="rate"):
            batch_queue(rate, linear_times(4, 0.1))

    @pytest.mark.parametrize("threshold", [0, 33])
    def test_threshold(self, threshold: int) -> None:
        with pytest.raises(WrongUsage, match="threshold"):
            batch_queue(1, linear_times(4, 0.1, 32), threshold)
