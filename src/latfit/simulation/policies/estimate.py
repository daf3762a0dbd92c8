"""Estimates of response times with intervals: docs/theory/simulation.md, "Statistics of response times".

Batch means, with batches much longer than the "reach", the correlation length in requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from latfit.histogram import Histogram, histogram_of, pooled
from latfit.records import Number, Record
from latfit.simulation.policies.replication import Replication, Totals
from latfit.simulation.summary import LEVEL, PERCENTILES, Interval
from latfit.stats import FloatArray, student_quantile

LEAST_BATCHES, BATCHES = 20, 60  # for a standard error
EXCEEDANCES = 100  # requests beyond a percentile in each batch, at least
APART = 150  # batch length over the reach of correlation
RESOLVED = 100
SURE = 3.0
SATURATED = 0.35  # lag-one correlation from which pieces are too short to show the reach
PIECES = 1 << 14  # of all runs, whose mean times show the correlation
GROWTH = 0.75  # exponent of growth over time: between 1/2 (at capacity) and 1 (above capacity)

STEADY, VARYING, RECORDED = "steady", "varying", "recorded"
"""Loads: stationary; varying over time and drawn anew for each replication; the same requests in every one."""


@dataclass(frozen=True)
class Length:
    """Requests of each replication, of which `warm` are left out."""

    requests: int
    warm: int
    replications: int

    @property
    def in_all(self) -> int:
        return self.requests * self.replications


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics of one replication."""

    batches: tuple[Histogram, ...]  # response times of consecutive batches of equally many requests
    pieces: FloatArray  # mean response time (k,) of stretches of `piece` requests, ms; NaN if none was served
    piece: int
    by_class: tuple[Histogram, ...]  # response times of each class; empty with one class
    load: str  # STEADY, VARYING or RECORDED
    length: Length
    met: int | None  # requests that met their deadline; None if there is no deadline
    served: Any  # requests (2,) by path
    unserved: int
    requests: int
    totals: Totals

    @property
    def counted(self) -> int:
        return sum(each.size for each in self.batches)

    @property
    def whole(self) -> FloatArray:
        """Mean and percentiles (4,) of all requests, ms."""
        return describe(self.batches)


