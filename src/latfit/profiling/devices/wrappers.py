"""Devices made of devices: several libraries of which each cell takes the fastest, and cold CPU caches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latfit.profiling.devices.device import Device, DeviceOutOfMemory
from latfit.profiling.shapes import StepShape

TRIAL_STEPS = 4
FLUSH_FACTOR = 2  # the buffer that is written between steps, in sizes of the last-level cache
MAX_FLUSH_BYTES = 512 << 20
USUAL_CACHE_BYTES = 64 << 20


class FastestOf:
    """Several CPU devices as one: the first time a cell is prepared each runs it, and the fastest keeps it.

    `path` is `amx` only while every device that has won a cell ran on AMX. `trials` in the facts hold every time.
    """

    name = "fastest"

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = {device.name: device for device in devices}
        self._first = self._running = devices[0]
        self._trials: dict[StepShape, dict[str, float]] = {}

    @property
    def path(self) -> str:
        paths = {self._devices[fastest(times)].path for times in self._trials.values() if times}
        return "amx" if paths == {"amx"} else "cpu"

    def facts(self) -> dict[str, Any]:
        tried = [(str(cell), times) for cell, times in self._trials.items() if times]
        return {
            "device": self.name,
            "threads": self._first.facts().get("threads"),
            "members": [device.facts() for device in self._devices.values()],
            "trials": [{"cell": cell, "fastest": fastest(times), "ms": times} for cell, times in tried],
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    def prepare(self, cell: StepShape) -> None:
        if cell not in self._trials:
            self._trials[cell] = self._try(cell)
        if not self._trials[cell]:
            raise DeviceOutOfMemory("no library has memory for it")
        self._running = self._devices[fastest(self._trials[cell])]
        self._running.prepare(cell)

    def step_ms(self) -> float:
        return self._running.step_ms()

    def close(self) -> None:
        for device in self._devices.values():
            device.close()

    def _try(self, cell: StepShape) -> dict[str, float]:
        """Time the cell on each device that has memory for it."""
        times = {}
        for name, device in self._devices.items():
            try:
                device.prepare(cell)
                times[name] = min(device.step_ms() for _ in range(TRIAL_STEPS))
            except DeviceOutOfMemory:
                continue
        return times


def fastest(times: dict[str, float]) -> str:
    """Return the name with the least time."""
    return min(times, key=times.__getitem__)


class ColdCaches:
    """A device whose steps find nothing of the last one in the CPU's caches, as when other work ran between them."""

    def __init__(self, device: Device, cache_bytes: int | None = None) -> None:
        self._device = device
        size = min(FLUSH_FACTOR * (cache_bytes or last_level_bytes()), MAX_FLUSH_BYTES)
        self._buffer = np.zeros(size // 8, np.int64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def facts(self) -> dict[str, Any]:
        return {**self._device.facts(), "flushed_bytes": self._buffer.nbytes}

    def step_ms(self) -> float:
        self._buffer += 1
        return self._device.step_ms()


def last_level_bytes() -> int:
    """Return the size of the first CPU's largest cache; 64 MiB if the system does not tell."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
        except (OSError, ValueError):
            continue
    return max(sizes, default=USUAL_CACHE_BYTES)
