"""What a trace covers and what it lacks: the (B,S) plane, phases, time, gaps of the engine's counter, drift.

Drift is looked for in the rows' excess over their cell's median, so that a changing load does not pass for it: the
relative change from a run's first to its last third of rows, with the standard error of 20 batch means (Student's t, 18
degrees of freedom), which allows for neighbours in time that share their noise.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray
from latfit.trace.clean import excess_over_cell, runs_in_time
from latfit.trace.read import CleanTrace
from latfit.trace.serving_engine import engine_notes
from latfit.trace.table import DECODE, Trace, phases

BATCHES = 20
T_99 = 2.878
"""99.5 % point of Student's t with 18 degrees of freedom: drift is reported at 1 %."""
LEAST_DRIFT = 0.02
MANY_ASYNC = 0.01


@dataclass(frozen=True)
class Coverage:
    """A clean trace described. spans: {column: (low, high)}; phases: rows by phase; drift: relative, where there is."""

    rows: int
    cells: int
    spans: Mapping[str, tuple[float, float]]
    phases: Mapping[str, int]
    runs: int
    seconds: float | None
    counter_gaps: int | None
    drift: Mapping[str, float]
    missing: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        whole = dict(vars(self))
        return {
            **whole,
            "spans": {name: list(span) for name, span in self.spans.items()},
            "missing": list(self.missing),
        }


def coverage_of(trace: Trace) -> Coverage:
    """Describe a clean trace of at least one row."""
    B, S = trace.floats("B"), trace.floats("S")
    named = [name for name in ("B", "S", "T_ms", "context_tokens") if name in trace]
    known = [name for name in named if np.isfinite(trace.floats(name)).any()]
    runs = runs_in_time(trace) if "t_s" in trace else []
    return Coverage(
        rows=len(trace),
        cells=len(np.unique(np.stack([B, S], axis=1), axis=0)),
        spans={name: (float(np.nanmin(trace.floats(name))), float(np.nanmax(trace.floats(name)))) for name in known},
        phases=phase_counts(trace),
        runs=max(len(runs), 1),
        seconds=sum(float(np.ptp(trace.floats("t_s")[rows])) for rows in runs) if runs else None,
        counter_gaps=counter_gaps(trace),
        drift=_drift(trace, runs),
        missing=tuple(_missing(trace)),
    )


def phase_counts(trace: Trace) -> dict[str, int]:
    return dict(sorted(Counter(phases(trace).tolist()).items()))


def counter_gaps(trace: Trace) -> int | None:
    """Steps that the engine counted and the trace lacks, over all runs; None where there is no counter."""
    if "step" not in trace:
        return None
    gaps = 0
    for rows in runs_in_time(trace):
        steps = trace.floats("step")[rows]
        steps = np.sort(steps[np.isfinite(steps)])
        gaps += int(np.sum(np.maximum(np.diff(steps) - 1, 0)))
    return gaps


def reading_notes(read: CleanTrace) -> list[str]:
    """What a user should know of how the sources were read."""
    notes = []
    asynchronous = read.cleaned.dropped.get("zero_time", 0)
    if asynchronous > MANY_ASYNC * read.cleaned.rows_read:
        notes.append(
            f"{asynchronous:,} steps have a latency of next to zero: the engine schedules asynchronously, so other"
            " latencies may be incomplete too. For vLLM, record with --no-async-scheduling."
        )
    if gaps := counter_gaps(read.everything):
        notes.append(f"The engine's counter skips {gaps:,} steps: lines are missing from the log.")
    notes += engine_notes(read.everything)
    for key, text in (("cut_lines", "cut short"), ("bad_lines", "unreadable")):
        if n := sum(_counts(read.everything.provenance, key)):
            notes.append(f"{n:,} line{' was' if n == 1 else 's were'} {text} and not read.")
    if n := sum(_counts(read.everything.provenance, "refused_lists")):
        notes.append(
            f"{n:,} steps hold lists of other requests than their own, as merged records do: attention is taken by"
            " averages."
        )
    return notes


def _counts(provenance: Mapping[str, Any], key: str) -> Iterator[int]:
    """A reader's count, from a single source or from each of several."""
    for origin in (provenance, *provenance.get("parts", {}).values()):
        if isinstance(origin, Mapping) and isinstance(origin.get(key), int):
            yield origin[key]


def _drift(trace: Trace, runs: list[NDArray[np.intp]]) -> dict[str, float]:
    """Relative drift of the runs that drift, by run."""
    if not runs:
        return {}
    excess, _ = excess_over_cell(trace)
    found = {}
    for i, rows in enumerate(runs):
        change, error = _change(excess[rows])
        if abs(change) > max(T_99 * error, math.log1p(LEAST_DRIFT)):
            name = str(trace["run"][rows[0]]) if "run" in trace else f"run {i + 1}"
            found[name] = math.expm1(change)
    return found


def _change(series: FloatArray) -> tuple[float, float]:
    """(last third minus first third of a series, its standard error), by batch means; (0, inf) for short series."""
    if len(series) < 10 * BATCHES:
        return 0.0, math.inf
    means = np.array([batch.mean() for batch in np.array_split(series, BATCHES)])
    position = np.linspace(-0.5, 0.5, BATCHES)
    slope = float(position @ means) / float(position @ position)
    scatter = means - means.mean() - slope * position
    error = math.sqrt(float(scatter @ scatter) / (BATCHES - 2) / float(position @ position))
    return slope * 2 / 3, error * 2 / 3


def _missing(trace: Trace) -> Iterator[str]:
    """What a good fit would want and these rows lack."""
    B, S = trace.floats("B"), trace.floats("S")
    sizes, decodes = np.unique(B), phases(trace) == DECODE
    prefill = S[(S > B) & ~decodes]
    if len(sizes) == 1:
        yield f"one batch size only (B={sizes[0]:g}): the effect of batching is not identifiable"
    elif len(sizes) < 4 or sizes[-1] < 8 * sizes[0]:
        shown = ", ".join(f"{size:g}" for size in sizes[:6])
        yield f"few batch sizes ({shown}): measure B = 1, 2, 4, ... as far as it is used"
    if not decodes.any():
        yield "no decode steps (S = B)"
    if len(prefill) == 0:
        yield "no prefill steps (S > B): cost per request and per token are not separately identifiable"
    elif prefill.max() < 1024:
        yield f"no prefill steps above {prefill.max():.0f} tokens"
    if len(prefill) and not np.any(prefill <= 4 * B.max()) and prefill.min() > 64:
        yield f"no prefill steps below {prefill.min():.0f} tokens: the latency floor at few tokens is not identifiable"
    if "context_tokens" not in trace:
        yield "no cached context (context_tokens): its effect on decode steps is not identifiable"
