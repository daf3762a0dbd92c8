"""Nominal paths: what a median says of the mean, linear latencies, refusals; the mark stays with the numbers."""

import math
from pathlib import Path

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.hardware.nominal import parse_nominal
from latfit.hardware.path_latency import PathLatency
from latfit.hardware.profile import HardwareProfile, add_path, nominal_path


def test_a_nominal_median_is_that_of_an_exponential() -> None:
    """theory F: p50 = 2 ms gives ln 2 / 2 = .346574 per ms and a mean of 2.88539 ms, not .5 per ms."""
    path = nominal_path("amx", parse_nominal("p50=2ms"))
    assert PathLatency(path).mean_ms(np.ones(1))[0] == pytest.approx(2.88539, rel=1e-5)
    draws = np.random.default_rng(0).exponential(2.88539, 400_000)
    assert np.median(draws) == pytest.approx(2.0, abs=3 * 2.88539 / math.sqrt(400_000))


def test_a_line_is_the_line() -> None:
    path = nominal_path("gpu", parse_nominal("launch=0.5ms, slope=0.02ms, per_token=10us, max_batch=64"))
    T = path.fit.latency_ms(np.array([8.0]), np.array([100.0]))
    assert T[0] == pytest.approx(0.5 + 8 * 0.02 + 100 * 0.01)
    assert path.fit.domain["B"] == [1, 64]
    assert PathLatency(path).mean_ms(np.ones(1))[0] == pytest.approx(0.53)


@pytest.mark.parametrize(
    ("text", "line", "most", "exponential"),
    [("8ms+50us*128", (8, 0.05), 128, False), ("8ms+50us", (8, 0.05), 256, False), ("exp:2ms", (2, 0), 1, True)],
)
def test_the_short_form(text: str, line: tuple[float, float], most: int, exponential: bool) -> None:
    found = parse_nominal(text)
    assert (found.launch_ms, found.slope_ms) == line
    assert (found.max_batch, found.exponential, found.median) == (most, exponential, False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2ms",
        "p50=2",
        "p50=2ms,slope=1ms",
        "p50=-2ms",
        "launch=0",
        "p50=2ms,p50=3ms",
        "speed=3ms",
        "p50=2ms,max_batch=0",
        "p50=2ms,max_batch=²",
    ],
)
def test_what_cannot_be_read_says_how_to_write_it(text: str) -> None:
    with pytest.raises(WrongUsage) as caught:
        parse_nominal(text)
    assert caught.value.remedy


def test_the_mark_survives_the_file(tmp_path: Path) -> None:
    target = tmp_path / "hardware.json"
    add_path(target, nominal_path("amx", parse_nominal("p50=2ms")))
    path = HardwareProfile.read(target).paths["amx"]
    assert path.label == "amx (nominal)"
    assert PathLatency(path).estimate(4).source == "nominal: p50=2ms"
    assert PathLatency(path).estimate(4).typical_ms == 8.0
    assert PathLatency(path).estimate(4).quantiles == {}


def test_files_that_call_the_numbers_quoted_are_still_read(tmp_path: Path) -> None:
    target = tmp_path / "hardware.json"
    add_path(target, nominal_path("amx", parse_nominal("p50=2ms")))
    written = target.read_text()
    assert '"nominal": "p50=2ms"' in written
    target.write_text(written.replace('"nominal"', '"quoted"'))
    path = HardwareProfile.read(target).paths["amx"]
    assert path.nominal is not None
    assert path.label == "amx (nominal)"
