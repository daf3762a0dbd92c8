"""What a run of the profiler leaves: every raw sample, why it stopped, its warnings; and the trace made of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from latfit.profiling.shapes import StepShape
from latfit.stats import FloatArray, MedianInterval, median_interval
from latfit.trace import Array, Trace
from latfit.warning import LatfitWarning

OUTLIER_FACTOR = 1.5
"""A step that takes longer than so many times its cell's median was disturbed."""

StopReason = Literal["precise", "budget", "interrupted", "device_failed"]


class Sample(NamedTuple):
    """One executed step: which cell (index), in which visit of that cell, when it started (s from the start
    of the run), how long it took, whether it only warmed up, and in which process it ran."""

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
    reason: str
    message: str

    def as_json(self) -> dict[str, Any]:
        cell = self.cell
        shape = {"B": cell.B, "S": cell.S, "phase": cell.phase, "context_tokens": cell.context_tokens}
        return {**shape, "reason": self.reason, "message": self.message}


@dataclass(frozen=True)
class BetweenProcesses:
    """Relative standard deviation of a cell's median over the processes that measured the cell."""

    processes: int
    sd: float

    def as_json(self) -> dict[str, float]:
        return {"processes": self.processes, "sd_pct": 100 * self.sd}


def between_processes(log_medians: Sequence[Sequence[float]]) -> BetweenProcesses | None:
    """Estimate it from the logarithms of each cell's medians, one a process; None where no cell has two.

    Each cell gives a variance; the median over cells, divided by the median of chi-squared per degree of freedom, is
    the estimate. A mean would follow the few cells that a disturbance hit: on a busy machine it was three times larger.
    """
    from scipy.stats import chi2

    several = [np.array(logs) for logs in log_medians if len(logs) > 1]
    if not several:
        return None
    freedom = np.array([len(logs) - 1 for logs in several])
    variances = np.array([logs.var(ddof=1) for logs in several]) * freedom / chi2.median(freedom)
    return BetweenProcesses(1 + int(np.median(freedom)), math.sqrt(float(np.median(variances))))


@dataclass(frozen=True, repr=False)
class ProfileResult:
    """A finished run. `elapsed_s` and `budget_s` are on the device's clock; `step_s` is the part spent inside
    steps, `overhead_s` what the harness added around them (the pipe to another process, the clock)."""

    cells: tuple[StepShape, ...]
    samples: tuple[Sample, ...]
    limits: tuple[Limit, ...]
    stop: StopReason
    elapsed_s: float
    budget_s: float
    precision: float
    warnings: tuple[LatfitWarning, ...] = ()
    overhead_s: float = 0.0
    prediction_error: float | None = None
    """Of an adaptive run: mean relative error at measured cells of fits that leave each out; 1 where there are too few
    cells to tell."""

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
    def between_processes(self) -> "BetweenProcesses | None":
        """How far medians move from one process to the next; None where no cell ran in two."""
        kept: dict[tuple[int, int], list[float]] = {}
        for sample in self.samples:
            if not sample.warmup:
                kept.setdefault((sample.cell, sample.process), []).append(sample.T_ms)
        logs: dict[int, list[float]] = {}
        for (cell, _), times in kept.items():
            logs.setdefault(cell, []).append(math.log(float(np.median(times))))
        return between_processes(list(logs.values()))

    @property
    def measured(self) -> tuple[bool, ...]:
        return tuple(len(times) > 0 for times in self.times_ms)

    @property
    def within_precision(self) -> tuple[bool, ...]:
        return tuple(interval.relative_half_width <= self.precision for interval in self.intervals)


@dataclass(frozen=True)
class TraceLabels:
    """What every row of a trace says about where it comes from."""

    path: str
    hardware: str
    model: str
    runs: Sequence[str]
    """A name for each process."""
    provenance: Mapping[str, Any] = field(default_factory=dict)


def to_trace(result: ProfileResult, labels: TraceLabels) -> Trace:
    """All samples as a Trace in the order measured, without the warm-up."""
    samples = [sample for sample in result.samples if not sample.warmup]
    columns = dict(cell_columns(result.cells).select(np.array([s.cell for s in samples], dtype=np.int64)).columns)
    text = {"path": labels.path, "hardware": labels.hardware, "model": labels.model}
    columns |= {
        "T_ms": np.array([sample.T_ms for sample in samples], dtype=np.float64),
        "t_s": np.array([sample.t_s for sample in samples], dtype=np.float64),
        "run": np.array([labels.runs[sample.process] for sample in samples], dtype=object),
        "rep": _integers(_repetitions(samples)),
        "outlier": _outliers(result, samples),
    }
    columns |= {name: np.full(len(samples), value, dtype=object) for name, value in text.items()}
    return Trace(columns, dict(labels.provenance))


def cell_columns(cells: Sequence[StepShape]) -> Trace:
    """The columns of cells before they are measured, a row each."""
    return Trace(
        {
            "B": _integers([cell.B for cell in cells], np.int32),
            "S": _integers([cell.S for cell in cells]),
            "phase": np.array([cell.phase for cell in cells], dtype=object),
            "prefill_requests": _integers([cell.prefill_requests for cell in cells]),
            "prefill_tokens": _integers([cell.prefill_tokens for cell in cells]),
            "context_tokens": _integers([cell.context_tokens for cell in cells]),
            "prefill_context_tokens": _integers([cell.prefill_context_tokens for cell in cells]),
        }
    )


def _outliers(result: ProfileResult, samples: Sequence[Sample]) -> Array:
    """True for samples beyond OUTLIER_FACTOR times their cell's median; they are kept."""
    medians = [interval.median for interval in result.intervals]
    return np.array([s.T_ms > OUTLIER_FACTOR * medians[s.cell] for s in samples], dtype=bool)


def _repetitions(samples: Sequence[Sample]) -> list[int]:
    """How often each sample's cell was sampled before it."""
    seen: dict[int, int] = {}
    repetitions = []
    for sample in samples:
        repetitions.append(seen.get(sample.cell, 0))
        seen[sample.cell] = repetitions[-1] + 1
    return repetitions


def _integers(values: list[int], dtype: type[np.signedinteger[Any]] = np.int64) -> Array:
    return np.array(values, dtype=dtype)
