"""Quantities: what users write, in one unit; numbers whose unit would be a guess are refused with what to write."""

from datetime import timedelta

import pytest

from latfit.api import quantities
from latfit.errors import WrongUsage


@pytest.mark.parametrize(
    ("value", "ms", "expected"),
    [("20ms", None, 20.0), ("1.5s", None, 1500.0), (timedelta(seconds=2), None, 2000.0), (None, 20, 20.0)],
)
def test_durations(value: object, ms: float | None, expected: float) -> None:
    assert quantities.duration(value, "--sla", ms) == expected


def test_rates() -> None:
    assert quantities.rate("500/s") == quantities.rate("0.5/ms") == quantities.rate(None, per_s=500) == 0.5
    assert quantities.rates(["500/s", "30/min"]) == [0.5, 0.0005]
    assert quantities.rates(None, per_s=[500, 1000]) == [0.5, 1.0]
    assert quantities.rates("1/s") == [0.001]


@pytest.mark.parametrize(("value", "expected"), [(95, 95.0), ("95%", 95.0), ("99.9 %", 99.9), ("p99", 99.0)])
def test_percentages(value: float | str, expected: float) -> None:
    assert quantities.percent(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2ms", (2.0, 0.0)),
        ("2ms+1us", (2.0, 1e-3)),
        ("0+1us", (0.0, 1e-3)),
        ("0", (0.0, 0.0)),
        ("2ms+0.00us", (2.0, 0.0)),
    ],
)
def test_transfers(value: str, expected: tuple[float, float]) -> None:
    assert quantities.transfer(value) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "ms", "words"),
    [
        (20, None, "has no unit"),
        ("20", None, "with its unit"),
        (None, None, "is not a quantity"),
        (None, -1, "not above zero"),
        (None, float("nan"), "is not a quantity"),
        (timedelta(0), None, "not above zero"),
        ("-1ms", None, "not above zero"),
    ],
)
def test_what_is_refused(value: object, ms: float | None, words: str) -> None:
    with pytest.raises(WrongUsage, match=words) as caught:
        quantities.duration(value, "--sla", ms)
    assert caught.value.remedy