def summarise(run: Replication, length: Length, sla_ms: float = math.inf, load: str = STEADY) -> Summary:
    warm = min(run.load.warm, len(run.response_ms))
    times, path = run.response_ms[warm:], run.path[warm:]
    ids = run.load.class_id[warm : warm + len(times)]
    count = 1 if load == VARYING else BATCHES if load == RECORDED else math.ceil(BATCHES / length.replications)
    piece = max(1, length.in_all // PIECES)
    return Summary(
        batches=tuple(histogram_of(part) for part in np.array_split(times, count)),
        pieces=_means(times, piece),
        piece=piece,
        by_class=tuple(histogram_of(times[ids == c]) for c in range(len(run.load.deadlines))) if len(ids) else (),
        load=load,
        length=length,
        met=_met(run, times, sla_ms),
        served=np.array([np.count_nonzero(path == p) for p in range(2)]),
        unserved=int(np.count_nonzero(run.path < 0)),
        requests=len(run.arrive_ms),
        totals=run.totals,
    )


def _met(run: Replication, times: FloatArray, sla_ms: float) -> int | None:
    load, rows = run.load, slice(run.load.warm, run.load.warm + len(times))
    if not np.isfinite([*load.deadlines, sla_ms]).any():
        return None
    of_class = load.deadlines[load.class_id[rows]] if len(load.class_id) else load.deadlines[0]
    deadlines = load.own_deadlines[rows] if len(load.own_deadlines) else of_class
    return int(np.count_nonzero(times <= np.minimum(deadlines, sla_ms)))


def describe(histograms: Sequence[Histogram]) -> FloatArray:
    """Return mean and percentiles (4,): the smallest times that a share p does not exceed."""
    pool = pooled(histograms)
    return np.array([pool.mean, *(pool.value(p) for p in PERCENTILES.values())])


class BatchErrors(Record, frozen=True):
    """Contributions of batches to the error of an estimate."""

    errors: list[float]  # by batch, in the unit of the estimate
    requests: float  # that count
    beyond: Number  # requests beyond the percentile; NaN for a mean
    # Requests of a replication, warm-up and replications: batches of equal lengths hold the same requests
    length: tuple[int, int, int]
    reach: float  # correlation length in requests

    @property
    def needed(self) -> int:
        """Requests that a trusted interval needs."""
        scarce = 0.0 if math.isnan(self.beyond) else LEAST_BATCHES * EXCEEDANCES * self.requests / max(self.beyond, 1)
        return math.ceil(max(LEAST_BATCHES * APART * self.reach, scarce) * (1 - 1e-9))

    def half_width(self) -> tuple[float, int]:
        """Return half of the interval and its number of batches; NaN and 0 if too few lie beyond the percentile."""
        beyond = math.inf if math.isnan(self.beyond) else self.beyond
        if beyond < LEAST_BATCHES * EXCEEDANCES or len(self.errors) < 2:
            return math.nan, 0
        most = self.requests / (APART * self.reach) if self.reach else math.inf
        count = min(len(self.errors), max(LEAST_BATCHES, round(min(BATCHES, beyond / EXCEEDANCES, most))))
        groups = np.array([part.sum() for part in np.array_split(np.array(self.errors), count)])
        left = self.reach * count / self.requests
        error = math.sqrt(count / (count - 1) * float(groups @ groups) * (1 + 2 * left))
        return student_quantile(count - 1, 0.5 + LEVEL / 2) * error, count


@dataclass(frozen=True)
class Estimate(Interval):
    batches: int = 0
    trusted: bool = False
    needed: int = 0


def estimate(summaries: Sequence[Summary], share: float | None) -> tuple[Estimate, BatchErrors]:
    """Return the mean, or the percentile of a share, over replications with its interval and its errors."""
    pool = pooled([batch for each in summaries for batch in each.batches])
    if not pool.size:
        return Estimate(math.nan, math.nan, math.nan), BatchErrors([], 0, math.nan, (0, 0, 0), 0)
    value = pool.mean if share is None else pool.value(share)
    found = _errors(summaries, pool, value, share)
    half, batches = found.half_width()
    low, high = value - half, value + half
    if share is not None:
        low, high = _ends(pool, share, half)
        slope = (high - low) / (2 * half) if half > 0 else 0.0 if half == 0 else math.nan
        # A larger share at or below a time means a smaller percentile, hence the sign.
        found = structs.replace(found, errors=[-slope * each for each in found.errors])
    # Each replication of a steady load is to be much longer than the effect of its empty start.
    forgets = summaries[0].load != STEADY or found.length[0] - found.length[1] >= APART * found.reach
    trusted = batches >= LEAST_BATCHES and forgets and found.requests >= found.needed and math.isfinite(half)
    return Estimate(value, min(low, value), max(high, value), batches, trusted, found.needed), found


def _errors(summaries: Sequence[Summary], pool: Histogram, value: float, share: float | None) -> BatchErrors:
    """Return the contributions of batches to the error of the mean in ms, or of the share at or below `value`."""
    runs, first, rows = [each.batches for each in summaries], summaries[0], [each.pieces for each in summaries]
    batches, same, beyond = [each for run in runs for each in run], 1, math.nan
    if first.load == RECORDED:
        batches, same, rows = [pooled(each) for each in zip(*runs, strict=True)], len(runs), [np.mean(rows, axis=0)]
    sizes = np.array([each.size for each in batches], dtype=np.float64)
    sums = np.array([each.mass.sum() for each in batches])
    if share is not None:
        place, beyond = pool.share_in_bin(value), min(share, 1 - share) * pool.size / same
        sums = np.array([each.at_most(*place) for each in batches])
    errors = (sums - sums.sum() / pool.size * sizes) / pool.size
    length = (first.length.requests, first.length.warm, len(summaries))
    reach = 0.0 if first.load == VARYING else reach_of(rows, first.piece)
    return BatchErrors(errors.tolist(), pool.size / same, beyond, length, reach)


def _ends(pool: Histogram, share: float, half: float) -> tuple[float, float]:
    if math.isnan(half):
        return math.nan, math.nan
    low = pool.value(share - half) if share - half > 0 else 0.0
    return low, pool.value(share + half) if share + half < 1 else math.nan


def reach_in(times: FloatArray) -> float:
    """Measure the correlation length in requests of the times (n,) of one run."""
    piece = max(1, len(times) // PIECES)
    return reach_of([_means(times, piece)], piece)


def reach_of(rows: Sequence[FloatArray], length: int) -> float:
    """Measure the correlation length in requests from mean times of pieces of `length` requests, a row each run."""
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
        if r - (found / length if r < SATURATED else 0.0) > SURE * error:
            found = max(found, r * length)
        if count < 2 * RESOLVED:
            return found
        rows, length = [row[: len(row) // 2 * 2].reshape(-1, 2).mean(axis=1) for row in rows], 2 * length


def _means(times: FloatArray, piece: int) -> FloatArray:
    starts = np.arange(0, len(times), piece)
    if not len(starts):
        return np.empty(0)
    served = np.isfinite(times)
    counts = np.add.reduceat(served, starts, dtype=np.float64)
    return np.add.reduceat(np.where(served, times, 0.0), starts) / np.where(counts > 0, counts, math.nan)


def grows(summaries: Sequence[Summary]) -> bool:
    """Return whether response times of a steady load grow without bound."""
    if summaries[0].load != STEADY:
        return False
    stretches = [each.pieces[np.isfinite(each.pieces)] for each in summaries]
    coarse = [np.array([part.mean() for part in np.array_split(row, max(1, len(row) // 16))]) for row in stretches]
    return rises(coarse, summaries[0].length.warm / max(1, summaries[0].requests))


def rises(series: Sequence[FloatArray], start: float) -> bool:
    """Return whether averages (k,) over stretches of each run grow without bound; `start`: the share left out.

    They do if the last third exceeds the first by more than the ratio at exponent GROWTH and, in most runs, never falls
    back to the mean of the first.
    """
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


MANY = 500_000  # requests in all at first, doubled until there are REACHES correlation lengths
REACHES = 64 * APART
WARM_SHARE = 0.05  # share of a run that is left out at its start
LONGEST = 2_000_000  # requests in one replication, limited by memory; longer runs are split into replications
MOST = 100_000_000  # requests in all unless the user sets a number; takes some seconds
STEP = 8  # largest factor by which a run that is too short is lengthened
SURELY_GROWING = 4_000_000  # requests in all from which a queue that still grows counts as unstable


def length_of(requests: int, replications: int, warmup: float | None) -> Length:
    return Length(requests, int((WARM_SHARE if warmup is None else warmup) * requests), replications)


def divided(in_all: float, replications: int, warmup: float | None) -> Length:
    """Split at least `in_all` counted requests, in powers of two of MANY, into replications."""
    counted = MANY * 2 ** math.ceil(math.log2(min(max(in_all, MANY), MOST / 2) / MANY))
    replications = max(replications, math.ceil(counted / LONGEST))
    share = WARM_SHARE if warmup is None else warmup
    return length_of(math.ceil(counted / replications / (1 - share)), replications, warmup)


def longer(summaries: Sequence[Summary], length: Length, warmup: float | None) -> Length | None:
    """Return a longer length for runs that are too short; None if they suffice or more requests cannot help."""
    counted = sum(each.counted for each in summaries)
    if length.in_all >= MOST / 2 or not counted:
        return None
    if grows(summaries):
        needed = math.inf if length.in_all < SURELY_GROWING else 0.0
    else:
        needed = REACHES * reach_of([each.pieces for each in summaries], summaries[0].piece)
    if counted >= 0.9 * needed:
        return None
    return divided(min(needed, STEP * (length.in_all - length.warm * length.replications)), length.replications, warmup)
