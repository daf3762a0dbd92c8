"""Requests and loads: what is checked, scaled and drawn; lengths fitted from planted ones."""

import math

import numpy as np
import pytest
from scipy import stats

from latfit.errors import BadInput, WrongUsage
from latfit.workload.arrivals import Poisson
from latfit.workload.load import ClosedLoad, OpenLoad, RecordedLoad, RequestClass, Streams
from latfit.workload.requests import Lognormal, make_requests


class TestRequests:
    @pytest.mark.parametrize(
        ("arguments", "found"),
        [
            (([], 1, 1), "no request"),
            (([0.0, 2.0, 1.0], 1, 1), "request 3 arrives before"),
            (([0.0, math.nan], 1, 1), "request 2 has no arrival time"),
            (([0.0, 1.0], [1, 0], 1), "request 2 needs prompt_tokens"),
            (([0.0, 1.0], 1, [-3, 1]), "request 1 needs output_tokens"),
            (([0.0, 1.0], [1.0, math.nan], 1), "request 2 has nan as prompt_tokens"),
            (([0.0, 1.0], [1, 2, 3], 1), "3 rows, arrivals have 2"),
        ],
    )
    def test_refused(self, arguments: tuple, found: str) -> None:  # type: ignore[type-arg]
        with pytest.raises(BadInput, match=found):
            make_requests(*arguments)

    def test_scaling_keeps_the_pattern(self) -> None:
        made = make_requests([5.0, 6.0, 10.0])
        assert made.at_rate(1.0).arrival_ms.tolist() == pytest.approx([5.0, 5.4, 7.0])
        with pytest.raises(WrongUsage):
            made.at_rate(0)
        with pytest.raises(BadInput, match="no rate"):
            make_requests([1.0, 1.0]).at_rate(1)

    def test_the_busiest_part(self) -> None:
        made = make_requests([0.0, 5.0, 9.0, 10.0, 11.0, 19.0], np.arange(1, 7))
        assert made.busiest(6.0).arrival_ms.tolist() == [0.0, 4.0, 5.0, 6.0]
        assert made.busiest(2.0).prompt_tokens.tolist() == [3, 4, 5]
        assert len(made.busiest(100.0)) == 6


class TestLoads:
    def test_common_random_numbers(self) -> None:
        """Longer requests, more classes, other replications elsewhere: the arrivals of a replication stay."""
        one = OpenLoad(Poisson(0.5)).sample(500, Streams(7, 3))
        other = OpenLoad(Poisson(0.5), Lognormal((3, 3), (1, 1)), (RequestClass(1), RequestClass(3))).sample(
            500, Streams(7, 3)
        )
        assert np.array_equal(one.arrival_ms, other.arrival_ms)
        assert not np.array_equal(one.arrival_ms, OpenLoad(Poisson(0.5)).sample(500, Streams(7, 4)).arrival_ms)

    def test_classes_by_share(self) -> None:
        load = OpenLoad(Poisson(1), classes=(RequestClass(1, 10.0), RequestClass(3, 50.0)), users=4)
        drawn = load.sample(40_000, Streams(0))
        urgent = int(np.count_nonzero(drawn.class_id == 0))
        assert stats.binomtest(urgent, 40_000, 0.25).pvalue > 1e-3
        assert set(drawn.deadline_ms[drawn.class_id == 0].tolist()) == {10.0}
        assert set(drawn.user_id.tolist()) == {0, 1, 2, 3}

    def test_recorded(self) -> None:
        load = RecordedLoad(make_requests([0.0, 1.0, 3.0]))
        assert len(load.sample(2, Streams(0))) == 2
        assert len(load.sample(9, Streams(0))) == 3
        assert load.at_rate(2.0).rate == pytest.approx(2.0)

    def test_closed_loop_refused(self) -> None:
        for users, think in ((0, 1.0), (1, -1.0), (1, math.inf)):
            with pytest.raises(WrongUsage):
                ClosedLoad(users, think)
        with pytest.raises(WrongUsage):
            RequestClass(0)
        with pytest.raises(WrongUsage):
            RequestClass(ttft_slo_ms=math.nan)


class TestLengths:
    def test_logarithms_of_a_lognormal_have_its_moments(self) -> None:
        drawn = Lognormal((5.0, 4.0), (0.8, 0.5)).lengths(40_000, np.random.default_rng(1))
        # Standard errors: sd/sqrt(n) and sd/sqrt(2n); rounding adds about 1/24 of a squared token.
        logs = np.log(np.stack(drawn))
        assert logs.mean(axis=1) == pytest.approx((5, 4), abs=0.02)
        assert logs.std(axis=1) == pytest.approx((0.8, 0.5), abs=0.012)
