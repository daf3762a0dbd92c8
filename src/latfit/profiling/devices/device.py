"""Interface of a device: prepare a cell, run its step, read the clock."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from latfit.errors import LatfitError, WrongUsage
from latfit.memory import free_memory_bytes
from latfit.profiling.shapes import GIB, ModelShape, Part, StepShape, step_bytes

if TYPE_CHECKING:
    from latfit.profiling.result import ProfileResult

PRECISIONS: Mapping[str, tuple[str, int]] = {
    "bf16": ("bfloat16", 2),
    "fp16": ("float16", 2),
    "fp32": ("float32", 4),
    "int8": ("int8", 1),
}
"""Each precision's full name, and the bytes of a weight."""

INPUT_SETS = 4  # of tokens that steps take in turn, so that none finds the last one's embeddings in the cache


@dataclass(frozen=True)
class DeviceSettings:
    """How a device computes. threads: None for as many as can run. evidence: see `executed_isa`."""

    precision: str = "bf16"
    threads: int | None = None
    seed: int = 0
    part: Part = "step"
    graphs: bool = True
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return PRECISIONS[self.precision][0]

    @property
    def cpu_path(self) -> str:
        return "amx" if self.evidence.get("isa") == "amx" else "cpu"


class Device(Protocol):
    """Execute whole steps and time them. `path` is the execution path of its rows."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    def facts(self) -> dict[str, Any]: ...

    def prepare(self, cell: StepShape) -> None:
        """Make what steps of `cell` need. Raises DeviceOutOfMemory."""

    def step_ms(self) -> float:
        """Execute the prepared step once and return its time. Raises DeviceOutOfMemory."""

    def now_s(self) -> float:
        """Return monotonic seconds, the clock of the budget."""

    def close(self) -> None: ...


class DeviceOutOfMemory(Exception):
    """A cell is too large for the device: a limit to record, not a failure."""


class DeviceFailed(LatfitError):
    """A device broke during a run. partial: what was measured before, if anything."""

    partial: "ProfileResult | None" = None


class LocalDevice:
    def free_bytes(self) -> int | None:
        return free_memory_bytes()

    def now_s(self) -> float:
        return time.perf_counter()

    def check_room(self, shape: ModelShape, cell: StepShape) -> None:
        needed, free = step_bytes(shape, cell), self.free_bytes()
        if free is not None and needed > free:
            raise DeviceOutOfMemory(
                f"needs {needed / GIB:.2f} GiB for cache and activations, {free / GIB:.2f} GiB are free"
            )


def time_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - started) / 1e6


def cpu_facts(name: str, settings: DeviceSettings, threads: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"device": name, "dtype": settings.dtype, "threads": threads, "part": settings.part}
    return {**facts, "isa": settings.evidence.get("isa"), "evidence": dict(settings.evidence)}


@contextmanager
def memory_errors(release: Callable[[], None] | None = None) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).strip() or "out of memory"
        lines = [line for line in text.splitlines() if "memory" in line.lower() or "alloc" in line.lower()]
        if not lines and not isinstance(error, MemoryError):
            raise
        if release is not None:
            release()
        raise DeviceOutOfMemory((lines or text.splitlines())[0]) from None


@contextmanager
def loading(shape: ModelShape) -> Iterator[None]:
    """Raise WrongUsage if the memory ends while weights are made."""
    try:
        with memory_errors():
            yield
    except DeviceOutOfMemory:
        found = f"there is no memory for its weights ({shape.weight_bytes / GIB:.1f} GiB)"
        remedy = "Choose a smaller --model, or fewer --layers."
        raise WrongUsage(found, where=f"model {shape.name}", remedy=remedy) from None
