"""Histograms against sorted samples: percentiles of all runs together, times that many share."""

import math

import numpy as np
import pytest

from latfit.histogram import histogram_of, pooled
from latfit.stats import FloatArray

SHARES = (0.001, 0.1, 0.5, 0.9, 0.99, 0.9999)
BIN = 2**-9


def exact(values: FloatArray, share: float) -> float:
    """The smallest value that a share does not exceed."""
    return float(np.sort(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)])


def runs(count: int, n: int = 20_011) -> list[FloatArray]:
    """Log-normal times of very different sizes in each run."""
    rng = np.random.default_rng(5)
    return [np.exp(rng.normal(k, 1.5, n)) for k in range(count)]


@pytest.mark.parametrize("share", SHARES)
def test_percentiles_of_all_runs_together(share: float) -> None:
    times = runs(4)
    pool = pooled([histogram_of(each) for each in times])
    together = np.concatenate(times)
    assert pool.size == len(together)
    # Evenly spread within a bin: a few ranks, and of a bin's width a small part.
    assert pool.value(share) == pytest.approx(exact(together, share), rel=0.2 * BIN)


def test_a_time_that_many_share_stays_exact() -> None:
    """Two of three requests take what an idle machine takes, up to rounding; others come just above it."""
    rng = np.random.default_rng(1)
    times = 4.1 + rng.exponential(3.0, 30_000)
    times[rng.random(30_000) < 2 / 3] = 4.1
    times += rng.normal(0, 1e-11, 30_000)
    pool = pooled([histogram_of(part) for part in np.split(times, 3)])
    for share in (0.01, 0.3, 0.6):
        assert pool.value(share) == pytest.approx(4.1, abs=1e-9)
    parts = [histogram_of(part) for part in np.split(times, 3)]
    place = pool.share_in_bin(4.1 + 1e-9)
    reached = sum(each.at_most(*place) for each in parts) / 30_000
    assert reached == pytest.approx(np.mean(times < 4.1 + 1e-9), abs=0.003)


def test_times_apart_by_rounding_only() -> None:
    """The sum of thousands of such times rounds to a mean outside their range; shares stay within 0 and 1."""
    rng = np.random.default_rng(0)
    low = 7.7
    times = np.where(rng.random(1206) < 0.8, low, np.nextafter(low, np.inf))
    pool = histogram_of(times)
    assert not low <= pool.mean <= np.nextafter(low, np.inf)
    for time in (low, np.nextafter(low, np.inf)):
        number, share = pool.share_in_bin(time)
        assert 0 <= share <= 1
        assert 0 <= pool.at_most(number, share) <= pool.size


def test_counts_of_a_part_add_up() -> None:
    times = runs(3)
    parts = [histogram_of(each) for each in times]
    place = pooled(parts).share_in_bin(5.0)
    for part, each in zip(parts, times, strict=True):
        assert part.at_most(*place) == pytest.approx(np.count_nonzero(each <= 5.0), abs=8)
        assert part.mean == pytest.approx(each.mean())


def test_requests_never_served_are_not_counted() -> None:
    (times,) = runs(1, 1000)
    times[900:] = np.nan
    histogram = histogram_of(times)
    assert histogram.size == histogram.totals.sum() == 900
    nobody = histogram_of(np.full(100, np.nan))
    assert pooled([nobody]).size == 0
    assert np.isnan(nobody.value(0.5))
    assert np.isnan(nobody.mean)
    assert pooled([nobody, histogram]).value(0.5) == histogram.value(0.5)


def test_memory_does_not_grow_with_the_run() -> None:
    def size(n: int) -> int:
        return histogram_of(np.random.default_rng(2).exponential(1.0, n)).totals.nbytes

    assert size(1_280_000) < 1.5 * size(128_000)


def test_the_share_above_a_time() -> None:
    times = runs(3)
    pool = pooled([histogram_of(each) for each in times])
    together = np.concatenate(times)
    for x in (0.01, 1.0, 7.5, 300.0):
        # A bin of width 2^-9 holds some thousandth of the requests, evenly spread up to chance.
        assert pool.above(x) == pytest.approx(np.mean(together > x), abs=2e-4)
    assert [pool.above(0.0), pool.above(together.max()), pool.above(1e12)] == [1.0, 0.0, 0.0]
    alike = histogram_of(np.full(1000, 4.1))
    assert [alike.above(4.0999), alike.above(4.1), alike.value(0.99)] == [1.0, 0.0, 4.1]
