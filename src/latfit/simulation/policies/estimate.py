"""Estimate means and percentiles of simulated response times, with confidence intervals, and choose run lengths.

The standard error comes from batch means, with batches much longer than the measured autocorrelation. The interval of
a percentile is read off the pooled distribution at the shares p ± t·s. The "reach" is the correlation length C in
requests. Derivation: docs/theory/simulation.md, "Statistics of response times".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from latfit.errors import WrongUsage
from latfit.histogram import Histogram, histogram_of, pooled
from latfit.records import Number, Record
from latfit.simulation.policies.replication import Replication
from latfit.simulation.summary import Interval
from latfit.stats import FloatArray

LEAST_BATCHES, BATCHES = 20, 60
"""For a standard error."""

EXCEEDANCES = 100
APART = 150
"""Batch length over the reach of correlation."""

RESOLVED = 100
SURE = 3.0
SATURATED = 0.35
"""Lag-one correlation from which pieces are too short to show the reach."""

PIECES = 1 << 14
"""Pieces of all runs whose mean times show the correlation."""

PERCENTILES = (0.5, 0.9, 0.99)
START = 0.1
"""Largest accepted bias of the empty start, over the standard error."""

GROWTH = 0.75
"""Exponent of growth over time: between 1/2 (at capacity) and 1 (above capacity)."""

STEADY, VARYING, RECORDED = "steady", "varying", "recorded"
"""Loads: stationary; varying over time and drawn anew for each replication; the same requests in every replication."""


@dataclass(frozen=True)
class Length:
    """Length of runs: requests of each replication, of which `warm` are left out."""

    requests: int
    warm: int
    replications: int

    @property
    def in_all(self) -> int:
        return self.requests * self.replications


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics of one replication.

    Attributes
    ----------
    percentiles
        Shares p, 0 to 1.
    batches
        Response times of consecutive batches of equally many requests.
    pieces
        Mean response time (k,) of consecutive stretches of `piece` requests, ms; NaN if none was served.
    by_class
        Response times of each class; empty with one class.
    load
        STEADY, VARYING or RECORDED.
    length
        Of the runs.
    met
        Requests that met their deadline.
    promised
        Whether there is any deadline.
    sizes, busy, served
        Batches by size (2, largest + 1), busy time in ms (2,) and requests (2,) by path.
    """

    percentiles: tuple[float, ...]
    batches: tuple[Histogram, ...]
    pieces: FloatArray
    piece: int
    by_class: tuple[Histogram, ...]
    load: str
    length: Length
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
        return sum(each.size for each in self.batches)

    @property
    def whole(self) -> FloatArray:
        """Mean and percentiles (1 + p,), ms."""
        return describe(self.batches, self.percentiles)


