"""Rates under an SLA, goodput, replicas, backlog: published values, closed forms, monotony, refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.batch import batch_queue
from latfit.queueing.capacity import (
    feasible_rates,
    fluid_backlog,
    replicas,
    sustainable_rate,
)
from latfit.queueing.responses import mm1
from latfit.queueing.service import linear_times

FREE = linear_times(4, 0.1)


class TestPublished:
    def test_mm1_rate_under_an_sla(self) -> None:
        found = sustainable_rate(lambda rate: mm1(rate, 0.5), 0.5, 20)
        assert found.rate == pytest.approx(0.269741, rel=2e-6)
        assert found.rate == pytest.approx(0.5 - math.log(100) / 20, rel=1e-8)
        assert found.binding == "sla"

    @pytest.mark.parametrize(("sla", "count"), [(13, 6), (15, 5)])
    def test_replicas(self, sla: float, count: int) -> None:
        for times in (FREE, linear_times(4, 0.1, 64)):
            limit = min(times.rate_limit(), 9.9)
            found = replicas(20, lambda rate, times=times: batch_queue(rate, times), limit, sla)  # type: ignore[misc]
            assert found.count == count
            assert found.percentile_ms <= sla
            assert batch_queue(20 / (count - 1), times).percentile(0.99) > sla

    def test_backlog_of_a_wave(self) -> None:
        t = np.linspace(0, 1000, 4001)
        found = fluid_backlog(t, 6 + 4 * np.sin(2 * math.pi * t / 1000), 8)
        assert found.peak == pytest.approx(435.991, rel=1e-5)
        assert [found.start_ms, found.peak_ms] == pytest.approx([83.3333, 416.667], rel=1e-5)
        assert found.extra_wait_ms == pytest.approx(54.4989, rel=1e-5)


class TestSearch:
    @settings(max_examples=15)
    @given(st.floats(9, 60), st.floats(1.02, 2))
    def test_a_looser_sla_carries_more(self, sla: float, looser: float) -> None:
        rates = [sustainable_rate(lambda r: batch_queue(r, FREE), 9.99, x).rate for x in (sla, sla * looser)]
        assert rates[0] <= rates[1]
        assert batch_queue(rates[0], FREE).percentile(0.99) <= sla * (1 + 1e-9)

    def test_stability_binds_where_the_sla_is_loose(self) -> None:
        assert sustainable_rate(lambda r: batch_queue(r, FREE), 9, 1e4).binding == "stability"

    def test_an_sla_below_the_fastest_step(self) -> None:
        with pytest.raises(SlaOutOfReach, match=r"idle system needs 4\.1 ms"):
            sustainable_rate(lambda r: batch_queue(r, FREE), 9, 4.0)

    def test_a_fixed_batch_has_a_lowest_rate(self) -> None:
        """Waiting for 8 is slow when few come: the feasible rates have two ends."""
        times = linear_times(4, 0.1, 8)
        found = feasible_rates(lambda r: batch_queue(r, times, 8), 8 / 4.8, 30)
        assert len(found.ranges) == 1
        low, high = found.ranges[0]
        assert 0.1 < low < high < 8 / 4.8
        for end in (low, high):
            assert batch_queue(end, times, 8).percentile(0.99) == pytest.approx(30, rel=1e-3)


class TestBacklog:
    def test_triangle_and_a_second_peak(self) -> None:
        found = fluid_backlog(np.array([0.0, 10, 20, 30, 40]), np.array([0.0, 4, 0, 6, 0]), 2.0)
        # first peak: 5 ms to 15 ms, area 10; it drains 10 by 15 + 10/3 + ..., the second rises from what is left
        t = np.linspace(0, 40, 400_001)
        net = np.interp(t, [0, 10, 20, 30, 40], [0, 4, 0, 6, 0]) - 2
        total = np.concatenate([[0], np.cumsum((net[1:] + net[:-1]) / 2 * np.diff(t))])
        assert found.peak == pytest.approx((total - np.minimum.accumulate(total)).max(), rel=1e-6)

    def test_none_below_capacity(self) -> None:
        assert fluid_backlog(np.array([0.0, 1]), np.array([1.0, 2]), 3).peak == 0

    @pytest.mark.parametrize(
        ("t", "rates"), [([0, 0], [1, 1]), ([0, 1], [1, math.nan]), ([0, 1], [-1, 1]), ([0], [1]), ([0, 1], [1, 1, 1])]
    )
    def test_refused(self, t: list[float], rates: list[float]) -> None:
        with pytest.raises(WrongUsage):
            fluid_backlog(np.array(t, float), np.array(rates, float), 1)
