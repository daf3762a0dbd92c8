"""Sketches against sorted samples: percentiles of all runs together, batches that merge, times that many share."""

import math

import numpy as np
import pytest

from latfit.histogram import PIECES, Sketch, at_most, order_statistics, pooled, sketch_of
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
    pool = pooled([sketch_of(each, 0, PIECES) for each in times])
    together = np.concatenate(times)
    assert pool.size == len(together)
    # Evenly spread within a bin: a few ranks, and of a bin's width a small part.
    assert pool.value(share) == pytest.approx(exact(together, share), rel=0.2 * BIN)


def test_one_run_is_exact() -> None:
    (times,) = runs(1)
    sketch = sketch_of(times, 1000, 256)
    expected = [exact(times[1000:], share) for share in SHARES]
    assert order_statistics(times, sketch, 1000, SHARES).tolist() == expected


def test_a_time_that_many_share_stays_exact() -> None:
    """Two of three requests take what an idle machine takes, up to rounding; others come just above it."""
    rng = np.random.default_rng(1)
    times = 4.1 + rng.exponential(3.0, 30_000)
    times[rng.random(30_000) < 2 / 3] = 4.1
    times += rng.normal(0, 1e-11, 30_000)
    pool = pooled([sketch_of(part, 0, 64) for part in np.split(times, 3)])
    for share in (0.01, 0.3, 0.6):
        assert pool.value(share) == pytest.approx(4.1, abs=1e-9)
    parts = [sketch_of(part, 0, 64) for part in np.split(times, 3)]
    reached = sum(at_most(each, pool, pool.place(0.5))[0].sum() for each in parts) / 30_000
    assert reached == pytest.approx(np.mean(times < 4.1 + 1e-9), abs=0.003)


def test_times_apart_by_rounding_only() -> None:
    """The sum of thousands of such times rounds to a mean outside their range; shares stay within 0 and 1."""
    rng = np.random.default_rng(0)
    low = 7.7
    times = np.where(rng.random(1206) < 0.8, low, np.nextafter(low, np.inf))
    sketch = sketch_of(times, 0, 64)
    pool = pooled([sketch])
    mean = float(pool.mass.sum()) / pool.size
    assert not low <= mean <= np.nextafter(low, np.inf)
    for share in SHARES:
        place = pool.place(share)
        assert 0 <= place.share <= 1
        assert at_most(sketch, pool, place)[1] >= 0


@pytest.mark.parametrize("warm", [0, 1000, 1037])
def test_batches_hold_their_requests(warm: int) -> None:
    """Batch k is requests 128 k to 128 (k + 1) of the run, whatever was left out."""
    (times,) = runs(1)
    sketch = sketch_of(times, warm, 128)
    pool = pooled([sketch])
    limit = pool.value(0.9)
    numbers = np.arange(len(times))[warm:] // 128
    kept = times[warm:]
    assert sketch.started == numbers[0]
    assert sketch.batch_sizes.tolist() == np.bincount(numbers)[numbers[0] :].tolist()
    assert sketch.batch_sums == pytest.approx(np.bincount(numbers, kept)[numbers[0] :])
    expected = np.bincount(numbers, kept <= limit)[numbers[0] :]
    found, unseen = at_most(sketch, pool, pool.place(0.9))
    assert found.sum() == pytest.approx(expected.sum(), abs=1)
    # A batch's share of the bin that the limit is in is taken from all requests; that they differ is told.
    assert np.abs(found - expected).max() < 4
    assert np.sum((found - expected) ** 2) == pytest.approx(unseen, rel=0.5)


def same(one: Sketch, other: Sketch) -> bool:
    return (one.length, one.started, one.first) == (other.length, other.started, other.first) and all(
        np.allclose(getattr(one, name), getattr(other, name)) for name in ("counts", "sums", "sizes", "totals")
    )


@pytest.mark.parametrize("warm", [0, 17, 64, 70, 128, 200])
@pytest.mark.parametrize("n", [500, 1024, 1030])
def test_doubled_batches_are_those_of_twice_the_length(warm: int, n: int) -> None:
    times = np.random.default_rng(n).gamma(2.0, 3.0, n)
    short, long = sketch_of(times, warm, 64), sketch_of(times, warm, 128)
    assert same(short.doubled(), long)
    assert same(short.doubled().doubled(), sketch_of(times, warm, 256))


def test_who_was_never_served_is_not_counted() -> None:
    (times,) = runs(1, 1000)
    times[900:] = np.nan
    sketch = sketch_of(times, 100, 64)
    assert sketch.sizes.sum() == sketch.totals.sum() == 800
    nobody = sketch_of(np.full(100, np.nan), 0, 16)
    assert pooled([nobody]).size == 0
    assert np.isnan(order_statistics(np.full(100, np.nan), nobody, 0, (0.5,))).all()
    assert pooled([nobody, sketch]).value(0.5) == pooled([sketch]).value(0.5)


def test_memory_does_not_grow_with_the_run() -> None:
    """Of ten times as many requests in as many batches; extremes lie a little farther apart."""

    def size(n: int, length: int) -> int:
        sketch = sketch_of(np.random.default_rng(2).exponential(1.0, n), 0, length)
        return sum(column.nbytes for column in vars(sketch).values() if isinstance(column, np.ndarray))

    assert size(1_280_000, 1280 * 10) < 1.5 * size(128_000, 1280)


def test_the_share_above_a_time() -> None:
    times = runs(3)
    pool = pooled([sketch_of(each, 0, PIECES) for each in times])
    together = np.concatenate(times)
    for x in (0.01, 1.0, 7.5, 300.0):
        # A bin of width 2^-9 holds some thousandth of the requests, evenly spread up to chance.
        assert pool.above(x) == pytest.approx(np.mean(together > x), abs=2e-4)
    assert [pool.above(0.0), pool.above(together.max()), pool.above(1e12)] == [1.0, 0.0, 0.0]
    alike = pooled([sketch_of(np.full(1000, 4.1), 0, PIECES)])
    assert [alike.above(4.0999), alike.above(4.1), alike.value(0.99)] == [1.0, 0.0, 4.1]
