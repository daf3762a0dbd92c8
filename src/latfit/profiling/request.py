"""What a user asks the profiler for."""

from dataclasses import dataclass, field

from latfit.errors import WrongUsage
from latfit.profiling.devices.protocol import PRECISIONS
from latfit.profiling.grid import DEFAULT_CONTEXT, parse_grid
from latfit.profiling.shapes import PARTS
from latfit.provenance import command_line

DEVICES = ("auto", "numpy", "openvino", "torch-cpu", "torch-cuda")
ENGINES = ("kernels", "transformers")
DESIGNS = ("grid", "adaptive")
CACHES = ("warm", "cold")
MOST_PROCESSES = 16


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure, and for how long. `grid` is text as in `parse_grid`; without it the budget decides.

    dtype: auto, or one of PRECISIONS; part: the whole step or a single kernel; histories: cached tokens before a
    prefill chunk; processes: how many take turns, None for as many as memory and budget allow, up to three; pin: CPUs
    to stay on, empty for none.
    """

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
    dtype: str = "auto"
    design: str = "grid"
    part: str = "step"
    cache: str = "warm"
    histories: tuple[int, ...] = (0,)
    processes: int | None = None
    pin: tuple[int, ...] = ()
    graphs: bool = True
    engine: str = "kernels"

    def check(self) -> None:
        """Refuse what no run could use. Raises WrongUsage."""
        for option, value, known in (
            ("--device", self.device, DEVICES),
            ("--dtype", self.dtype, ("auto", *PRECISIONS)),
            ("--design", self.design, DESIGNS),
            ("--kernel", self.part, PARTS),
            ("--cache", self.cache, CACHES),
            ("--engine", self.engine, ENGINES),
        ):
            if value not in known:
                raise WrongUsage(f"{value!r} is not known", where=option, remedy=f"Choose one of {', '.join(known)}.")
        if not 0 < self.precision < 1:
            raise WrongUsage(
                f"{self.precision} is no relative precision", where="--precision", remedy="Write 0.03 for ±3 %."
            )
        if self.threads is not None and self.threads < 1:
            raise WrongUsage(f"{self.threads} threads is too few", where="--threads", remedy="Ask for 1 or more.")
        if self.processes is not None and not 1 <= self.processes <= MOST_PROCESSES:
            raise WrongUsage(
                f"{self.processes} processes cannot take turns",
                where="--processes",
                remedy=f"Ask for 1 to {MOST_PROCESSES}.",
            )
        if self.engine != "kernels" and (self.grid or self.part != "step" or self.cache != "warm"):
            raise WrongUsage(
                "an engine chooses its own steps",
                where="--engine",
                remedy="Leave --grid, --kernel and --cache out, or measure --engine kernels.",
            )
        if self.grid is not None:
            parse_grid(self.grid, self.contexts)
