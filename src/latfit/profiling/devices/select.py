"""Which devices a request means, whether this machine has them, and how they are opened.

A path is one device, or several libraries of the CPU: the first time a cell is prepared every library runs it a few
times, and the fastest keeps it. What was tried is told in the facts, so that the trace shows what the other libraries
took. NumPy computes in float32 and stands in for the CPU only where neither OpenVINO nor PyTorch is installed, or where
it is asked for.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from latfit.errors import HardwareMissing, WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.devices.protocol import PRECISIONS, Device, DeviceOutOfMemory, DeviceSettings
from latfit.profiling.devices.subprocess_device import RemoteDevice, Turns
from latfit.profiling.host.executed_isa import probe, satisfies
from latfit.profiling.host.isa import cpu_flags, environment_for, missing_for_amx, tile_permission
from latfit.profiling.host.machine import idle_threads, sensible_threads, usable_cpus
from latfit.profiling.request import ProfileRequest
from latfit.profiling.shapes import PARTS, ModelShape, Part, StepShape

TRIAL_STEPS = 4


class FasterOf:
    """Several devices of one path as one; the first is asked for the time. `path` is `amx` only while every device that
    has won a cell ran on AMX."""

    name = "fastest"

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._trials: dict[StepShape, dict[str, float]] = {}
        self._running: Device = self._devices[0]

    @property
    def path(self) -> str:
        winners = {_fastest(times) for times in self._trials.values() if times}
        paths = {device.path for device in self._devices if device.name in winners}
        return "amx" if paths == {"amx"} else "cpu"

    def facts(self) -> dict[str, Any]:
        trials = [
            {"cell": str(cell), "fastest": _fastest(times), "ms": times}
            for cell, times in self._trials.items()
            if times
        ]
        return {
            "device": self.name,
            "threads": self._devices[0].facts().get("threads"),
            "members": [device.facts() for device in self._devices],
            "trials": trials,
        }

    def free_bytes(self) -> int | None:
        return self._devices[0].free_bytes()

    def prepare(self, cell: StepShape) -> None:
        if cell not in self._trials:
            self._trials[cell] = self._tried(cell)
        times = self._trials[cell]
        if not times:
            raise DeviceOutOfMemory("no library has memory for it")
        best = _fastest(times)
        self._running = next(device for device in self._devices if device.name == best)
        self._running.prepare(cell)

    def step_ms(self) -> float:
        return self._running.step_ms()

    def now_s(self) -> float:
        return self._devices[0].now_s()

    def close(self) -> None:
        for device in self._devices:
            device.close()

    def _tried(self, cell: StepShape) -> dict[str, float]:
        times = {}
        for device in self._devices:
            try:
                device.prepare(cell)
                times[device.name] = min(device.step_ms() for _ in range(TRIAL_STEPS))
            except DeviceOutOfMemory:
                continue
        return times


def _fastest(times: dict[str, float]) -> str:
    return min(times, key=lambda name: times[name])


LIBRARY = {"openvino": "openvino", "torch-cpu": "torch", "torch-cuda": "torch"}
EXTRA = {"openvino": "amx", "torch-cpu": "torch", "torch-cuda": "torch"}
_OFFERED = {
    "numpy": ("fp32",),
    "openvino": ("bf16", "fp32", "int8"),
    "torch-cpu": ("bf16", "fp32", "int8"),
    "torch-cuda": ("bf16", "fp16", "fp32"),
}


USUAL_PROCESSES = 3
WORTH_PROCESSES_MS = 20_000.0
BUILD_FACTOR = 4
"""Memory that weights take at most while they are made and packed, as a multiple of their size."""


@dataclass(frozen=True)
class PathSpec:
    """All that a process must know to open the device of one execution path. `kinds` with several members is a CPU path
    of which each cell takes the fastest."""

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
    """The execution paths of a request, CPU first. Raises HardwareMissing, WrongUsage."""
    check_pin(request.pin)
    if request.engine == "transformers":
        return [_path((_engine_device(request),), request, shape)]
    if request.device != "auto":
        require(request.device)
        return [_path((request.device,), request, shape)]
    cpu = tuple(kind for kind in ("openvino", "torch-cpu") if reason_missing(kind) is None) or ("numpy",)
    if request.dtype == "fp16":
        cpu = ()
    paths = [_path(cpu, request, shape)] if cpu else []
    if request.isa == "auto" and request.dtype != "int8" and reason_missing("torch-cuda") is None:
        paths.append(_path(("torch-cuda",), request, shape))
    if not paths:
        require("torch-cuda")
    return paths


def _engine_device(request: ProfileRequest) -> str:
    kind = request.device
    if kind == "auto":
        kind = "torch-cuda" if reason_missing("torch-cuda") is None else "torch-cpu"
    if kind not in ("torch-cpu", "torch-cuda"):
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
    """Raises HardwareMissing with the reason where this machine cannot run `kind`."""
    reason = reason_missing(kind)
    if reason is None:
        return
    extra = EXTRA[kind]
    remedy = f"Install it: pip install 'latfit[{extra}]'."
    if "installed" not in reason:
        remedy = "Measure the CPU instead: --device torch-cpu, openvino or numpy."
    raise HardwareMissing(reason, where=f"--device {kind}", remedy=remedy)


@cache
def reason_missing(kind: str) -> str | None:
    """Why `kind` cannot run here, in words; None where it can."""
    if kind == "numpy":
        return None
    if find_spec(LIBRARY[kind]) is None:
        return f"{LIBRARY[kind]} is not installed"
    if kind != "torch-cuda":
        return None
    return cuda_missing()


def cuda_missing() -> str | None:
    """Why PyTorch has no GPU here. The driver's file is looked for first: importing PyTorch takes a second."""
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
    return PathSpec(
        kinds,
        replace(shape, dtype_bytes=widest),
        settings,
        environment,
        request.cache == "cold",
        request.pin,
        request.engine,
        request.isa,
    )