def summarise(
    run: Replication,
    length: Length,
    sla_ms: float = math.inf,
    percentiles: Sequence[float] = PERCENTILES,
    load: str = STEADY,
) -> Summary:
    """Summarise a run without the warm-up and requests that were never served."""
    warm = min(run.drawn.warm, len(run.response_ms))
    times, path = run.response_ms[warm:], run.path[warm:]
    met, promised = _met(run, times, sla_ms)
    ids = run.drawn.load.class_id
    own = ids[warm : warm + len(times)]
    count = 1 if load == VARYING else BATCHES if load == RECORDED else math.ceil(BATCHES / length.replications)
    piece = max(1, length.in_all // PIECES)
    return Summary(
        percentiles=tuple(percentiles),
        batches=tuple(histogram_of(part) for part in np.array_split(times, count)),
        pieces=_means(times, piece),
        piece=piece,
        by_class=tuple(histogram_of(times[own == c]) for c in range(run.drawn.classes)) if len(ids) else (),
        load=load,
        length=length,
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


def describe(histograms: Sequence[Histogram], percentiles: Sequence[float] = PERCENTILES) -> FloatArray:
    """Return mean and percentiles (1 + p,) of all requests: the smallest times that a share p does not exceed."""
    pool = pooled(histograms)
    return np.array([pool.mean, *(pool.value(p) for p in percentiles)])


class BatchErrors(Record, frozen=True):
    """Contributions of batches to the error of an estimate.

    Attributes
    ----------
    errors
        By batch, in the unit of the estimate.
    requests, beyond
        Requests that count, and those beyond the percentile; NaN for a mean.
    length
        Requests of a replication, warm-up and replications: batches of equal lengths hold the same requests.
    reach
        Correlation length in requests.
    """

    errors: list[float]
    requests: float
    beyond: Number
    length: tuple[int, int, int]
    reach: float

    @property
    def needed(self) -> int:
        """Requests that a trusted interval needs."""
        scarce = 0.0 if math.isnan(self.beyond) else LEAST_BATCHES * EXCEEDANCES * self.requests / max(self.beyond, 1)
        return math.ceil(max(LEAST_BATCHES * APART * self.reach, scarce) * (1 - 1e-9))

    def standard_error(self) -> tuple[float, int]:
        """Return the standard error and its number of batches; NaN and 0 if too few lie beyond the percentile."""
        beyond = math.inf if math.isnan(self.beyond) else self.beyond
        if beyond < LEAST_BATCHES * EXCEEDANCES or len(self.errors) < 2:
            return math.nan, 0
        most = self.requests / (APART * self.reach) if self.reach else math.inf
        count = min(len(self.errors), max(LEAST_BATCHES, round(min(BATCHES, beyond / EXCEEDANCES, most))))
        groups = np.array([part.sum() for part in np.array_split(np.array(self.errors), count)])
        left = self.reach * count / self.requests
        return math.sqrt(count / (count - 1) * float(groups @ groups) * (1 + 2 * left)), count


def interval(summaries: Sequence[Summary], statistic: str, level: float = 0.95) -> Interval:
    """Return the confidence interval of `mean`, `p50`, `p90` or `p99` over replications."""
    pool = pooled([batch for each in summaries for batch in each.batches])
    if not pool.size:
        return Interval(math.nan, math.nan, math.nan, 0, False)
    share = _share(summaries[0], statistic)
    value = pool.mean if share is None else pool.value(share)
    found = _errors(summaries, pool, value, share)
    error, batches = found.standard_error()
    half = _student(batches, level) * error
    low, high = (value - half, value + half) if share is None else _ends(pool, share, half)
    trusted = batches >= LEAST_BATCHES and found.requests >= found.needed and _forgets_start(found, summaries)
    return Interval(value, min(low, value), max(high, value), batches, trusted and math.isfinite(half), found.needed)


def error_parts(summaries: Sequence[Summary], statistic: str, level: float = 0.95) -> tuple[float, BatchErrors]:
    """Return an estimate in ms and the contributions of batches to its error in ms, for `paired`."""
    pool = pooled([batch for each in summaries for batch in each.batches])
    share = _share(summaries[0], statistic)
    value = pool.mean if share is None else pool.value(share)
    found = _errors(summaries, pool, value, share)
    if share is None:
        return value, found
    error, batches = found.standard_error()
    half = _student(batches, level) * error
    low, high = _ends(pool, share, half)
    slope = (high - low) / (2 * half) if half > 0 else 0.0 if half == 0 else math.nan
    # A larger share at or below a time means a smaller percentile, hence the sign.
    return value, structs.replace(found, errors=[-slope * each for each in found.errors])


def paired(first: tuple[float, BatchErrors], other: tuple[float, BatchErrors], level: float = 0.95) -> Interval:
    """Return the interval of other - first from the `error_parts` of both.

    Batches of equal lengths hold the same requests, whose common noise cancels; else the errors are independent.
    """
    value, (a, b) = other[0] - first[0], (first[1], other[1])
    fewest = min((a, b), key=lambda each: each.requests)
    if a.length == b.length:
        errors = [y - x for x, y in zip(a.errors, b.errors, strict=True)]
        gap = BatchErrors(errors, fewest.requests, fewest.beyond, a.length, max(a.reach, b.reach))
        error, batches = gap.standard_error()
    else:
        (one, k), (two, m) = a.standard_error(), b.standard_error()
        error, batches = math.hypot(one, two), min(k, m)
    half = _student(batches, level) * error
    needed = max(a.needed, b.needed)
    return Interval(value, value - half, value + half, batches, fewest.requests >= needed, needed)


def reach(summaries: Sequence[Summary]) -> float:
    """Return the correlation length of response times, in requests."""
    first = summaries[0]
    if first.load == VARYING:
        return 0.0
    rows = [each.pieces for each in summaries]
    if first.load == RECORDED:
        rows = [np.mean(rows, axis=0)]
    return reach_of(rows, first.piece)


def reach_in(times: FloatArray) -> float:
    """Measure the correlation length in requests of the times (n,) of one run, in order."""
    piece = max(1, len(times) // PIECES)
    return reach_of([_means(times, piece)], piece)


def reach_of(rows: Sequence[FloatArray], length: int) -> float:
    """Measure the correlation length C in requests from mean times of pieces of `length` requests, a row each run."""
    centre, found = np.nanmean(np.concatenate(rows)) if sum(map(len, rows)) else 0.0, 0.0
    rows = [np.nan_to_num(row - centre) for row in rows]
    while True:
        rows = [row for row in rows if len(row) > 1]
        count, pairs = sum(map(len, rows)), sum(len(row) - 1 for row in rows)
        square = sum(float(row @ row) for row in rows) / count if pairs else 0.0
        if square <= 0 or not math.isfinite(square):
            return found
        products = np.concatenate([row[1:] * row[:-1] for row in rows]) / square
        # Empirical error instead of 1/sqrt(pairs): two pieces that share one long queue are weak evidence.
        error = math.sqrt(float(products @ products)) / pairs
        r = float(products.sum()) / pairs + 1 / count
        expected = found / length
        if r - (expected if r < SATURATED else 0.0) > SURE * error:
            found = max(found, r * length)
        if count < 2 * RESOLVED:
            return found
        rows, length = [row[: len(row) // 2 * 2].reshape(-1, 2).mean(axis=1) for row in rows], 2 * length


def grows(summaries: Sequence[Summary]) -> bool:
    """Return whether response times of a steady load grow without bound.

    Above capacity a queue grows in proportion to time, at capacity as its square root. Growth is unbounded if the last
    third exceeds the first third by more than the ratio at exponent GROWTH and, in most runs, never falls back to the
    mean of the first third.
    """
    if summaries[0].load != STEADY:
        return False
    stretches = [each.pieces[np.isfinite(each.pieces)] for each in summaries]
    coarse = [np.array([part.mean() for part in np.array_split(row, max(1, len(row) // 16))]) for row in stretches]
    return rises(coarse, summaries[0].length.warm / max(1, summaries[0].requests))


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


def _errors(summaries: Sequence[Summary], pool: Histogram, value: float, share: float | None) -> BatchErrors:
    """Return the contributions of batches to the error of the mean in ms, or of the share at or below `value`."""
    runs = [each.batches for each in summaries]
    recorded = summaries[0].load == RECORDED
    batches = [pooled(each) for each in zip(*runs, strict=True)] if recorded else [each for run in runs for each in run]
    sizes = np.array([each.size for each in batches], dtype=np.float64)
    if share is None:
        sums = np.array([each.mass.sum() for each in batches])
    else:
        place = pool.share_in_bin(value)
        sums = np.array([each.at_most(*place) for each in batches])
    errors = (sums - sums.sum() / pool.size * sizes) / pool.size
    same = len(runs) if recorded else 1
    beyond = math.nan if share is None else min(share, 1 - share) * pool.size / same
    length, replications = summaries[0].length, len(summaries)
    return BatchErrors(
        errors.tolist(), pool.size / same, beyond, (length.requests, length.warm, replications), reach(summaries)
    )


def _means(times: FloatArray, piece: int) -> FloatArray:
    """Return the mean of the finite times in stretches of `piece` requests (k,)."""
    served = np.isfinite(times)
    starts = np.arange(0, len(times), piece)
    if not len(starts):
        return np.empty(0)
    counts = np.add.reduceat(served, starts, dtype=np.float64)
    return np.add.reduceat(np.where(served, times, 0.0), starts) / np.where(counts > 0, counts, math.nan)


def _student(batches: int, level: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(batches - 1, 0.5 + level / 2)) if batches > 1 else math.nan


def _forgets_start(found: BatchErrors, summaries: Sequence[Summary]) -> bool:
    """Return whether the bias of the empty start is below START standard errors; always true for loads that vary."""
    if found.reach <= 0 or summaries[0].load != STEADY:
        return True
    left = math.exp(-summaries[0].length.warm / (2 * found.reach))
    return left * math.sqrt(found.reach * len(summaries) ** 2 / found.requests) <= START


def _ends(pool: Histogram, share: float, half: float) -> tuple[float, float]:
    """Return the times at the ends of an interval of shares; NaN beyond all requests."""
    if math.isnan(half):
        return math.nan, math.nan
    low = pool.value(share - half) if share - half > 0 else 0.0
    return low, pool.value(share + half) if share + half < 1 else math.nan


def _share(summary: Summary, statistic: str) -> float | None:
    """Return the share of a percentile, None for the mean."""
    names = summary.names
    if statistic not in names:
        raise WrongUsage(f"{statistic!r} is not known", where="statistic", remedy=f"Take one of {', '.join(names)}.")
    return (None, *summary.percentiles)[names.index(statistic)]


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
"""Requests in all at first, doubled until there are REACHES correlation lengths."""
REACHES = 64 * APART
WARM_SHARE = 0.05
"""Share of a run that is left out at its start."""

LONGEST = 2_000_000
"""Requests in one replication, limited by memory; longer runs are split into replications."""

MOST = 100_000_000
"""Requests in all unless the user sets a number; takes some seconds."""

STEP = 8
"""Largest factor by which a run that is too short is lengthened."""

SURELY_GROWING = 4_000_000
"""Requests in all from which a queue that still grows counts as unstable."""


def length_of(requests: int, replications: int, warmup: float | None) -> Length:
    """Return runs of `requests` each. `warmup` is the share left out; None for WARM_SHARE."""
    return Length(requests, int((WARM_SHARE if warmup is None else warmup) * requests), replications)


def divided(in_all: float, replications: int, warmup: float | None) -> Length:
    """Split at least `in_all` counted requests, in powers of two of MANY, into replications.

    Policies at one load then mostly have equal lengths, so that their batches hold the same requests.
    """
    counted = MANY * 2 ** math.ceil(math.log2(min(max(in_all, MANY), MOST / 2) / MANY))
    replications = max(replications, math.ceil(counted / LONGEST))
    share = WARM_SHARE if warmup is None else warmup
    return length_of(math.ceil(counted / replications / (1 - share)), replications, warmup)


def wanted(percentiles: Sequence[float], far: float) -> float:
    """Return the requests in all that the percentiles need at the reach `far`."""
    return max(REACHES * far, *(1.1 * LEAST_BATCHES * EXCEEDANCES / min(p, 1 - p) for p in percentiles or (0.5,)), 0.0)


def longer(summaries: Sequence[Summary], length: Length, warmup: float | None) -> Length | None:
    """Return a longer length for runs that are too short; None if they are long enough or more requests cannot help."""
    if length.in_all >= MOST / 2:
        return None
    if grows(summaries):
        needed = math.inf if length.in_all < SURELY_GROWING else 0.0
    else:
        needed = wanted(summaries[0].percentiles, reach(summaries))
    if sum(each.counted for each in summaries) >= 0.9 * needed or not any(each.counted for each in summaries):
        return None
    return divided(min(needed, STEP * (length.in_all - length.warm * length.replications)), length.replications, warmup)
