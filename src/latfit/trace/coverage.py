"""What a trace covers and lacks: the (B, S) plane, phases, time, gaps of the step counter, drift."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from latfit.records import Record
from latfit.stats import FloatArray
from latfit.trace.clean import excess_over_cell, runs_in_time
from latfit.trace.metadata import facts_of
from latfit.trace.read import CleanTrace
from latfit.trace.serving_engine import engine_notes
from latfit.trace.table import DECODE, Trace, phases

DRIFT_BATCHES = 20  # batch means, so that correlated neighbours do not look like drift
T_QUANTILE = 2.878  # 99.5 % of Student's t with 18 degrees of freedom
MIN_DRIFT = 0.02  # relative
MAX_ASYNC_SHARE = 0.01  # of steps with next to no time, before a note


class Coverage(Record, frozen=True):
    """A clean trace described. spans: {column: (low, high)}; phases: rows by phase; drift: relative, by run."""

    rows: int
    cells: int
    spans: Mapping[str, tuple[float, float]]
    phases: Mapping[str, int]
    runs: int
    seconds: float | None
    counter_gaps: int | None
    drift: Mapping[str, float]
    missing: tuple[str, ...]


def coverage_of(trace: Trace) -> Coverage:
    named = [name for name in ("B", "S", "T_ms", "context_tokens") if name in trace]
    known = [name for name in named if np.isfinite(trace.floats(name)).any()]
    runs = runs_in_time(trace) if "t_s" in trace else []
    timed = [t_s[np.isfinite(t_s)] for t_s in (trace.floats("t_s")[rows] for rows in runs)]
    return Coverage(
        rows=len(trace),
        cells=int(trace.group(("B", "S")).max()) + 1,
        spans={name: (float(np.nanmin(trace.floats(name))), float(np.nanmax(trace.floats(name)))) for name in known},
        phases=dict(sorted(Counter(phases(trace).tolist()).items())),
        runs=max(len(runs), 1),
        seconds=sum(float(np.ptp(t_s)) for t_s in timed if len(t_s)) if runs else None,
        counter_gaps=count_gaps(trace),
        drift=_find_drift(trace, runs),
        missing=tuple(_missing(trace)),
    )


def count_gaps(trace: Trace) -> int | None:
    """Count the steps that the engine counted and the trace lacks; None without a step counter."""
    if "step" not in trace:
        return None
    step = trace.floats("step")
    by_run = [np.sort(step[rows[np.isfinite(step[rows])]]) for rows in runs_in_time(trace)]
    return sum(int(np.maximum(np.diff(steps) - 1, 0).sum()) for steps in by_run)


def reading_notes(steps: CleanTrace) -> list[str]:
    notes = []
    asynchronous = steps.dropped.get("zero_time", 0)
    if asynchronous > MAX_ASYNC_SHARE * steps.rows_read:
        notes.append(
            f"{asynchronous:,} steps have a latency of next to zero: the engine schedules asynchronously, so other"
            " latencies may be incomplete too. For vLLM, record with latfit's plug-in."
        )
    if gaps := count_gaps(steps.everything):
        notes.append(f"The engine's counter skips {gaps:,} steps: lines are missing from the log.")
    notes += engine_notes(steps.everything)
    total: Counter[str] = Counter()
    for each in facts_of(steps.everything.provenance).sources:
        total.update({name: getattr(each, name) for name in ("cut_lines", "bad_lines", "refused_lists")})
    for name, text in (("cut_lines", "cut short"), ("bad_lines", "unreadable")):
        if n := total[name]:
            notes.append(f"{n:,} line{' was' if n == 1 else 's were'} {text} and not read.")
    if n := total["refused_lists"]:
        notes.append(
            f"{n:,} steps hold lists of other requests than their own, as merged records do: attention is taken by"
            " averages."
        )
    return notes


def _find_drift(trace: Trace, runs: list[NDArray[np.intp]]) -> dict[str, float]:
    """Return the relative drift of the runs that drift, from their steps' excess over the cell's median."""
    drift = {}
    excess = excess_over_cell(trace)[0] if runs else np.empty(0)
    for i, rows in enumerate(runs):
        change, error = _change(excess[rows])
        if abs(change) > max(T_QUANTILE * error, math.log1p(MIN_DRIFT)):
            drift[str(trace["run"][rows[0]]) if "run" in trace else f"run {i + 1}"] = math.expm1(change)
    return drift


def _change(series: FloatArray) -> tuple[float, float]:
    """Return (last third minus first third by a straight line, its standard error); (0, inf) for short series."""
    if len(series) < 10 * DRIFT_BATCHES:
        return 0.0, math.inf
    means = np.array([batch.mean() for batch in np.array_split(series, DRIFT_BATCHES)])
    position = np.linspace(-0.5, 0.5, DRIFT_BATCHES)
    slope = float(position @ means) / float(position @ position)
    residual = means - means.mean() - slope * position
    error = math.sqrt(float(residual @ residual) / (DRIFT_BATCHES - 2) / float(position @ position))
    return slope * 2 / 3, error * 2 / 3


def _missing(trace: Trace) -> Iterator[str]:
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
