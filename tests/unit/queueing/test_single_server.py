"""One request at a time: M/M/1 against published values; M/D/1 of the tests, which other queues are held against."""

import math

import pytest

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.responses import mm1
from tests.unit.queueing.textbook import MD1


def test_mm1() -> None:
    law = mm1(0.3, 0.5)
    assert law.mean_ms == pytest.approx(5)
    assert law.percentile(0.5) == pytest.approx(3.46574, rel=1e-5)
    assert law.percentile(0.99) == pytest.approx(23.0259, rel=1e-5)


def test_md1() -> None:
    assert MD1(0.8, 1).percentile(0.99) == pytest.approx(11.3559, rel=1e-5)


def test_crommelins_sum_where_it_can_be_trusted() -> None:
    rate, law = 0.8, MD1(0.8, 1)
    for t in (0.0, 0.3, 1.0, 2.7, 6.5):
        terms = [(rate * (k - t)) ** k / math.factorial(k) * math.exp(-rate * (k - t)) for k in range(int(t) + 1)]
        assert 1 - law.wait_tail(t) == pytest.approx((1 - rate) * sum(terms), rel=1e-9)


def test_unstable_load_names_its_limit() -> None:
    with pytest.raises(SlaOutOfReach, match=r"from 500/s on"):
        mm1(0.5, 0.5)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_is_a_finite_number_above_zero(rate: float) -> None:
    with pytest.raises(WrongUsage, match="rate"):
        mm1(rate, 1)


def test_a_percentile_is_a_share() -> None:
    with pytest.raises(WrongUsage, match="percentile"):
        mm1(0.1, 1).percentile(99)
