"""Check that a trace's steps and a measured run come from one start of the engine, or else from one time.

Another start compiles anew: two runs of one model on two cores were 40 to 160 % apart.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.messages import Message, message
from latfit.trace import Trace, facts_of
from latfit.validation.measured import Measured

TOGETHER_S = 60.0  # largest time between the starts of a recorder and of the counters of its server
EDGE_S = 5.0  # error of the end time that load generators report


@dataclass(frozen=True)
class EngineStart:
    """Start of an engine, and its first and last steps, in seconds since 1970; NaN if unknown."""

    started_s: float
    first_s: float = np.nan
    last_s: float = np.nan


def starts_of(provenance: Mapping[str, Any], trace: Trace | None = None) -> list[EngineStart]:
    """Return the starts that a recorder stored, with times of steps if the trace is given."""
    found = []
    for run, started_s in _started(provenance).items():
        span = []
        if trace is not None and "t_s" in trace and "run" in trace:
            t_s = trace.floats("t_s")[np.asarray(trace["run"]).astype(str) == run]
            t_s = t_s[np.isfinite(t_s)]
            span = [started_s + float(t_s.min()), started_s + float(t_s.max())] if len(t_s) else []
        found.append(EngineStart(started_s, *span))
    return found


def during(trace: Trace, measured: Measured) -> NDArray[np.bool_]:
    """Mark the steps (n,) within the time of a measured run, ± EDGE_S; all if either has no times."""
    kept = np.ones(len(trace), dtype=bool)
    if measured.began_s is None or "t_s" not in trace or "run" not in trace:
        return kept
    named, t_s = np.asarray(trace["run"]).astype(str), trace.floats("t_s")
    for run, started_s in _started(trace.provenance).items():
        at_s = started_s + t_s - measured.began_s
        kept[named == run] = ((at_s >= -EDGE_S) & (at_s <= _span_s(measured) + EDGE_S))[named == run]
    return kept


def not_together(starts: Sequence[EngineStart], measured: Measured, server_started_s: float | None) -> Message | None:
    """Warn if steps and run are of different starts or, if starts are unknown, of different times."""
    if server_started_s is not None and starts:
        nearest = min(starts, key=lambda each: abs(each.started_s - server_started_s))
        if abs(nearest.started_s - server_started_s) <= TOGETHER_S:
            return None
        starts_at, runs_at = _clock(nearest.started_s), _clock(server_started_s)
        return message("other_start", steps=starts_at, run=runs_at)
    began_s = measured.began_s
    if began_s is None:
        return None
    gaps_s = [max(each.first_s - began_s - _span_s(measured), began_s - each.last_s) for each in starts]
    gap_s = min((gap for gap in gaps_s if np.isfinite(gap)), default=0.0)
    if gap_s <= TOGETHER_S:
        return None
    return message("other_time", run=_clock(began_s), minutes=gap_s / 60)


def _started(provenance: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for each in facts_of(provenance).sources:
        with suppress(ValueError):
            if each.run and each.run_started:
                found[each.run] = datetime.fromisoformat(each.run_started).replace(tzinfo=UTC).timestamp()
    return found


def _span_s(measured: Measured) -> float:
    return 1e-3 * float(np.nanmax(measured.last_ms))


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
