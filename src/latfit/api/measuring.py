"""`profile`: steps of a transformer, measured on this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from latfit import profiling, reporting
from latfit.api.answer import Answer, State
from latfit.api.quantities import duration
from latfit.api.request import verb
from latfit.api.requests import ProfileRequest
from latfit.errors import Interrupted, LatfitError, TargetNotWritable, WrongUsage
from latfit.files import check_writable
from latfit.messages import Message
from latfit.trace import Trace, check_trace_name, write_trace
from latfit.units import format_ms, format_percent

MUCH_PREPARING = 0.2  # share of the time from which preparing is reported
COUNTS = ("rows", "cells", "cells_within_precision", "elapsed_s")
FINISHED = ("precise", "budget")  # why a run stops that leaves nothing to continue
SAME_NAME = (
    "device", "isa", "dtype", "model", "layers", "grid", "threads", "processes", "graphs",
    "precision", "seed",
)  # fmt: skip
"""Fields of a measurement that are those of its request."""


@dataclass(frozen=True, repr=False, eq=False)
class Profile(Answer):
    """Measured steps, which `latfit.fit` takes."""

    trace: Trace
    outcomes: Sequence[profiling.PathOutcome]
    out: Path | None = None

    @property
    def frame(self) -> Any:
        """DataFrame: a row a sample."""
        return self.trace.to_pandas()

    @property
    def warnings(self) -> list[Message]:
        return [warning for outcome in self.outcomes for warning in outcome.result.warnings]

    @property
    def interrupted(self) -> bool:
        return any(outcome.result.interrupted for outcome in self.outcomes)

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        verdicts, lines = [], []
        for outcome in self.outcomes:
            result = outcome.result
            name = f"{outcome.path}: " if len(self.outcomes) > 1 else ""
            within = f"{sum(result.within_precision)} within ±{100 * result.precision:.3g} %"
            cells = f"{sum(result.measured)} of {len(result.cells)} cells, {within}"
            verdicts.append(f"{name}Measured {result.steps:,} steps in {format_ms(result.elapsed_s * 1e3)}: {cells}.")
            medians = [each.median for each, there in zip(result.intervals, result.measured, strict=True) if there]
            if medians:
                span = f"{format_ms(min(medians))} to {format_ms(max(medians))}"
                lines.append(f"Median step times: {span} on {outcome.device}.")
            if result.samples:
                warm_up = format_percent(100 * result.warmup_s / result.step_s)
                lines.append(f"Warm-up took {warm_up} of the time in steps.")
            if result.prepare_s > MUCH_PREPARING * result.elapsed_s:
                spent = f"{format_ms(result.prepare_s * 1e3)} of {format_ms(result.elapsed_s * 1e3)}"
                lines.append(f"Preparing cells (inputs, caches, CUDA graphs) took {spent}.")
            lines += [f"Not measured: {limit.cell}: {limit.message}." for limit in result.limits]
        ended_early = any(outcome.result.stop not in FINISHED for outcome in self.outcomes)
        state: State = "bad" if ended_early else "doubt" if self.warnings else "good"
        return reporting.table.Shown(" ".join(verdicts), state, lines, messages=self.warnings)

    def to_json(self) -> dict[str, Any]:
        parts = [_path_json(outcome) for outcome in self.outcomes]
        return {
            "out": None if self.out is None else str(self.out),
            **{key: sum(part[key] for part in parts) for key in COUNTS},
            "interrupted": self.interrupted,
            "warnings": [each for part in parts for each in part["warnings"]],
            "limits": [each for part in parts for each in part["limits"]],
            "paths": {outcome.path: part for outcome, part in zip(self.outcomes, parts, strict=True)},
        }


@verb(ProfileRequest)
def profile(request: ProfileRequest) -> Profile:
    """Measure steps of a transformer on this machine; Ctrl-C after the first step ends the run early.

    Raises WrongUsage, BadInput, HardwareMissing, DeviceFailed, TargetNotWritable.
    """
    design, budget = request.design, request.budget
    measurement = profiling.ProfileRequest(
        contexts=profiling.parse_contexts(request.context),
        histories=profiling.parse_contexts(request.history, option="--set history"),
        pin=profiling.parse_cpus(request.pin),
        part=request.kernel,
        budget_ms=duration(budget or "60s", "--budget"),
        design=("adaptive" if budget and not request.grid else "grid") if design == "auto" else design,
        **{name: getattr(request, name) for name in SAME_NAME},
    )
    listeners: dict[str, Any] = {"progress": request.progress, "announce": request.announce}
    measurement.check()
    if request.out is None:
        return Profile(*profiling.measure(measurement, **listeners))
    out = Path(request.out)
    check_trace_name(out)
    check_writable(out)
    journal = profiling.Journal(profiling.journal_of(out), measurement, resume=request.resume)
    try:
        trace, outcomes = profiling.measure(measurement, **listeners, journal=journal)
        if not len(trace):
            raise _nothing_measured(outcomes[0].result)
        write_trace(out, trace)
    except BaseException as error:
        kept = journal.steps
        journal.close(finished=not kept, stored=False)
        if kept and isinstance(error, TargetNotWritable):
            error.remedy += f" Then repeat the command with --resume: {journal.file} has {kept:,} steps."
        raise
    journal.close(finished=outcomes[-1].result.stop in FINISHED)
    return Profile(trace, outcomes, out)


def _nothing_measured(result: profiling.ProfileResult) -> LatfitError:
    if result.interrupted:
        return Interrupted("interrupted before the first step", remedy="Nothing was measured, nothing was written.")
    if result.limits:
        found = f"no cell fits in memory; {result.limits[0].message}"
        return WrongUsage(found, where="--grid", remedy="Ask for smaller steps.")
    found = "the budget ended before the first step was measured"
    return WrongUsage(found, where="--budget", remedy="Give more time: 60s is the default.")


def _path_json(outcome: profiling.PathOutcome) -> dict[str, Any]:
    result = outcome.result
    between = result.between_processes
    return {
        "device": outcome.device,
        "rows": result.steps,
        "cells": sum(result.measured),
        "cells_within_precision": sum(result.within_precision),
        "elapsed_s": round(result.elapsed_s, 3),
        "between_processes": between._asdict() if between else None,
        "prediction_error_pct": None,  # of older versions; `latfit fit` states the held-out error
        "warnings": [warning.to_json() for warning in result.warnings],
        "limits": [limit.as_json() for limit in result.limits],
    }
