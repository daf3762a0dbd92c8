"""Store response times of many requests in little memory: counts by bin and by batch of consecutive requests.

Bins follow the leading bits of a float64: 512 bins an octave, at most 0.2 % wide. Sketches add up, so percentiles are
those of all requests of all replications. Batches are numbered from the start of a run, warm-up included, so that a
number means the same requests under every policy. Interpolation and its error: docs/theory/simulation.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.compiled import compiled
from latfit.stats import FloatArray

SHIFT = 43
"""Low bits of a float64 that a bin drops; nine bits of the fraction stay."""

LEAST = 2.0**-30
"""ms; shorter times go into the lowest bin."""

WIDEST, MOST_BINS = 3, 2048
"""Batches use bins up to 2^WIDEST wide, to need at most MOST_BINS of them."""

PIECES = 16
"""Pieces of a batch whose times are summed separately, because short pieces show autocorrelation best."""

LEANS = 2.5
"""Significant offset of a bin's mean from its middle, times √(requests): four standard errors of a uniform spread."""

NEVER = -1
LEAST_BITS = int(np.float64(LEAST).view(np.int64))


@dataclass(frozen=True, eq=False)
class Sketch:
    """Histogram of one run.

    Attributes
    ----------
    length
        Requests in a batch, a multiple of PIECES.
    started
        Number of the first batch.
    first
        Number of the first bin, a multiple of 2^WIDEST.
    counts
        Requests (k, bins / 2^wider) by batch and wide bin.
    totals, low, high, mass
        Count, smallest time, largest time and sum of times in each bin (bins,), in ms; 0 if empty.
    sums, sizes
        Sum of times in ms and count in each piece (k * PIECES,).
    """

    length: int
    started: int
    first: int
    wider: int
    counts: NDArray[np.unsignedinteger]
    totals: NDArray[np.int64]
    low: FloatArray
    high: FloatArray
    mass: FloatArray
    sums: FloatArray
    sizes: FloatArray

    @property
    def batches(self) -> int:
        return len(self.counts)

    @property
    def batch_sums(self) -> FloatArray:
        """Sum of times in each batch (k,), ms."""
        return np.asarray(self.sums.reshape(-1, PIECES).sum(axis=1))

    @property
    def batch_sizes(self) -> FloatArray:
        """Requests in each batch (k,)."""
        return np.asarray(self.sizes.reshape(-1, PIECES).sum(axis=1))

    def doubled(self) -> "Sketch":
        """Merge pairs of batches into batches of twice the length."""
        before = self.started % 2
        after = (before + self.batches) % 2
        kept = np.unique([0, *range(before, self.batches, 2)])[: self.batches]

        def pairs(column: FloatArray) -> FloatArray:
            padded = np.pad(column, (before * PIECES, after * PIECES))
            return np.asarray(padded.reshape(-1, 2).sum(axis=1))

        return replace(
            self,
            length=2 * self.length,
            started=self.started // 2,
            counts=np.add.reduceat(self.counts, kept, axis=0, dtype=_integers(2 * self.length)),
            sums=pairs(self.sums),
            sizes=pairs(self.sizes),
        )


class Place(NamedTuple):
    """Position of a time in the distribution: its bin, and the share of the bin's requests at or below it."""

    bin: int
    share: float


