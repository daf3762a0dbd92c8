"""Measure a grid of cells in rounds until the medians are precise or the time budget is spent.

A visit prepares a cell, warms it up and takes a few samples. Rounds are shuffled so that slow drift affects all cells
alike. A cell is done after three visits if its median's 95 % interval is within the precision. Two anchor cells are
visited in every round so that drift stays visible.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.errors import TargetNotWritable
from latfit.profiling.devices.device import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiling.host.machine import LoadReading
from latfit.profiling.quality import find_warnings
from latfit.profiling.result import Limit, ProfileResult, Sample, StopReason
from latfit.profiling.shapes import StepShape
from latfit.stats import median_interval

SAMPLES_PER_VISIT = 4
MAX_SAMPLES_PER_VISIT = 16  # of a later visit, where preparing the cell takes longer than the samples
VISITS_AT_LEAST = 3
MAX_WARMUP_STEPS = 8
CONFIRMING_STEPS = 2  # one step alone may be quick by chance
WARMUP_TOLERANCE = 0.05
ANCHORS = 2
VISITS_BETWEEN_ANCHORS = 4  # of an ordered first round, which may be the only one


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a visit."""

    elapsed_s: float
    budget_s: float
    cells: int
    cells_done: int
    samples: int
    cell: StepShape


@dataclass(frozen=True)
class Earlier:
    """Results of an interrupted run of the same cells; limits are (cell, message)."""

    samples: tuple[Sample, ...] = ()
    limits: tuple[tuple[int, str], ...] = ()
    elapsed_s: float = 0.0


Keep = Callable[[Sequence[Sample], Sequence[tuple[int, str]], float], None]
"""Called with a visit's samples, (cell, message) if the cell was too large, and the seconds used so far."""


@dataclass(frozen=True)
class Hooks:
    """Callbacks of a run.

    Attributes
    ----------
    progress
        Called after every visit.
    load
        Called at the end: the machine's use by others.
    earlier, keep
        The continuation of an interrupted run, and its journal.
    predict
        Returns the mean relative error of predicting a measured cell without it.
    """

    progress: Callable[[Progress], None] | None = None
    load: Callable[[], LoadReading | None] | None = None
    earlier: Earlier = Earlier()
    keep: Keep | None = None
    predict: Callable[[ProfileResult], float] | None = None


@dataclass(frozen=True)
class Rounds:
    """The order of visits: `first` in the first round if given; each other round is shuffled anew."""

    seed: int = 0
    first: Sequence[int] = ()


