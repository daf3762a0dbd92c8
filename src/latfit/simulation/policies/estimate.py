"""Estimate means and percentiles of simulated response times, with confidence intervals, and choose run lengths.

The standard error comes from batch means, with batches much longer than the measured autocorrelation. The interval of
a percentile is read off the pooled distribution at the shares p ± t·s. The "reach" is the correlation length C in
requests, measured on a pilot run. Derivation: docs/theory/simulation.md, "Statistics of response times".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.histogram import PIECES, Pool, Sketch, at_most, order_statistics, pooled, sketch_of
from latfit.simulation.policies.replication import Replication
from latfit.simulation.summary import Interval
from latfit.stats import FloatArray

SPREAD = (20, 60)
"""Smallest and largest number of batches for a standard error."""

EXCEEDANCES = 100
APART = 150
"""Batch length over the reach of correlation."""

RESOLVED = 100
SURE = 3.0
SATURATED = 0.35
"""Lag-one correlation from which batches are too short to show the reach."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Contributions of batches to the error of an estimate.

    Attributes
    ----------
    length
        Requests in a batch.
    started
        Number of the first batch of every row.
    rows
        Contributions (k,) of consecutive batches, a row for each independent series, in the unit of the estimate.
    requests
        Requests that count.
    beyond
        Requests beyond the percentile; infinite for a mean.
    unseen
        Variance of the error that the rows do not contain.
    """

    length: int
    started: int
    rows: tuple[FloatArray, ...]
    requests: float
    beyond: float = math.inf
    unseen: float = 0.0

    def doubled(self) -> "Parts":
        """Merge pairs of batches into batches of twice the length."""
        pad = self.started % 2
        rows = [np.concatenate([np.zeros(pad), row, np.zeros((pad + len(row)) % 2)]) for row in self.rows]
        return replace(
            self,
            length=2 * self.length,
            started=self.started // 2,
            rows=tuple(row.reshape(-1, 2).sum(axis=1) for row in rows),
        )

    def minus(self, other: "Parts") -> "Parts":
        """Return the contributions to the difference of two estimates on the same requests."""
        if self.length < other.length:
            return self.doubled().minus(other)
        if self.length > other.length:
            return self.minus(other.doubled())
        started = min(self.started, other.started)
        rows = max(len(self.rows), len(other.rows))
        ours, theirs = (each._from(started, rows) for each in (self, other))
        found = []
        for a, b in zip(ours, theirs, strict=True):
            row = np.zeros(max(len(a), len(b)))
            row[: len(a)] += a
            row[: len(b)] -= b
            found.append(row)
        requests, beyond = min(self.requests, other.requests), min(self.beyond, other.beyond)
        # The same requests under the same policy: the difference is exactly zero.
        unseen = self.unseen + other.unseen if any(row.any() for row in found) else 0.0
        return Parts(self.length, started, tuple(found), requests, beyond, unseen)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "rows": [row.tolist() for row in self.rows]}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Parts":
        return cls(**{**document, "rows": tuple(np.array(row, dtype=np.float64) for row in document["rows"])})

    def _from(self, started: int, rows: int) -> list[FloatArray]:
        lead = np.zeros(self.started - started)
        return [np.concatenate([lead, row]) for row in self.rows] + [np.empty(0)] * (rows - len(self.rows))


@dataclass(frozen=True)
class Spread:
    """Standard error of an estimate.

    Attributes
    ----------
    error
        Standard error, in the unit of the estimate; NaN without batches.
    batches
        Batches that the error comes from.
    reach
        Correlation length in requests.
    requests, needed
        Requests that count, and requests that a trusted interval needs.
    """

    error: float
    batches: int
    reach: float
    requests: float
    needed: float

    @property
    def enough(self) -> bool:
        return self.batches >= SPREAD[0] and self.requests >= self.needed

    def half_width(self, level: float) -> float:
        from scipy.special import stdtrit

        return float(stdtrit(self.batches - 1, 0.5 + level / 2)) * self.error if self.batches > 1 else math.nan


def spread_of(parts: Parts, reach: float = 0.0) -> Spread:
    """Return the standard error of an estimate; without batches if too few requests lie beyond the percentile.

    `reach` is a lower bound of the correlation length, in requests, that is known already.
    """
    rows = [row for row in parts.rows if len(row)]
    whole, requests, reach = sum(map(len, rows)), parts.requests, reach_of(parts, reach)
    scarce = SPREAD[0] * EXCEEDANCES / parts.beyond
    needed = max(SPREAD[0] * APART * reach, scarce * requests)
    limits = (SPREAD[1], parts.beyond / EXCEEDANCES, requests / (APART * reach) if reach else math.inf)
    wanted = max(SPREAD[0], min(limits))
    groups: list[float] = []
    for row in rows:
        ends = np.linspace(0, len(row), 1 + min(len(row), max(1, round(wanted * len(row) / whole))))
        groups += np.add.reduceat(row, ends[:-1].astype(np.int64)).tolist()
    m = len(groups)
    if m < 2 or scarce > 1:
        return Spread(math.nan, 0, reach, requests, needed)
    left = reach * (m - len(rows)) / requests
    error = math.sqrt(m / (m - 1) * float(np.sum(np.square(groups))) * (1 + 2 * left) + parts.unseen)
    return Spread(error, m, reach, requests, needed)


def reach_of(parts: Parts, found: float = 0.0) -> float:
    """Measure the correlation length C in requests; at least `found`."""
    while True:
        rows = [row for row in parts.rows if len(row) > 1]
        count, pairs = sum(map(len, rows)), sum(len(row) - 1 for row in rows)
        square = sum(float(row @ row) for row in rows) / count if pairs else 0.0
        if square <= 0 or not math.isfinite(square):
            return found
        products = np.concatenate([row[1:] * row[:-1] for row in rows]) / square
        # Empirical error instead of 1/sqrt(pairs): two batches that share one long queue are weak evidence.
        error = math.sqrt(float(products @ products)) / pairs
        r = float(products.sum()) / pairs + 1 / count
        expected = found / parts.length
        if r - (expected if r < SATURATED else 0.0) > SURE * error:
            found = max(found, r * parts.length)
        if count < 2 * RESOLVED:
            return found
        parts = parts.doubled()


PERCENTILES = (0.5, 0.9, 0.99)
START = 0.1
"""Largest accepted bias of the empty start, over the standard error."""

GROWTH = 0.75
"""Exponent of growth over time: between 1/2 (at capacity) and 1 (above capacity)."""

STEADY, VARYING, RECORDED = "steady", "varying", "recorded"
"""Loads: stationary; varying over time and drawn anew for each replication; the same requests in every replication."""


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics of one replication.

    Attributes
    ----------
    percentiles
        Shares p, 0 to 1.
    whole
        Mean and percentiles (1 + p,), ms.
    sketch
        Histogram of the response times.
    by_class
        Histogram of each class; empty with one class.
    load
        STEADY, VARYING or RECORDED.
    warm
        Requests left out at the start.
    met
        Requests that met their deadline.
    promised
        Whether there is any deadline.
    sizes, busy, served
        Batches by size (2, largest + 1), busy time in ms (2,) and requests (2,) by path.
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
    """Summarise a run in batches of `length` requests, without the warm-up and requests that were never served."""
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
    """Return the names of the mean and of percentiles: `mean`, `p50`, `p99.9`."""
    return ("mean", *(f"p{100 * p:g}" for p in percentiles))


def describe(sketches: Sequence[Sketch], percentiles: Sequence[float] = PERCENTILES) -> FloatArray:
    """Return mean and percentiles (1 + p,) of all requests: the smallest times that a share p does not exceed."""
    pool = pooled(sketches)
    if not pool.size:
        return np.full(1 + len(percentiles), math.nan)
    mean = sum(float(each.sums.sum()) for each in sketches) / pool.size
    return np.array([mean, *(pool.value(p) for p in percentiles)])


def interval(summaries: Sequence[Summary], statistic: str, level: float = 0.95) -> Interval:
    """Return the confidence interval of `mean`, `p50`, `p90` or `p99` over replications."""
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
    """Return the interval of other - first in ms, for two policies on the same random numbers."""
    a, b = (error_parts(each, statistic, level) for each in (first, other))
    return paired(a, b, level)


def error_parts(summaries: Sequence[Summary], statistic: str, level: float = 0.95) -> tuple[float, Parts]:
    """Return an estimate in ms and the contributions of batches to its error in ms, for `paired`."""
    pool = pooled([each.sketch for each in summaries])
    if not pool.size:
        return math.nan, Parts(1, 0, (), 0.0)
    estimate = _estimate(summaries, pool, statistic)
    if estimate.share is None:
        return estimate.value, estimate.parts
    half = spread_of(estimate.parts, _reach_of_mean(summaries, pool)).half_width(level)
    low, high = _ends(pool, estimate.share, half) if math.isfinite(half) else (math.nan, math.nan)
    slope = (high - low) / (2 * half) if half != 0 else 0.0
    # A larger share at or below a time means a smaller percentile, hence the sign.
    rows = tuple(-slope * row for row in estimate.parts.rows)
    return estimate.value, replace(estimate.parts, rows=rows, unseen=slope**2 * estimate.parts.unseen)


def paired(first: tuple[float, Parts], other: tuple[float, Parts], level: float = 0.95) -> Interval:
    """Return the interval of other - first from the `error_parts` of both."""
    value, spread = other[0] - first[0], spread_of(other[1].minus(first[1]))
    half = spread.half_width(level)
    return Interval(value, value - half, value + half, spread.batches, spread.enough, math.ceil(spread.needed))


def reach(summaries: Sequence[Summary]) -> float:
    """Return the largest correlation length of any statistic, in requests."""
    pool = pooled([each.sketch for each in summaries])
    if not pool.size:
        return 0.0
    of_mean = _reach_of_mean(summaries, pool)
    return max(reach_of(_estimate(summaries, pool, name).parts, of_mean) for name in summaries[0].names)


def forgotten(spread: Spread, summaries: Sequence[Summary]) -> bool:
    """Return whether the bias of the empty start is below START standard errors; always true for loads that vary."""
    if spread.reach <= 0 or summaries[0].load != STEADY:
        return True
    left = math.exp(-summaries[0].warm / (2 * spread.reach))
    return left * math.sqrt(spread.reach * len(summaries) ** 2 / spread.requests) <= START


def grows(summaries: Sequence[Summary]) -> bool:
    """Return whether response times of a steady load grow without bound.

    Above capacity a queue grows in proportion to time, at capacity as its square root. Growth is unbounded if the last
    third exceeds the first third by more than the ratio at exponent GROWTH and, in most runs, never falls back to the
    mean of the first third.
    """
    if summaries[0].load != STEADY:
        return False
    series = []
    for each in summaries:
        sums, sizes = each.sketch.batch_sums, each.sketch.batch_sizes
        series.append(sums[sizes > 0] / sizes[sizes > 0])
    return rises(series, summaries[0].warm / max(1, summaries[0].requests))


def rises(series: Sequence[FloatArray], start: float) -> bool:
    """Return whether the averages (k,) over stretches of each run grow without bound; `start` is the share left out."""
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
    """Measure the correlation length in requests of the times (n,) of one run, in order."""
    sketch = sketch_of(times, 0, PIECES * max(1, len(times) // (PIECES * PIECES * RESOLVED)))
    if not sketch.sizes.sum():
        return 0.0
    error = sketch.sums - sketch.sums.sum() / sketch.sizes.sum() * sketch.sizes
    return reach_of(Parts(sketch.length // PIECES, 0, (error,), float(sketch.sizes.sum())))


@dataclass(frozen=True, eq=False)
class _Estimate:
    """An estimate in ms with its error: in ms for a mean, in shares for the percentile `share`."""

    value: float
    parts: Parts
    share: float | None = None


def _reach_of_mean(summaries: Sequence[Summary], pool: Pool) -> float:
    """Measure the reach of the mean: small pieces of batches show it best; percentiles decorrelate at least as fast."""
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
    """Group rows (k * pieces,) of replications, in pieces of a batch, into independent series."""
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
    """Return the times at the ends of an interval of shares; NaN beyond all requests."""
    low = pool.value(share - half) if share - half > 0 else 0.0
    return low, pool.value(share + half) if share + half < 1 else math.nan


def _column(summary: Summary, statistic: str) -> int:
    names = summary.names
    if statistic not in names:
        raise WrongUsage(f"{statistic!r} is not known", where="statistic", remedy=f"Take one of {', '.join(names)}.")
    return names.index(statistic)


def _met(run: Replication, times: FloatArray, sla_ms: float) -> tuple[int, bool]:
    """Count the served requests that met their deadline; return whether there is any deadline, too.

    `times` (n,) are those that count, NaN for requests that were never served.
    """
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


MANY = 500_000
REACHES = 128 * APART
PILOT, PILOT_REACHES = 50_000, 1500
WARM = 20
WARM_SHARE = 0.02
"""Smallest share of a run that is left out at its start; the largest is one half."""

LONGEST = 2_000_000
"""Requests that count in one replication, limited by memory; longer runs are split into replications."""

MOST = 100_000_000
"""Requests in all unless the user sets a number; takes some seconds."""

BATCHES = 1024
"""Smallest number of batches stored over all replications."""

STEP = 8
"""Largest factor by which a run that is too short is lengthened."""

SURELY_GROWING = 4_000_000
"""Requests in all from which a queue that still grows counts as unstable."""


@dataclass(frozen=True)
class Length:
    """Length of runs: requests of each replication, of which `warm` are left out."""

    requests: int
    warm: int
    replications: int

    @property
    def in_all(self) -> int:
        return self.requests * self.replications

    @property
    def batch(self) -> int:
        """Requests in a batch: a power of two, so that runs of any two lengths are comparable."""
        return int(max(PIECES, 2 ** math.floor(math.log2(max(1.0, self.in_all / BATCHES)))))


def length_of(requests: int, replications: int, warmup: float | None, far: float = 0.0) -> Length:
    """Return runs of `requests` each. `warmup` is the share left out; None derives it from the reach `far`."""
    forgotten = min(max(WARM_SHARE * requests, WARM * far), requests / 2)
    return Length(requests, int(forgotten if warmup is None else warmup * requests), replications)


def wanted(percentiles: Sequence[float], far: float) -> int:
    """Return the requests in all that the percentiles need at the reach `far`, limited by MOST."""
    beyond = max(1.1 * SPREAD[0] * EXCEEDANCES / min(share, 1 - share) for share in percentiles or (0.5,))
    return math.ceil(min(MOST, max(MANY, beyond, REACHES * far)))


def divided(in_all: int, replications: int, warmup: float | None, far: float) -> Length:
    """Split `in_all` counted requests into replications."""
    replications = max(replications, math.ceil(in_all / LONGEST))
    each = math.ceil(in_all / replications)
    if warmup is not None:
        return length_of(math.ceil(each / (1 - warmup)), replications, warmup)
    return length_of(each + math.ceil(WARM * far), replications, None, far)


def measured_reach(pilot: Callable[[Length], Summary], most: int) -> float:
    """Measure the reach on runs of `pilot` of up to `most` requests; 0 if the queue grows without bound."""
    requests = min(PILOT, most)
    while True:
        found = [pilot(Length(requests, 0, 1))]
        far = reach(found)
        if requests >= PILOT_REACHES * far:
            return far
        if requests > PILOT and grows(found):
            return 0.0
        if requests >= most:
            return far
        requests = min(most, max(2 * requests, min(STEP * requests, math.ceil(PILOT_REACHES * far))))


def longer(summaries: Sequence[Summary], length: Length, warmup: float | None) -> Length | None:
    """Return a longer length for runs that are too short; None if they are long enough or more requests cannot help."""
    if length.in_all >= MOST:
        return None
    if grows(summaries):
        if length.in_all >= SURELY_GROWING:
            return None
        return divided(STEP * length.in_all, length.replications, warmup, 0.0)
    if all(interval(summaries, name).trusted for name in summaries[0].names):
        return None
    far = reach(summaries)
    in_all = min(MOST, STEP * length.in_all, max(2 * length.in_all, wanted(summaries[0].percentiles, far)))
    return divided(in_all, length.replications, warmup, far)
