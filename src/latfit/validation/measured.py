"""Measured serving runs: recorded requests with the moments of their first and last token.

A run and a trace's steps have to come from one start of the engine, or else from one time. Another start compiles anew:
two runs of one model on two cores were 40 to 160 % apart.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.messages import Message, message
from latfit.stats import FloatArray
from latfit.trace import Trace, facts_of
from latfit.workload import Recording, Requests

TOGETHER_S = 60.0  # largest time between the starts of a recorder and of the counters of its server
EDGE_S = 5.0  # error of the end time that load generators report
ZONES_S = 3600.0  # clocks of nearly all zones differ by whole hours


@dataclass(frozen=True, eq=False, repr=False)
class Measured:
    """Requests with the times of their first and last token (n,), ms on the clock of their arrivals.

    began_s: time of the first request in seconds since 1970, None if unknown.  watched_ms: begin and end of a watch,
    which knows no single request (`watch.py`); else None.
    """

    requests: Requests
    first_ms: FloatArray
    last_ms: FloatArray
    source: str = "requests"
    notes: tuple[str, ...] = ()
    began_s: float | None = None
    watched_ms: tuple[float, float] | None = None
    engines: int = 1

    def __len__(self) -> int:
        return len(self.requests)


def as_measured(found: Recording) -> Measured:
    """Return recorded requests without impossible ones. Raises BadInput if most are."""
    if found.first_ms is None or found.last_ms is None:
        raise BadInput(
            "no times of first and last tokens",
            where=found.source,
            remedy="Give first_token_s, last_token_s or ttft_s, latency_s or ttft_ms, latency_ms; save results of"
            " `vllm bench serve` with --save-detailed.",
        )
    arrival = found.requests.arrival_ms
    wrong = ~np.isfinite(found.first_ms) | ~np.isfinite(found.last_ms)
    wrong |= (found.first_ms < arrival) | (found.last_ms < found.first_ms)
    what = f"a first token before its arrival, a last one before its first, or no time ({int(wrong.sum())} such)"
    first = f"request {int(np.argmax(wrong)) + 1} has {what}"
    if 2 * wrong.sum() >= len(wrong):
        remedy = "Leave out requests that failed; arrivals and tokens must be on one clock."
        raise BadInput(first, where=found.source, remedy=remedy)
    notes = (*found.notes, f"Left out: {first}") if wrong.any() else tuple(found.notes)
    kept = found.requests.select(~wrong)
    return Measured(kept, found.first_ms[~wrong], found.last_ms[~wrong], found.source, notes, found.began_s)


@dataclass(frozen=True)
class EngineStart:
    """Start of an engine, and its first and last steps, in seconds since 1970; NaN if unknown.

    every_s: the times of a log, which has no zone, are known up to this period.
    """

    started_s: float
    first_s: float = np.nan
    last_s: float = np.nan
    every_s: float | None = None

    def gap_s(self, began_s: float, span_s: float) -> float:
        """Return the time between its steps and a run; negative if they overlap."""
        if self.every_s is None:
            return max(self.first_s - began_s - span_s, began_s - self.last_s)
        since_s = (began_s - self.first_s) % self.every_s
        return min(since_s - (self.last_s - self.first_s), self.every_s - since_s - span_s)


def starts_of(provenance: Mapping[str, Any], trace: Trace | None = None) -> list[EngineStart]:
    """Return the starts that a recorder stored, with times of steps if the trace is given, and the times of logs."""
    found = []
    for run, started_s in _started(provenance).items():
        span = []
        if trace is not None and "t_s" in trace and "run" in trace:
            t_s = trace.floats("t_s")[np.asarray(trace["run"]).astype(str) == run]
            t_s = t_s[np.isfinite(t_s)]
            span = [started_s + float(t_s.min()), started_s + float(t_s.max())] if len(t_s) else []
        found.append(EngineStart(started_s, *span))
    clocks = [each.log_clock_s for each in facts_of(provenance).sources if each.log_clock_s is not None]
    return found + [EngineStart(np.nan, *clock, ZONES_S) for clock in clocks]


def during(trace: Trace, measured: Measured) -> NDArray[np.bool_]:
    """Mark the steps (n,) within the time of a measured run, ± EDGE_S; all if either has no times.

    A log, which has no zone, has them at these minutes of any hour.
    """
    kept = np.ones(len(trace), dtype=bool)
    if measured.began_s is None or "t_s" not in trace or "run" not in trace:
        return kept
    named, t_s, longest_s = np.asarray(trace["run"]).astype(str), trace.floats("t_s"), _span_s(measured) + 2 * EDGE_S
    for run, started_s in _started(trace.provenance).items():
        since_s = started_s + t_s - measured.began_s + EDGE_S
        kept[named == run] = ((since_s >= 0) & (since_s <= longest_s))[named == run]
    facts = facts_of(trace.provenance)
    if facts.log_clock_s is not None and facts.runs == 1:  # the times of a second run begin again at zero
        kept = (facts.log_clock_s[0] + t_s - measured.began_s + EDGE_S) % ZONES_S <= longest_s
    return kept


def not_together(starts: Sequence[EngineStart], measured: Measured, server_started_s: float | None) -> Message | None:
    """Warn if steps and run are of different starts or, if starts are unknown, of different times."""
    known = [each for each in starts if np.isfinite(each.started_s)]
    if server_started_s is not None and known:
        nearest = min(known, key=lambda each: abs(each.started_s - server_started_s))
        if abs(nearest.started_s - server_started_s) <= TOGETHER_S:
            return None
        starts_at, runs_at = _clock(nearest.started_s), _clock(server_started_s)
        return message("other_start", steps=starts_at, run=runs_at)
    began_s = measured.began_s
    if began_s is None:
        return None
    gaps_s = [each.gap_s(began_s, _span_s(measured)) for each in starts]
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
    with suppress(ValueError, OverflowError):
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"{seconds:g} s after 1970"
