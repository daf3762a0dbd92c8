"""Steps that find nothing of the step before in the CPU's caches.

Before each step a buffer larger than the last-level cache is written, which drives everything else out. That is what a
model meets whose machine did something else meanwhile; warm steps are what an engine that does nothing else meets.
"""

from pathlib import Path
from typing import Any

import numpy as np

from latfit.profiling.devices.protocol import Device
from latfit.profiling.shapes import StepShape

LARGEST = 512 << 20
USUAL = 64 << 20
TIMES_THE_CACHE = 2


class ColdCaches:
    """A device whose steps start with cold CPU caches."""

    def __init__(self, device: Device, cache_bytes: int | None = None) -> None:
        self._device = device
        size = min(TIMES_THE_CACHE * (cache_bytes or last_level_bytes()), LARGEST)
        self._buffer = np.zeros(size // 8, np.int64)

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def path(self) -> str:
        return self._device.path

    def facts(self) -> dict[str, Any]:
        return {**self._device.facts(), "flushed_bytes": self._buffer.nbytes}

    def free_bytes(self) -> int | None:
        return self._device.free_bytes()

    def prepare(self, cell: StepShape) -> None:
        self._device.prepare(cell)

    def step_ms(self) -> float:
        self._buffer += 1
        return self._device.step_ms()

    def now_s(self) -> float:
        return self._device.now_s()

    def close(self) -> None:
        self._device.close()


def last_level_bytes() -> int:
    """Size of the largest cache of the first CPU; 64 MiB where the system does not tell."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0))
        except (OSError, ValueError):
            continue
    return max(sizes, default=USUAL)