def _settings(kind: str, request: ProfileRequest) -> DeviceSettings:
    precision = precision_of(kind, request.dtype)
    settings = DeviceSettings(
        precision,
        request.threads or _idle_threads(kind),
        request.seed,
        _part(request),
        request.graphs,
        cold=request.cache == "cold",
    )
    if kind == "torch-cuda":
        if request.isa != "auto":
            raise WrongUsage("a GPU has no CPU instruction set", where="--isa", remedy="Leave --isa out.")
        return settings
    if kind == "numpy":
        environment_for(request.isa, kind)
        return settings
    return replace(settings, evidence=proved(kind, precision, request.isa))


@cache
def _idle_threads(kind: str) -> int | None:
    """Fewer threads than could run, where others keep CPUs busy; None for as many as can run."""
    if kind == "torch-cuda":
        return None
    idle = idle_threads()
    if idle >= sensible_threads():
        return None
    if kind == "numpy":
        from latfit.profiling.host.blas import find_openblas

        return idle if find_openblas() else None
    return idle


def _part(request: ProfileRequest) -> Part:
    return next(part for part in PARTS if part == request.part)


def precision_of(kind: str, asked: str) -> str:
    """The precision that a device computes in. Raises HardwareMissing where it does not offer what was asked."""
    offered = _OFFERED[kind]
    if asked == "auto":
        flags = cpu_flags()
        narrow = kind == "torch-cuda" or "avx512_bf16" in flags or "amx_bf16" in flags
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
    """What products of `kind` ran on in a short run of their own, under the cap `isa`.

    Raises HardwareMissing where AMX was asked for and cannot be, or where something else ran than was asked for.
    """
    if isa == "amx":
        lacking = missing_for_amx(cpu_flags(), tile_permission(), int8=precision == "int8")
        if lacking:
            raise HardwareMissing(lacking, where="--isa amx", remedy="Use --isa auto, which says what really runs.")
    found = probe(kind, precision, isa)
    if isa != "auto" and not satisfies(found["isa"], isa):
        ran = f"ran on {found['isa']}" if found["isa"] else "did not go through kernels that name an instruction set"
        raise HardwareMissing(
            f"products in {precision} on {kind} {ran} under that cap" + _why(found),
            where=f"--isa {isa}",
            remedy="Use --isa auto, or --dtype fp32 with --device numpy for avx512 and avx2.",
        )
    return found


