"""The result of a run: every sample, why it stopped, its warnings; and the trace made of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from latfit.messages import Message
from latfit.profiling.shapes import StepShape
from latfit.stats import FloatArray, MedianInterval, median_interval
from latfit.trace import Trace

if TYPE_CHECKING:
    from pandas import DataFrame, Series

OUTLIER_FACTOR = 1.5  # a step that takes more than so many times its cell's median was disturbed

StopReason = Literal["precise", "budget", "interrupted", "device_failed"]


class Sample(NamedTuple):
    """One executed step. t_s: seconds from the start of the run."""

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
    """State of the run on one path. too_large: the message by the number of a cell without memory."""

    cells: list[StepShape]
    grid: dict[str, Any] = {}
    samples: list[Sample] = []
    too_large: dict[int, str] = {}
    elapsed_s: float = 0.0


class BetweenProcesses(NamedTuple):
    processes: int
    sd_pct: float


@dataclass(frozen=True, repr=False)
class ProfileResult:
    """A finished run. prepare_s: time to make inputs and caches and to record graphs."""

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
    def step_s(self) -> float:
        return sum(sample.T_ms for sample in self.samples) / 1e3

    @property
    def warmup_s(self) -> float:
        return sum(sample.T_ms for sample in self.samples if sample.warmup) / 1e3

    @cached_property
    def frame(self) -> "DataFrame":
        import pandas as pd

        kept = [sample for sample in self.samples if not sample.warmup]
        kinds = {"cell": np.int64, "visit": np.int64, "t_s": float, "T_ms": float, "process": np.int64}
        return pd.DataFrame(kept, columns=list(Sample._fields)).astype(kinds)

    @property
    def steps(self) -> int:
        return len(self.frame)

    @cached_property
    def relative(self) -> "Series[float]":
        return self.frame.T_ms / self.frame.groupby("cell").T_ms.transform("median")

    @cached_property
    def times_ms(self) -> tuple[FloatArray, ...]:
        by_cell = {cell: times.to_numpy() for cell, times in self.frame.groupby("cell").T_ms}
        return tuple(by_cell.get(index, np.empty(0)) for index in range(len(self.cells)))

    @cached_property
    def intervals(self) -> tuple[MedianInterval, ...]:
        return tuple(median_interval(times) for times in self.times_ms)

    @cached_property
    def between_processes(self) -> BetweenProcesses | None:
        """None if no cell was measured in two processes."""
        from scipy.stats import chi2

        medians = np.log(self.frame.groupby(["cell", "process"]).T_ms.median())
        cells = medians.groupby("cell").agg(["var", "count"]).query("count > 1")
        if cells.empty:
            return None
        freedom = cells["count"] - 1
        variance = (cells["var"] * freedom / chi2.median(freedom)).median()
        return BetweenProcesses(1 + int(freedom.median()), 100 * math.sqrt(variance))

    @property
    def measured(self) -> tuple[bool, ...]:
        return tuple(len(times) > 0 for times in self.times_ms)

    @property
    def within_precision(self) -> tuple[bool, ...]:
        return tuple(interval.relative_half_width <= self.precision for interval in self.intervals)


def to_trace(
    result: ProfileResult, path: str, hardware: str, model: str, runs: Sequence[str], provenance: dict[str, Any]
) -> Trace:
    """Return all samples but warm-up steps as a trace. runs: a name for each process."""
    frame = result.frame
    text = {"path": path, "hardware": hardware, "model": model}
    return Trace(
        {
            **cell_columns(result.cells).select(frame.cell.to_numpy()).columns,
            "T_ms": frame.T_ms.to_numpy(),
            "t_s": frame.t_s.to_numpy(),
            "run": np.array(runs, dtype=object)[frame.process],
            "rep": frame.groupby("cell").cumcount().to_numpy(),
            "outlier": (result.relative > OUTLIER_FACTOR).to_numpy(),
            **{name: np.full(len(frame), value, dtype=object) for name, value in text.items()},
        },
        provenance,
    )


def cell_columns(cells: Sequence[StepShape]) -> Trace:
    kinds: dict[str, Any] = {"B": np.int32, "S": np.int64, "prefill_requests": np.int64, "prefill_tokens": np.int64}
    kinds |= {"context_tokens": np.int64, "prefill_context_tokens": np.int64, "phase": object}
    return Trace({name: np.array([getattr(cell, name) for cell in cells], kind) for name, kind in kinds.items()})
