"""Cold CPU caches: a device whose every step finds nothing of the last one there."""

from pathlib import Path
from typing import Any

import numpy as np

from latfit.profiling.devices.device import Device

FLUSH_FACTOR = 2  # the buffer that is written between steps, in sizes of the last-level cache
MAX_FLUSH_BYTES = 512 << 20
USUAL_CACHE_BYTES = 64 << 20


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