def _why(found: Mapping[str, Any]) -> str:
    return f" ({found['failed'][:160]})" if found.get("failed") else ""


def check_pin(cpus: tuple[int, ...]) -> None:
    """Raises WrongUsage for CPUs that this process may not run on."""
    absent = sorted(set(cpus) - set(usable_cpus()))
    if absent:
        raise WrongUsage(
            f"this process may not run on CPU {absent[0]}",
            where="--pin",
            remedy=f"Choose among {', '.join(map(str, usable_cpus()))}.",
        )


def open_path(spec: PathSpec) -> Device:
    """The device of a path in this process, with its weights loaded."""
    if spec.pin and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, spec.pin)
    devices = [_open_kind(kind, spec) for kind in spec.kinds]
    device = devices[0] if len(devices) == 1 else FasterOf(devices)
    if spec.cold and not spec.on_gpu:
        from latfit.profiling.devices.cache_flush import ColdCaches

        return ColdCaches(device)
    return device


def _open_kind(kind: str, spec: PathSpec) -> Device:
    settings = spec.settings[kind]
    shape = replace(spec.shape, dtype_bytes=PRECISIONS[settings.precision][1])
    if kind == "numpy":
        from latfit.profiling.devices.numpy_device import NumpyDevice

        device = NumpyDevice(shape, threads=settings.threads, seed=settings.seed, part=settings.part)
        _check_numpy(device, spec.isa)
        return device
    if kind == "openvino":
        from latfit.profiling.devices.openvino_device import OpenVinoDevice

        return OpenVinoDevice(shape, settings)
    if kind == "torch-cpu":
        from latfit.profiling.devices.torch_device import TorchCpuDevice

        return TorchCpuDevice(shape, settings)
    return _cuda_device(shape, settings)


def _cuda_device(shape: ModelShape, settings: DeviceSettings) -> Device:
    from latfit.profiling.devices.cuda_device import TorchCuda, TorchCudaDevice

    return TorchCudaDevice(shape, settings, TorchCuda())


def _check_numpy(device: Device, isa: str) -> None:
    """Raises HardwareMissing where NumPy's BLAS runs other kernels than were asked for."""
    running = device.facts()["isa"]
    if isa in ("auto", running):
        return
    device.close()
    raise HardwareMissing(
        f"NumPy's BLAS runs float32 on {running or 'kernels that it does not name'} all the same",
        where=f"--isa {isa}",
        remedy="Use --isa auto, or a NumPy built with OpenBLAS (the wheels on PyPI are).",
    )


def process_count(request: ProfileRequest, spec: PathSpec) -> int:
    """How many processes take turns: what was asked for, else USUAL_PROCESSES where the budget is worth their start and
    memory holds their weights."""
    if request.processes is not None:
        return request.processes
    free = free_memory_bytes()
    needed = USUAL_PROCESSES * BUILD_FACTOR * len(spec.kinds) * spec.shape.weight_bytes
    roomy = free is None or needed <= free / 2
    return USUAL_PROCESSES if roomy and not spec.on_gpu and request.budget_ms >= WORTH_PROCESSES_MS else 1


def open_in_processes(spec: PathSpec, processes: int) -> list[Device]:
    """The devices that take turns: in this process where one is enough and nothing must be set before its library
    loads, else each in its own."""
    if processes == 1 and not spec.environment and not spec.pin:
        return [open_path(spec)]
    opened: list[Device] = []
    turns = Turns()
    try:
        opened.extend(RemoteDevice(open_path, (spec,), spec.environment, turns) for _ in range(processes))
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened
