"""`measure`: from a request to a trace: open the devices, choose the cells, run each path, and record the
provenance."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from latfit._version import __version__
from latfit.errors import WrongUsage
from latfit.messages import Message as LatfitWarning
from latfit.profiling.adaptive import order_by_information
from latfit.profiling.devices.device import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiling.devices.select import PathSpec, choose_paths, open_in_processes, process_count
from latfit.profiling.grid import StepCost, grid_for_budget, parse_grid, time_pilot
from latfit.profiling.host.machine import LoadWatch, cpu_model, machine_facts, sensible_threads
from latfit.profiling.host.sensors import compare_sensors, find_sensor_warnings, read_sensors
from latfit.profiling.journal import Journal
from latfit.profiling.quality import find_device_warnings, find_warnings
from latfit.profiling.request import ProfileRequest
from latfit.profiling.result import PathRecord, ProfileResult, to_trace
from latfit.profiling.sampler import Progress, run_profile
from latfit.profiling.shapes import ModelShape, model_shape
from latfit.profiling.warnings import warn
from latfit.provenance import utc_now
from latfit.trace import Trace, concatenated

ADAPTIVE_GAIN = 5  # the adaptive design chooses among the cells of a grid that takes so many times its budget


@dataclass(frozen=True)
class Announcement:
    """What a run is about to do on one path, before its first step. `budget_s` is the share of this path."""

    cells: int
    model: str
    device: str
    threads: int | None
    processes: int
    budget_s: float


@dataclass(frozen=True)
class PathOutcome:
    """What was measured on one execution path."""

    path: str
    device: str
    result: ProfileResult


@dataclass
class _Run:
    """What all paths of a run share; `spent_s` is the time that earlier paths took."""

    request: ProfileRequest
    journal: Journal | None
    progress: Callable[[Progress], None] | None
    announce: Callable[[Announcement], None]
    machine: dict[str, Any] = field(default_factory=machine_facts)
    started: str = field(default_factory=utc_now)
    process: int = field(default_factory=os.getpid)
    spent_s: float = 0.0

    def trace(self, result: ProfileResult, path: str, hardware: str, shape: ModelShape, **facts: Any) -> Trace:
        """Return the samples of a path; the provenance holds the model and these facts."""
        stamp = self.started.replace(":", "").replace("-", "").replace("+0000", "Z")
        processes = max((sample.process for sample in result.samples), default=0) + 1
        runs = [f"{stamp}-{self.process}-{path}-{number}" for number in range(processes)]
        model = {**asdict(shape), "parameters": shape.parameters, "weight_bytes": shape.weight_bytes}
        provenance = {"model": model, "processes": processes, "stop": result.stop, **facts}
        return to_trace(result, path, hardware, shape.name, runs, provenance)


def measure(
    request: ProfileRequest,
    *,
    device: Device | None = None,
    journal: Journal | None = None,
    progress: Callable[[Progress], None] | None = None,
    announce: Callable[[Announcement], None] | None = None,
) -> tuple[Trace, tuple[PathOutcome, ...]]:
    """Measure what `request` asks for, on `device` if given, and go on with the run in the journal.

    After Ctrl-C, or if a device broke midway (`result.stop`), trace and outcomes hold what was measured until then.
    Raises DeviceFailed if nothing was measured, KeyboardInterrupt before the first step.
    """
    request.check()
    shape = model_shape(request.model, request.layers)
    run = _Run(request, journal, progress, announce or (lambda about: None))
    if journal:
        run.started, run.process = journal.started, journal.process
    specs: list[PathSpec | None] = [None] if device else list(choose_paths(request, shape))
    parts: list[Trace] = []
    outcomes: list[PathOutcome] = []
    for number, spec in enumerate(specs):
        if spec and request.engine == "transformers":
            trace, outcome = _measure_engine(run, spec)
        else:
            opened = open_in_processes(spec, process_count(spec)) if spec else [device] if device else []
            try:
                trace, outcome = _measure_path(run, spec.shape if spec else shape, opened, number, len(specs))
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
    return whole.with_columns(hardware=machine).with_provenance(**_provenance(run, outcomes, parts)), tuple(outcomes)


def _provenance(run: _Run, outcomes: Sequence[PathOutcome], parts: Sequence[Trace]) -> dict[str, Any]:
    """Facts of the whole run; what belongs to one path is under its name in `paths`."""
    named = [(outcome.result, {"path": outcome.path} if len(outcomes) > 1 else {}) for outcome in outcomes]
    return {
        "made_by": "latfit profile",
        "latfit": __version__,
        "command": run.request.command,
        "started": run.started,
        "seed": run.request.seed,
        "machine": run.machine,
        "budget_s": run.request.budget_ms / 1e3,
        "precision": run.request.precision,
        "elapsed_s": round(sum(result.elapsed_s for result, _ in named), 3),
        "stop": outcomes[-1].result.stop,
        "warnings": [{**warning.to_json(), **path} for result, path in named for warning in result.warnings],
        "limits": [{**limit.as_json(), **path} for result, path in named for limit in result.limits],
        "model": parts[0].provenance["model"],
        "paths": {outcome.path: dict(part.provenance) for outcome, part in zip(outcomes, parts, strict=True)},
    }


def _measure_engine(run: _Run, spec: PathSpec) -> tuple[Trace, PathOutcome]:
    """Measure a path whose steps an engine chooses."""
    from latfit.profiling.engine_run import add_contexts, run_engine

    path, name = ("gpu" if spec.on_gpu else "cpu"), f"transformers on {spec.kinds[0]}"
    settings = spec.settings[spec.kinds[0]]
    run.announce(Announcement(0, spec.shape.name, name, settings.threads, 1, run.request.budget_ms / 1e3))
    steps, result = run_engine(run.request, spec)
    device = {"device": name, "dtype": settings.dtype, "evidence": dict(settings.evidence)}
    trace = run.trace(result, path, cpu_model(), spec.shape, device=device, engine="transformers")
    return add_contexts(trace, steps), PathOutcome(path, name, result)


def _measure_path(
    run: _Run, shape: ModelShape, devices: Sequence[Device], number: int, paths: int
) -> tuple[Trace, PathOutcome]:
    """Measure path `number` of `paths`, which share the time that is left."""
    request, first = run.request, devices[0]
    before = read_sensors(gpu=first.path == "gpu")
    result, grid = _run_cells(run, shape, devices, number, (request.budget_ms / 1e3 - run.spent_s) / (paths - number))
    after = read_sensors(gpu=first.path == "gpu")
    run.spent_s += result.elapsed_s
    facts = {**first.facts(), "pinned": list(request.pin), "threads_idle": request.threads is None}
    result = replace(
        result, warnings=(*result.warnings, *find_sensor_warnings(before, after), *find_device_warnings(facts))
    )
    moves = getattr(first, "kv_transfer", list)  # only a device with a memory of its own has one
    transfer: list[dict[str, float]] = moves() if result.stop in ("precise", "budget") else []
    between = result.between_processes
    trace = run.trace(
        result,
        first.path,
        facts.get("gpu") or cpu_model(),
        shape,
        device=facts,
        grid=grid,
        between_processes=between.as_json() if between else None,
        design=request.design,
        sensors=compare_sensors(before, after),
        warmup_steps=len(result.samples) - result.steps,
        **{name: round(getattr(result, name), 3) for name in ("elapsed_s", "step_s", "prepare_s", "warmup_s")},
        **({"kv_transfer": transfer} if transfer else {}),
    )
    return trace, PathOutcome(first.path, first.name, result)


def _run_cells(
    run: _Run, shape: ModelShape, devices: Sequence[Device], number: int, budget_s: float
) -> tuple[ProfileResult, dict[str, Any]]:
    """Choose the cells and measure them; the pilot's time counts. Returns the grid's facts too."""
    request, device, journal = run.request, devices[0], run.journal
    start_s = device.now_s()
    record = journal.paths.get(number) if journal else None
    if record is None:
        record = _choose_cells(request, shape, device, budget_s)
        if journal:
            journal.plan(number, record)
    threads = device.facts().get("threads")
    run.announce(Announcement(len(record.cells), shape.name, device.name, threads, len(devices), budget_s))
    first: list[int] = []
    if request.design == "adaptive":
        cost = StepCost(*record.grid["pilot"])
        first = order_by_information(record.cells, [cost.step_ms(shape, cell) for cell in record.cells])
    load = LoadWatch(threads or sensible_threads())
    warnings: list[LatfitWarning] = []
    record.elapsed_s += device.now_s() - start_s
    try:
        result = run_profile(
            devices,
            record,
            budget_s=budget_s,
            precision=request.precision,
            seed=request.seed,
            first=first,
            keep=journal.keep(number) if journal else None,
            progress=run.progress,
        )
    except DeviceFailed as error:
        if error.partial is None or not error.partial.samples:
            raise
        result, warnings = error.partial, [warn("device_failed", found=error.found, remedy=error.remedy)]
    warnings += find_warnings(result, load(), request.design)
    return replace(result, warnings=tuple(warnings)), record.grid


def _choose_cells(request: ProfileRequest, shape: ModelShape, device: Device, budget_s: float) -> PathRecord:
    try:
        cost = time_pilot(device, shape, max(request.contexts))
    except DeviceOutOfMemory as error:
        raise WrongUsage(
            f"not even the smallest step fits in memory: {error}",
            where=f"model {shape.name}",
            remedy="Choose a smaller --model, fewer --layers, or a shorter --context.",
        ) from None
    if request.grid is None:
        worth_s = budget_s * (ADAPTIVE_GAIN if request.design == "adaptive" else 1)
        cells = grid_for_budget(shape, cost, worth_s, request.contexts, request.histories)
    else:
        cells = parse_grid(request.grid, request.contexts, request.histories)
    asked = {"asked": request.grid, "contexts": list(request.contexts), "histories": list(request.histories)}
    grid = {**asked, "cells": len(cells), "pilot": [cost.floor_ms, cost.flops_per_ms]}
    return PathRecord(cells, grid)
