"""What the profiler adds to a step, and how well a profile repeats.

Overhead: a device whose step does nothing tells what its own clock adds to a step, and what the harness takes around a
step in this process and in one of its own. Only the first is part of a measured time. It is set against the quickest
step of the preset `tiny`.

Repeatability: the same profile twice, each in three fresh processes; both are fitted, and the predictions are compared
over the grid.
"""

import sys
import time
from typing import Any

import numpy as np
from tests.unit.profiling.fake_device import FakeDevice

from latfit.api.measuring import refit
from latfit.profiling.devices.device import Device
from latfit.profiling.devices.remote import RemoteDevice
from latfit.profiling.request import ProfileRequest
from latfit.profiling.result import cell_columns
from latfit.profiling.run import measure
from latfit.profiling.sampler import Visits
from latfit.profiling.shapes import StepShape

CELL = StepShape(1, 256)


class Nothing(FakeDevice):
    """A device whose step is empty, timed as the real ones time theirs."""

    def __init__(self) -> None:
        super().__init__(lambda B, S: 1.0)

    def step_ms(self) -> float:
        started = time.perf_counter_ns()
        return max(1, time.perf_counter_ns() - started) / 1e6

    def now_s(self) -> float:
        return time.perf_counter()


def overhead(name: str, device: Device, steps: int) -> tuple[float, float]:
    """(inside, around) a step in ms, medians."""
    run = Visits([device], [CELL], 3600.0, 0.01)
    device.prepare(CELL)
    around = []
    for _ in range(steps):
        started = time.perf_counter()
        inside_ms = run.step(0, 0, warmup=False)
        around.append((time.perf_counter() - started) * 1e3 - inside_ms)
    inside = float(np.median([sample.T_ms for sample in run.samples]))
    print(f"{name}: {1e3 * inside:.2f} us inside a step, {1e3 * float(np.median(around)):.1f} us around it")
    device.close()
    return inside, float(np.median(around))


def quickest_ms() -> float:
    from latfit.profiling.devices.numpy_device import NumpyDevice
    from latfit.profiling.shapes import model_shape

    device = NumpyDevice(model_shape("tiny"), threads=1)
    device.prepare(CELL)
    times = [device.step_ms() for _ in range(20)]
    device.close()
    return min(times)


def repeat(budget_s: float, grid: str) -> None:
    """Two runs of one profile against each other."""
    request = ProfileRequest(
        device="numpy", grid=grid, budget_ms=1e3 * budget_s, processes=3, threads=1, precision=0.01
    )
    logs: list[Any] = []
    for number in range(2):
        _, (outcome,) = measure(request)
        result = outcome.result
        table = cell_columns(result.cells)
        there = np.flatnonzero(result.measured)
        rows = table.select(there).with_columns(T_ms=np.array([np.median(result.times_ms[i]) for i in there]))
        found, between = refit(rows), result.between_processes
        if found is None or between is None:
            print(f"  run {number + 1}: too little was measured")
            return
        logs.append(found.log_ms(table))
        print(
            f"  run {number + 1}: {result.steps} steps, medians move by {100 * between.sd:.1f} % between "
            f"{between.processes} processes"
        )
    apart = np.abs(np.expm1(logs[1] - logs[0]))
    print(f"  predictions differ by {100 * np.median(apart):.1f} % (median), {100 * apart.max():.1f} % at most")


def main(smoke: bool) -> None:
    steps = 200 if smoke else 5000
    inside, _ = overhead("in this process", Nothing(), steps)
    from benchmarks.profile_quality import Nothing as Importable  # a child cannot find what __main__ holds

    overhead("in its own process", RemoteDevice(Importable, ()), steps)
    quickest = quickest_ms()
    print(f"quickest step of tiny: {quickest:.2f} ms; what the clock adds is {100 * inside / quickest:.4f} % of it")
    print("the same profile twice:")
    repeat(6.0 if smoke else 60.0, "B=1,4,16;S=1,4,16,32,64,128" if smoke else "B=1,2,4,8,16,32;S=1,4,16,32,64,128,256")


if __name__ == "__main__":
    main("--smoke" in sys.argv[1:])
