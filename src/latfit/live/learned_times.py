"""Batch times of one path, learned while it serves: whether T(b) in use still applies, and what replaces it.

Two one-sided CUSUMs of signs (Page 1954) find a shift of the median by more than 10 %. Medians and a Theil-Sen slope of
the batches since the shift give the new times.
Derivation, false alarms and delays: docs/theory/planning.md#learning-while-it-serves.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from latfit.fitting import long_run_variance
from latfit.live.executor import padded_size
from latfit.stats import FloatArray

MARGIN = math.log(1.1)  # shift of ln T that the times in use tolerate
RUN_LENGTH = 1_000_000  # mean batches between false alarms of a path, at least
STAKES = (0.25, 0.6)  # 2p - 1 for the shares p of slow batches that the CUSUMs are tuned to
STEPS = tuple((math.log1p(stake), math.log1p(-stake)) for stake in STAKES)
THRESHOLD = math.log(2 * len(STAKES) * RUN_LENGTH)  # two directions

WINDOW = 256  # batches that an estimate uses, at most
MIN_BATCHES = 30  # and at least
SETTLED = 200  # batches after which new times are refined once, and kept if the path fails
MIN_REFINEMENT = 0.03  # change of ln T below which that refinement is not worth a switch
COLD_BATCHES = 5  # first batches of a path, or after a failure: caches and clocks are cold
Z99 = 2.576  # standard errors of a two-sided 99 % interval
MAX_SLOPE_ERROR = 0.1  # half width of the slope's interval above which sizes do not determine it


@dataclass(frozen=True)
class Correction:
    """ln(T / planned T) = level + slope (ln b - centre) between sizes low and high, constant beyond them."""

    level: float = 0.0
    slope: float = 0.0
    centre: float = 0.0
    low: int = 1
    high: int = 1

    def at(self, sizes: FloatArray) -> FloatArray:
        """Return ln(T / planned T) for batches of these sizes (n,)."""
        return np.asarray(self.level + self.slope * (np.log(np.clip(sizes, self.low, self.high)) - self.centre))


@dataclass(frozen=True)
class Estimate:
    """Last batches: mean ln(T in use / planned T), ln(T / T in use), and the half width of its 99 % interval."""

    correction: Correction
    used: float
    shift: float
    half_width: float


class SignCusum:
    """Detect that more than half of the batches lie beyond the margin, in one direction."""

    def __init__(self) -> None:
        self._sums = [0.0] * len(STAKES)
        self._batches = [0] * len(STAKES)

    @property
    def peak(self) -> float:
        return max(self._sums)

    @property
    def batches_since_change(self) -> int:
        """Return the batches since the largest sum left zero."""
        return self._batches[self._sums.index(self.peak)]

    def add(self, beyond: bool) -> bool:
        """Add a batch. Return whether the alarm is on."""
        for k, (rise, fall) in enumerate(STEPS):
            self._batches[k] = self._batches[k] + 1 if self._sums[k] > 0 else 1
            self._sums[k] = max(self._sums[k] + (rise if beyond else fall), 0.0)
        return self.peak >= THRESHOLD


class LearnedTimes:
    """Times of one path.

    Parameters
    ----------
    planned_ms
        T(1), T(2), ... of the plan, shape (largest,), ms.
    buckets
        Sizes that batches are padded to.

    Attributes
    ----------
    in_use, good
        Correction that the router uses; the last one in use for SETTLED batches.
    batches, dropped
        Batches that counted; batches that were cold, failed, or ran beside a failure.
    """

    def __init__(self, planned_ms: FloatArray, buckets: Sequence[int] = ()) -> None:
        self.planned_ms = np.asarray(planned_ms, dtype=np.float64)
        self._sizes = np.arange(1.0, len(self.planned_ms) + 1)
        self._ln_planned = [0.0, *np.log(self.planned_ms).tolist()]
        self._shape = [padded_size(b, buckets) for b in range(len(self._ln_planned))]
        self._shapes_seen: set[int] = set()
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)  # size, ln(T / planned T), end
        self._cold, self._failed_until = COLD_BATCHES, -math.inf
        self.batches = self.dropped = 0
        self.good = Correction()
        self.adopt(self.good)

    @property
    def is_settled(self) -> bool:
        return self.in_use == self.good

    def times_ms(self, correction: Correction) -> FloatArray:
        """Return T(1), T(2), ... in ms, shape (largest,)."""
        return np.asarray(self.planned_ms * np.exp(correction.at(self._sizes)))

    def adopt(self, correction: Correction) -> None:
        """Use this correction from now on."""
        self.in_use, self._age = correction, 0
        self._ln_used = [0.0, *correction.at(self._sizes).tolist()]
        self._reset()

    def add_batch(self, size: int, began_ms: float, ended_ms: float) -> bool:
        """Add a batch that ran to its end. Return whether `propose` may have new times."""
        if began_ms < self._failed_until or self._cold or self._shape[size] not in self._shapes_seen:
            self._cold = max(self._cold - (began_ms >= self._failed_until), 0)
            self._shapes_seen.add(self._shape[size])  # an engine compiles a new shape, or captures its graph
            self.dropped += 1
            return False
        ratio = math.log(max(ended_ms - began_ms, 1e-6)) - self._ln_planned[size]
        self._recent.append((size, ratio, ended_ms))
        self.batches += 1
        self._age += 1
        if self._age == SETTLED:
            self.good = self.in_use
        excess = ratio - self._ln_used[size]
        slower, faster = self._slower.add(excess > MARGIN), self._faster.add(excess < -MARGIN)
        return slower or faster or self._age == SETTLED

    def add_failure(self, began_ms: float, ended_ms: float) -> None:
        """Forget the batches that ran beside a failed one, and the evidence so far."""
        self._cold, self._failed_until = COLD_BATCHES, ended_ms
        while self._recent and self._recent[-1][2] >= began_ms:
            self._recent.pop()
        self._reset()
        self.dropped += 1

    def propose(self) -> Correction | None:
        """Return new times, or None if those in use still apply."""
        alarm = max(self._slower, self._faster, key=lambda each: each.peak)
        is_alarm = alarm.peak >= THRESHOLD
        found = self.estimate(alarm.batches_since_change if is_alarm else self._age)
        least = MARGIN / 2 if is_alarm else MIN_REFINEMENT
        if found is None or abs(found.shift) <= max(found.half_width, least):
            self._reset()
            return None
        return found.correction

    def estimate(self, batches: int = WINDOW) -> Estimate | None:
        """Estimate the correction from the last batches; None if there are fewer than MIN_BATCHES."""
        n = min(batches, len(self._recent))
        if n < MIN_BATCHES:
            return None
        last = np.array(list(islice(self._recent, len(self._recent) - n, None)))
        sizes, ratio = last[:, 0], last[:, 1]
        used = self.in_use.at(sizes)
        shift, half_width = _median_interval(ratio - used)
        moved = replace(self.in_use, level=self.in_use.level + shift)
        slope, error = _theil_sen(np.log(sizes), ratio)
        if error <= MAX_SLOPE_ERROR and abs(slope - self.in_use.slope) > error:
            x = np.log(sizes)
            centre = float(x.mean())
            level = float(np.median(ratio - slope * (x - centre)))
            moved = Correction(level, slope, centre, int(sizes.min()), int(sizes.max()))
        return Estimate(moved, float(used.mean()), shift, half_width)

    def _reset(self) -> None:
        self._slower, self._faster = SignCusum(), SignCusum()


def _median_interval(values: FloatArray) -> tuple[float, float]:
    """Return the median of a series (n,) and the half width of its 99 % interval, allowing for autocorrelation."""
    median = float(np.median(values))
    signs = np.sign(values - median)
    reach = Z99 * math.sqrt(max(long_run_variance(signs - signs.mean()), 1.0) / len(values)) / 2
    low, high = np.quantile(values, (max(0.5 - reach, 0.0), min(0.5 + reach, 1.0)))
    return median, max(high - median, median - low)


def _theil_sen(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Return the Theil-Sen slope of y over x (n,) and the half width of its 99 % interval (Sen 1968)."""
    from scipy.stats import theilslopes

    if np.ptp(x) == 0:
        return 0.0, math.inf
    found = theilslopes(y, x, alpha=0.99)
    return float(found.slope), float(max(found.high_slope - found.slope, found.slope - found.low_slope))
