"""What a run leaves: every raw sample, why it stopped, its warnings; and the trace made of it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from latfit.messages import Message
from latfit.profiling.shapes import StepShape
from latfit.stats import FloatArray, MedianInterval, median_interval
from latfit.trace import Trace

OUTLIER_FACTOR = 1.5  # a step that takes more than so many times its cell's median was disturbed

StopReason = Literal["precise", "budget", "interrupted", "device_failed"]


class Sample(NamedTuple):
    """One executed step: index of its cell, number of the visit, start (s from the start of the run), time, whether it
    only warmed up, and the process it ran in."""

    cell: int
    visit: int
    t_s: float
    T_ms: float
    warmup: bool
    process: int = 0


@dataclass(frozen=True)
class Limit:
    """A cell that the device has no memory for."""

    cell: StepShape
    message: str

    def as_json(self) -> dict[str, Any]:
        shape = {name: getattr(self.cell, name) for name in ("B", "S", "phase", "context_tokens")}
        return {**shape, "reason": "out_of_memory", "message": self.message}


class PathRecord(msgspec.Struct):
    """State of the run on one path. too_large: (cell, message) of cells without memory."""

    cells: list[StepShape]
    grid: dict[str, Any] = {}
    samples: list[Sample] = []
    too_large: list[tuple[int, str]] = []
    elapsed_s: float = 0.0


class BetweenProcesses(NamedTuple):
    """Relative standard deviation of a cell's median over the processes that measured the cell."""

    processes: int
    sd: float

    def as_json(self) -> dict[str, float]:
        return {"processes": self.processes, "sd_pct": 100 * self.sd}


def between_processes(log_medians: Sequence[Sequence[float]]) -> BetweenProcesses | None:
    """Estimate the spread from the logarithms of each cell's medians, one a process; None if no cell has two."""
    from scipy.stats import chi2

    several = [np.array(logs) for logs in log_medians if len(logs) > 1]
    if not several:
        return None
    freedom = np.array([len(logs) - 1 for logs in several])
    variances = np.array([logs.var(ddof=1) for logs in several]) * freedom / chi2.median(freedom)
    return BetweenProcesses(1 + int(np.median(freedom)), math.sqrt(float(np.median(variances))))


@dataclass(frozen=True, repr=False)
class ProfileResult:
    """A finished run. Times are on the device's clock; prepare_s: making inputs and caches, recording graphs."""

    cells: tuple[StepShape, ...]
    samples: tuple[Sample, ...]
    limits: tuple[Limit, ...]
    stop: StopReason
    elapsed_s: float
    budget_s: float
    precision: float
    warnings: tuple[Message, ...] = ()
    prepare_s: float = 0.0

    def __repr__(self) -> str:
        return f"ProfileResult({self.steps:,} steps, {len(self.cells)} cells, {self.elapsed_s:.1f} s, {self.stop})"

    @property
    def interrupted(self) -> bool:
        return self.stop == "interrupted"

    @property
    def steps(self) -> int:
        """Measured steps, without those of the warm-up."""
        return sum(not sample.warmup for sample in self.samples)

    @property
    def step_s(self) -> float:
        return sum(sample.T_ms for sample in self.samples) / 1e3

    @property
    def warmup_s(self) -> float:
        return sum(sample.T_ms for sample in self.samples if sample.warmup) / 1e3

    @cached_property
    def times_ms(self) -> tuple[FloatArray, ...]:
        """The samples of each cell without its warm-up steps, in the order measured."""
        found: list[list[float]] = [[] for _ in self.cells]
        for sample in self.samples:
            if not sample.warmup:
                found[sample.cell].append(sample.T_ms)
        return tuple(np.array(times, dtype=np.float64) for times in found)

    @cached_property
    def intervals(self) -> tuple[MedianInterval, ...]:
        """The median of each cell with its 95 % interval."""
        return tuple(median_interval(times) for times in self.times_ms)

    @cached_property
    def between_processes(self) -> BetweenProcesses | None:
        times: dict[int, dict[int, list[float]]] = {}
        for sample in self.samples:
            if not sample.warmup:
                times.setdefault(sample.cell, {}).setdefault(sample.process, []).append(sample.T_ms)
        return between_processes([[math.log(np.median(each)) for each in cell.values()] for cell in times.values()])

    @property
    def measured(self) -> tuple[bool, ...]:
        return tuple(len(times) > 0 for times in self.times_ms)

    @property
    def within_precision(self) -> tuple[bool, ...]:
        return tuple(interval.relative_half_width <= self.precision for interval in self.intervals)


def to_trace(
    result: ProfileResult, path: str, hardware: str, model: str, runs: Sequence[str], provenance: dict[str, Any]
) -> Trace:
    """Return all samples but warm-up steps as a trace in the order measured. runs: a name for each process."""
    samples = [sample for sample in result.samples if not sample.warmup]
    cells = np.array([sample.cell for sample in samples], dtype=np.int64)
    T_ms = np.array([sample.T_ms for sample in samples], dtype=np.float64)
    medians = np.array([interval.median for interval in result.intervals])
    seen: Counter[int] = Counter()
    repetitions = []
    for cell in cells.tolist():
        repetitions.append(seen[cell])
        seen[cell] += 1
    text = {"path": path, "hardware": hardware, "model": model}
    return Trace(
        {
            **cell_columns(result.cells).select(cells).columns,
            "T_ms": T_ms,
            "t_s": np.array([sample.t_s for sample in samples], dtype=np.float64),
            "run": np.array([runs[sample.process] for sample in samples], dtype=object),
            "rep": np.array(repetitions, dtype=np.int64),
            "outlier": T_ms > OUTLIER_FACTOR * medians[cells],
            **{name: np.full(len(samples), value, dtype=object) for name, value in text.items()},
        },
        provenance,
    )


def cell_columns(cells: Sequence[StepShape]) -> Trace:
    """Return the columns of cells before they are measured, a row each."""
    kinds: dict[str, Any] = {"B": np.int32, "S": np.int64, "prefill_requests": np.int64, "prefill_tokens": np.int64}
    kinds |= {"context_tokens": np.int64, "prefill_context_tokens": np.int64, "phase": object}
    return Trace({name: np.array([getattr(cell, name) for cell in cells], kind) for name, kind in kinds.items()})
