"""`measure`: from a request to a trace: open the devices, choose the cells, run each path, and write down where it all
came from.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from latfit._version import __version__
from latfit.errors import WrongUsage
from latfit.profiling.adaptive import AdaptiveDesign, Refit
from latfit.profiling.devices.protocol import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiling.devices.select import PathSpec, open_in_processes, paths_of, process_count
from latfit.profiling.grid import (
    LEVELS,
    StepCost,
    default_cells,
    grid_cost_s,
    grid_for_budget,
    parse_grid,
    pilot,
    split_by_memory,
)
from latfit.profiling.host.isa import best_float32_isa, cpu_flags
from latfit.profiling.host.machine import LoadWatch, cpu_model, machine_facts, sensible_threads
from latfit.profiling.host.sensors import read_sensors, sensor_facts, sensor_warnings
from latfit.profiling.journal import Journal, PathRecord
from latfit.profiling.request import ProfileRequest
from latfit.profiling.result import ProfileResult, TraceLabels, to_trace
from latfit.profiling.sampler import Choice, Hooks, Progress, rounds, run_profile
from latfit.profiling.shapes import ModelShape, model_shape
from latfit.provenance import utc_now
from latfit.trace import Trace, concatenated
from latfit.warning import LatfitWarning

ADAPTIVE_GAIN = 5
"""The adaptive design may choose among the cells of a grid that takes so many times its budget."""


@dataclass(frozen=True)
class Announcement:
    """What a run is about to do on one path, told before its first step."""

    cells: int
    model: str
    device: str
    threads: int | None
    processes: int


@dataclass(frozen=True)
class PathOutcome:
    """What was measured on one execution path."""

    path: str
    device: str
    result: ProfileResult


@dataclass(frozen=True)
class Listeners:
    """Who is told of a run while it goes on."""

    progress: Callable[[Progress], None] | None = None
    announce: Callable[[Announcement], None] | None = None


def measure(
    request: ProfileRequest,
    *,
    device: Device | None = None,
    listeners: Listeners | None = None,
    journal: Journal | None = None,
    refit: Refit | None = None,
) -> tuple[Trace, tuple[PathOutcome, ...]]:
    """Measure what `request` asks for, on `device` or on those that it means; `journal` holds what is continued, and is
    told of every visit; `refit` fits what was measured so far, which the adaptive design needs.

    Returns the trace of all samples, and for each path the result with its warnings and limits; after Ctrl-C, or where
    a device broke midway (`result.stop`), both hold what was measured until then. Raises HardwareMissing, WrongUsage,
    BadInput, and DeviceFailed where nothing was measured; KeyboardInterrupt before the first step.
    """
    request.check()
    shape = model_shape(request.model, request.layers)
    specs: list[PathSpec | None] = [None] if device else list(paths_of(request, shape))
    session = _Session(request, machine_facts(), listeners or Listeners(), journal, refit)
    parts: list[Trace] = []
    outcomes: list[PathOutcome] = []
    for number, spec in enumerate(specs):
        if spec and spec.engine == "transformers":
            trace, outcome = _measure_engine(session, spec)
            parts.append(trace)
            outcomes.append(outcome)
            break
        opened = [device] if device else open_in_processes(spec, process_count(request, spec)) if spec else []
        try:
            trace, outcome = _measure_path(session, spec.shape if spec else shape, opened, (number, len(specs)))
        finally:
            for each in opened if device is None else ():
                each.close()
        parts.append(trace)
        outcomes.append(outcome)
        if outcome.result.stop in ("interrupted", "device_failed"):
            break
    whole = concatenated(parts, [outcome.path for outcome in outcomes])
    units = dict.fromkeys(str(part["hardware"][0]) for part in parts if len(part))
    machine = np.full(len(whole), " + ".join(units), dtype=object)  # the paths of a trace are one machine's
    return whole.with_columns(hardware=machine).with_provenance(**session.provenance(outcomes, parts)), tuple(outcomes)


class _Session:
    """What all paths of a run share."""

    def __init__(
        self,
        request: ProfileRequest,
        machine: dict[str, Any],
        listeners: Listeners,
        journal: Journal | None,
        refit: Refit | None,
    ) -> None:
        self.refit = refit
        self.request, self.machine, self.listeners, self.journal = request, machine, listeners, journal
        self.started = journal.started if journal else utc_now()
        self.process = journal.process if journal else os.getpid()
        self.spent_s = 0.0

    def run_names(self, path: str, processes: int) -> list[str]:
        stamp = self.started.replace(":", "").replace("-", "").replace("+0000", "Z")
        return [f"{stamp}-{self.process}-{path}-{number}" for number in range(processes)]

    def provenance(self, outcomes: Sequence[PathOutcome], parts: Sequence[Trace]) -> dict[str, Any]:
        """Facts of the whole run; what belongs to one path stands under its name in `paths`."""
        several = len(outcomes) > 1
        warnings = [(outcome.path, warning) for outcome in outcomes for warning in outcome.result.warnings]
        limits = [(outcome.path, limit) for outcome in outcomes for limit in outcome.result.limits]
        return {
            "made_by": "latfit profile",
            "latfit": __version__,
            "command": self.request.command,
            "started": self.started,
            "seed": self.request.seed,
            "machine": self.machine,
            "budget_s": self.request.budget_ms / 1e3,
            "precision": self.request.precision,
            "elapsed_s": round(sum(outcome.result.elapsed_s for outcome in outcomes), 3),
            "stop": outcomes[-1].result.stop,
            "warnings": [{**warning.to_json(), **({"path": path} if several else {})} for path, warning in warnings],
            "limits": [{**limit.as_json(), **({"path": path} if several else {})} for path, limit in limits],
            "model": parts[0].provenance["model"],
            "paths": {outcome.path: dict(part.provenance) for outcome, part in zip(outcomes, parts, strict=True)},
        }


def _measure_engine(session: _Session, spec: PathSpec) -> tuple[Trace, PathOutcome]:
    """One path's trace and outcome where an engine chooses the steps."""
    from latfit.profiling.engine_run import engine_trace, run_engine

    path, name = ("gpu" if spec.on_gpu else "cpu"), f"transformers on {spec.kinds[0]}"
    settings = spec.settings[spec.kinds[0]]
    if session.listeners.announce:
        session.listeners.announce(Announcement(0, spec.shape.name, name, settings.threads, 1))
    steps, result = run_engine(session.request, spec)
    provenance = {
        "device": {"device": name, "dtype": settings.dtype, "evidence": dict(settings.evidence)},
        "model": _model_facts(spec.shape),
        "engine": "transformers",
        "processes": 1,
        "stop": result.stop,
    }
    labels = TraceLabels(path, cpu_model(), spec.shape.name, session.run_names(path, 1), provenance)
    return engine_trace(steps, result, labels), PathOutcome(path, name, result)


