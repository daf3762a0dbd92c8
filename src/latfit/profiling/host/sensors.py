"""Clock, temperature, throttling and power of CPU and GPU, where the system tells them; None where it does not.

The CPU's are files of Linux (cpufreq, thermal zones, thermal_throttle, powercap's energy counters, in microjoules; in
many containers none of them are there). A GPU's come from NVML, the library of NVIDIA's driver, called directly.
"""

import ctypes
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latfit.warning import LatfitWarning

SLOWER_CLOCK = 0.9
"""A clock below this share of the first one is worth a warning: steps became slower with it."""

_NVML_SM_CLOCK = 1
_NVML_GPU_TEMPERATURE = 0
# Bits of nvmlClocksThrottleReasons that slow a busy GPU down: software power cap, hardware slowdown, software and
# hardware thermal slowdown, hardware power brake.
_NVML_SLOWED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class Reading:
    """One look at the sensors. energy_uj counts up and starts over at some point; throttled counts events."""

    at_s: float
    cpu_mhz: float | None = None
    cpu_celsius: float | None = None
    throttled: int | None = None
    energy_uj: int | None = None
    gpu: "GpuReading | None" = None


@dataclass(frozen=True)
class GpuReading:
    """One look at a GPU. slowed: the driver holds its clock down, for power or heat."""

    mhz: float | None
    celsius: float | None
    watts: float | None
    slowed: bool | None


def read_sensors(root: Path = Path("/"), *, gpu: bool = False) -> Reading:
    """The sensors now. root: where `sys` and `proc` lie."""
    cpus = root / "sys/devices/system/cpu"
    clocks = [khz / 1e3 for khz in _numbers(cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))] or _proc_mhz(root)
    heat = [milli / 1e3 for milli in _numbers((root / "sys/class/thermal").glob("thermal_zone*/temp"))]
    heat += [milli / 1e3 for milli in _numbers((root / "sys/class/hwmon").glob("hwmon*/temp*_input"))]
    throttled = _numbers(cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    energy = _numbers((root / "sys/class/powercap").glob("intel-rapl:[0-9]/energy_uj"))
    return Reading(
        at_s=time.monotonic(),
        cpu_mhz=sorted(clocks)[len(clocks) // 2] if clocks else None,
        cpu_celsius=max(heat) if heat else None,
        throttled=int(sum(throttled)) if throttled else None,
        energy_uj=int(sum(energy)) if energy else None,
        gpu=read_gpu() if gpu else None,
    )


def read_gpu(index: int = 0, library: Any = None) -> GpuReading | None:
    """A GPU's sensors through NVML; None where there is no driver, or it refuses."""
    try:
        nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
        return None

    def asked(function: str, *arguments: int, kind: Any = ctypes.c_uint) -> int | None:
        value = kind(0)
        code = getattr(nvml, function)(device, *arguments, ctypes.byref(value))
        return int(value.value) if code == 0 else None

    clock = asked("nvmlDeviceGetClockInfo", _NVML_SM_CLOCK)
    celsius = asked("nvmlDeviceGetTemperature", _NVML_GPU_TEMPERATURE)
    milliwatts = asked("nvmlDeviceGetPowerUsage")
    reasons = asked("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong)
    nvml.nvmlShutdown()
    return GpuReading(
        mhz=clock,
        celsius=celsius,
        watts=None if milliwatts is None else milliwatts / 1e3,
        slowed=None if reasons is None else bool(reasons & _NVML_SLOWED),
    )


def sensor_facts(first: Reading, last: Reading) -> dict[str, Any]:
    """What the trace keeps of two looks, before and after a run."""
    watts = None
    if first.energy_uj is not None and last.energy_uj is not None and last.energy_uj > first.energy_uj:
        watts = round((last.energy_uj - first.energy_uj) / 1e6 / max(last.at_s - first.at_s, 1e-9), 1)
    facts: dict[str, Any] = {
        "cpu_mhz": [first.cpu_mhz, last.cpu_mhz],
        "cpu_celsius": [first.cpu_celsius, last.cpu_celsius],
        "cpu_throttle_events": _events(first, last),
        "cpu_watts": watts,
    }
    if first.gpu or last.gpu:
        facts["gpu"] = [None if each is None else vars(each) for each in (first.gpu, last.gpu)]
    return facts


def sensor_warnings(first: Reading, last: Reading) -> list[LatfitWarning]:
    """Warnings about a run from its sensors."""
    found = []
    if events := _events(first, last):
        found.append(
            LatfitWarning(
                "throttled",
                f"The CPU was throttled for heat {events} times during the run.",
                "Improve its cooling, or measure with fewer --threads.",
            )
        )
    clocks = [(last.cpu_mhz, first.cpu_mhz, "CPU")]
    if first.gpu and last.gpu:
        clocks.append((last.gpu.mhz, first.gpu.mhz, "GPU"))
    for now, before, what in clocks:
        if now and before and now < SLOWER_CLOCK * before:
            found.append(
                LatfitWarning(
                    "slower_clock",
                    f"The {what} ended at {now:.0f} MHz and had begun at {before:.0f} MHz.",
                    "Let it warm up with a first run, fix its clock if you may, and measure again.",
                )
            )
    if last.gpu and last.gpu.slowed:
        found.append(
            LatfitWarning(
                "throttled",
                "The driver held the GPU's clock down, for power or heat, when the run ended.",
                "Measure on a cooler machine; under such load in use, these times are the honest ones.",
            )
        )
    return found


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
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "cpu MHz":
            found.append(float(value))
    return found
