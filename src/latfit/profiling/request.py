from dataclasses import dataclass

from latfit.errors import WrongUsage
from latfit.profiling.devices.device import PRECISIONS
from latfit.profiling.grid import DEFAULT_CONTEXT, parse_grid
from latfit.profiling.shapes import PARTS

DEVICES = ("auto", "numpy", "openvino", "torch-cpu", "torch-cuda")
DESIGNS = ("grid", "adaptive")
MAX_PROCESSES = 16


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure, and for how long: the options of `latfit profile`, parsed."""

    device: str = "auto"
    isa: str = "auto"
    model: str = "tiny"
    layers: int | None = None
    grid: str | None = None  # as in `parse_grid`; without it the budget decides
    contexts: tuple[int, ...] = (DEFAULT_CONTEXT,)
    threads: int | None = None
    budget_ms: float = 60_000.0
    precision: float = 0.03  # stop when the 95 % interval of every median is within this share
    seed: int = 0
    dtype: str = "auto"
    design: str = "grid"
    part: str = "step"
    histories: tuple[int, ...] = (0,)
    processes: int | None = None  # that take turns; None: up to three, as memory and budget allow
    pin: tuple[int, ...] = ()
    graphs: bool = True

    def check(self) -> None:
        for option, value, known in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, ("auto", *PRECISIONS)),
            ("--set design", self.design, DESIGNS),
            ("--set kernel", self.part, PARTS),
        ):
            if value not in known:
                raise WrongUsage(f"{value!r} is not known", where=option, remedy=f"Choose one of {', '.join(known)}.")
        if not 0 < self.precision < 1:
            found = f"{self.precision} is no relative precision"
            raise WrongUsage(found, where="--precision", remedy="Write 0.03 for ±3 %.")
        if self.threads is not None and self.threads < 1:
            raise WrongUsage(f"{self.threads} threads is too few", where="--threads", remedy="Ask for 1 or more.")
        if self.processes is not None and not 1 <= self.processes <= MAX_PROCESSES:
            found = f"{self.processes} processes"
            raise WrongUsage(found, where="--processes", remedy=f"Ask for 1 to {MAX_PROCESSES}.")
        if self.grid is not None:
            parse_grid(self.grid, self.contexts)
