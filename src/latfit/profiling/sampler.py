"""Measure a grid of cells in rounds until the medians are precise or the time budget is spent.

Rounds are shuffled so that drift affects all cells alike. The quickest cell is the anchor, visited in every round so
that drift stays visible.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from latfit.errors import TargetNotWritable
from latfit.profiling.devices.device import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiling.result import Limit, PathRecord, ProfileResult, Sample, StopReason
from latfit.profiling.shapes import StepShape
from latfit.stats import median_interval

SAMPLES_PER_VISIT = 4
MAX_SAMPLES_PER_VISIT = 16  # of a later visit, where preparing the cell takes longer than the samples
VISITS_AT_LEAST = 3
MAX_WARMUP_STEPS = 8
CONFIRMING_STEPS = 2  # one step alone may be quick by chance
WARMUP_TOLERANCE = 0.05
VISITS_BETWEEN_ANCHORS = 4  # of an ordered first round, which may be the only one


@dataclass(frozen=True)
class Progress:
    elapsed_s: float
    budget_s: float
    cells: int
    cells_done: int
    samples: int
    cell: StepShape


Keep = Callable[[Sequence[Sample], Mapping[int, str], float], None]
"""Called with a visit's samples, why the cell was too large if so, and the seconds used so far."""


def count_warmup(times_ms: Sequence[float]) -> int:
    """Return how many of a visit's first steps warm up: those before one as fast as the CONFIRMING_STEPS after it."""
    for first in range(min(len(times_ms), MAX_WARMUP_STEPS) - CONFIRMING_STEPS):
        candidate, *later = times_ms[first : first + CONFIRMING_STEPS + 1]
        if candidate <= max((1 + WARMUP_TOLERANCE) * sum(later) / len(later), later[-1]):
            return first
    return min(len(times_ms), MAX_WARMUP_STEPS)


