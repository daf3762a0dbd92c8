"""A run: visits of cells in rounds over the grid, each in a freshly shuffled order, until every cell is known well
enough or the time is spent.

A visit prepares a cell on one of the processes that take turns, warms it up and takes a few samples. The warm-up ends
with the first step that the next steps do not beat; it is in the journal but not in the trace. What a visit found is
told at once to whoever keeps the journal, so that an interrupted run loses at most the visit in flight.

Rounds instead of one long visit a cell: what changes slowly on a machine (clock, heat, neighbours) then hits all cells
alike and widens their intervals, instead of bending the surface. A cell is done when it was visited in three rounds at
least and the 95 % interval of its median is within the precision. Two anchor cells, a quick one and one of middle
length, are visited in every round to the end, so that drift shows even when few cells are left.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from latfit.errors import TargetNotWritable
from latfit.profiling.devices.protocol import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiling.host.machine import LoadReading
from latfit.profiling.quality import find_warnings
from latfit.profiling.result import Limit, ProfileResult, Sample, StopReason
from latfit.profiling.shapes import StepShape
from latfit.stats import median_interval

SAMPLES_PER_VISIT = 4
VISITS_AT_LEAST = 3
MAX_WARMUP_STEPS = 8
CONFIRMING_STEPS = 2  # one step alone may be quick by chance
WARMUP_TOLERANCE = 0.05


@dataclass(frozen=True)
class Progress:
    """Where a run stands, told after every visit."""

    elapsed_s: float
    budget_s: float
    cells: int
    cells_done: int
    samples: int
    cell: StepShape


@dataclass(frozen=True)
class Earlier:
    """What an interrupted run had found of the same cells: it is continued, not repeated."""

    samples: tuple[Sample, ...] = ()
    limits: tuple[tuple[int, str], ...] = ()
    elapsed_s: float = 0.0

    @property
    def processes(self) -> int:
        return max((sample.process for sample in self.samples), default=-1) + 1


Keep = Callable[[Sequence[Sample], Sequence[tuple[int, str]], float], None]
"""Told after each visit: its samples, (cell, message) where the cell was too large, and the seconds used so far."""


class Visits:
    """All state of a run over `cells` on `devices`, which take turns. Times are on the first device's clock."""

    def __init__(
        self,
        devices: Sequence[Device],
        cells: Sequence[StepShape],
        budget_s: float,
        precision: float,
        earlier: Earlier | None = None,
        keep: Keep | None = None,
    ) -> None:
        earlier = earlier or Earlier()
        self.devices, self.cells = tuple(devices), tuple(cells)
        self.budget_s, self.precision = budget_s, precision
        self.samples: list[Sample] = list(earlier.samples)
        self.limits: dict[int, Limit] = {
            index: Limit(self.cells[index], "out_of_memory", message) for index, message in earlier.limits
        }
        self.current = 0
        self.done: set[int] = set()
        self.overhead_s = 0.0
        self._keep = keep
        self._processes_before = earlier.processes
        self._times: list[list[float]] = [[] for _ in cells]
        self.visits = [0] * len(cells)
        self.quickest_ms = [0.0] * len(cells)
        for sample in earlier.samples:
            self._count(sample)
            self.visits[sample.cell] = max(self.visits[sample.cell], sample.visit + 1)
        self._start_s = self.devices[0].now_s() - earlier.elapsed_s

    def elapsed_s(self) -> float:
        return self.devices[0].now_s() - self._start_s

    def left_ms(self) -> float:
        return (self.budget_s - self.elapsed_s()) * 1e3

    def affordable(self, index: int) -> bool:
        """Whether a warm-up step and one sample fit in the time left; the time of a new cell is not known yet."""
        return self.left_ms() > 2 * self.quickest_ms[index]

    def times_ms(self, index: int) -> list[float]:
        """The samples of a cell so far, warm-up steps aside."""
        return self._times[index]

    def visit(self, index: int, samples: int = SAMPLES_PER_VISIT) -> None:
        """One visit of a cell, by the process whose turn it is there."""
        self.current = index
        process = (self.visits[index] + index) % len(self.devices)
        device, first = self.devices[process], len(self.samples)
        before = len(self.limits)
        try:
            device.prepare(self.cells[index])
            recorded = self._warm_up(index, process)
            while recorded < samples and self.left_ms() > self.quickest_ms[index]:
                self._step(index, process, warmup=False)
                recorded += 1
        except DeviceOutOfMemory as error:
            self.limits[index] = Limit(self.cells[index], "out_of_memory", str(error))
        else:
            self.visits[index] += 1
            if self._is_done(index):
                self.done.add(index)
        finally:
            if self._keep:
                found = [(index, self.limits[index].message)] if len(self.limits) > before else []
                self._keep(self.samples[first:], found, self.elapsed_s())

    def progress(self, index: int) -> Progress:
        return Progress(
            elapsed_s=self.elapsed_s(),
            budget_s=self.budget_s,
            cells=len(self.cells) - len(self.limits),
            cells_done=len(self.done),
            samples=len(self.samples),
            cell=self.cells[index],
        )

    def _warm_up(self, index: int, process: int) -> int:
        """Run steps until one is as fast as the CONFIRMING_STEPS after it; return how many of them are samples.

        That step and those that confirm it are samples, the steps before are warm-up. Where the time ends first, only
        the last of several steps is a sample.
        """
        times: list[float] = []
        while len(times) < MAX_WARMUP_STEPS:
            if self.left_ms() <= 0:
                return self._record_last(1 if len(times) > 1 else 0)
            times.append(self._step(index, process, warmup=True))
            if len(times) > CONFIRMING_STEPS:
                candidate, *later = times[-CONFIRMING_STEPS - 1 :]
                if candidate <= max((1 + WARMUP_TOLERANCE) * sum(later) / len(later), later[-1]):
                    return self._record_last(1 + CONFIRMING_STEPS)
        return 0

    def _record_last(self, count: int) -> int:
        """Turn the last `count` warm-up steps into samples."""
        for at in range(len(self.samples) - count, len(self.samples)):
            self.samples[at] = self.samples[at]._replace(warmup=False)
            self._count(self.samples[at])
        return count

    def _step(self, index: int, process: int, *, warmup: bool) -> float:
        started_s = self.elapsed_s()
        elapsed_ms = self.devices[process].step_ms()
        if not (math.isfinite(elapsed_ms) and elapsed_ms > 0):
            raise ValueError(f"it timed a step at {elapsed_ms} ms")
        number = self._processes_before + process
        sample = Sample(index, self.visits[index], started_s, elapsed_ms, warmup, number)
        self.samples.append(sample)
        self._count(sample)
        self.overhead_s += max(0.0, self.elapsed_s() - started_s - elapsed_ms / 1e3)
        return elapsed_ms

    def _count(self, sample: Sample) -> None:
        quickest = self.quickest_ms[sample.cell]
        self.quickest_ms[sample.cell] = min(sample.T_ms, quickest or sample.T_ms)
        if not sample.warmup:
            self._times[sample.cell].append(sample.T_ms)

    def _is_done(self, index: int) -> bool:
        if self.visits[index] < max(VISITS_AT_LEAST, len(self.devices)):
            return False
        interval = median_interval(np.array(self._times[index], dtype=np.float64))
        return interval.relative_half_width <= self.precision


ANCHORS = 2


class Visitor(Protocol):
    """Visits a cell, by its index, for so many samples."""

    def __call__(self, index: int, samples: int = SAMPLES_PER_VISIT) -> None: ...


Choice = Callable[[Visits, Visitor], bool]
"""A design: visits the cells that it chooses until all is known (True) or the time is spent (False)."""


@dataclass(frozen=True)
class Hooks:
    """What a run is connected to. progress: told after every visit.  load: asked once, at the end, what others used of
    the machine.  earlier, keep: the continuation of an interrupted run, and its journal."""

    progress: Callable[[Progress], None] | None = None
    load: Callable[[], LoadReading | None] | None = None
    earlier: Earlier | None = None
    keep: Keep | None = None


def run_profile(
    device: Device | Sequence[Device],
    cells: Sequence[StepShape],
    *,
    budget_s: float,
    precision: float = 0.03,
    design: Choice | None = None,
    hooks: Hooks = Hooks(),
) -> ProfileResult:
    """Measure `cells` on `device`, or on several that take turns, for at most `budget_s` seconds of its clock (plus the
    step in flight).

    Ctrl-C ends the run and keeps what was measured; a cell without memory becomes a limit. design: which cells, in what
    order; rounds over all of them without it. Raises DeviceFailed, with the partial result in it, where the device
    breaks; TargetNotWritable where the journal can take no more.
    """
    devices = tuple(device) if isinstance(device, Sequence) else (device,)
    run = Visits(devices, cells, budget_s, precision, hooks.earlier, hooks.keep)
    chosen = design or rounds(np.random.default_rng(0))

    def visit(index: int, samples: int = SAMPLES_PER_VISIT) -> None:
        run.visit(index, samples)
        if hooks.progress:
            hooks.progress(run.progress(index))

    stop: StopReason
    try:
        stop = "precise" if chosen(run, visit) else "budget"
    except KeyboardInterrupt:
        stop = "interrupted"
    except TargetNotWritable:  # what is measured cannot be kept any more, and no device is to blame
        raise
    except Exception as error:
        failure = error if isinstance(error, DeviceFailed) else _failure(devices[0], run, error)
        failure.partial = _finished(run, "device_failed", hooks, chosen)
        raise failure from error
    return _finished(run, stop, hooks, chosen)


def rounds(rng: np.random.Generator) -> Choice:
    """Rounds over all cells, in an order shuffled anew each time."""

    def choose(run: Visits, visit: Visitor) -> bool:
        anchors: set[int] = set()
        while len(run.done) + len(run.limits) < len(run.cells):
            steps_before = len(run.samples)
            for index in rng.permutation(len(run.cells)).tolist():
                known = index in run.limits or (index in run.done and index not in anchors)
                if not known and run.affordable(index):
                    visit(index)
            if len(run.samples) == steps_before and len(run.done) + len(run.limits) < len(run.cells):
                return False
            anchors = anchors or anchor_cells(run)
        return True

    return choose


def anchor_cells(run: Visits) -> set[int]:
    """The quickest cell, and the one at the median of the cells' times: cheap to repeat, and unlike each other."""
    known = sorted((ms, index) for index, ms in enumerate(run.quickest_ms) if ms > 0 and index not in run.limits)
    return {known[at][1] for at in (0, len(known) // 2)[:ANCHORS]} if known else set()


def _finished(run: Visits, stop: StopReason, hooks: Hooks, design: Choice) -> ProfileResult:
    result = ProfileResult(
        cells=run.cells,
        samples=tuple(run.samples),
        limits=tuple(run.limits.values()),
        stop=stop,
        elapsed_s=run.elapsed_s(),
        budget_s=run.budget_s,
        precision=run.precision,
        overhead_s=run.overhead_s,
        prediction_error=getattr(design, "prediction_error", None),
    )
    return replace(result, warnings=find_warnings(result, hooks.load() if hooks.load else None))


def _failure(device: Device, run: Visits, error: Exception) -> DeviceFailed:
    return DeviceFailed(
        f"the device broke at {run.cells[run.current]}: {error or type(error).__name__}",
        where=f"device {device.name}",
        remedy="Leave that cell out with --grid, or choose another --device.",
    )