@dataclass(frozen=True, eq=False)
class Pool:
    """All requests of several sketches; `reached` (bins,) is the cumulative count."""

    first: int
    totals: NDArray[np.int64]
    low: FloatArray
    high: FloatArray
    mass: FloatArray
    reached: NDArray[np.int64]

    @property
    def size(self) -> int:
        return int(self.reached[-1]) if len(self.reached) else 0

    @property
    def mean(self) -> float:
        """Mean of all times, ms."""
        return float(self.mass.sum()) / self.size

    def place(self, share: float) -> Place:
        """Locate the smallest time that a share of the requests does not exceed."""
        column, inside = self._rank(share)
        count = int(self.totals[column])
        at_low, at_high = self._ends(column)
        if inside <= at_low:
            inside = at_low
        elif inside > count - at_high:
            inside = count
        return Place(self.first + column, inside / count)

    def place_of(self, time: float) -> Place:
        """Locate a time in ms, clipped to the range of all requests."""
        bits = max(int(np.float64(time).view(np.int64)), LEAST_BITS) if time > 0 else LEAST_BITS
        column = (bits >> SHIFT) - self.first
        if not 0 <= column < len(self.totals):
            return Place(self.first, 0.0) if column < 0 else Place(self.first + len(self.totals) - 1, 1.0)
        low, high, count = float(self.low[column]), float(self.high[column]), int(self.totals[column])
        if time < low or not count:
            return Place(self.first + column, 0.0)
        if time >= high:
            return Place(self.first + column, 1.0)
        at_low, at_high = self._ends(column)
        inside = at_low + (count - at_low - at_high) * (time - low) / (high - low)
        return Place(self.first + column, inside / count)

    def above(self, time: float) -> float:
        """Return the share of requests that take longer than a time in ms."""
        place = self.place_of(time)
        column = place.bin - self.first
        rest = (1 - place.share) * int(self.totals[column])
        return (self.size - int(self.reached[column]) + rest) / self.size

    def value(self, share: float) -> float:
        """Return the quantile of a share in ms."""
        column, inside = self._rank(share)
        low, high, count = float(self.low[column]), float(self.high[column]), int(self.totals[column])
        at_low, at_high = self._ends(column)
        between = count - at_low - at_high
        if inside <= max(at_low, 1):
            return low
        if inside > count - at_high or between <= 1:
            return high
        return low + (high - low) * min(1.0, max(0.0, (inside - at_low - 1) / (between - 1)))

    def _rank(self, share: float) -> tuple[int, float]:
        """Return the bin of a share, and the rank within the bin."""
        rank = min(self.size, max(1, int(np.ceil(share * self.size - 1e-9))))
        column = int(np.searchsorted(self.reached, rank))
        return column, float(rank - (int(self.reached[column]) - int(self.totals[column])))

    def _ends(self, column: int) -> tuple[float, float]:
        """Return the requests with exactly the bin's smallest and largest time, in excess of a uniform spread."""
        low, high, count = float(self.low[column]), float(self.high[column]), int(self.totals[column])
        if high <= low:
            return float(count), 0.0
        # Rounding of the sum can put the mean outside a narrow bin.
        lean = min(1.0, max(-1.0, 2 * (float(self.mass[column]) / count - low) / (high - low) - 1))
        if abs(lean) < LEANS / math.sqrt(count):
            return 0.0, 0.0
        return count * max(0.0, -lean), count * max(0.0, lean)

    def wide_share(self, place: Place, wider: int) -> float:
        """Return the share of requests at or below a place within its wide bin."""
        column = place.bin - self.first
        start = column >> wider << wider
        below, own = int(self.totals[start:column].sum()), int(self.totals[column])
        whole = int(self.totals[start : start + (1 << wider)].sum())
        return (below + place.share * own) / whole if whole else 0.0


def sketch_of(times: FloatArray, warm: int, length: int) -> Sketch:
    """Build the sketch of a run.

    Parameters
    ----------
    times
        Response times (n,) in ms in order of arrival; NaN for requests never served.
    warm
        Requests left out at the start.
    length
        Requests in a batch, a multiple of PIECES.
    """
    times = np.ascontiguousarray(times)
    bits, started = times.view(np.int64), warm // length
    first, last = _span(times, bits, warm)
    first = first >> WIDEST << WIDEST
    bins = (((last - first) >> WIDEST) + 1) << WIDEST if last != NEVER else 0
    wider = next(w for w in range(WIDEST + 1) if bins >> w <= MOST_BINS or w == WIDEST)
    batches = (len(times) - 1) // length - started + 1 if last != NEVER else 0
    counts = np.zeros((batches, bins >> wider), _integers(length))
    by_bin = (np.zeros(bins, np.int64), np.zeros(bins), np.zeros(bins), np.zeros(bins))
    by_piece = np.zeros(batches * PIECES), np.zeros(batches * PIECES)
    _count(times, bits, (warm, length, started, first, wider), counts, by_bin, by_piece)
    return Sketch(length, started, first, wider, counts, *by_bin, *by_piece)


def order_statistics(times: FloatArray, sketch: Sketch, warm: int, shares: Sequence[float]) -> FloatArray:
    """Return the exact smallest times (p,) in ms that shares of the requests do not exceed; NaN without requests."""
    pool = pooled([sketch])
    if not pool.size:
        return np.full(len(shares), np.nan)
    bits = times.view(np.int64)
    places = [pool.place(share).bin for share in shares]
    wanted = np.zeros(len(pool.totals), np.bool_)
    wanted[np.array(places) - pool.first] = True
    members = np.sort(_members(times, bits, warm, pool.first, wanted, int(pool.totals[wanted].sum())))
    before = np.cumsum(np.where(wanted, pool.totals, 0))
    found = []
    for share, bin_ in zip(shares, places, strict=True):
        column = bin_ - pool.first
        rank = min(pool.size, max(1, int(np.ceil(share * pool.size - 1e-9))))
        found.append(members[rank - pool.reached[column] + before[column] - 1])
    return np.array(found)


