"""`measure`: from a request to a trace: open the device, choose the grid, run, and write down where it all
came from."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from latfit._version import __version__
from latfit.errors import HardwareMissing, WrongUsage
from latfit.profiler.design import (
    DEFAULT_CONTEXT,
    LEVELS,
    default_cells,
    grid_cost_s,
    grid_for_budget,
    parse_grid,
    pilot,
    split_by_memory,
)
from latfit.profiler.device import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiler.isa import best_float32_isa, cpu_flags
from latfit.profiler.machine import (
    LoadWatch,
    cpu_model,
    machine_facts,
    sensible_threads,
)
from latfit.profiler.record import Doubt, Limit, ProfileResult, TraceLabels, to_trace
from latfit.profiler.runner import Progress, run_profile
from latfit.profiler.workload import ModelShape, StepShape, model_shape
from latfit.provenance import command_line, utc_now
from latfit.trace.table import Trace

DEVICES = ("auto", "numpy", "openvino", "torch-cpu", "torch-cuda")


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure, and for how long. `grid` is text as in `parse_grid`; without it the budget decides."""

    device: str = "auto"
    isa: str = "auto"
    model: str = "tiny"
    layers: int | None = None
    grid: str | None = None
    contexts: tuple[int, ...] = (DEFAULT_CONTEXT,)
    threads: int | None = None
    budget_ms: float = 60_000.0
    precision: float = 0.03
    seed: int = 0
    command: str = field(default_factory=command_line)
    """How the user started this; it goes into the trace."""


@dataclass(frozen=True)
class Announcement:
    """What a run is about to do, told once before its first step."""

    cells: int
    model: str
    device: str
    threads: int | None


def measure(
    request: ProfileRequest,
    *,
    device: Device | None = None,
    progress: Callable[[Progress], None] | None = None,
    announce: Callable[[Announcement], None] | None = None,
) -> tuple[Trace, ProfileResult]:
    """Measure what `request` asks for, on `device` or on the one that it names.

    Returns the trace of all samples, and the result with its doubts and limits; after Ctrl-C, or where the
    device broke midway (`result.stop`), both hold what was measured until then. Raises HardwareMissing,
    WrongUsage, BadInput, and DeviceFailed where nothing was measured; KeyboardInterrupt before the first
    step.
    """
    _check(request)
    shape = model_shape(request.model, request.layers)
    opened = device or open_device(request, shape)
    started, machine = utc_now(), machine_facts()
    try:
        result, grid = _run(request, shape, opened, progress, announce)
        facts = opened.facts()
    finally:
        if device is None:
            opened.close()
    result = replace(result, doubts=(*result.doubts, *_kernel_doubts(facts)))
    provenance = {
        "made_by": "latfit profile",
        "latfit": __version__,
        "command": request.command,
        "started": started,
        "seed": request.seed,
        "machine": machine,
        "device": facts,
        "model": {**asdict(shape), "parameters": shape.parameters, "weight_bytes": shape.weight_bytes},
        "grid": grid,
        "budget_s": request.budget_ms / 1e3,
        "elapsed_s": round(result.elapsed_s, 3),
        "precision": request.precision,
        "stop": result.stop,
        "warnings": [doubt.as_json() for doubt in result.doubts],
        "limits": [limit.as_json() for limit in result.limits],
    }
    run = f"{started.replace(':', '').replace('-', '').replace('+0000', 'Z')}-{os.getpid()}"
    return to_trace(result, TraceLabels(opened.path, cpu_model(), shape.name, run, provenance)), result


def open_device(request: ProfileRequest, shape: ModelShape) -> Device:
    """The device that `request` names, with its weights loaded. Raises HardwareMissing where it is not
    there."""
    if request.device not in ("auto", "numpy"):
        raise HardwareMissing(
            f"latfit {__version__} has no kernels for this device; it measures the CPU through NumPy",
            where=f"--device {request.device}",
            remedy="Use --device numpy.",
        )
    from latfit.profiler.numpy_blas import NumpyDevice

    device = NumpyDevice(shape, threads=request.threads, seed=request.seed)
    running = device.facts()["isa"]
    if request.isa not in ("auto", running):
        device.close()
        raise HardwareMissing(
            f"NumPy's BLAS runs float32 on {running or 'kernels that it does not name'} all the same",
            where=f"--isa {request.isa}",
            remedy="Use --isa auto, or a NumPy built with OpenBLAS (the wheels on PyPI are).",
        )
    return device


def _run(
    request: ProfileRequest,
    shape: ModelShape,
    device: Device,
    progress: Callable[[Progress], None] | None,
    announce: Callable[[Announcement], None] | None,
) -> tuple[ProfileResult, dict[str, Any]]:
    """The run, and the description of its grid. The pilot's time is part of the budget."""
    start_s = device.now_s()
    cells, limits, grid = _choose_cells(request, shape, device)
    facts = device.facts()
    threads = facts.get("threads")
    if announce:
        announce(Announcement(len(cells), shape.name, device.name, threads))
    spent_s = device.now_s() - start_s
    try:
        result = run_profile(
            device,
            cells,
            budget_s=request.budget_ms / 1e3 - spent_s,
            precision=request.precision,
            seed=request.seed,
            progress=progress,
            load=LoadWatch(threads or sensible_threads()),
        )
    except DeviceFailed as error:
        if error.partial is None or not error.partial.samples:
            raise
        failure = Doubt("device_failed", f"{error.found}; the run ended there.", error.remedy)
        result = replace(error.partial, doubts=(failure, *error.partial.doubts))
    return replace(result, limits=(*limits, *result.limits)), grid


def _choose_cells(
    request: ProfileRequest, shape: ModelShape, device: Device
) -> tuple[list[StepShape], list[Limit], dict[str, Any]]:
    budget_s = request.budget_ms / 1e3
    try:
        cost = pilot(device, shape, max(request.contexts))
    except DeviceOutOfMemory as error:
        raise WrongUsage(
            f"not even the smallest step fits in memory: {error}",
            where=f"model {shape.name}",
            remedy="Choose a smaller --model, fewer --layers, or a shorter --context.",
        ) from None
    if request.grid is None:
        wanted = grid_for_budget(shape, cost, budget_s, request.contexts)
    else:
        wanted = parse_grid(request.grid, request.contexts)
    cells, limits = split_by_memory(shape, wanted, device.free_bytes())
    if not cells:
        raise WrongUsage(
            f"none of the {len(wanted)} cells fits in memory; the first {limits[0].message}",
            where="--grid",
            remedy="Ask for fewer requests, fewer tokens, or a shorter --context.",
        )
    full = default_cells(*LEVELS[0], contexts=request.contexts)
    grid = {
        "asked": request.grid,
        "contexts": list(request.contexts),
        "cells": len(cells),
        "reduced_to_fit_budget": request.grid is None and len(wanted) < len(full),
        "expected_s": round(grid_cost_s(shape, cells, cost), 1),
    }
    return cells, limits, grid


def _kernel_doubts(facts: dict[str, Any]) -> list[Doubt]:
    """A BLAS that does not know the CPU runs narrower kernels than the CPU could."""
    running, best = facts.get("isa"), best_float32_isa(cpu_flags())
    if running == "avx2" and best == "avx512":
        return [
            Doubt(
                "narrow_kernels",
                "NumPy's BLAS chose AVX2 kernels although this CPU has AVX-512.",
                "Measure with --isa avx512 to see what the CPU can do; this is what NumPy does by default.",
            )
        ]
    return []


def _check(request: ProfileRequest) -> None:
    """Refuse what no run could use."""
    if request.device not in DEVICES:
        raise WrongUsage(
            f"{request.device!r} is not known",
            where="--device",
            remedy=f"Choose one of {', '.join(DEVICES)}.",
        )
    if not 0 < request.precision < 1:
        raise WrongUsage(
            f"{request.precision} is no relative precision",
            where="--precision",
            remedy="Write 0.03 for ±3 %.",
        )
    if request.grid is not None:
        parse_grid(request.grid, request.contexts)