def _model_facts(shape: ModelShape) -> dict[str, Any]:
    return {**asdict(shape), "parameters": shape.parameters, "weight_bytes": shape.weight_bytes}


def _measure_path(
    session: _Session, shape: ModelShape, devices: Sequence[Device], place: tuple[int, int]
) -> tuple[Trace, PathOutcome]:
    """One path's trace and outcome; place: its number and how many there are, which share the time that is left."""
    request = session.request
    first = devices[0]
    before = read_sensors(gpu=first.path == "gpu")
    result, grid = _run(session, shape, devices, place)
    after = read_sensors(gpu=first.path == "gpu")
    facts = {**first.facts(), "pinned": list(request.pin), "threads_idle": request.threads is None}
    result = replace(result, warnings=(*result.warnings, *sensor_warnings(before, after), *_device_warnings(facts)))
    session.spent_s += result.elapsed_s
    moves = getattr(first, "kv_transfer", list)  # only a device with a memory of its own has one
    transfer: list[dict[str, float]] = moves() if result.stop in ("precise", "budget") else []
    between = result.between_processes
    processes = max((sample.process for sample in result.samples), default=0) + 1
    provenance = {
        "device": facts,
        "model": _model_facts(shape),
        "grid": grid,
        "processes": processes,
        "between_processes": between.as_json() if between else None,
        "design": request.design,
        "prediction_error": result.prediction_error,
        "elapsed_s": round(result.elapsed_s, 3),
        "sensors": sensor_facts(before, after),
        "step_s": round(result.step_s, 3),
        "warmup_steps": len(result.samples) - result.steps,
        "warmup_s": round(result.warmup_s, 3),
        "harness_share": round(result.overhead_s / result.step_s, 5) if result.step_s else None,
        "stop": result.stop,
        **({"kv_transfer": transfer} if transfer else {}),
    }
    hardware = facts.get("gpu") or cpu_model()
    labels = TraceLabels(first.path, hardware, shape.name, session.run_names(first.path, processes), provenance)
    return to_trace(result, labels), PathOutcome(first.path, first.name, result)


def _run(
    session: _Session, shape: ModelShape, devices: Sequence[Device], place: tuple[int, int]
) -> tuple[ProfileResult, dict[str, Any]]:
    """The run, and the description of its grid. The pilot's time is part of the budget."""
    request, device, journal = session.request, devices[0], session.journal
    number, paths = place
    budget_s = (request.budget_ms / 1e3 - session.spent_s) / (paths - number)
    start_s = device.now_s()
    record = journal.paths.get(number) if journal else None
    if record is None:
        record = _choose_cells(request, shape, device, budget_s)
        if journal:
            journal.plan(number, record)
    threads = device.facts().get("threads")
    if session.listeners.announce:
        session.listeners.announce(Announcement(len(record.cells), shape.name, device.name, threads, len(devices)))
    spent_s = device.now_s() - start_s
    try:
        result = run_profile(
            devices,
            record.cells,
            budget_s=budget_s - spent_s,
            precision=request.precision,
            design=_design(session, shape, record),
            hooks=Hooks(
                progress=session.listeners.progress,
                load=LoadWatch(threads or sensible_threads()),
                earlier=record.earlier,
                keep=journal.keep(number) if journal else None,
            ),
        )
    except DeviceFailed as error:
        if error.partial is None or not error.partial.samples:
            raise
        failure = LatfitWarning("device_failed", f"{error.found}; the run ended there.", error.remedy)
        result = replace(error.partial, warnings=(failure, *error.partial.warnings))
    return replace(result, limits=(*record.limits, *result.limits)), record.grid


def _design(session: _Session, shape: ModelShape, record: PathRecord) -> Choice:
    """The adaptive design where it was asked for and can be, else rounds over the grid."""
    if session.request.design != "adaptive" or session.refit is None:
        return rounds(np.random.default_rng(session.request.seed))
    cost = StepCost(*record.grid["pilot"])
    return AdaptiveDesign(session.refit, [cost.step_ms(shape, cell) for cell in record.cells])


def _choose_cells(request: ProfileRequest, shape: ModelShape, device: Device, budget_s: float) -> PathRecord:
    try:
        cost = pilot(device, shape, max(request.contexts))
    except DeviceOutOfMemory as error:
        raise WrongUsage(
            f"not even the smallest step fits in memory: {error}",
            where=f"model {shape.name}",
            remedy="Choose a smaller --model, fewer --layers, or a shorter --context.",
        ) from None
    if request.grid is None:
        worth_s = budget_s * (ADAPTIVE_GAIN if request.design == "adaptive" else 1)
        wanted = grid_for_budget(shape, cost, worth_s, request.contexts, request.histories)
    else:
        wanted = parse_grid(request.grid, request.contexts, request.histories)
    cells, limits = split_by_memory(shape, wanted, device.free_bytes())
    if not cells:
        raise WrongUsage(
            f"none of the {len(wanted)} cells fits in memory; the first {limits[0].message}",
            where="--grid",
            remedy="Ask for fewer requests, fewer tokens, or a shorter --context.",
        )
    full = default_cells(*LEVELS[0], contexts=request.contexts, histories=request.histories)
    grid = {
        "asked": request.grid,
        "contexts": list(request.contexts),
        "histories": list(request.histories),
        "cells": len(cells),
        "reduced_to_fit_budget": request.grid is None and len(wanted) < len(full),
        "expected_s": round(grid_cost_s(shape, cells, cost), 1),
        "pilot": [cost.floor_ms, cost.flops_per_ms],
    }
    return PathRecord(cells, limits, grid)


def _device_warnings(facts: dict[str, Any]) -> list[LatfitWarning]:
    """Fewer threads than CPUs because others are busy; a BLAS that runs narrower kernels than the CPU could."""
    found = []
    threads, most = facts.get("threads"), sensible_threads()
    if facts.get("threads_idle") and threads and threads < most:
        found.append(
            LatfitWarning(
                "busy_cpus",
                f"Others keep CPUs busy, so {threads} of {most} threads were used.",
                "Stop them and measure again, or say how many you want with --threads.",
            )
        )
    running, best = facts.get("isa"), best_float32_isa(cpu_flags())
    if facts.get("device") == "numpy" and running == "avx2" and best == "avx512":
        found.append(
            LatfitWarning(
                "narrow_kernels",
                "NumPy's BLAS chose AVX2 kernels although this CPU has AVX-512.",
                "Measure with --isa avx512 to see what the CPU can do; this is what NumPy does by default.",
            )
        )
    return found
