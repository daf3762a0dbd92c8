"""Clock, temperature, throttling and power of CPU and GPU; None where the system does not tell.

The CPU's are files of Linux (cpufreq, thermal zones, thermal_throttle), a GPU's come from nvidia-smi.
"""

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latfit.messages import Message
from latfit.profiling.warnings import warn

QUERY_S = 5.0
SLOWER_CLOCK = 0.9  # a clock below this share of the first one is worth a warning

GPU_FIELDS = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
# Reasons that slow a busy GPU: software power cap, hardware slowdown, thermal slowdowns, power brake.
SLOWING_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class GpuReading:
    """A GPU's sensors. `slowed`: the driver holds its clock down, for power or heat."""

    mhz: float | None
    celsius: float | None
    watts: float | None
    slowed: bool | None


@dataclass(frozen=True)
class Reading:
    """The sensors at a moment. `throttled` counts events."""

    cpu_mhz: float | None = None
    cpu_celsius: float | None = None
    throttled: int | None = None
    gpu: GpuReading | None = None


def read_sensors(root: Path = Path("/"), *, gpu: bool = False) -> Reading:
    """Read the sensors now. `root` is the folder of `sys` and `proc`."""
    cpus = root / "sys/devices/system/cpu"
    clocks = [khz / 1e3 for khz in _numbers(cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))]
    if not clocks:
        lines = re.findall(r"(?m)^cpu MHz\s*:\s*([\d.]+)", _text(root / "proc/cpuinfo"))
        clocks = [float(mhz) for mhz in lines]
    zones, chips = root.glob("sys/class/thermal/thermal_zone*/temp"), root.glob("sys/class/hwmon/hwmon*/temp*_input")
    heat = _numbers([*zones, *chips])
    throttled = _numbers(cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    return Reading(
        cpu_mhz=sorted(clocks)[len(clocks) // 2] if clocks else None,
        cpu_celsius=max(heat) / 1e3 if heat else None,
        throttled=int(sum(throttled)) if throttled else None,
        gpu=read_gpu() if gpu else None,
    )


def read_gpu() -> GpuReading | None:
    """Read the first GPU's sensors; None without a driver."""
    for values in query_gpus(*GPU_FIELDS):
        mhz, celsius, watts = (_number(text) for text in values[:3])
        reasons = values[3].removeprefix("0x")
        slowed = bool(int(reasons, 16) & SLOWING_REASONS) if re.fullmatch("[0-9a-fA-F]+", reasons) else None
        return GpuReading(mhz, celsius, watts, slowed)
    return None


def query_gpus(*fields: str) -> list[list[str]]:
    """Return these fields of each GPU from nvidia-smi, as text; empty without it."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == len(fields) and row[0]]


def compare_sensors(first: Reading, last: Reading) -> dict[str, Any]:
    """Return what the trace keeps of two readings, before and after a run."""
    facts: dict[str, Any] = {
        "cpu_mhz": [first.cpu_mhz, last.cpu_mhz],
        "cpu_celsius": [first.cpu_celsius, last.cpu_celsius],
        "cpu_throttle_events": _events(first, last),
    }
    if first.gpu or last.gpu:
        facts["gpu"] = [each and vars(each) for each in (first.gpu, last.gpu)]
    return facts


def find_sensor_warnings(first: Reading, last: Reading) -> list[Message]:
    """Return what the sensors say against a run."""
    found = [warn("throttled", events=events)] if (events := _events(first, last)) else []
    clocks = [("CPU", first.cpu_mhz, last.cpu_mhz)]
    clocks += [("GPU", first.gpu.mhz, last.gpu.mhz)] if first.gpu and last.gpu else []
    for what, before, now in clocks:
        if now and before and now < SLOWER_CLOCK * before:
            found.append(warn("slower_clock", what=what, before=before, now=now))
    return [*found, warn("throttled_gpu")] if last.gpu and last.gpu.slowed else found


def _events(first: Reading, last: Reading) -> int | None:
    """Return how often the CPU was throttled between two readings."""
    return None if first.throttled is None or last.throttled is None else max(0, last.throttled - first.throttled)


def _numbers(files: Iterable[Path]) -> list[float]:
    return [value for file in files if (value := _number(_text(file))) is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
