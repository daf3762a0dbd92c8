"""The adaptive design against the full grid: how well a fit to what was measured so far predicts, over measuring time.

On the fake device the truth is planted; on the CPU it is a long run over the grid, by the median of every cell, and the
clock is the thread's own CPU time, so that busy neighbours disturb neither the times nor the budget by waiting. Each
design runs once with no target but the budget; after every visit the clock and the samples are known, so that the fit
to what was there at a given time can be made afterwards. The figure is the time that each design takes to come, and to
stay, within twice the error that the full grid's fit has at its end.
"""

import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from latfit.cli.profile import _refit as refit
from latfit.profiler.adaptive import AdaptiveDesign
from latfit.profiler.design import LEVELS, StepCost, default_cells, pilot
from latfit.profiler.device import Device
from latfit.profiler.fake import FakeDevice
from latfit.profiler.models import model_shape
from latfit.profiler.numpy_blas import NumpyDevice
from latfit.profiler.record import ProfileResult, cell_columns
from latfit.profiler.runner import run_profile
from latfit.profiler.workload import ModelShape, StepShape
from latfit.stats import FloatArray

POINTS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)


def planted_ms(B: int, S: int) -> float:
    """Steps of 2 to 120 ms, like those of the preset `tiny` on two cores: a saturation law, and a bend that the fitted
    family lacks, 3 % more from 100 tokens on."""
    rate = 17.5 * -np.expm1(-0.03 * S)
    return float((0.3 + S / rate + 0.05 * B + 0.06 * S) * (1.03 if S > 100 else 1.0))


class CpuTime(NumpyDevice):
    """NumPy in one thread whose clock counts what this thread computed: preparing cells and running steps."""

    def __init__(self, seed: int) -> None:
        super().__init__(model_shape("tiny"), threads=1, seed=seed)
        self._spent_s = 0.0

    def prepare(self, cell: StepShape) -> None:
        started = time.thread_time()
        super().prepare(cell)
        self._spent_s += time.thread_time() - started

    def step_ms(self) -> float:
        started = time.thread_time()
        super().step_ms()
        elapsed_s = time.thread_time() - started
        self._spent_s += elapsed_s
        return 1e3 * elapsed_s

    def now_s(self) -> float:
        return self._spent_s


def error_at(result: ProfileResult, time_s: float, truth: FloatArray) -> float | None:
    """Median relative error over the grid of a fit to the samples until then; None where they are too few."""
    times: list[list[float]] = [[] for _ in result.cells]
    for sample in result.samples:
        if not sample.warmup and sample.t_s + sample.T_ms / 1e3 <= time_s:
            times[sample.cell].append(sample.T_ms)
    measured = np.array([index for index, each in enumerate(times) if each], dtype=np.int64)
    table = cell_columns(result.cells)
    if not len(measured):
        return None
    found = refit(table.select(measured).with_columns(T_ms=np.array([np.median(times[i]) for i in measured])))
    if found is None:
        return None
    return float(np.median(np.abs(np.expm1(found.log_ms(table) - np.log(truth)))))


def curve(result: ProfileResult, full_s: float, truth: FloatArray) -> list[tuple[float, float | None]]:
    ends = [share * full_s for share in POINTS if share * full_s <= 1.05 * result.elapsed_s]
    return [(end, error_at(result, end, truth)) for end in ends]


def reached(points: Sequence[tuple[float, float | None]], target: float) -> float | None:
    """The first time from which on the error stays within the target."""
    good = None
    for time_s, error in points:
        if error is None or error > target:
            good = None
        elif good is None:
            good = time_s
    return good


def compare(
    name: str, open_device: Callable[[int], Device], cells: Sequence[StepShape], truth_s: float, full_s: float
) -> None:
    shape = model_shape("tiny")
    truth, cost = _truth(open_device(0), shape, cells, truth_s)
    grid = run_profile(open_device(1), cells, budget_s=full_s)
    design = AdaptiveDesign(refit, [cost.step_ms(shape, cell) for cell in cells])
    adaptive = run_profile(open_device(2), cells, budget_s=grid.elapsed_s, precision=1e-4, design=design)
    lines = {"full grid": curve(grid, grid.elapsed_s, truth), "adaptive": curve(adaptive, grid.elapsed_s, truth)}
    final = next(error for _, error in reversed(lines["full grid"]) if error is not None)
    print(
        f"{name}: {len(cells)} cells; the full grid takes {grid.elapsed_s:.1f} s; its fit is off by {100 * final:.2f} %"
    )
    for label, points in lines.items():
        told = "  ".join(f"{t:.1f}s:{'-' if e is None else f'{100 * e:.2f}%'}" for t, e in points)
        print(f"  {label:9s} {told}")
    times = {label: reached(points, 2 * final) for label, points in lines.items()}
    print(
        "  within twice that error from: "
        + ", ".join(f"{k} {v:.1f} s" if v else f"{k} never" for k, v in times.items())
    )
    if times["adaptive"]:
        print(f"  adaptive over the whole grid's time: {times['adaptive'] / grid.elapsed_s:.3f}")


def _truth(
    device: Device, shape: ModelShape, cells: Sequence[StepShape], budget_s: float
) -> tuple[FloatArray, StepCost]:
    cost = pilot(device, shape)
    if isinstance(device, FakeDevice):
        return np.array([planted_ms(cell.B, cell.S) for cell in cells]), cost
    found = run_profile(device, cells, budget_s=budget_s, precision=0.005)
    return np.array([np.median(times) for times in found.times_ms]), cost


def main(smoke: bool) -> None:
    cells = default_cells(*LEVELS[1])
    for noise in (0.01, 0.05):
        compare(
            f"fake device, noise {100 * noise:.0f} %",
            lambda seed, noise=noise: FakeDevice(planted_ms, noise=noise, seed=seed),  # type: ignore[misc]
            cells,
            0.0,
            20.0 if smoke else 120.0,
        )
    if smoke:
        return
    compare("this CPU, NumPy, one thread", CpuTime, default_cells(*LEVELS[4]), 60.0, 30.0)


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
