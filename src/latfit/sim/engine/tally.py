"""Statistics that stream: gaps between tokens in bins of a 128th of an octave, and a timeline of fixed length.

A bin is the leading bits of a float64, so counting takes no logarithm. The timeline has `SLICES` slices; when time runs
past its end, neighbours are added up and a slice lasts twice as long.
"""

import numpy as np

from latfit.sim.engine.state import (
    BUSY,
    COUNT,
    FREE,
    GAP_BINS,
    GAP_LOWEST,
    GAP_SHIFT,
    GAPS,
    GAPS_MAX,
    MADE,
    ORIGIN,
    RUN,
    SLICE,
    SLICES,
    SPENT,
    STEPS,
    USED,
    WAIT,
    WAITING,
    State,
    njit,
    rare,
)


@njit
def count_gaps(s: State, gap_ms: float, times: int) -> None:
    """Count a gap between two tokens of a request, `times` over."""
    if times == 0:
        return
    place = int(np.float64(gap_ms).view(np.int64) >> GAP_SHIFT) - GAP_LOWEST
    s.gaps[min(max(place, 0), GAP_BINS - 1)] += times
    s.f[GAPS] += gap_ms * times
    s.f[GAPS_MAX] = max(s.f[GAPS_MAX], gap_ms)


@njit
def note_step(s: State, begin: float, duration: float, B: float, made: float, blocks: int) -> None:
    """Add a step to the counters and to the slice that it begins in."""
    s.i[STEPS] += 1
    s.f[BUSY] += duration
    s.batch[int(B)] += 1
    at = int((begin - s.f[ORIGIN]) * s.f[SLICE])
    while at >= SLICES:
        _halve(s)
        at = int((begin - s.f[ORIGIN]) * s.f[SLICE])
    s.timeline[SPENT, at] += duration
    s.timeline[RUN, at] += duration * s.i[COUNT]
    s.timeline[WAIT, at] += duration * s.i[WAITING]
    s.timeline[USED, at] += duration * (blocks - s.i[FREE])
    s.timeline[MADE, at] += made


@rare
def _halve(s: State) -> None:
    for row in range(s.timeline.shape[0]):
        for at in range(SLICES // 2):
            s.timeline[row, at] = s.timeline[row, 2 * at] + s.timeline[row, 2 * at + 1]
        for at in range(SLICES // 2, SLICES):
            s.timeline[row, at] = 0.0
    s.f[SLICE] *= 0.5
