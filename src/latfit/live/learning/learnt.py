"""How long a path's batches take, learnt while it serves: a correction of the times it was planned with.

ln T(b) of a path is that of the plan plus a level, plus a slope in ln b where sizes tell it. Three things are kept
apart: whether the times in use still hold, when they ceased to, and what holds now.

Whether. Let r be a batch's ln time less the one in use. Bets on the signs and on the ranks of r (`bets`) tell whether r
has moved by more than MARGIN; as long as it has not, false alarms of a path are RUN_LENGTH batches apart in the mean. A
spike shorter than LASTING is not believed, however sure it is. The change-point test of `fitting` judges a finished
run: asked after each batch it would alarm at some time for sure, which is why it is not asked here.

When. The change is dated where the bets for it last began to gain.

What. The level is the median of r over the batches since the change, the last WINDOW at the most, each weighted 1/2 as
much every HALF_LIFE batches: what a recursion with forgetting would hold, made anew when it is asked for, since ranks
know no recursion. Its interval is one of quantiles (no assumption on the shape), widened by the long-run variance of
the signs, as neighbours in time share their noise. The slope is Huber's M-estimate, taken only where its interval is
within +-SLOPE_KNOWN and without the one in use, so never from one size; sizes beyond those seen are corrected like the
nearest one seen. Where the slope is not known, the correction keeps its shape and moves.

Not listened to: the first COLD batches of a path and after a failure, the first of each size (an engine compiles it, or
captures a graph), batches that failed or ran beside one that did.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from latfit.fitting import long_run_variance
from latfit.live.executor import padded_size
from latfit.live.learning.bets import ENOUGH, MARGIN, Bets, Earlier
from latfit.stats import FloatArray, mad_sigma, weighted_quantile, weighted_quantiles

WINDOW, HALF_LIFE = 512, 200.0
FEWEST = 30
"""Batches that a level is taken from, at the least."""

LASTING = 36
"""Batches that a change has lasted before it is believed, however sure it is: a spike passes."""

SETTLED = 200
"""Batches after which times are taken to be good, and once more compared with what was measured."""

WORTH = 0.03
"""Least change that this second look adopts."""

COLD = 5
SURE = 2.576
"""Of normal estimates 99 % are within so many standard errors."""

BEND = 1.345
"""Residuals beyond so many standard deviations count as that many (Huber 1964)."""

SLOPE_KNOWN = 0.1
ROUNDS = 10


@dataclass(frozen=True)
class Correction:
    """ln of a batch's time over the planned one: `level` at `centre`, a value of ln b, and `slope` for each unit of ln
    b, between sizes `low` and `high`, beyond which it is constant."""

    level: float = 0.0
    slope: float = 0.0
    centre: float = 0.0
    low: int = 1
    high: int = 1

    def at(self, sizes: FloatArray) -> FloatArray:
        """For batches of these sizes (n,)."""
        inside = np.log(np.clip(sizes, self.low, self.high))
        return np.asarray(self.level + self.slope * (inside - self.centre))


@dataclass(frozen=True)
class Estimate:
    """What the last batches say. used: ln of the time in use over the planned one, their mean.  shift: ln of their
    time over the one in use.  half_width: of its 99 % interval.  batches: that it rests on."""

    correction: Correction
    used: float
    shift: float
    half_width: float
    batches: int


class LearntTimes:
    """Of one path. planned_ms: T(1), T(2), ... as it was planned.  buckets: sizes that batches are padded to.

    in_use: what the router decides by.  good: the last that held for SETTLED batches.  batches: that were listened to.
    dropped: that were not.
    """

    def __init__(self, planned_ms: FloatArray, buckets: Sequence[int] = ()) -> None:
        self.planned_ms = np.asarray(planned_ms, dtype=np.float64)
        self._planned = [0.0, *np.log(self.planned_ms).tolist()]
        self._shape = [padded_size(b, buckets) for b in range(len(self._planned))]
        self._seen: set[int] = set()
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)
        self._cold, self._since_ms = COLD, -math.inf
        self._compared = False
        self.batches = self.dropped = 0
        self.good = Correction()
        self.adopt(self.good)

    def times_ms(self, correction: Correction) -> FloatArray:
        """T(1), T(2), ..."""
        return np.asarray(self.planned_ms * np.exp(correction.at(np.arange(1.0, len(self._planned)))))

    def adopt(self, correction: Correction) -> None:
        """Go by it."""
        self.in_use, self._age = correction, 0
        self._correction = [0.0, *correction.at(np.arange(1.0, len(self._planned))).tolist()]
        self._slower, self._faster = Bets(), Bets()
        self._earlier = Earlier()

    def ended(self, size: int, began_ms: float, ended_ms: float) -> bool:
        """A batch that was run to its end. True where `proposal` is to be asked."""
        shape = self._shape[size]
        if began_ms < self._since_ms or self._cold or shape not in self._seen:
            self._cold = max(self._cold - (began_ms >= self._since_ms), 0)
            self._seen.add(shape)
            self.dropped += 1
            return False
        ratio = math.log(max(ended_ms - began_ms, 1e-6)) - self._planned[size]
        self._recent.append((size, ratio, ended_ms))
        self.batches += 1
        self._age += 1
        if self._age == SETTLED:
            self.good = self.in_use
        excess = ratio - self._correction[size]
        above, below = self._earlier.ranks(excess)
        self._earlier.add(excess)
        slower, faster = self._slower.bet(excess > MARGIN, above), self._faster.bet(excess < -MARGIN, below)
        return slower or faster or (self._age >= SETTLED and not self._compared)

    @property
    def settled(self) -> bool:
        """Whether what is in use is the last that was good."""
        return self.in_use == self.good

    def failed(self, began_ms: float, ended_ms: float) -> None:
        """A batch that was not. Those that ran beside it, and the first after it, are not listened to."""
        self._cold, self._since_ms = COLD, ended_ms
        while self._recent and self._recent[-1][2] >= began_ms:
            self._recent.pop()
        self._slower, self._faster = Bets(), Bets()
        self.dropped += 1

    def proposal(self) -> Correction | None:
        """What to go by from now on; None where the times in use still hold, or too few batches were seen."""
        alarm = max(self._slower, self._faster, key=lambda each: each.purse)
        if alarm.purse >= ENOUGH:
            if alarm.since < LASTING:
                return None
            self._compared = False
            found, least = self.estimate(alarm.since), MARGIN / 2
        else:
            self._compared = True
            found, least = self.estimate(self._age), WORTH
        if found is None or abs(found.shift) <= max(found.half_width, least):
            self._slower, self._faster = Bets(), Bets()
            return None
        return found.correction

    def estimate(self, batches: int = WINDOW) -> Estimate | None:
        """Of the last batches; None of fewer than FEWEST."""
        n = min(batches, len(self._recent))
        if n < FEWEST:
            return None
        last = list(islice(self._recent, len(self._recent) - n, None))
        sizes, ratio = np.array([each[0] for each in last], dtype=np.float64), np.array([each[1] for each in last])
        weights = 2.0 ** (-np.arange(n - 1, -1, -1) / HALF_LIFE)
        used = self.in_use.at(sizes)
        shift, half_width = _level(ratio - used, weights)
        moved = replace(self.in_use, level=self.in_use.level + shift)
        inside = np.log(sizes)
        centre = float(weights @ inside / weights.sum())
        slope, within = _slope(inside - centre, ratio, weights)
        if within <= SLOPE_KNOWN and abs(slope - self.in_use.slope) > within:
            at_centre, _ = _level(ratio - slope * (inside - centre), weights)
            moved = Correction(at_centre, slope, centre, int(sizes.min()), int(sizes.max()))
        return Estimate(moved, float(used.mean()), shift, half_width, n)


def _level(rest: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """The weighted median (n,) and the half width of its interval."""
    median = weighted_quantile(rest, 0.5, weights)
    signs = np.sign(rest - median)
    seen = float(weights.sum()) ** 2 / float(weights @ weights)
    reach = SURE * math.sqrt(max(long_run_variance(signs - signs.mean()), 1.0) / seen) / 2
    low, high = weighted_quantiles(rest, (max(0.5 - reach, 0.0), min(0.5 + reach, 1.0)), weights)
    return median, max(high - median, median - low)


def _slope(x: FloatArray, y: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """Of y over x (n,), x of weighted mean zero, and the half width of its interval; infinite where x does not vary."""
    if float(np.ptp(x)) < 1e-9:
        return 0.0, math.inf
    level, slope = weighted_quantile(y, 0.5, weights), 0.0
    sigma = max(mad_sigma(y - level, weights), 1e-6)
    for _ in range(ROUNDS):
        rest = y - level - slope * x
        robust = weights * np.minimum(1.0, BEND * sigma / np.maximum(np.abs(rest), 1e-12))
        slope = float(robust @ (x * (y - level)) / (robust @ x**2))
        level = float(robust @ (y - slope * x) / robust.sum())
        sigma = max(mad_sigma(y - level - slope * x, weights), 1e-6)
    scores = np.clip((y - level - slope * x) / sigma, -BEND, BEND)
    known = float(np.mean(np.abs(scores) < BEND)) ** 2 * float(weights @ x**2) ** 2 / float(weights**2 @ x**2)
    within = SURE * sigma * math.sqrt(long_run_variance(scores - scores.mean()) / known) if known > 0 else math.inf
    return slope, within
