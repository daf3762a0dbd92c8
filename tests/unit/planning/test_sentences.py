"""Sentences of plans: which one a case gets, and its numbers."""

import math
from typing import Any

import pytest

from latfit.planning.result import Alternative, Kind
from latfit.planning.serving.result import Reached
from latfit.planning.wording import describe_limit, interval_text, spans_text


@pytest.mark.parametrize(
    ("highest", "low", "replicas", "begin", "end"),
    [
        (None, 0.0, None, "the SLA: even an idle", "machine misses it (12 ms)"),
        (3.0, 0.0, None, "the SLA leaves no room", "one alone takes 12 ms"),
        (960.0, 0.0, 1, "stability-bound", "(stability limit 1,000 req/s)"),
        (900.0, 0.0, 1, "SLA-bound", "(stability limit 1,000 req/s)"),
        (900.0, 300.0, 1, "SLA-bound", "missed below 300 req/s too, where batches are too small to be fast"),
    ],
)
def test_what_limits_a_rate(highest: float | None, low: float, replicas: int | None, begin: str, end: str) -> None:
    ranges = ((low, highest or 0.0),)
    rates: dict[str, Any] = {"rate_limit_per_s": 1000.0, "sustainable_per_s": highest, "feasible_per_s": ranges}
    name = "gpu, greedy batches"
    text = describe_limit(Alternative(name=name, kind=Kind.GREEDY, paths=("gpu",), replicas=replicas, **rates), 12.0)
    assert text.startswith(begin)
    assert text.endswith(end)


def test_intervals_and_spans() -> None:
    assert interval_text(None) == interval_text((None, 3.0)) == ""
    assert interval_text((11.2, 12.4)) == " (95 %: 11.2 ms to 12.4 ms)"
    assert interval_text((11.2, None)) == " (95 %: 11.2 ms to no upper end)"
    # The shortest T_cut that is tried is 0.1 % of the SLA, so a range from there on has no lower end.
    assert spans_text([(0.1, 2.0), (5.0, 20.0)], 100.0) == "up to 2 ms, 5 ms to 20 ms"


@pytest.mark.parametrize(
    ("value", "limit", "ratio", "text"),
    [
        (1.5, 5.0, 0.3, "98.5 % of requests meet all limits, 95 % asked"),
        (0.2, 0.5, 0.4, "99.8 % of requests meet all limits, 99.5 % asked"),
        (2.0, 0.0, math.inf, "98 % of requests meet all limits, 100 % asked"),
    ],
)
def test_a_share_of_requests(value: float, limit: float, ratio: float, text: str) -> None:
    """Percent of requests that miss a limit, shown as the percent that meet it."""
    reached = Reached(name="goodput", value_pct=value, limit_pct=limit)
    assert reached.ratio == pytest.approx(ratio)
    assert reached.outcome == text
