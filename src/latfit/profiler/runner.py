"""The run: rounds over the grid in freshly shuffled order, until every cell is known well enough or the time
is spent.

Rounds instead of one long visit a cell: what changes slowly on a machine (clock, heat, neighbours) then hits
all cells alike and widens their intervals, instead of bending the surface. A visit warms the cell up, then
takes a few samples. A cell is done when it was visited in three rounds at least and the 95 % interval of its
median is within the precision. Two anchor cells, a quick one and one of middle length, are visited in every round
to the end, so that drift shows even when few cells are left.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from latfit.profiler.device import Device, DeviceFailed
from latfit.profiler.doubts import find_doubts
from latfit.profiler.machine import LoadReading
from latfit.profiler.record import ProfileResult, StopReason
from latfit.profiler.visits import SAMPLES_PER_VISIT, Earlier, Keep, Progress, Visits
from latfit.profiler.workload import StepShape

ANCHORS = 2


class Visitor(Protocol):
    """Visits a cell, by its index, for so many samples."""

    def __call__(self, index: int, samples: int = SAMPLES_PER_VISIT) -> None: ...


Choice = Callable[[Visits, Visitor], bool]
"""A design: visits the cells that it chooses until all is known (True) or the time is spent (False)."""


def run_profile(
    device: Device | Sequence[Device],
    cells: Sequence[StepShape],
    *,
    budget_s: float,
    precision: float = 0.03,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    load: Callable[[], LoadReading | None] | None = None,
    design: Choice | None = None,
    earlier: Earlier | None = None,
    keep: Keep | None = None,
) -> ProfileResult:
    """Measure `cells` on `device`, or on several that take turns, for at most `budget_s` seconds of its clock (plus the
    step in flight).

    Ctrl-C ends the run and keeps what was measured; a cell without memory becomes a limit. `load` is asked once, at the
    end, what others used of the machine. design: which cells, in what order; rounds over all of them without it.
    earlier, keep: the continuation of an interrupted run, and its journal. Raises DeviceFailed, with the partial result
    in it, where the device breaks.
    """
    devices = tuple(device) if isinstance(device, Sequence) else (device,)
    run = Visits(devices, cells, budget_s, precision, earlier, keep)
    chosen = design or rounds(np.random.default_rng(seed))

    def visit(index: int, samples: int = SAMPLES_PER_VISIT) -> None:
        run.visit(index, samples)
        if progress:
            progress(run.progress(index))

    stop: StopReason
    try:
        stop = "precise" if chosen(run, visit) else "budget"
    except KeyboardInterrupt:
        stop = "interrupted"
    except Exception as error:
        failure = error if isinstance(error, DeviceFailed) else _failure(devices[0], run, error)
        failure.partial = _finished(run, "device_failed", load, chosen)
        raise failure from error
    return _finished(run, stop, load, chosen)


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


def _finished(
    run: Visits, stop: StopReason, load: Callable[[], LoadReading | None] | None, design: Choice
) -> ProfileResult:
    result = ProfileResult(
        cells=run.cells,
        samples=tuple(run.samples),
        limits=tuple(run.limits.values()),
        stop=stop,
        elapsed_s=run.elapsed_s(),
        budget_s=run.budget_s,
        precision=run.precision,
        overhead_s=run.overhead_s,
        prediction_half_width=getattr(design, "half_width", None),
    )
    return replace(result, doubts=find_doubts(result, load() if load else None))


def _failure(device: Device, run: Visits, error: Exception) -> DeviceFailed:
    return DeviceFailed(
        f"the device broke at {run.cells[run.current]}: {error or type(error).__name__}",
        where=f"device {device.name}",
        remedy="Leave that cell out with --grid, or choose another --device.",
    )
