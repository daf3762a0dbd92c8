"""Clock, temperature, throttling and power of CPU and GPU; None where the system does not tell.

The CPU's are files of Linux (cpufreq, thermal zones, thermal_throttle, powercap's energy counters in microjoules). A
GPU's come from NVML, the library of NVIDIA's driver.
"""

import ctypes
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latfit.messages import Message as LatfitWarning
from latfit.profiling.warnings import warn

SLOWER_CLOCK = 0.9  # a clock below this share of the first one is worth a warning

_NVML_SM_CLOCK = 1
_NVML_GPU_TEMPERATURE = 0
# nvmlClocksThrottleReasons that slow a busy GPU: software power cap, hardware slowdown, thermal slowdowns, power brake
_NVML_SLOWED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class GpuReading:
    """A GPU's sensors. `slowed`: the driver holds its clock down, for power or heat."""

    mhz: float | None
    celsius: float | None
    watts: float | None
    slowed: bool | None


@dataclass(frozen=True)
class Reading:
    """The sensors at a moment. `energy_uj` counts up and starts over at some point; `throttled` counts events."""

    at_s: float
    cpu_mhz: float | None = None
    cpu_celsius: float | None = None
    throttled: int | None = None
    energy_uj: int | None = None
    gpu: GpuReading | None = None


def read_sensors(root: Path = Path("/"), *, gpu: bool = False) -> Reading:
    """Read the sensors now. `root` is the folder of `sys` and `proc`."""
    cpus = root / "sys/devices/system/cpu"
    clocks = [khz / 1e3 for khz in _numbers(cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))] or _proc_mhz(root)
    heat = _numbers(
        [*root.glob("sys/class/thermal/thermal_zone*/temp"), *root.glob("sys/class/hwmon/hwmon*/temp*_input")]
    )
    throttled = _numbers(cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    energy = _numbers((root / "sys/class/powercap").glob("intel-rapl:[0-9]/energy_uj"))
    return Reading(
        at_s=time.monotonic(),
        cpu_mhz=sorted(clocks)[len(clocks) // 2] if clocks else None,
        cpu_celsius=max(heat) / 1e3 if heat else None,
        throttled=int(sum(throttled)) if throttled else None,
        energy_uj=int(sum(energy)) if energy else None,
        gpu=read_gpu() if gpu else None,
    )


def read_gpu(index: int = 0, library: Any = None) -> GpuReading | None:
    """Read a GPU's sensors through NVML; None if there is no driver, or it refuses."""
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return None

    def query(function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
        value = kind(0)
        code = getattr(nvml, function)(device, *arguments, ctypes.byref(value))
        return int(value.value) if code == 0 else None

    mhz = query("nvmlDeviceGetClockInfo", _NVML_SM_CLOCK)
    celsius = query("nvmlDeviceGetTemperature", _NVML_GPU_TEMPERATURE)
    milliwatts = query("nvmlDeviceGetPowerUsage")
    reasons = query("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    nvml.nvmlShutdown()
    watts = None if milliwatts is None else milliwatts / 1e3
    return GpuReading(mhz, celsius, watts, None if reasons is None else bool(reasons & _NVML_SLOWED))


def sensor_facts(first: Reading, last: Reading) -> dict[str, Any]:
    """Return what the trace keeps of two readings, before and after a run."""
    used_uj = (last.energy_uj or 0) - (first.energy_uj or 0) if first.energy_uj is not None else 0
    facts: dict[str, Any] = {
        "cpu_mhz": [first.cpu_mhz, last.cpu_mhz],
        "cpu_celsius": [first.cpu_celsius, last.cpu_celsius],
        "cpu_throttle_events": _events(first, last),
        "cpu_watts": round(used_uj / 1e6 / max(last.at_s - first.at_s, 1e-9), 1) if used_uj > 0 else None,
    }
    if first.gpu or last.gpu:
        facts["gpu"] = [each and vars(each) for each in (first.gpu, last.gpu)]
    return facts


def sensor_warnings(first: Reading, last: Reading) -> list[LatfitWarning]:
    """Return what the sensors say against a run."""
    events = _events(first, last)
    found = [warn("throttled", events=events)] if events else []
    clocks = [("CPU", first.cpu_mhz, last.cpu_mhz)]
    clocks += [("GPU", first.gpu.mhz, last.gpu.mhz)] if first.gpu and last.gpu else []
    for what, before, now in clocks:
        if now and before and now < SLOWER_CLOCK * before:
            found.append(warn("slower_clock", what=what, before=before, now=now))
    return [*found, warn("throttled_gpu")] if last.gpu and last.gpu.slowed else found


def _events(first: Reading, last: Reading) -> int | None:
    if first.throttled is None or last.throttled is None:
        return None
    return max(0, last.throttled - first.throttled)


def _numbers(files: Iterable[Path]) -> list[float]:
    found = []
    for file in files:
        try:
            found.append(float(file.read_text()))
        except (OSError, ValueError):
            continue
    return found


def _proc_mhz(root: Path) -> list[float]:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
