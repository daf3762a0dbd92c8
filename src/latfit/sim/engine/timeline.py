"""What the core tallied, as numbers for people: gaps between tokens by quantile, and the engine over time."""

from dataclasses import dataclass

import numpy as np

from latfit.sim.engine.state import (
    GAP_LOWEST,
    GAP_SHIFT,
    GAPS,
    GAPS_MAX,
    MADE,
    ORIGIN,
    RUN,
    SLICE,
    SPENT,
    USED,
    WAIT,
    Limits,
    State,
)
from latfit.stats import FloatArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """An engine over time, by slices (k,) from start_ms on: running and waiting requests and the share of KV blocks in
    use, as means over the time of steps (NaN where there was none); tokens_per_ms; busy, the share of time in steps."""

    start_ms: float
    slice_ms: float
    running: FloatArray
    waiting: FloatArray
    kv_usage: FloatArray
    tokens_per_ms: FloatArray
    busy: FloatArray


def timeline_of(limits: Limits, state: State) -> Timeline:
    """The slices up to the last in which something was done."""
    done = np.flatnonzero(state.timeline[SPENT])
    rows = state.timeline[:, : int(done[-1]) + 1 if len(done) else 0]
    slice_ms = 1.0 / state.f[SLICE]
    spent = np.where(rows[SPENT] > 0, rows[SPENT], np.nan)
    return Timeline(
        float(state.f[ORIGIN]),
        float(slice_ms),
        rows[RUN] / spent,
        rows[WAIT] / spent,
        rows[USED] / spent / limits.blocks,
        rows[MADE] / slice_ms,
        rows[SPENT] / slice_ms,
    )


def gap_summary(states: list[State]) -> dict[str, float]:
    """Mean, p50, p90, p99 and max of the gaps between tokens, ms; a quantile is within 0.4 % (half a bin). NaN where
    no request has two tokens."""
    counts = np.sum([state.gaps for state in states], axis=0)
    total = int(counts.sum())
    if total == 0:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"), float("nan"))
    reached = np.cumsum(counts)
    found = {"mean": float(sum(state.f[GAPS] for state in states)) / total}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        found[name] = _middle(int(np.searchsorted(reached, share * total)))
    return found | {"max": max(float(state.f[GAPS_MAX]) for state in states)}


def _middle(place: int) -> float:
    """The middle of a bin of gaps, ms; the lowest one holds gaps of zero, too."""
    if place == 0:
        return 0.0
    edges = (np.array([place, place + 1], dtype=np.int64) + GAP_LOWEST) << GAP_SHIFT
    return float(edges.view(np.float64).mean())
