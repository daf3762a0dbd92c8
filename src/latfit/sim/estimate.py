"""Means and percentiles of simulated response times, with intervals that allow for correlation.

A percentile x is that of all requests of all replications together (`latfit.sim.sketch`). Near saturation the average
of each run's own percentile is too low: the few runs that meet a long queue have most of the slow requests, and an
average gives them the weight of one run.

Intervals come from what batches of consecutive requests add to the error of an estimate (`latfit.sim.spread`):

    e_i = sum over batch i of (R - mean)/N          for the mean,
    e_i = sum over batch i of (1{R <= x} - F(x))/N  for the share F(x) of requests at or below x.

With the standard error s of their sum and Student's t the mean's interval is mean -+ t s. A percentile's is read off
the responses at the shares p -+ t s, which makes it as lopsided as the tail is; no density is needed, and an atom keeps
an interval of no width. A batch must hold EXCEEDANCES requests beyond a percentile; where that leaves fewer than
SPREAD[0] batches, there is no interval.

An interval is not to be trusted where the runs are too short for it, and where the start from empty still counts: its
share of the standard error is about exp(-w/2C) sqrt(C R/n) with w requests left out and n counted in each of R runs, C
being the reach of correlation.

Loads that vary in a course of their own (a day) have batches that differ by that course: there each replication is one
batch. Replications of one recorded load share their arrivals: there a batch is the same requests of all replications.

Two policies on the same random numbers are compared by the differences of what the same requests add to the errors, in
which the noise of the load cancels; a share turns into ms by the slope of the percentile over its interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.sim.replication import Replication
from latfit.sim.sketch import PIECES, Pool, Sketch, at_most, order_statistics, pooled, sketch_of
from latfit.sim.spread import RESOLVED, Parts, Spread, reach_of, spread_of
from latfit.stats import FloatArray

PERCENTILES = (0.5, 0.9, 0.99)
START = 0.1
"""Bias of the start over the standard error, at the most."""

GROWTH = 0.75
"""Between a rise as the root of time, 1/2, and one in proportion to it, 1."""

STEADY, VARYING, RECORDED = "steady", "varying", "recorded"
"""Loads: the same throughout; with a course of its own, drawn anew; the same requests in every replication."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; NaN ends where there is none to give. batches: that it is made from.
    trusted: whether the runs were long enough for it.  needed: requests that count, in all, which are."""

    value: float
    low: float
    high: float
    batches: int = 0
    trusted: bool = True
    needed: int = 0

    @property
    def relative_half_width(self) -> float:
        return (self.high - self.low) / (2 * self.value) if self.value > 0 else math.inf


@dataclass(frozen=True, eq=False)
class Summary:
    """What is kept of a replication. whole (1 + p,): its mean and percentiles.  sketch: of its response times.
    by_class: sketches of each class.

    load: STEADY, VARYING or RECORDED.  warm: requests left out.  met: how many ended by their deadline, where one was
    promised.  sizes (2, largest + 1), busy (2,), served (2,) by path.
    """

    percentiles: tuple[float, ...]
    whole: FloatArray
    sketch: Sketch
    by_class: tuple[Sketch, ...]
    load: str
    warm: int
    met: int
    promised: bool
    sizes: Any
    busy: FloatArray
    served: Any
    unserved: int
    throughput: float
    mean_in_system: float
    most_waiting: int
    requests: int

    @property
    def names(self) -> tuple[str, ...]:
        return statistics(self.percentiles)

    @property
    def counted(self) -> int:
        return int(self.sketch.totals.sum())


def summarise(
    run: Replication,
    length: int,
    sla_ms: float = math.inf,
    percentiles: Sequence[float] = PERCENTILES,
    load: str = STEADY,
) -> Summary:
    """The numbers of a run in batches of `length`; the warm-up is left out, and so is who was never served."""
    warm = min(run.drawn.warm, len(run.response_ms))
    times, path = run.response_ms, run.path[warm:]
    sketch = sketch_of(times, warm, length)
    met, promised = _met(run, times[warm:], sla_ms)
    ids = run.drawn.load.class_id
    by_class: tuple[Sketch, ...] = ()
    if len(ids):
        own = ids[warm : len(times)]
        kept = times[warm:]
        by_class = tuple(sketch_of(kept[own == c], 0, len(times) + 1) for c in range(run.drawn.classes))
    counted = int(sketch.totals.sum())
    mean = float(sketch.sums.sum()) / counted if counted else math.nan
    return Summary(
        percentiles=tuple(percentiles),
        whole=np.array([mean, *order_statistics(times, sketch, warm, percentiles)]),
        sketch=sketch,
        by_class=by_class,
        load=load,
        warm=warm,
        met=met,
        promised=promised,
        sizes=run.sizes,
        busy=run.busy,
        served=np.array([np.count_nonzero(path == p) for p in range(2)]),
        unserved=run.unserved,
        throughput=run.throughput,
        mean_in_system=run.mean_in_system,
        most_waiting=run.most_waiting,
        requests=len(run.arrive_ms),
    )


def statistics(percentiles: Sequence[float]) -> tuple[str, ...]:
    """Names of the mean and of percentiles: `mean`, `p50`, `p99.9`."""
    return ("mean", *(f"p{100 * p:g}" for p in percentiles))


def describe(sketches: Sequence[Sketch], percentiles: Sequence[float] = PERCENTILES) -> FloatArray:
    """Mean and percentiles (1 + p,) of all requests of sketches: the smallest time that a share p does not exceed."""
    pool = pooled(sketches)
    if not pool.size:
        return np.full(1 + len(percentiles), math.nan)
    mean = sum(float(each.sums.sum()) for each in sketches) / pool.size
    return np.array([mean, *(pool.value(p) for p in percentiles)])


def interval(summaries: Sequence[Summary], statistic: str, level: float = 0.95) -> Interval:
    """The interval of `mean`, `p50`, `p90` or `p99` over replications."""
    pool = pooled([each.sketch for each in summaries])
    if not pool.size:
        return Interval(math.nan, math.nan, math.nan, 0, False)
    estimate = _estimate(summaries, pool, statistic)
    value, spread = estimate.value, spread_of(estimate.parts, _reach_of_mean(summaries, pool))
    half, sure = spread.half_width(level), spread.enough and forgotten(spread, summaries)
    low, high = value - half, value + half
    if estimate.share is not None and math.isfinite(half):
        low, high = _ends(pool, estimate.share, half)
        low, high = min(low, value), max(high, value)
    needed = math.ceil(spread.needed * (1 - 1e-9))
    return Interval(value, low, high, spread.batches, sure and math.isfinite(high), needed)


def difference(first: Sequence[Summary], other: Sequence[Summary], statistic: str, level: float = 0.95) -> Interval:
    """other - first in ms, from runs of two policies on the same random numbers."""
    a, b = (error_parts(each, statistic, level) for each in (first, other))
    return paired(a, b, level)


def error_parts(summaries: Sequence[Summary], statistic: str, level: float = 0.95) -> tuple[float, Parts]:
    """(an estimate in ms, what batches add to its error in ms), to be compared with that of another policy."""
    pool = pooled([each.sketch for each in summaries])
    if not pool.size:
        return math.nan, Parts(1, 0, (), 0.0)
    estimate = _estimate(summaries, pool, statistic)
    if estimate.share is None:
        return estimate.value, estimate.parts
    half = spread_of(estimate.parts, _reach_of_mean(summaries, pool)).half_width(level)
    low, high = _ends(pool, estimate.share, half) if math.isfinite(half) else (math.nan, math.nan)
    slope = (high - low) / (2 * half) if half != 0 else 0.0
    # The more requests are at or below a time, the earlier the percentile is reached.
    rows = tuple(-slope * row for row in estimate.parts.rows)
    return estimate.value, replace(estimate.parts, rows=rows, unseen=slope**2 * estimate.parts.unseen)


def paired(first: tuple[float, Parts], other: tuple[float, Parts], level: float = 0.95) -> Interval:
    """other - first with its interval, from what `error_parts` gives of both."""
    value, spread = other[0] - first[0], spread_of(other[1].minus(first[1]))
    half = spread.half_width(level)
    return Interval(value, value - half, value + half, spread.batches, spread.enough, math.ceil(spread.needed))


def reach(summaries: Sequence[Summary]) -> float:
    """The farthest of any statistic, in requests."""
    pool = pooled([each.sketch for each in summaries])
    if not pool.size:
        return 0.0
    of_mean = _reach_of_mean(summaries, pool)
    return max(reach_of(_estimate(summaries, pool, name).parts, of_mean) for name in summaries[0].names)


def forgotten(spread: Spread, summaries: Sequence[Summary]) -> bool:
    """Whether the start from empty is less than START of the standard error. Of other loads it is a part."""
    if spread.reach <= 0 or summaries[0].load != STEADY:
        return True
    left = math.exp(-summaries[0].warm / (2 * spread.reach))
    return left * math.sqrt(spread.reach * len(summaries) ** 2 / spread.requests) <= START


def grows(summaries: Sequence[Summary]) -> bool:
    """Whether response times rise through the runs of a steady load without end, as they do above capacity.

    A queue with more load than capacity rises in proportion to time, one at capacity as its root. So it is without end
    if the last third is above the first by more than the ratio between these two, and in most runs never comes down
    again to what the first third was on average, as every stable queue does in time.
    """
    if summaries[0].load != STEADY:
        return False
    series = []
    for each in summaries:
        sums, sizes = each.sketch.batch_sums, each.sketch.batch_sizes
        series.append(sums[sizes > 0] / sizes[sizes > 0])
    return rises(series, summaries[0].warm / max(1, summaries[0].requests))


def rises(series: Sequence[FloatArray], start: float) -> bool:
    """Whether times averaged over stretches (k,) of each run rise as above capacity. start: share of a run left out."""
    early_sum, late_sum, stays = 0.0, 0.0, 0
    for means in series:
        third = len(means) // 3
        if third < 1:
            return False
        early, late = means[:third], means[-third:]
        early_sum, late_sum = early_sum + float(early.mean()), late_sum + float(late.mean())
        stays += bool(late.min() > early.mean())
    straight = (start + (1 - start) * 5 / 6) / (start + (1 - start) / 6)
    return late_sum > straight**GROWTH * early_sum and stays > len(series) / 2


def reach_in(times: FloatArray) -> float:
    """The reach in requests of the times (n,) of one run, in order."""
    sketch = sketch_of(times, 0, PIECES * max(1, len(times) // (PIECES * PIECES * RESOLVED)))
    if not sketch.sizes.sum():
        return 0.0
    error = sketch.sums - sketch.sums.sum() / sketch.sizes.sum() * sketch.sizes
    return reach_of(Parts(sketch.length // PIECES, 0, (error,), float(sketch.sizes.sum())))


@dataclass(frozen=True, eq=False)
class _Estimate:
    """value in ms; parts of its error, in ms for a mean, in shares for a percentile; share: of the percentile."""

    value: float
    parts: Parts
    share: float | None = None


def _reach_of_mean(summaries: Sequence[Summary], pool: Pool) -> float:
    """It is known the best, from small pieces of batches, and percentiles forget no faster."""
    return reach_of(_estimate(summaries, pool, "mean").parts)


def _estimate(summaries: Sequence[Summary], pool: Pool, statistic: str) -> _Estimate:
    column = _column(summaries[0], statistic)
    sketches = [each.sketch for each in summaries]
    if column == 0:
        mean = sum(float(each.sums.sum()) for each in sketches) / pool.size
        rows = [(each.sums - mean * each.sizes) / pool.size for each in sketches]
        return _Estimate(mean, _series(summaries, rows, PIECES, math.inf))
    share = summaries[0].percentiles[column - 1]
    place = pool.place(share)
    below, unseen = zip(*(at_most(each, pool, place) for each in sketches), strict=True)
    reached = sum(float(each.sum()) for each in below) / pool.size
    rows = [(own - reached * each.batch_sizes) / pool.size for own, each in zip(below, sketches, strict=True)]
    value = float(summaries[0].whole[column]) if len(summaries) == 1 else pool.value(share)
    parts = _series(summaries, rows, 1, min(share, 1 - share) * pool.size)
    return _Estimate(value, replace(parts, unseen=sum(unseen) / pool.size**2), share)


def _series(summaries: Sequence[Summary], rows: Sequence[FloatArray], pieces: int, beyond: float) -> Parts:
    """Rows (k * pieces,) of replications, in pieces of a batch, as series that are independent of each other."""
    first, requests = summaries[0], float(sum(each.counted for each in summaries))
    if first.load == VARYING:
        return Parts(first.requests, 0, tuple(np.array([row.sum()]) for row in rows), requests, beyond)
    length, started = first.sketch.length // pieces, first.sketch.started * pieces
    if first.load == RECORDED:
        together = np.zeros(max(map(len, rows)))
        for row in rows:
            together[: len(row)] += row
        return Parts(length, started, (together,), requests / len(rows), beyond / len(rows))
    return Parts(length, started, tuple(rows), requests, beyond)


def _ends(pool: Pool, share: float, half: float) -> tuple[float, float]:
    """The times at the ends of an interval of shares; NaN where it goes beyond all requests."""
    low = pool.value(share - half) if share - half > 0 else 0.0
    return low, pool.value(share + half) if share + half < 1 else math.nan


def _column(summary: Summary, statistic: str) -> int:
    names = summary.names
    if statistic not in names:
        raise WrongUsage(f"{statistic!r} is not known", where="statistic", remedy=f"Take one of {', '.join(names)}.")
    return names.index(statistic)


def _met(run: Replication, times: FloatArray, sla_ms: float) -> tuple[int, bool]:
    """How many of the served ended by their deadline, and whether there was any promise. times (n,): of those that
    count, NaN for who was never served."""
    deadlines, ids, warm = run.drawn.deadline_ms, run.drawn.load.class_id, run.drawn.warm
    if not np.isfinite(deadlines).any():
        return int(np.count_nonzero(times <= sla_ms)), math.isfinite(sla_ms)
    if run.drawn.by_request:
        own = deadlines[warm : warm + len(times)]
    elif len(ids):
        own = deadlines[ids[warm : warm + len(times)]]
    else:
        return int(np.count_nonzero(times <= deadlines[0])), True
    return int(np.count_nonzero(times <= np.minimum(own, sla_ms))), True
