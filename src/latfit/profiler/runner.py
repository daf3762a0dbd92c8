"""The run: rounds over the grid in freshly shuffled order, until every cell is known well enough or the time
is spent.

Rounds instead of one long visit a cell: what changes slowly on a machine (clock, heat, neighbours) then hits
all cells alike and widens their intervals, instead of bending the surface. A visit warms the cell up, then
takes a few samples. A cell is done when it was visited in three rounds at least and the 95 % interval of its
median is within the precision.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.profiler.device import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiler.doubts import find_doubts
from latfit.profiler.machine import LoadReading
from latfit.profiler.record import Limit, ProfileResult, Sample, StopReason
from latfit.profiler.workload import StepShape
from latfit.stats import median_interval

SAMPLES_PER_VISIT = 4
VISITS_AT_LEAST = 3
WARMUP_AT_MOST = 8
WARMUP_AGREES = 0.05


@dataclass(frozen=True)
class Progress:
    """Where a run stands, told after every visit."""

    elapsed_s: float
    budget_s: float
    cells: int
    cells_done: int
    samples: int
    cell: StepShape


def run_profile(
    device: Device,
    cells: Sequence[StepShape],
    *,
    budget_s: float,
    precision: float = 0.03,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    load: Callable[[], LoadReading | None] | None = None,
) -> ProfileResult:
    """Measure `cells` on `device` for at most `budget_s` seconds of its clock (plus the step in flight).

    Ctrl-C ends the run and keeps what was measured; a cell without memory becomes a limit. `load` is asked
    once, at the end, what others used of the machine. Raises DeviceFailed, with the partial result in it,
    where the device breaks.
    """
    run = _Run(device, tuple(cells), budget_s, precision, np.random.default_rng(seed))
    stop: StopReason
    try:
        stop = "precise" if run.measure_rounds(progress) else "budget"
    except KeyboardInterrupt:
        stop = "interrupted"
    except Exception as error:
        failure = error if isinstance(error, DeviceFailed) else _failure(device, run, error)
        failure.partial = _finished(run, "device_failed", load)
        raise failure from error
    return _finished(run, stop, load)


def _finished(run: "_Run", stop: StopReason, load: Callable[[], LoadReading | None] | None) -> ProfileResult:
    result = ProfileResult(
        cells=run.cells,
        samples=tuple(run.samples),
        limits=tuple(run.limits.values()),
        stop=stop,
        elapsed_s=run.elapsed_s(),
        budget_s=run.budget_s,
        precision=run.precision,
    )
    return replace(result, doubts=find_doubts(result, load() if load else None))


def _failure(device: Device, run: "_Run", error: Exception) -> DeviceFailed:
    return DeviceFailed(
        f"the device broke at {run.cells[run.current]}: {error or type(error).__name__}",
        where=f"device {device.name}",
        remedy="Leave that cell out with --grid, or choose another --device.",
    )


class _Run:
    """All state of a run."""

    def __init__(
        self,
        device: Device,
        cells: tuple[StepShape, ...],
        budget_s: float,
        precision: float,
        rng: np.random.Generator,
    ) -> None:
        self.device, self.cells, self.budget_s, self.precision, self.rng = (
            device,
            cells,
            budget_s,
            precision,
            rng,
        )
        self.samples: list[Sample] = []
        self.limits: dict[int, Limit] = {}
        self.current = 0
        self._times: list[list[float]] = [[] for _ in cells]
        self._visits = [0] * len(cells)
        self._quickest_ms = [0.0] * len(cells)
        self._done: set[int] = set()
        self._start_s = device.now_s()

    def elapsed_s(self) -> float:
        return self.device.now_s() - self._start_s

    def measure_rounds(self, progress: Callable[[Progress], None] | None) -> bool:
        """Rounds until every cell is done (True), or no cell left fits in what is left of the budget
        (False)."""
        while len(self._done) + len(self.limits) < len(self.cells):
            steps_before = len(self.samples)
            for index in self.rng.permutation(len(self.cells)).tolist():
                if index in self._done or index in self.limits or not self._affordable(index):
                    continue
                self._visit(index)
                if progress:
                    progress(self._progress(index))
            if len(self.samples) == steps_before and len(self._done) + len(self.limits) < len(self.cells):
                return False
        return True

    def _affordable(self, index: int) -> bool:
        """Whether the warm-up step and one sample fit in the time left; of a new cell the time is not known
        yet."""
        return self._left_ms() > 2 * self._quickest_ms[index]

    def _left_ms(self) -> float:
        return (self.budget_s - self.elapsed_s()) * 1e3

    def _visit(self, index: int) -> None:
        self.current = index
        try:
            self.device.prepare(self.cells[index])
            self._warm_up(index)
            for _ in range(SAMPLES_PER_VISIT):
                if self._left_ms() <= self._quickest_ms[index]:
                    break
                self._times[index].append(self._step(index, warmup=False))
        except DeviceOutOfMemory as error:
            self.limits[index] = Limit(self.cells[index], "out_of_memory", str(error))
            return
        self._visits[index] += 1
        if self._is_done(index):
            self._done.add(index)

    def _warm_up(self, index: int) -> None:
        """On the first visit, steps until two successive ones agree (slow first steps become faster one by one; a
        plateau of slow ones would not be seen); later, one step for the caches."""
        before = 0.0
        for _ in range(WARMUP_AT_MOST if not self._visits[index] else 1):
            if self._left_ms() <= 0:
                return
            now = self._step(index, warmup=True)
            if abs(now - before) <= WARMUP_AGREES * before:
                return
            before = now

    def _step(self, index: int, *, warmup: bool) -> float:
        started_s = self.elapsed_s()
        elapsed_ms = self.device.step_ms()
        if not (math.isfinite(elapsed_ms) and elapsed_ms > 0):
            raise ValueError(f"it timed a step at {elapsed_ms} ms")
        self._quickest_ms[index] = min(elapsed_ms, self._quickest_ms[index] or elapsed_ms)
        self.samples.append(Sample(index, self._visits[index], started_s, elapsed_ms, warmup))
        return elapsed_ms

    def _is_done(self, index: int) -> bool:
        if self._visits[index] < VISITS_AT_LEAST:
            return False
        interval = median_interval(np.array(self._times[index], dtype=np.float64))
        return interval.relative_half_width <= self.precision

    def _progress(self, index: int) -> Progress:
        return Progress(
            elapsed_s=self.elapsed_s(),
            budget_s=self.budget_s,
            cells=len(self.cells) - len(self.limits),
            cells_done=len(self._done),
            samples=len(self.samples),
            cell=self.cells[index],
        )