class Visits:
    """State of a run over `cells` on `devices`, which take turns. Times are on the first device's clock."""

    def __init__(
        self,
        devices: Sequence[Device],
        cells: Sequence[StepShape],
        budget_s: float,
        precision: float,
        hooks: Hooks = Hooks(),
    ) -> None:
        earlier = hooks.earlier
        self.devices, self.cells, self._hooks = tuple(devices), tuple(cells), hooks
        self.budget_s, self.precision = budget_s, precision
        self.samples: list[Sample] = list(earlier.samples)
        self.limits = {index: Limit(self.cells[index], "out_of_memory", message) for index, message in earlier.limits}
        self.done: set[int] = set()
        self.current = 0
        self.overhead_s = self.prepare_s = 0.0
        self.visits = [0] * len(cells)
        self.quickest_ms = [0.0] * len(cells)
        self._processes_before = max((sample.process for sample in earlier.samples), default=-1) + 1
        self._times: list[list[float]] = [[] for _ in cells]
        for sample in earlier.samples:
            self._count(sample)
            self.visits[sample.cell] = max(self.visits[sample.cell], sample.visit + 1)
        self._start_s = self.devices[0].now_s() - earlier.elapsed_s

    def elapsed_s(self) -> float:
        return self.devices[0].now_s() - self._start_s

    def left_ms(self) -> float:
        return (self.budget_s - self.elapsed_s()) * 1e3

    def is_affordable(self, index: int) -> bool:
        """Whether a warm-up step and a sample fit in the time left; an unmeasured cell always fits."""
        return self.left_ms() > 2 * self.quickest_ms[index]

    def visit(self, index: int) -> None:
        """Visit a cell once, on the device whose turn it is."""
        self.current = index
        process = (self.visits[index] + index) % len(self.devices)
        first, started_s, found = len(self.samples), self.elapsed_s(), []
        try:
            self.devices[process].prepare(self.cells[index])
            prepare_s = self.elapsed_s() - started_s
            self.prepare_s += prepare_s
            self._take_samples(index, process, prepare_s * 1e3)
        except DeviceOutOfMemory as error:
            self.limits[index] = Limit(self.cells[index], "out_of_memory", str(error))
            found.append((index, str(error)))
        else:
            self.visits[index] += 1
            if self._is_done(index):
                self.done.add(index)
        finally:
            if self._hooks.keep:
                self._hooks.keep(self.samples[first:], found, self.elapsed_s())
        if self._hooks.progress:
            self._hooks.progress(
                Progress(
                    elapsed_s=self.elapsed_s(),
                    budget_s=self.budget_s,
                    cells=len(self.cells) - len(self.limits),
                    cells_done=len(self.done),
                    samples=len(self.samples),
                    cell=self.cells[index],
                )
            )

    def anchors(self) -> list[int]:
        """Return the quickest cell and the cell of median time: two different cells that are cheap to repeat."""
        known = sorted((ms, index) for index, ms in enumerate(self.quickest_ms) if ms > 0 and index not in self.limits)
        return [known[at][1] for at in (0, len(known) // 2)[:ANCHORS]] if known else []

    def result(self, stop: StopReason) -> ProfileResult:
        """Return what was measured so far, with its warnings."""
        result = ProfileResult(
            cells=self.cells,
            samples=tuple(self.samples),
            limits=tuple(self.limits.values()),
            stop=stop,
            elapsed_s=self.elapsed_s(),
            budget_s=self.budget_s,
            precision=self.precision,
            overhead_s=self.overhead_s,
            prepare_s=self.prepare_s,
        )
        load = self._hooks.load() if self._hooks.load else None
        result = replace(result, prediction_error=self._hooks.predict(result) if self._hooks.predict else None)
        return replace(result, warnings=find_warnings(result, load))

    def _take_samples(self, index: int, process: int, prepare_ms: float) -> None:
        """Warm up until a step is as fast as the CONFIRMING_STEPS after it; these are samples. Then take more.

        If the time ends first, only the last of several steps counts.
        """
        times: list[float] = []
        taken = 0
        while len(times) < MAX_WARMUP_STEPS and not taken:
            if self.left_ms() <= 0:
                self._record_last(1 if len(times) > 1 else 0)
                return
            times.append(self.step(index, process, warmup=True))
            if len(times) > CONFIRMING_STEPS:
                candidate, *later = times[-CONFIRMING_STEPS - 1 :]
                if candidate <= max((1 + WARMUP_TOLERANCE) * sum(later) / len(later), later[-1]):
                    taken = 1 + CONFIRMING_STEPS
        self._record_last(taken)
        worth = math.ceil(prepare_ms / self.quickest_ms[index]) if self.visits[index] else 0  # every cell once, first
        wanted = min(max(SAMPLES_PER_VISIT, worth), MAX_SAMPLES_PER_VISIT)
        while taken < wanted and self.left_ms() > self.quickest_ms[index]:
            self.step(index, process, warmup=False)
            taken += 1

    def _record_last(self, count: int) -> None:
        """Turn the last `count` warm-up steps into samples."""
        for at in range(len(self.samples) - count, len(self.samples)):
            self.samples[at] = self.samples[at]._replace(warmup=False)
            self._count(self.samples[at])

    def step(self, index: int, process: int, *, warmup: bool) -> float:
        """Run one step of the prepared cell and return its time in ms."""
        started_s = self.elapsed_s()
        elapsed_ms = self.devices[process].step_ms()
        if not (math.isfinite(elapsed_ms) and elapsed_ms > 0):
            raise ValueError(f"it timed a step at {elapsed_ms} ms")
        number = self._processes_before + process
        self.samples.append(Sample(index, self.visits[index], started_s, elapsed_ms, warmup, number))
        self._count(self.samples[-1])
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


def run_profile(
    device: Device | Sequence[Device],
    cells: Sequence[StepShape],
    *,
    budget_s: float,
    precision: float = 0.03,
    rounds: Rounds = Rounds(),
    hooks: Hooks = Hooks(),
) -> ProfileResult:
    """Measure `cells` in rounds, on a device or on several that take turns.

    Ctrl-C ends the run and keeps what was measured; a cell without memory becomes a limit.

    Parameters
    ----------
    budget_s
        Seconds of the first device's clock; the step in flight may exceed them.

    Raises
    ------
    DeviceFailed
        With the partial result, if the device breaks.
    TargetNotWritable
        If the journal takes no more.
    """
    devices = tuple(device) if isinstance(device, Sequence) else (device,)
    run = Visits(devices, cells, budget_s, precision, hooks)
    try:
        stop: StopReason = "precise" if visit_in_rounds(run, rounds) else "budget"
    except KeyboardInterrupt:
        stop = "interrupted"
    except TargetNotWritable:  # no device is to blame
        raise
    except Exception as error:
        failure = error if isinstance(error, DeviceFailed) else _failure(run, error)
        failure.partial = run.result("device_failed")
        raise failure from error
    return run.result(stop)


def _failure(run: Visits, error: Exception) -> DeviceFailed:
    return DeviceFailed(
        f"the device broke at {run.cells[run.current]}: {error or type(error).__name__}",
        where=f"device {run.devices[0].name}",
        remedy="Leave that cell out with --grid, or choose another --device.",
    )


def visit_in_rounds(run: Visits, rounds: Rounds) -> bool:
    """Visit the cells until all are precise (True) or the time is spent (False)."""
    rng, anchors = np.random.default_rng(rounds.seed), list[int]()
    unvisited = [index for index in rounds.first if not run.visits[index] and index not in run.limits]
    ordered = _with_anchors(run, unvisited) if unvisited else None
    while len(run.done) + len(run.limits) < len(run.cells):
        steps_before = len(run.samples)
        for index in ordered or rng.permutation(len(run.cells)).tolist():
            known = index in run.limits or (index in run.done and index not in anchors)
            if not known and run.is_affordable(index):
                run.visit(index)
        if len(run.samples) == steps_before and len(run.done) + len(run.limits) < len(run.cells):
            return False
        ordered, anchors = None, anchors or run.anchors()
    return True


def _with_anchors(run: Visits, order: Sequence[int]) -> Iterator[int]:
    """Yield the cells of an ordered round, with the quickest one interspersed so that drift shows in this round."""
    for number, index in enumerate(order, start=1):
        yield index
        if number % VISITS_BETWEEN_ANCHORS == 0:
            yield from run.anchors()[:1]
