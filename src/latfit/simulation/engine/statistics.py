"""Statistics of an engine: gaps between tokens in bins of a 128th of an octave, and a timeline.

A bin is the leading bits of a float64. When time runs past the timeline's end, neighbouring slices are merged.
"""

from dataclasses import dataclass

import numpy as np

from latfit.compiled import inner, rare
from latfit.simulation.engine import state as st
from latfit.simulation.engine.state import Limits, State
from latfit.simulation.engine.step_cost import Work
from latfit.simulation.summary import PERCENTILES, STATISTICS
from latfit.stats import FloatArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """An engine by slices (k,) from start_ms on; means are over the time of steps, NaN where none began."""

    start_ms: float
    slice_ms: float
    running: FloatArray  # mean requests
    waiting: FloatArray  # mean requests
    kv_usage: FloatArray  # mean share of KV blocks in use
    busy: FloatArray  # share of time in steps


def timeline_of(limits: Limits, state: State) -> Timeline:
    done = np.flatnonzero(state.timeline[st.SPENT])
    rows = state.timeline[:, : int(done[-1]) + 1 if len(done) else 0]
    slice_ms = 1.0 / state.f[st.SLICE]
    spent = np.where(rows[st.SPENT] > 0, rows[st.SPENT], np.nan)
    return Timeline(
        float(state.f[st.ORIGIN]),
        float(slice_ms),
        rows[st.RUN] / spent,
        rows[st.WAIT] / spent,
        rows[st.USED] / spent / limits.blocks,
        rows[st.SPENT] / slice_ms,
    )


def gap_summary(states: list[State]) -> dict[str, float]:
    """Return statistics of the gaps between tokens, ms; a quantile is within 0.4 % (half a bin)."""
    counts = sum((state.gaps for state in states[1:]), states[0].gaps)
    total = int(counts.sum())
    if total == 0:
        return dict.fromkeys((*STATISTICS, "max"), float("nan"))
    reached = np.cumsum(counts)
    found = {"mean": float(sum(state.f[st.GAPS] for state in states)) / total}
    for name, share in PERCENTILES.items():
        place = int(np.searchsorted(reached, share * total))
        edges = (np.array([place, place + 1], dtype=np.int64) + st.GAP_LOWEST) << st.GAP_SHIFT
        found[name] = float(edges.view(np.float64).mean()) if place else 0.0  # the lowest bin holds gaps of zero, too
    return found | {"max": max(float(state.f[st.GAPS_MAX]) for state in states)}


@inner
def count_gaps(s: State, gap_ms: float, times: int) -> None:
    if times == 0:
        return
    place = int(np.float64(gap_ms).view(np.int64) >> st.GAP_SHIFT) - st.GAP_LOWEST
    s.gaps[min(max(place, 0), st.GAP_BINS - 1)] += times
    s.f[st.GAPS] += gap_ms * times
    s.f[st.GAPS_MAX] = max(s.f[st.GAPS_MAX], gap_ms)


@inner
def note_step(o: Limits, s: State, work: Work, made: int, times: tuple[float, float, float]) -> None:
    """Add a step that made so many tokens to counters and timeline. times: begin, duration, when tokens appear."""
    begin, duration, out = times
    s.i[st.STEPS] += 1
    s.i[st.PREFILL_TOKENS] += int(work.P)
    s.i[st.TOKENS] += made
    s.i[st.COMPUTED] += int(work.S)
    s.f[st.BUSY] += duration
    s.f[st.BUSY_UNTIL] = begin + duration
    s.f[st.LAST_TOKENS] = out
    s.batch[int(work.B)] += 1
    at = int((begin - s.f[st.ORIGIN]) * s.f[st.SLICE])
    while at >= st.SLICES:
        _halve(s)
        at = int((begin - s.f[st.ORIGIN]) * s.f[st.SLICE])
    s.timeline[st.SPENT, at] += duration
    s.timeline[st.RUN, at] += duration * s.i[st.COUNT]
    s.timeline[st.WAIT, at] += duration * s.i[st.WAITING]
    s.timeline[st.USED, at] += duration * (o.blocks - s.i[st.FREE])


@rare
def _halve(s: State) -> None:
    for row in range(s.timeline.shape[0]):
        for at in range(st.SLICES // 2):
            s.timeline[row, at] = s.timeline[row, 2 * at] + s.timeline[row, 2 * at + 1]
        for at in range(st.SLICES // 2, st.SLICES):
            s.timeline[row, at] = 0.0
    s.f[st.SLICE] *= 0.5
