"""Quantities: what users write, in one unit; numbers whose unit would be a guess are refused with what to write."""

from datetime import timedelta

import pytest

from latfit.api import quantities
from latfit.errors import WrongUsage


def test_texts_with_units() -> None:
    assert [quantities.duration(each, "--sla") for each in ("20ms", "1.5s", timedelta(seconds=2))] == [20, 1500, 2000]
    assert quantities.rates(["500/s", "30/min"]) == [0.5, 0.0005]
    assert [quantities.percent(each) for each in (95, "95%", "99.9 %", "p99")] == [95, 95, 99.9, 99]
    for text, expected in {"2ms": (2, 0), "2ms+1us": (2, 1e-3), "0+1us": (0, 1e-3), "0": (0, 0)}.items():
        assert quantities.transfer(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (20, "has no unit"),
        ("20", "with its unit"),
        (None, "nothing is given"),
        (timedelta(0), "not above zero"),
        ("-1ms", "not above zero"),
    ],
)
def test_what_is_refused(value: object, words: str) -> None:
    with pytest.raises(WrongUsage, match=words) as caught:
        quantities.duration(value, "--sla")
    assert caught.value.remedy
