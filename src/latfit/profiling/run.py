"""Measure a request: open the devices, choose the cells, run each path, and record the provenance."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np

from latfit._version import __version__
from latfit.errors import WrongUsage
from latfit.messages import Message, message
from latfit.profiling.devices.device import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiling.devices.select import choose_paths, open_in_processes
from latfit.profiling.grid import (
    ProfileRequest,
    StepCost,
    grid_for_budget,
    order_by_information,
    parse_grid,
    time_pilot,
)
from latfit.profiling.host.machine import (
    LoadWatch,
    compare_sensors,
    cpu_model,
    find_sensor_warnings,
    machine_facts,
    read_sensors,
)
from latfit.profiling.journal import Journal
from latfit.profiling.quality import find_warnings
from latfit.profiling.result import PathRecord, ProfileResult, to_trace
from latfit.profiling.sampler import Progress, run_profile
from latfit.profiling.shapes import ModelShape, model_shape
from latfit.provenance import command_line, utc_now
from latfit.trace import Trace, concatenated

ADAPTIVE_GAIN = 5  # the adaptive design chooses cells of the grid for this multiple of the budget


@dataclass(frozen=True)
class Announcement:
    """What a run is about to do on one path. `budget_s` is the share of this path."""

    cells: int
    model: str
    device: str
    threads: int | None
    processes: int
    budget_s: float


@dataclass(frozen=True)
class PathOutcome:
    path: str
    device: str
    result: ProfileResult


@dataclass(frozen=True)
class _Run:
    request: ProfileRequest
    journal: Journal | None
    progress: Callable[[Progress], None] | None
    announce: Callable[[Announcement], None] | None
    started: str
    process: int


def measure(
    request: ProfileRequest,
    *,
    device: Device | None = None,
    journal: Journal | None = None,
    progress: Callable[[Progress], None] | None = None,
    announce: Callable[[Announcement], None] | None = None,
) -> tuple[Trace, tuple[PathOutcome, ...]]:
    """Measure what `request` asks for, on `device` if given; continue the run in the journal.

    After Ctrl-C, or if a device broke midway (`result.stop`), the result holds what was measured until then. Raises
    DeviceFailed if nothing was measured, KeyboardInterrupt before the first step.
    """
    request.check()
    shape = model_shape(request.model, request.layers)
    started, process = (journal.started, journal.process) if journal else (utc_now(), os.getpid())
    run = _Run(request, journal, progress, announce, started, process)
    machine = machine_facts()
    specs = [] if device else choose_paths(request, shape)
    count, left_s = max(len(specs), 1), request.budget_ms / 1e3
    parts: list[Trace] = []
    outcomes: list[PathOutcome] = []
    for number in range(count):
        devices = [device] if device else open_in_processes(specs[number])
        try:
            model = specs[number].shape if specs else shape
            trace, outcome = _measure_path(run, model, devices, number, left_s / (count - number))
        finally:
            for each in [] if device else devices:
                each.close()
        left_s -= outcome.result.elapsed_s
        parts.append(trace)
        outcomes.append(outcome)
        if outcome.result.stop in ("interrupted", "device_failed"):
            break
    whole = concatenated(parts, [outcome.path for outcome in outcomes])
    units = dict.fromkeys(str(part["hardware"][0]) for part in parts if len(part))
    hardware = np.full(len(whole), " + ".join(units), dtype=object)  # all paths of a trace are on one machine
    named = [(outcome.result, {"path": outcome.path} if len(outcomes) > 1 else {}) for outcome in outcomes]
    facts = {
        "made_by": "latfit profile",
        "latfit": __version__,
        "command": command_line(),
        "started": run.started,
        "seed": request.seed,
        "machine": machine,
        "budget_s": request.budget_ms / 1e3,
        "precision": request.precision,
        "elapsed_s": round(sum(result.elapsed_s for result, _ in named), 3),
        "stop": outcomes[-1].result.stop,
        "warnings": [{**warning.to_json(), **path} for result, path in named for warning in result.warnings],
        "limits": [{**limit.as_json(), **path} for result, path in named for limit in result.limits],
        "model": parts[0].provenance["model"],
        "paths": {outcome.path: dict(part.provenance) for outcome, part in zip(outcomes, parts, strict=True)},
    }
    return whole.with_columns(hardware=hardware).with_provenance(**facts), tuple(outcomes)


def _measure_path(
    run: _Run, shape: ModelShape, devices: Sequence[Device], number: int, budget_s: float
) -> tuple[Trace, PathOutcome]:
    request, first, journal = run.request, devices[0], run.journal
    before, start_s = read_sensors(gpu=first.path == "gpu"), first.now_s()
    record = journal.paths.get(number) if journal else None
    if record is None:
        record = _choose_cells(request, shape, first, budget_s)
        if journal:
            journal.plan(number, record)
    device = {**first.facts(), "pinned": list(request.pin), "threads_idle": request.threads is None}
    threads = device.get("threads")
    if run.announce:
        run.announce(Announcement(len(record.cells), shape.name, first.name, threads, len(devices), budget_s))
    order: list[int] = []
    if request.design == "adaptive":
        cost = StepCost(*record.grid["pilot"])
        order = order_by_information(record.cells, [cost.step_ms(shape, cell) for cell in record.cells])
    load = LoadWatch()
    warnings: list[Message] = []
    record.elapsed_s += first.now_s() - start_s
    keep = partial(journal.keep, number) if journal else None
    try:
        result = run_profile(
            devices,
            record,
            budget_s=budget_s,
            precision=request.precision,
            seed=request.seed,
            first=order,
            keep=keep,
            progress=run.progress,
        )
    except DeviceFailed as error:
        if error.partial is None or not error.partial.samples:
            raise
        result, warnings = error.partial, [message("device_failed", found=error.found, remedy=error.remedy)]
    sensors = compare_sensors(before, read_sensors(gpu=first.path == "gpu"))
    warnings += [*find_warnings(result, load(), device, request.design), *find_sensor_warnings(sensors)]
    result = replace(result, warnings=tuple(warnings))
    between = result.between_processes
    processes = max((sample.process for sample in result.samples), default=0) + 1
    provenance = {
        "model": {**asdict(shape), "parameters": shape.parameters, "weight_bytes": shape.weight_bytes},
        "processes": processes,
        "stop": result.stop,
        "device": device,
        "grid": record.grid,
        "between_processes": between._asdict() if between else None,
        "design": request.design,
        "sensors": sensors,
        "warmup_steps": len(result.samples) - result.steps,
        **{name: round(getattr(result, name), 3) for name in ("elapsed_s", "step_s", "prepare_s", "warmup_s")},
    }
    stamp = run.started.replace(":", "").replace("-", "").replace("+0000", "Z")
    runs = [f"{stamp}-{run.process}-{first.path}-{process}" for process in range(processes)]
    trace = to_trace(result, first.path, device.get("gpu") or cpu_model(), shape.name, runs, provenance)
    return trace, PathOutcome(first.path, first.name, result)


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
