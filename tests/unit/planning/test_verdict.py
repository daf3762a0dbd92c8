"""Verdicts of plans: from the probability that the interval of a figure gives its limit."""

import math

import pytest
from scipy.stats import lognorm

from latfit.planning.load.uncertainty import PercentileEstimate
from latfit.planning.verdict import CONFIRMED, probability_within, verdict_of


@pytest.mark.parametrize("limit", [8.0, 10.0, 11.0, 14.0, 15.1])
def test_probability_is_that_of_a_log_normal_with_these_quantiles(limit: float) -> None:
    """Median 10 ms and a 95 % interval of 10/1.5 to 10 * 1.5."""
    spread = math.log(1.5) / 1.959964
    assert probability_within(10.0, 10 / 1.5, 15.0, limit) == pytest.approx(lognorm(spread, scale=10.0).cdf(limit))


def test_an_open_end_has_no_probability() -> None:
    assert probability_within(10.0, 8.0, None, 12.0) is None
    assert probability_within(10.0, 8.0, math.nan, 12.0) is None
    assert probability_within(10.0, 8.0, None, 8.0) == pytest.approx(0.025)


def test_a_limit_at_the_end_of_the_interval_is_confirmed() -> None:
    at_the_end = probability_within(10.0, 9.0, 11.0, 11.0)
    assert verdict_of(met=True, probability=at_the_end, doubted=False) == "meets"
    assert verdict_of(met=True, probability=CONFIRMED, doubted=True) == "likely"
    assert verdict_of(met=True, probability=probability_within(10.0, 9.0, 11.0, 10.9), doubted=False) == "likely"
    assert verdict_of(met=True, probability=None, doubted=False) == "likely"
    assert verdict_of(met=False, probability=0.4, doubted=False) == "misses"


@pytest.mark.parametrize(("sla", "verdict"), [(11.0, "meets"), (10.5, "likely"), (10.0, "likely"), (9.9, "misses")])
def test_a_percentile_keeps_or_misses_an_sla(sla: float, verdict: str) -> None:
    assert PercentileEstimate(10.0, (9.0, 11.0)).promise(sla) == verdict