def pooled(sketches: Sequence[Sketch]) -> Pool:
    """Merge all requests of the sketches."""
    kept = [each for each in sketches if len(each.totals)]
    if not kept:
        none, empty = np.empty(0, np.int64), np.empty(0)
        return Pool(0, none, empty, empty, empty, none)
    first = min(each.first for each in kept)
    bins = max(each.first + len(each.totals) for each in kept) - first
    totals, low, high, mass = np.zeros(bins, np.int64), np.full(bins, np.inf), np.zeros(bins), np.zeros(bins)
    for each in kept:
        own = slice(each.first - first, each.first - first + len(each.totals))
        totals[own] += each.totals
        low[own] = np.where(each.totals > 0, np.minimum(low[own], each.low), low[own])
        high[own] = np.maximum(high[own], each.high)
        mass[own] += each.mass
    return Pool(first, totals, low, high, mass, np.cumsum(totals))


def at_most(sketch: Sketch, pool: Pool, place: Place) -> tuple[FloatArray, float]:
    """Return the expected requests (k,) of each batch at or below a place, and the variance of their sum left out."""
    found = np.zeros(sketch.batches)
    column = (place.bin - sketch.first) >> sketch.wider
    if column < 0 or not sketch.batches:
        return found, 0.0
    share = pool.wide_share(place, sketch.wider)
    inside = _reach(sketch.counts, column, share, found)
    return found, share * (1 - share) * inside


def _integers(most: int) -> type[np.unsignedinteger]:
    """Return the smallest unsigned type that holds counts up to `most`."""
    return np.uint16 if most < 1 << 16 else np.uint32


@compiled
def _bin(took: float, bits: int) -> int:
    return (bits if took > LEAST else LEAST_BITS) >> SHIFT


@compiled
def _span(times: Any, bits: Any, warm: int) -> tuple[int, int]:
    """Return the bins of the smallest and the largest time."""
    low, high = np.inf, -1.0
    least, most = NEVER, NEVER
    for i in range(warm, len(times)):
        took = times[i]
        if took < low:
            low, least = took, _bin(took, bits[i])
        if took > high:
            high, most = took, _bin(took, bits[i])
    return least, most


@compiled
def _count(times: Any, bits: Any, how: Any, counts: Any, by_bin: Any, by_piece: Any) -> None:
    """Fill by_bin (totals, low, high, mass) and by_piece (sums, sizes); see `Sketch`."""
    warm, length, started, first, wider = how
    totals, low, high, mass = by_bin
    sums, sizes = by_piece
    i, piece = warm, length // PIECES
    for k in range(len(sums)):
        total, size = 0.0, 0
        end = min(len(times), started * length + (k + 1) * piece)
        while i < end:
            took = times[i]
            if took == took:
                place = _bin(took, bits[i]) - first
                counts[k // PIECES, place >> wider] += 1
                if totals[place] == 0:
                    low[place] = high[place] = took
                elif took < low[place]:
                    low[place] = took
                elif took > high[place]:
                    high[place] = took
                totals[place] += 1
                mass[place] += took
                total += took
                size += 1
            i += 1
        sums[k], sizes[k] = total, size


@compiled
def _members(times: Any, bits: Any, warm: int, first: int, wanted: Any, count: int) -> Any:
    """Return the times (count,) in the wanted bins."""
    found = np.empty(count)
    k = 0
    for i in range(warm, len(times)):
        if times[i] == times[i] and wanted[_bin(times[i], bits[i]) - first]:
            found[k] = times[i]
            k += 1
    return found


@compiled
def _reach(counts: Any, column: int, share: float, found: Any) -> int:
    """Count requests (k,) below a column plus `share` of that column, into `found`; return the column's total."""
    inside = 0
    for k in range(len(counts)):
        total = 0
        for j in range(min(column, counts.shape[1])):
            total += counts[k, j]
        own = counts[k, column] if column < counts.shape[1] else 0
        found[k] = total + share * own
        inside += own
    return inside
