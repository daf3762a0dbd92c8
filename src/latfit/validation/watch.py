"""Reconstruct the load of a watched server from a recording of its `/metrics`, to simulate it.

Arrivals are uniform within each window; lengths are drawn from the server's histograms. Earlier arrivals that explain
the requests running at the start follow from Little's law. See docs/theory/planning.md, "Watched servers".
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.metrics import Interval, read_state
from latfit.stats import FloatArray
from latfit.trace import WATCHED, Trace, open_source
from latfit.validation.measured import Measured
from latfit.workload import make_requests

LEAD_LATENCIES = 3.0  # mean latencies before the watch from which requests may still run at its start
MAX_EARLIER = 100_000


def is_watched(provenance: Mapping[str, Any]) -> bool:
    """Return whether `latfit record` took the trace from a server as windows."""
    return provenance.get("source") == WATCHED and "texts_at_s" in provenance


def watched(trace: Trace, before: str | Path, after: str | Path, source: str, seed: int = 0) -> Measured:
    """Reconstruct the load between two `/metrics` texts from windows; token times are NaN. Raises BadInput."""
    begin_s, end_s = _texts_at(trace, source)
    seen = Interval(read_state(open_source(before)), read_state(open_source(after)), max(end_s - begin_s, 1e-3))
    rng = np.random.default_rng(seed)
    came_s = _arrivals(trace, seen, begin_s, rng)
    under_way = max(0.0, finite_or_zero(seen.first.running) + finite_or_zero(seen.first.waiting))
    latency_s = finite_or_zero(seen.mean("latency")) / 1e3
    earlier = min(round(LEAD_LATENCIES * under_way), MAX_EARLIER) if latency_s > 0 else 0
    early_s = np.sort(-LEAD_LATENCIES * latency_s * rng.random(earlier))
    lengths = seen.lengths(earlier + len(came_s), rng)
    if lengths is None or not len(came_s):
        found = f"{seen.last.engine} does not publish how {'long' if len(came_s) else 'many'} requests are"
        raise BadInput(found, where=source, remedy="Measure with a load generator, and give its result.")
    led_s = -float(early_s[0]) if earlier else 0.0
    requests = make_requests(1e3 * (led_s + np.concatenate([early_s, came_s])), *lengths)
    nobody = np.full(len(requests), np.nan)
    span = (1e3 * led_s, 1e3 * (led_s + seen.seconds))
    return Measured(requests, nobody, nobody, source, watched_ms=span, engines=seen.last.engines)


def _texts_at(trace: Trace, source: str) -> tuple[float, float]:
    try:
        begin_s, end_s = (float(each) for each in trace.provenance["texts_at_s"])
        if end_s > begin_s and {"t_s", "window_ms", "arrived_requests"} <= trace.columns.keys():
            return begin_s, end_s
    except (KeyError, TypeError, ValueError):
        pass
    remedy = "Give a file of latfit record from an engine that counts its requests."
    raise BadInput("does not say when requests came", where=source, remedy=remedy)


def _arrivals(trace: Trace, seen: Interval, begin_s: float, rng: np.random.Generator) -> FloatArray:
    t_s, length_s = trace.floats("t_s") - begin_s, trace.floats("window_ms") / 1e3
    inside = (t_s > -1e-6) & (t_s + length_s <= seen.seconds * (1 + 1e-6)) & (length_s > 0)
    order = np.argsort(t_s[inside], kind="stable")
    start, end = (np.clip(each[inside][order], 0.0, seen.seconds) for each in (t_s, t_s + length_s))
    end = np.maximum.accumulate(end)
    told = np.maximum(np.nan_to_num(trace.floats("arrived_requests")[inside][order]), 0.0)
    edges = np.concatenate([[0.0], np.column_stack([start, end]).ravel(), [seen.seconds]])
    gaps = np.diff(edges)[::2].clip(0.0)
    rest = max(0.0, finite_or_zero(seen.arrived) - float(told.sum()))
    counts = np.zeros(len(edges) - 1)
    counts[1::2] = told
    counts[::2] = rest * gaps / gaps.sum() if gaps.sum() > 0 else 0.0
    return spread_arrivals(edges, counts, rng)


def spread_arrivals(edges: FloatArray, counts: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Draw sorted arrival times of `counts` (k,) requests between `edges` (k + 1,)."""
    total = np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(counts)]))  # counts never fall
    whole = np.diff(np.rint(total)).astype(np.int64)
    which = np.repeat(np.arange(len(whole)), whole)
    return np.sort(edges[which] + (edges[which + 1] - edges[which]) * rng.random(len(which)))


def finite_or_zero(value: float) -> float:
    return value if np.isfinite(value) else 0.0
