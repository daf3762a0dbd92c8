import math

import pytest

from latfit.errors import WrongUsage
from latfit.units import (
    format_bytes,
    format_ms,
    format_percent,
    format_rate,
    number,
    parse_bytes,
    parse_duration_ms,
    parse_rate_per_ms,
)


@pytest.mark.parametrize(
    ("text", "ms"), [("20ms", 20), ("1.5s", 1500), ("250us", 0.25), ("250µs", 0.25), ("2min", 120_000), (" 3 ms ", 3)]
)
def test_durations(text: str, ms: float) -> None:
    assert parse_duration_ms(text) == pytest.approx(ms)


@pytest.mark.parametrize(("text", "rate"), [("500/s", 0.5), ("0.5/ms", 0.5), ("30000/min", 0.5)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate_per_ms(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("81559MiB", 81559 * 2**20), ("80GB", 80e9), ("1.5 TB", 1.5e12), ("7B", 7)],
)
def test_sizes_of_memory(text: str, size: float) -> None:
    assert parse_bytes(text) == pytest.approx(size)


@pytest.mark.parametrize("text", ["80", "GiB", "", "80Gb", "80 gigs", "-3GiB", "0GiB", "80GB/s"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(WrongUsage, match="24GiB"):
        parse_bytes(text, option="--gpu-memory")


@pytest.mark.parametrize(
    ("size", "text"), [(5.0546875 * 2**30, "5.05 GiB"), (2 * 2**30, "2 GiB"), (2**20, "0.000977 GiB")]
)
def test_sizes_are_shown_in_gib(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize("text", ["0", "0s", " 0.0 ms", "0µs", "0min"])
def test_nothing_is_a_duration_where_it_is_asked_for(text: str) -> None:
    assert parse_duration_ms(text, zero=True) == 0.0


@pytest.mark.parametrize("text", ["5", "0 parsecs", "-1ms", "0/s"])
def test_what_is_no_duration_is_not_one_with_nothing_either(text: str) -> None:
    with pytest.raises(WrongUsage):
        parse_duration_ms(text, zero=True)


@pytest.mark.parametrize("text", ["20", "ms", "", "20 parsecs", "-3ms", "0ms", "nanms", "1e999s", "20/s"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(WrongUsage, match="20ms") as caught:
        parse_duration_ms(text, option="--sla")
    assert str(caught.value).startswith("--sla: ")


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (20, "20 ms"),
        (1234.5, "1.23 s"),
        (0.0123, "12.3 µs"),
        (0, "0 ms"),
        (1e300, "1.00e+297 s"),
        (math.inf, "unlimited"),
    ],
)
def test_format(ms: float, text: str) -> None:
    assert format_ms(ms) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 %"), (2e-14, "under 0.01 %"), (0.126, "0.13 %"), (3.14, "3.1 %"), (12.6, "13 %"), (None, "unknown")],
)
def test_percentages_keep_two_digits(value: float | None, text: str) -> None:
    assert format_percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (60.0, "60"),
        (1234.5, "1,234"),
        (0.001234567, "0.001235"),
        (1.2e-7, "1.200e-07"),
        (math.inf, "unlimited"),
        (math.nan, "unknown"),
        (None, "unknown"),
    ],
)
def test_numbers_keep_four_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_rate_that_is_carried_is_never_rounded_up() -> None:
    assert format_rate(2655.96) == "2,656 req/s"
    assert format_rate(2655.96, down=True) == "2,655 req/s"
    assert format_rate(4.8157, down=True, digits=3, planned_per_s=4.8152) == "4.815 req/s"  # as planned, not 4.81
    assert format_rate(4.86, down=True, digits=2, planned_per_s=4.9) == "4.8 req/s"
    assert format_rate(123_456.0) == "123,500 req/s"
    assert format_rate(0.05) == "0.05 req/s"
