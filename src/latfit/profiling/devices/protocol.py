"""What the profiler asks of a device: prepare a cell, run its step, tell the time.

The run knows nothing else of a device, so a GPU that times itself with events, a CPU library, and a fake with a virtual
clock are measured by the same code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from latfit.errors import LatfitError
from latfit.profiling.shapes import Part, StepShape

if TYPE_CHECKING:
    from latfit.profiling.result import ProfileResult


PRECISIONS: Mapping[str, tuple[str, int]] = {
    "bf16": ("bfloat16", 2),
    "fp16": ("float16", 2),
    "fp32": ("float32", 4),
    "int8": ("int8", 1),
}
"""Each precision's full name, and the bytes of a weight."""


@dataclass(frozen=True)
class DeviceSettings:
    """How a device computes. precision: see PRECISIONS; threads: None for as many as can run at a time; evidence: what
    was seen to run here (`dispatch`), which decides whether a path may be called `amx`."""

    precision: str = "bf16"
    threads: int | None = None
    seed: int = 0
    part: Part = "step"
    graphs: bool = True
    cold: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return PRECISIONS[self.precision][0]


class Device(Protocol):
    """Something that executes whole steps and times them.

    `name` is the device's own name (`numpy`), `path` the execution path that its rows belong to (`cpu`).
    """

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    def facts(self) -> dict[str, Any]:
        """What a reader of the trace must know to repeat the measurement: libraries, kernels, threads,
        precision."""
        ...

    def free_bytes(self) -> int | None:
        """Memory left for caches and activations; None where that cannot be known."""
        ...

    def prepare(self, cell: StepShape) -> None:
        """Make everything that steps of `cell` need. Raises DeviceOutOfMemory."""
        ...

    def step_ms(self) -> float:
        """Execute the prepared step once, whole, and return how long it took. Raises DeviceOutOfMemory."""
        ...

    def now_s(self) -> float:
        """The clock of the budget: monotonic seconds from any origin."""
        ...

    def close(self) -> None:
        """Give everything back; the device is not used again."""
        ...


class DeviceOutOfMemory(Exception):
    """A cell is too large for the device: a limit to record, not a failure."""


class DeviceFailed(LatfitError):
    """A device broke during a run. `partial` holds what was measured before, where anything was."""

    partial: "ProfileResult | None" = None
