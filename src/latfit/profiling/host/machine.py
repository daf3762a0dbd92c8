"""The machine of a trace, its sensors (files of Linux, nvidia-smi), and the load of others. What is unknown is None."""

import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latfit.messages import Message, message
from latfit.profiling.host.isa import cpu_flags

QUERY_S = 5.0

GPU_FIELDS = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
# Reasons that slow a busy GPU: software power cap, hardware slowdown, thermal slowdowns, power brake.
SLOWING_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def machine_facts() -> dict[str, Any]:
    usable = usable_cpus()
    memory = dict(_pairs("/proc/meminfo")).get("MemTotal", "").split()
    return {
        "cpu": cpu_model(),
        "cpu_flags": list(cpu_flags()),
        "cores": os.cpu_count(),
        "affinity": usable,
        "cpu_quota": cpu_quota(),
        "governor": _first_line(Path(f"/sys/devices/system/cpu/cpu{usable[0]}/cpufreq/scaling_governor")),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "memory_bytes": int(memory[0]) * 1024 if memory else None,
        "os": f"{platform.system()} {platform.release().partition('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    names = [" ".join(value.split()) for key, value in _pairs("/proc/cpuinfo") if key == "model name"]
    return next(filter(None, names), platform.processor() or platform.machine() or "unknown CPU")


def usable_cpus() -> list[int]:
    """Return the numbers of the CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cpu_quota() -> float | None:
    """Return how many CPUs a container may use (cgroup v2); None without a limit."""
    quota, _, period = (_first_line(Path("/sys/fs/cgroup/cpu.max")) or "").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else None


def sensible_threads() -> int:
    """Return the usable CPUs, or the container's quota if that is less."""
    quota = cpu_quota()
    cpus = len(usable_cpus())
    return cpus if quota is None else max(1, min(cpus, math.floor(quota)))


def idle_threads(seconds: float = 0.3) -> int:
    """Return how many threads find an idle CPU now, at least 1.

    Threads that share a CPU wait for each other at every barrier: two on one idle CPU were 20 times slower than one.
    """
    watch = LoadWatch()
    time.sleep(seconds)
    reading, most = watch(), sensible_threads()
    return most if reading is None else max(1, min(most, round(reading.cpus - reading.other_cpus)))


@dataclass(frozen=True)
class LoadReading:
    """Mean CPUs that others kept busy, of those that this process may run on."""

    other_cpus: float
    cpus: int

    @property
    def share(self) -> float:
        return self.other_cpus / self.cpus


class LoadWatch:
    """Read the system's CPU counters now and when called.

    Others used what was busy on the usable CPUs, stolen time included, less this process and its children.
    """

    def __init__(self) -> None:
        self._cpus = usable_cpus()
        self._start = self._counters()

    def __call__(self) -> LoadReading | None:
        """None without counters or in under 0.2 s."""
        end = self._counters()
        if self._start is None or end is None:
            return None
        wall, busy, own = (late - early for early, late in zip(self._start, end, strict=True))
        if wall < 0.2:  # the counters tick in hundredths of a second
            return None
        return LoadReading(max(0.0, (busy - own) / wall), len(self._cpus))

    def _counters(self) -> tuple[float, float, float] | None:
        names = {f"cpu{number}" for number in self._cpus}
        ticks = 0
        for line in _lines(Path("/proc/stat")):
            name, *counts = line.split()
            if name in names:
                user, nice, system, _idle, _iowait, irq, softirq, steal = (int(count) for count in counts[:8])
                ticks += user + nice + system + irq + softirq + steal
        if not ticks:
            return None
        tick = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), ticks / tick, _family_ticks() / tick


def _family_ticks() -> int:
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        _, closed, rest = (_first_line(stat) or "").rpartition(")")
        if not closed:
            continue  # it ended while we looked
        fields = rest.split()
        pid = int(stat.parent.name)
        ticks[pid] = sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime of proc(5)
        children.setdefault(int(fields[1]), []).append(pid)
    family = [os.getpid()]
    for pid in family:
        family.extend(children.get(pid, ()))
    return sum(ticks.get(pid, 0) for pid in family)


def read_sensors(root: Path = Path("/"), *, gpu: bool = False) -> dict[str, Any]:
    cpus, classes = root / "sys/devices/system/cpu", root / "sys/class"
    clocks = [khz / 1e3 for khz in _numbers(cpus.glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))]
    if not clocks:
        lines = re.findall(r"(?m)^cpu MHz\s*:\s*([\d.]+)", _text(root / "proc/cpuinfo"))
        clocks = [float(mhz) for mhz in lines]
    heat = _numbers([*classes.glob("thermal/thermal_zone*/temp"), *classes.glob("hwmon/hwmon*/temp*_input")])
    throttled = _numbers(cpus.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    return {
        "cpu_mhz": sorted(clocks)[len(clocks) // 2] if clocks else None,
        "cpu_celsius": max(heat) / 1e3 if heat else None,
        "cpu_throttle_events": int(sum(throttled)) if throttled else None,
        "gpu": read_gpu() if gpu else None,
    }


def read_gpu() -> dict[str, Any] | None:
    """Read the first GPU's sensors; None without a driver. slowed: the driver limits the clock."""
    for values in query_gpus(*GPU_FIELDS):
        numbers = dict(zip(("mhz", "celsius", "watts"), map(_number, values), strict=False))
        known = re.fullmatch("0x[0-9a-fA-F]+", values[3])
        return {**numbers, "slowed": bool(int(values[3], 16) & SLOWING_REASONS) if known else None}
    return None


def query_gpus(*fields: str) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_S, check=True).stdout
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines()]
    return [row for row in rows if len(row) == len(fields) and row[0]]


def compare_sensors(first: dict[str, Any], last: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {name: [first[name], last[name]] for name in ("cpu_mhz", "cpu_celsius")}
    before, after = first["cpu_throttle_events"], last["cpu_throttle_events"]
    facts["cpu_throttle_events"] = None if None in (before, after) else max(0, after - before)
    if first["gpu"] or last["gpu"]:
        facts["gpu"] = [first["gpu"], last["gpu"]]
    return facts


def find_sensor_warnings(facts: dict[str, Any]) -> list[Message]:
    found = [message("throttled", what="CPU")] if facts["cpu_throttle_events"] else []
    gpu = facts.get("gpu", [None])[-1]
    return [*found, message("throttled", what="GPU")] if gpu and gpu["slowed"] else found


def _numbers(files: Iterable[Path]) -> list[float]:
    return [value for file in files if (value := _number(_text(file))) is not None]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _pairs(path: str) -> list[tuple[str, str]]:
    return [(key.strip(), value) for key, colon, value in (line.partition(":") for line in _lines(Path(path))) if colon]


def _first_line(path: Path) -> str | None:
    return next(iter(_lines(path)), None)


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