class Sampler:
    """A run on `devices`, which take turns; continues from the samples in `record`."""

    def __init__(self, devices: Sequence[Device], record: PathRecord, budget_s: float, precision: float) -> None:
        self.devices, self.cells = tuple(devices), tuple(record.cells)
        self.samples, self.too_large = record.samples, record.too_large
        self.budget_s, self.precision = budget_s, precision
        self.keep: Keep | None = None
        self.progress: Callable[[Progress], None] | None = None
        self.done: set[int] = set()
        self.current = 0
        self.prepare_s = 0.0
        self.visits = [0] * len(self.cells)
        self.quickest_ms = [math.inf] * len(self.cells)
        self._processes_before = max((sample.process for sample in self.samples), default=-1) + 1
        self._times: list[list[float]] = [[] for _ in self.cells]
        for sample in self.samples:
            self._count(sample)
            self.visits[sample.cell] = max(self.visits[sample.cell], sample.visit + 1)
        self._start_s = self.devices[0].now_s() - record.elapsed_s

    def elapsed_s(self) -> float:
        return self.devices[0].now_s() - self._start_s

    def has_time(self, index: int, steps: int) -> bool:
        quickest_ms = self.quickest_ms[index] if self.quickest_ms[index] < math.inf else 0.0
        return (self.budget_s - self.elapsed_s()) * 1e3 > steps * quickest_ms

    @property
    def is_complete(self) -> bool:
        return len(self.done) + len(self.too_large) >= len(self.cells)

    def find_anchor(self) -> int:
        return min(range(len(self.cells)), key=lambda index: (index in self.too_large, self.quickest_ms[index]))

    def visit_in_rounds(self, seed: int, first: Iterable[int]) -> bool:
        """Visit the cells until all are precise (True) or the time is spent. first: the first order."""
        rng, anchor = np.random.default_rng(seed), -1
        ordered = [index for index in first if not self.visits[index]]
        while not self.is_complete:
            steps_before = len(self.samples)
            for number, index in enumerate(ordered or rng.permutation(len(self.cells)).tolist(), start=1):
                self._visit_if_open(index, anchor)
                if ordered and number % VISITS_BETWEEN_ANCHORS == 0:
                    anchor = self.find_anchor()
                    self._visit_if_open(anchor, anchor)
            if len(self.samples) == steps_before and not self.is_complete:
                return False
            ordered, anchor = [], self.find_anchor() if anchor < 0 else anchor
        return True

    def _visit_if_open(self, index: int, anchor: int) -> None:
        is_open = index not in self.too_large and (index not in self.done or index == anchor)
        if is_open and self.has_time(index, 2):
            self.visit(index)

    def visit(self, index: int) -> None:
        self.current = index
        turn = (self.visits[index] + index) % len(self.devices)
        started_s = self.elapsed_s()
        starts_s: list[float] = []
        times_ms: list[float] = []
        too_large: dict[int, str] = {}
        try:
            self.devices[turn].prepare(self.cells[index])
            prepare_s = self.elapsed_s() - started_s
            self.prepare_s += prepare_s
            wanted = SAMPLES_PER_VISIT
            while len(times_ms) < (warmup := count_warmup(times_ms)) + wanted:
                if not self.has_time(index, int(len(times_ms) > warmup)):
                    break
                starts_s.append(self.elapsed_s())
                T_ms = float(self.devices[turn].step_ms())
                if not 0 < T_ms < math.inf:
                    raise ValueError(f"it timed a step at {T_ms} ms")
                times_ms.append(T_ms)
                self.quickest_ms[index] = min(T_ms, self.quickest_ms[index])
                if self.visits[index]:  # the first visit to each cell is short
                    worth = math.ceil(prepare_s * 1e3 / self.quickest_ms[index])
                    wanted = min(max(SAMPLES_PER_VISIT, worth), MAX_SAMPLES_PER_VISIT)
        except DeviceOutOfMemory as error:
            too_large[index] = str(error)
        finally:
            warmup = min(count_warmup(times_ms), max(len(times_ms) - 1, 1))  # at least the last of several steps counts
            process = self._processes_before + turn
            rows = [
                Sample(index, self.visits[index], t_s, T_ms, number < warmup, process)
                for number, (t_s, T_ms) in enumerate(zip(starts_s, times_ms, strict=False))
            ]
            if self.keep:
                self.keep(rows, too_large, self.elapsed_s())
            self.samples += rows
            self.too_large |= too_large
            for row in rows:
                self._count(row)
        self.visits[index] += 1
        if self.visits[index] >= max(VISITS_AT_LEAST, len(self.devices)) and index not in self.too_large:
            interval = median_interval(np.array(self._times[index], dtype=np.float64))
            if interval.relative_half_width <= self.precision:
                self.done.add(index)
        if self.progress:
            left, counts = len(self.cells) - len(self.too_large), (len(self.done), len(self.samples))
            self.progress(Progress(self.elapsed_s(), self.budget_s, left, *counts, self.cells[index]))

    def result(self, stop: StopReason) -> ProfileResult:
        limits = tuple(Limit(self.cells[index], message) for index, message in self.too_large.items())
        return ProfileResult(
            *(self.cells, tuple(self.samples), limits, stop, self.elapsed_s(), self.budget_s, self.precision),
            prepare_s=self.prepare_s,
        )

    def _count(self, sample: Sample) -> None:
        self.quickest_ms[sample.cell] = min(sample.T_ms, self.quickest_ms[sample.cell])
        if not sample.warmup:
            self._times[sample.cell].append(sample.T_ms)


def run_profile(
    devices: Device | Sequence[Device],
    record: PathRecord | Sequence[StepShape],
    *,
    budget_s: float,
    precision: float = 0.03,
    seed: int = 0,
    first: Iterable[int] = (),
    keep: Keep | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ProfileResult:
    """Measure cells, or continue an interrupted run, for `budget_s` and the step in flight.

    Ctrl-C ends the run and keeps what was measured. Raises DeviceFailed with the partial result if the device breaks,
    TargetNotWritable for the journal.
    """
    devices = tuple(devices) if isinstance(devices, Sequence) else (devices,)
    record = record if isinstance(record, PathRecord) else PathRecord(list(record))
    run = Sampler(devices, record, budget_s, precision)
    run.keep, run.progress = keep, progress
    try:
        return run.result("precise" if run.visit_in_rounds(seed, first) else "budget")
    except KeyboardInterrupt:
        return run.result("interrupted")
    except TargetNotWritable:  # not the device's fault
        raise
    except Exception as error:
        place, found = run.cells[run.current], error or type(error).__name__
        remedy = "Leave that cell out with --grid, or choose another --device."
        where = f"device {run.devices[0].name}"
        broken = DeviceFailed(f"the device broke at {place}: {found}", where=where, remedy=remedy)
        failure = error if isinstance(error, DeviceFailed) else broken
        failure.partial = run.result("device_failed")
        raise failure from error
