"""Choose and open the devices of a request: the CPU through OpenVINO if installed, else PyTorch, else NumPy."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from latfit.errors import HardwareMissing, WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.device import PRECISIONS, Device, DeviceSettings
from latfit.profiling.devices.remote import RemoteDevice
from latfit.profiling.grid import ProfileRequest
from latfit.profiling.host.blas import blas_threads
from latfit.profiling.host.executed_isa import probe, satisfies
from latfit.profiling.host.isa import cpu_flags, environment_for
from latfit.profiling.host.machine import idle_threads, sensible_threads, usable_cpus
from latfit.profiling.shapes import PARTS, ModelShape

USUAL_PROCESSES = 3
MIN_BUDGET_FOR_PROCESSES_MS = 20_000.0  # below, opening them takes too large a share
BUILD_FACTOR = 4  # memory that weights take while they are made and packed, as a multiple of their size


class Kind(NamedTuple):
    """The library of a device, the extra of latfit that installs it, and its precisions."""

    library: str
    extra: str
    precisions: tuple[str, ...]


KINDS: Mapping[str, Kind] = {
    "numpy": Kind("numpy", "", ("fp32",)),
    "openvino": Kind("openvino", "amx", ("bf16", "fp32", "int8")),
    "torch-cpu": Kind("torch", "torch", ("bf16", "fp32", "int8")),
    "torch-cuda": Kind("torch", "torch", ("bf16", "fp16", "fp32")),
}


@dataclass(frozen=True)
class PathSpec:
    kind: str
    shape: ModelShape
    settings: DeviceSettings
    environment: Mapping[str, str] = field(default_factory=dict)
    request: ProfileRequest = field(default_factory=ProfileRequest)


def choose_paths(request: ProfileRequest, shape: ModelShape) -> list[PathSpec]:
    """Return the paths of a request, CPU first. Raises HardwareMissing, WrongUsage."""
    if absent := sorted(set(request.pin) - set(usable := usable_cpus())):
        remedy = f"Choose among {', '.join(map(str, usable))}."
        raise WrongUsage(f"this process may not run on CPU {absent[0]}", where="--pin", remedy=remedy)
    if request.device != "auto":
        require(request.device)
        return [_path(request.device, request, shape)]
    kinds = []
    if request.dtype != "fp16":  # no CPU library offers it
        kinds.append(next(kind for kind in ("openvino", "torch-cpu", "numpy") if reason_missing(kind) is None))
    if request.isa == "auto" and request.dtype != "int8" and reason_missing("torch-cuda") is None:
        kinds.append("torch-cuda")
    if not kinds:
        require("torch-cuda")
    return [_path(kind, request, shape) for kind in kinds]


def require(kind: str) -> None:
    reason = reason_missing(kind)
    if reason is not None:
        install = f"Install it: pip install 'latfit[{KINDS[kind].extra}]'."
        remedy = install if "installed" in reason else "Measure the CPU instead: --device torch-cpu, openvino or numpy."
        raise HardwareMissing(reason, where=f"--device {kind}", remedy=remedy)


@cache
def reason_missing(kind: str) -> str | None:
    if find_spec(KINDS[kind].library) is None:
        return f"{KINDS[kind].library} is not installed"
    return cuda_missing() if kind == "torch-cuda" else None


def cuda_missing() -> str | None:
    """Return why PyTorch has no GPU here. Looks for the driver first: importing PyTorch takes a second."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return "there is no NVIDIA driver (/dev/nvidiactl is missing)"
    import torch

    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) was built without CUDA"
    return None if torch.cuda.is_available() else "PyTorch finds no CUDA device it can use"


def _path(kind: str, request: ProfileRequest, shape: ModelShape) -> PathSpec:
    precision = precision_of(kind, request.dtype)
    if kind == "torch-cuda" and request.isa != "auto":
        raise WrongUsage("a GPU has no CPU instruction set", where="--isa", remedy="Leave --isa out.")
    environment = {} if kind == "torch-cuda" else environment_for(request.isa, kind)
    evidence = prove_isa(kind, precision, request.isa) if kind in ("openvino", "torch-cpu") else {}
    part = next(part for part in PARTS if part == request.part)
    threads = request.threads or _idle_threads(kind)
    settings = DeviceSettings(precision, threads, request.seed, part, request.graphs, evidence)
    return PathSpec(kind, replace(shape, dtype_bytes=PRECISIONS[precision][1]), settings, environment, request)


@cache
def _idle_threads(kind: str) -> int | None:
    if kind == "torch-cuda" or (kind == "numpy" and blas_threads() is None):
        return None
    idle = idle_threads()
    return idle if idle < sensible_threads() else None


def precision_of(kind: str, asked: str) -> str:
    offered = KINDS[kind].precisions
    if asked == "auto":
        narrow = kind == "torch-cuda" or bool({"avx512_bf16", "amx_bf16"} & set(cpu_flags()))
        return "bf16" if "bf16" in offered and narrow else "fp32"
    if asked not in offered:
        remedy = f"It offers {', '.join(offered)}."
        raise HardwareMissing(f"{kind} does not compute in {asked}", where=f"--dtype {asked}", remedy=remedy)
    return asked


@cache
def prove_isa(kind: str, precision: str, isa: str) -> Mapping[str, Any]:
    """Return what products of `kind` run on under the cap `isa`. Raises HardwareMissing if another."""
    found = probe(kind, precision, isa)
    if isa != "auto" and not satisfies(found["isa"], isa):
        ran = f"ran on {found['isa']}" if found["isa"] else "did not go through kernels that name an instruction set"
        why = f" ({found['failed'][:160]})" if found.get("failed") else ""
        remedy = "Use --isa auto, or --dtype fp32 with --device numpy for avx512 and avx2."
        text = f"products in {precision} on {kind} {ran} under that cap{why}"
        raise HardwareMissing(text, where=f"--isa {isa}", remedy=remedy)
    return found


def open_path(spec: PathSpec) -> Device:
    """Open the device of a path here. Raises WrongUsage if the weights do not fit, HardwareMissing."""
    request, kind, settings = spec.request, spec.kind, spec.settings
    if request.pin and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request.pin)
    if KINDS[kind].library == "torch":
        from latfit.profiling.devices.torch_device import CudaDevice, TorchDevice

        return (CudaDevice if kind == "torch-cuda" else TorchDevice)(spec.shape, settings)
    if kind == "openvino":
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        return OpenVinoDevice(spec.shape, settings)
    from latfit.profiling.devices.numpy_device import NumpyDevice

    device = NumpyDevice(spec.shape, threads=settings.threads, seed=settings.seed, part=settings.part)
    running = device.facts()["isa"]
    if request.isa not in ("auto", running):
        device.close()
        found = f"NumPy's BLAS runs float32 on {running or 'unknown kernels'} under that cap"
        remedy = "Use --isa auto, or a NumPy built with OpenBLAS (the wheels on PyPI are)."
        raise HardwareMissing(found, where=f"--isa {request.isa}", remedy=remedy)
    return device


def process_count(spec: PathSpec) -> int:
    request, free = spec.request, free_memory_bytes()
    if request.processes is not None:
        return request.processes
    fits = free is None or USUAL_PROCESSES * BUILD_FACTOR * spec.shape.weight_bytes <= free / 2
    several = fits and spec.kind != "torch-cuda" and request.budget_ms >= MIN_BUDGET_FOR_PROCESSES_MS
    return USUAL_PROCESSES if several else 1


def open_in_processes(spec: PathSpec) -> list[Device]:
    processes = process_count(spec)
    if processes == 1 and not spec.environment and not spec.request.pin:
        return [open_path(spec)]
    opened: list[Device] = []
    try:
        for _ in range(processes):
            opened.append(RemoteDevice(open_path, (spec,), spec.environment))  # noqa: PERF401 - closed on errors
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened
