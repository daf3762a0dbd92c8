"""Batch times of one path, learned while it serves.

Two one-sided CUSUMs of signs (Page 1954) find a shift of the median by more than 10 %; the median of the batches since
the shift gives the new factor. See docs/theory/planning.md#learning-while-it-serves.
"""

import math
from collections import deque

import numpy as np

from latfit.fitting import long_run_variance
from latfit.stats import FloatArray

MARGIN = math.log(1.1)  # shift of ln T that the times in use tolerate
RUN_LENGTH = 1_000_000  # smallest mean number of batches between false alarms
STAKE = 0.4  # 2p - 1 for the share p of slow batches that the CUSUM is tuned to
RISE, FALL = math.log1p(STAKE), math.log1p(-STAKE)
THRESHOLD = math.log(2 * RUN_LENGTH)  # 2: one CUSUM for each direction

WINDOW = 256  # most batches that an estimate uses
MIN_BATCHES = 30  # fewest batches that an estimate uses
SETTLED = 200  # batches after which new times are refined once
MIN_REFINEMENT = 0.03  # change of ln T below which that refinement is not worth a switch
Z99 = 2.576  # standard errors of a two-sided 99 % interval


class SignCusum:
    """Detect that more than half of the batches lie beyond the margin."""

    def __init__(self) -> None:
        self.sum = 0.0
        self.batches_since_change = 0  # since the sum left zero

    def add(self, beyond: bool) -> bool:
        self.batches_since_change = self.batches_since_change + 1 if self.sum > 0 else 1
        self.sum = max(self.sum + (RISE if beyond else FALL), 0.0)
        return self.sum >= THRESHOLD


class LearnedTimes:
    """Planned T(1), T(2), ... (largest,) of a path in ms, times a factor."""

    def __init__(self, planned_ms: FloatArray) -> None:
        self.planned_ms = np.asarray(planned_ms, dtype=np.float64)
        self._ln_planned = [0.0, *np.log(self.planned_ms).tolist()]
        self._recent: deque[float] = deque(maxlen=WINDOW)  # ln(T / planned T) of batches
        self.adopt(0.0)

    def times_ms(self, ln_factor: float) -> FloatArray:
        return np.asarray(self.planned_ms * math.exp(ln_factor))

    def adopt(self, ln_factor: float) -> None:
        self.ln_factor, self._age = ln_factor, 0  # ln(T in use / planned T); batches since then
        self.forget_evidence()

    def add_batch(self, size: int, took_ms: float) -> bool:
        """Return whether `propose` may have a new factor."""
        ratio = math.log(max(took_ms, 1e-6)) - self._ln_planned[size]
        self._recent.append(ratio)
        self._age += 1
        excess = ratio - self.ln_factor
        is_slower, is_faster = self._slower.add(excess > MARGIN), self._faster.add(excess < -MARGIN)
        return is_slower or is_faster or self._age == SETTLED

    def forget_evidence(self) -> None:
        self._slower, self._faster = SignCusum(), SignCusum()

    def propose(self) -> float | None:
        """Return a new ln(T / planned T), or None if the one in use still applies."""
        cusum = max(self._slower, self._faster, key=lambda each: each.sum)
        is_alarm = cusum.sum >= THRESHOLD
        median, half_width = self.estimate(cusum.batches_since_change if is_alarm else self._age)
        least = MARGIN / 2 if is_alarm else MIN_REFINEMENT
        if not abs(median - self.ln_factor) > max(half_width, least):  # also if there are too few batches
            self.forget_evidence()
            return None
        return median

    def estimate(self, batches: int = WINDOW) -> tuple[float, float]:
        """Return the median ln(T / planned T) of the last batches, and the half width of its 99 % interval."""
        n = min(batches, len(self._recent))
        if n < MIN_BATCHES:
            return math.nan, math.nan
        ratios = np.array(self._recent)[-n:]
        median = float(np.median(ratios))
        signs = np.sign(ratios - median)
        reach = Z99 * math.sqrt(max(long_run_variance([signs - signs.mean()]), 1.0) / n) / 2
        low, high = np.quantile(ratios, (max(0.5 - reach, 0.0), min(0.5 + reach, 1.0)))
        return median, float(max(high - median, median - low))
