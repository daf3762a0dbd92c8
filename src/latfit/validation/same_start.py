"""Check that a trace's steps and a measured run come from one start of the engine, or else from one time.

A recorder stores its start, and vLLM creates the counters of `/metrics` together with it. Another start compiles anew:
two runs of one model on two cores were 40 to 160 % apart. Without counters the run and the steps must overlap in time.
Sources without times are not judged.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.messages import Message as LatfitWarning
from latfit.trace import Trace
from latfit.validation.measured import Measured

TOGETHER_S = 60.0
"""Largest time between the starts of a recorder and of the counters of its server."""
EDGE_S = 5.0
"""Error of the end time that load generators report."""


@dataclass(frozen=True)
class EngineStart:
    """Start of an engine, and its first and last steps, in seconds since 1970; NaN if unknown."""

    started_s: float
    first_s: float = np.nan
    last_s: float = np.nan


def starts_of(provenance: Mapping[str, Any], trace: Trace | None = None) -> list[EngineStart]:
    """Return the starts that latfit's recorder stored in a provenance, with times of steps if the trace is given."""
    found = []
    for run, started_s in dict(_started(provenance)).items():
        span = (np.nan, np.nan)
        if trace is not None and "t_s" in trace and "run" in trace:
            t_s = trace.floats("t_s")[np.asarray(trace["run"]).astype(str) == run]
            t_s = t_s[np.isfinite(t_s)]
            if len(t_s):
                span = started_s + float(t_s.min()), started_s + float(t_s.max())
        found.append(EngineStart(started_s, *span))
    return found


def during(trace: Trace, measured: Measured) -> NDArray[np.bool_]:
    """Mark the steps (n,) within the time of a measured run, ± EDGE_S; all if either has no times."""
    kept = np.ones(len(trace), dtype=bool)
    if measured.began_s is None or "t_s" not in trace or "run" not in trace:
        return kept
    ended_s = measured.began_s + 1e-3 * float(np.nanmax(measured.last_ms))
    named, t_s = np.asarray(trace["run"]).astype(str), trace.floats("t_s")
    for run, started_s in dict(_started(trace.provenance)).items():
        rows = named == run
        kept[rows] = (started_s + t_s[rows] >= measured.began_s - EDGE_S) & (started_s + t_s[rows] <= ended_s + EDGE_S)
    return kept


def _started(provenance: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (run, its start in seconds since 1970) of each file."""
    parts = provenance.get("parts")
    for each in parts.values() if isinstance(parts, Mapping) else [provenance]:
        try:
            yield str(each["run"]), datetime.fromisoformat(each["run_started"]).replace(tzinfo=UTC).timestamp()
        except (KeyError, TypeError, ValueError):
            continue


def not_together(
    starts: Sequence[EngineStart], measured: Measured, server_started_s: float | None
) -> LatfitWarning | None:
    """Warn if steps and run are of different starts or, if starts are unknown, of different times; else None."""
    if not starts:
        return None
    if server_started_s is not None:
        nearest = min(starts, key=lambda each: abs(each.started_s - server_started_s))
        if abs(nearest.started_s - server_started_s) <= TOGETHER_S:
            return None
        return LatfitWarning(
            "other_start",
            f"The steps are of the engine that was started at {_clock(nearest.started_s)}, the run of the one started"
            f" at {_clock(server_started_s)}",
            "Record and measure in one start: after another one, or beside other work, steps take another time.",
        )
    if measured.began_s is None:
        return None
    began_s, ended_s = measured.began_s, measured.began_s + 1e-3 * float(np.nanmax(measured.last_ms))
    gaps = [max(each.first_s - ended_s, began_s - each.last_s) for each in starts if np.isfinite(each.last_s)]
    if not gaps or min(gaps) <= TOGETHER_S:
        return None
    return LatfitWarning(
        "other_time",
        f"The run began at {_clock(began_s)}, {min(gaps) / 60:,.0f} min away from the steps",
        "Record while the run is measured; give --metrics-after where both are of one start of the engine.",
    )


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
