"""Which devices a request means, whether this machine has them, and how they are opened.

A path is one device, or several libraries of the CPU of which each cell takes the fastest. NumPy computes in float32
and stands in for the CPU only where neither OpenVINO nor PyTorch is installed, or where it is requested."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from latfit.errors import HardwareMissing, WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.device import PRECISIONS, Device, DeviceSettings
from latfit.profiling.devices.remote import RemoteDevice, Turns
from latfit.profiling.host.executed_isa import probe, satisfies
from latfit.profiling.host.isa import cpu_flags, environment_for, missing_for_amx, tile_permission
from latfit.profiling.host.machine import idle_threads, sensible_threads, usable_cpus
from latfit.profiling.request import ProfileRequest
from latfit.profiling.shapes import PARTS, ModelShape

USUAL_PROCESSES = 3
MIN_BUDGET_FOR_PROCESSES_MS = 20_000.0  # below, opening them takes too large a share
BUILD_FACTOR = 4  # memory that weights take while they are made and packed, as a multiple of their size


@dataclass(frozen=True)
class Kind:
    """A device: the library it needs, the extra of this package that brings it, and the precisions it offers."""

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
    """What a process must know to open the device of one execution path; of several `kinds` each cell takes the
    fastest."""

    kinds: tuple[str, ...]
    shape: ModelShape
    settings: Mapping[str, DeviceSettings]
    environment: Mapping[str, str] = field(default_factory=dict)
    cold: bool = False
    pin: tuple[int, ...] = ()
    engine: str = "kernels"
    isa: str = "auto"

    @property
    def on_gpu(self) -> bool:
        return self.kinds == ("torch-cuda",)


def paths_of(request: ProfileRequest, shape: ModelShape) -> list[PathSpec]:
    """Return the execution paths of a request, CPU first. Raises HardwareMissing, WrongUsage."""
    check_pin(request.pin)
    if request.engine == "transformers":
        return [_path((_engine_device(request),), request, shape)]
    if request.device != "auto":
        require(request.device)
        return [_path((request.device,), request, shape)]
    paths = []
    if request.dtype != "fp16":  # no CPU library offers it
        libraries = tuple(kind for kind in ("openvino", "torch-cpu") if reason_missing(kind) is None)
        paths.append(_path(libraries or ("numpy",), request, shape))
    if request.isa == "auto" and request.dtype != "int8" and reason_missing("torch-cuda") is None:
        paths.append(_path(("torch-cuda",), request, shape))
    if not paths:
        require("torch-cuda")
    return paths


def _engine_device(request: ProfileRequest) -> str:
    kind = request.device
    if kind == "auto":
        kind = "torch-cuda" if reason_missing("torch-cuda") is None else "torch-cpu"
    if KINDS[kind].library != "torch":
        raise WrongUsage(
            f"transformers runs in PyTorch, not on {kind}", where="--engine", remedy="Use --device torch-cpu."
        )
    require(kind)
    if find_spec("transformers") is None:
        raise HardwareMissing(
            "transformers is not installed", where="--engine", remedy="Install it: pip install 'latfit[engine]'."
        )
    return kind


def require(kind: str) -> None:
    """Raise HardwareMissing with the reason if this machine cannot run `kind`."""
    reason = reason_missing(kind)
    if reason is None:
        return
    remedy = "Measure the CPU instead: --device torch-cpu, openvino or numpy."
    if "installed" in reason:
        remedy = f"Install it: pip install 'latfit[{KINDS[kind].extra}]'."
    raise HardwareMissing(reason, where=f"--device {kind}", remedy=remedy)


@cache
def reason_missing(kind: str) -> str | None:
    """Return why `kind` cannot run here, in words; None if it can."""
    if find_spec(KINDS[kind].library) is None:
        return f"{KINDS[kind].library} is not installed"
    return cuda_missing() if kind == "torch-cuda" else None


def cuda_missing() -> str | None:
    """Return why PyTorch has no GPU here. Looks for the driver's file first: importing PyTorch takes a second."""
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return "there is no NVIDIA driver (/dev/nvidiactl is missing)"
    import torch

    if torch.version.cuda is None:
        return f"this PyTorch ({torch.__version__}) was built without CUDA"
    return None if torch.cuda.is_available() else "PyTorch finds no CUDA device it can use"


def _path(kinds: tuple[str, ...], request: ProfileRequest, shape: ModelShape) -> PathSpec:
    settings = {kind: _settings(kind, request) for kind in kinds}
    environment: dict[str, str] = {}
    for kind in kinds:
        environment |= {} if kind == "torch-cuda" else environment_for(request.isa, kind)
    widest = max(PRECISIONS[each.precision][1] for each in settings.values())
    cold = request.cache == "cold"
    shape = replace(shape, dtype_bytes=widest)
    return PathSpec(kinds, shape, settings, environment, cold, request.pin, request.engine, request.isa)


def _settings(kind: str, request: ProfileRequest) -> DeviceSettings:
    settings = DeviceSettings(
        precision_of(kind, request.dtype),
        request.threads or _idle_threads(kind),
        request.seed,
        next(part for part in PARTS if part == request.part),
        request.graphs,
        cold=request.cache == "cold",
    )
    if kind == "torch-cuda" and request.isa != "auto":
        raise WrongUsage("a GPU has no CPU instruction set", where="--isa", remedy="Leave --isa out.")
    if kind in ("torch-cuda", "numpy"):
        return settings
    return replace(settings, evidence=proved(kind, settings.precision, request.isa))


