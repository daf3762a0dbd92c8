"""Clock, temperature, throttling and power of CPU (files of Linux) and GPU (nvidia-smi); None if unknown."""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from latfit.messages import Message, message

QUERY_S = 5.0

GPU_FIELDS = ("clocks.sm", "temperature.gpu", "power.draw", "clocks_throttle_reasons.active")
# Reasons that slow a busy GPU: software power cap, hardware slowdown, thermal slowdowns, power brake.
SLOWING_REASONS = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


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


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
