"""One CPU path made of several libraries: each cell runs on the library that was faster there.

The first time a cell is prepared every library runs it a few times, and the fastest keeps it. What was tried is told in
the facts, so that the trace shows what the other libraries took.
"""

from collections.abc import Sequence
from typing import Any

from latfit.profiler.device import Device, DeviceOutOfMemory
from latfit.profiler.workload import StepShape

TRIAL_STEPS = 4


class FasterOf:
    """Several devices of one path as one; the first is asked for the time. `path` is `amx` only while every device that
    has won a cell ran on AMX."""

    name = "fastest"

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._trials: dict[StepShape, dict[str, float]] = {}
        self._running: Device = self._devices[0]

    @property
    def path(self) -> str:
        winners = {_fastest(times) for times in self._trials.values() if times}
        paths = {device.path for device in self._devices if device.name in winners}
        return "amx" if paths == {"amx"} else "cpu"

    def facts(self) -> dict[str, Any]:
        trials = [
            {"cell": str(cell), "fastest": _fastest(times), "ms": times}
            for cell, times in self._trials.items()
            if times
        ]
        return {
            "device": self.name,
            "threads": self._devices[0].facts().get("threads"),
            "members": [device.facts() for device in self._devices],
            "trials": trials,
        }

    def free_bytes(self) -> int | None:
        return self._devices[0].free_bytes()

    def prepare(self, cell: StepShape) -> None:
        if cell not in self._trials:
            self._trials[cell] = self._tried(cell)
        times = self._trials[cell]
        if not times:
            raise DeviceOutOfMemory("no library has memory for it")
        best = _fastest(times)
        self._running = next(device for device in self._devices if device.name == best)
        self._running.prepare(cell)

    def step_ms(self) -> float:
        return self._running.step_ms()

    def now_s(self) -> float:
        return self._devices[0].now_s()

    def close(self) -> None:
        for device in self._devices:
            device.close()

    def _tried(self, cell: StepShape) -> dict[str, float]:
        times = {}
        for device in self._devices:
            try:
                device.prepare(cell)
                times[device.name] = min(device.step_ms() for _ in range(TRIAL_STEPS))
            except DeviceOutOfMemory:
                continue
        return times


def _fastest(times: dict[str, float]) -> str:
    return min(times, key=lambda name: times[name])