@cache
def _idle_threads(kind: str) -> int | None:
    """Return fewer threads than could run if others keep CPUs busy; None for as many as can run."""
    if kind == "torch-cuda":
        return None
    if kind == "numpy":
        from latfit.profiling.host.blas import find_openblas

        if find_openblas() is None:
            return None
    idle = idle_threads()
    return idle if idle < sensible_threads() else None


def precision_of(kind: str, asked: str) -> str:
    """Return the precision that a device computes in. Raises HardwareMissing if it does not offer what was asked."""
    offered = KINDS[kind].precisions
    if asked == "auto":
        narrow = kind == "torch-cuda" or bool({"avx512_bf16", "amx_bf16"} & set(cpu_flags()))
        return "bf16" if "bf16" in offered and narrow else "fp32"
    if asked not in offered:
        raise HardwareMissing(
            f"{kind} does not compute in {asked}",
            where=f"--dtype {asked}",
            remedy=f"It offers {', '.join(offered)}.",
        )
    return asked


@cache
def proved(kind: str, precision: str, isa: str) -> Mapping[str, Any]:
    """Return what products of `kind` ran on in a short run of their own, under the cap `isa`.

    Raises HardwareMissing if AMX was requested and cannot be, or if something else ran than was requested.
    """
    if isa == "amx":
        lacking = missing_for_amx(cpu_flags(), tile_permission(), int8=precision == "int8")
        if lacking:
            raise HardwareMissing(lacking, where="--isa amx", remedy="Use --isa auto, which says what really runs.")
    found = probe(kind, precision, isa)
    if isa != "auto" and not satisfies(found["isa"], isa):
        ran = f"ran on {found['isa']}" if found["isa"] else "did not go through kernels that name an instruction set"
        why = f" ({found['failed'][:160]})" if found.get("failed") else ""
        raise HardwareMissing(
            f"products in {precision} on {kind} {ran} under that cap{why}",
            where=f"--isa {isa}",
            remedy="Use --isa auto, or --dtype fp32 with --device numpy for avx512 and avx2.",
        )
    return found


def check_pin(cpus: tuple[int, ...]) -> None:
    """Raise WrongUsage for CPUs that this process may not run on."""
    usable = usable_cpus()
    absent = sorted(set(cpus) - set(usable))
    if absent:
        raise WrongUsage(
            f"this process may not run on CPU {absent[0]}",
            where="--pin",
            remedy=f"Choose among {', '.join(map(str, usable))}.",
        )


def open_path(spec: PathSpec) -> Device:
    """Open the device of a path in this process, with its weights loaded."""
    if spec.pin and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec.pin)
    devices = [open_device(kind, spec.shape, spec.settings[kind], spec.isa) for kind in spec.kinds]
    if devices[1:] or (spec.cold and not spec.on_gpu):
        from latfit.profiling.devices.wrappers import ColdCaches, FastestOf

        device = FastestOf(devices) if devices[1:] else devices[0]
        return ColdCaches(device) if spec.cold else device
    return devices[0]


def open_device(kind: str, shape: ModelShape, settings: DeviceSettings, isa: str = "auto") -> Device:
    """Open one device. Raises WrongUsage if the weights do not fit; HardwareMissing if NumPy's BLAS ignores `isa`."""
    shape = replace(shape, dtype_bytes=PRECISIONS[settings.precision][1])
    if kind == "openvino":
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        return OpenVinoDevice(shape, settings)
    if kind != "numpy":
        from latfit.profiling.devices.torch_device import CpuRuntime, CudaRuntime, TorchDevice

        return TorchDevice(shape, settings, CudaRuntime() if kind == "torch-cuda" else CpuRuntime())
    from latfit.profiling.devices.numpy_device import NumpyDevice

    device = NumpyDevice(shape, threads=settings.threads, seed=settings.seed, part=settings.part)
    running = device.facts()["isa"]
    if isa in ("auto", running):
        return device
    device.close()
    raise HardwareMissing(
        f"NumPy's BLAS runs float32 on {running or 'kernels that it does not name'} all the same",
        where=f"--isa {isa}",
        remedy="Use --isa auto, or a NumPy built with OpenBLAS (the wheels on PyPI are).",
    )


def process_count(request: ProfileRequest, spec: PathSpec) -> int:
    """Return how many processes take turns: as requested, else USUAL_PROCESSES if budget and memory allow, else one."""
    if request.processes is not None:
        return request.processes
    free = free_memory_bytes()
    needed = USUAL_PROCESSES * BUILD_FACTOR * len(spec.kinds) * spec.shape.weight_bytes
    fits = free is None or needed <= free / 2
    several = fits and not spec.on_gpu and request.budget_ms >= MIN_BUDGET_FOR_PROCESSES_MS
    return USUAL_PROCESSES if several else 1


def open_in_processes(spec: PathSpec, processes: int) -> list[Device]:
    """Open the devices that take turns, each in a process; in this one if one is enough and nothing must be set before
    its library loads."""
    if processes == 1 and not spec.environment and not spec.pin:
        return [open_path(spec)]
    opened: list[Device] = []
    turns = Turns()
    try:
        for _ in range(processes):
            opened.append(RemoteDevice(open_path, (spec,), spec.environment, turns))  # noqa: PERF401 - closed on errors
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened
