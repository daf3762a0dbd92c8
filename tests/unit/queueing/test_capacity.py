"""Feasible ranges, and the backlog of a load that varies: published values, refusals."""

import math

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.queueing.capacity import feasible_ranges, fluid_backlog


def test_ranges_end_where_the_condition_changes() -> None:
    """(x - 1)(x - 2)(x - 3) <= 0 up to 1 and from 2 to 3."""
    ranges = feasible_ranges(np.linspace(0.1, 4, 30), lambda x: (x - 1) * (x - 2) * (x - 3) <= 0, precision=1e-6)
    assert np.ravel(ranges) == pytest.approx([0.1, 1, 2, 3], rel=1e-5)
    assert feasible_ranges(np.linspace(0, 1, 5), lambda _: False) == []


class TestBacklog:
    def test_backlog_of_a_wave(self) -> None:
        t = np.linspace(0, 1000, 4001)
        found = fluid_backlog(t, 6 + 4 * np.sin(2 * math.pi * t / 1000), 8)
        assert found.peak == pytest.approx(435.991, rel=1e-5)
        assert [found.start_ms, found.peak_ms] == pytest.approx([83.3333, 416.667], rel=1e-5)
        assert found.extra_wait_ms == pytest.approx(54.4989, rel=1e-5)

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
