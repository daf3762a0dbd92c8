"""Whether a trace's steps and a measured run are of one start of the engine, or else of one time.

A recorder writes down when it was started, which vLLM does together with the counters of `/metrics`, whose moments of
creation stand beside them. Another start is another compilation, with other neighbours on the machine: two runs of one
model on two cores were 40 to 160 % apart. Where only the result of a load generator tells a time, the run and the steps
have to meet. What says no time is not judged.
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
"""Within this time a recorder and the counters of its server begin."""
EDGE_S = 5.0
"""Load generators say to the second when they ended, or a little later."""


@dataclass(frozen=True)
class EngineStart:
    """A start of an engine that a trace records: when, and when its first and last steps were; seconds since 1970, NaN
    where the trace does not tell."""

    started_s: float
    first_s: float = np.nan
    last_s: float = np.nan


def starts_of(provenance: Mapping[str, Any], trace: Trace | None = None) -> list[EngineStart]:
    """Starts that latfit's recorder wrote into a provenance; with the trace the times of their steps."""
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
    """Which steps (n,) of a trace may be of the time of a measured run: those of its time, give or take EDGE_S, and all
    where the trace or the run says no time."""
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
    """(run, when it was started) of each file."""
    parts = provenance.get("parts")
    for each in parts.values() if isinstance(parts, Mapping) else [provenance]:
        try:
            yield str(each["run"]), datetime.fromisoformat(each["run_started"]).replace(tzinfo=UTC).timestamp()
        except (KeyError, TypeError, ValueError):
            continue


def not_together(
    starts: Sequence[EngineStart], measured: Measured, server_started_s: float | None
) -> LatfitWarning | None:
    """For steps and a run that are of different starts or, where that is not known, of different times."""
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
