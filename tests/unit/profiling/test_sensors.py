"""Sensors as Linux and the driver offer them, written into an empty folder, and a stand-in for nvidia-smi."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from latfit.profiling.host import machine
from latfit.profiling.host.machine import compare_sensors, find_sensor_warnings, read_gpu, read_sensors


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


CPU = "sys/devices/system/cpu"
FILES = {
    f"{CPU}/cpu0/cpufreq/scaling_cur_freq": "3100000\n",
    f"{CPU}/cpu1/cpufreq/scaling_cur_freq": "2900000\n",
    f"{CPU}/cpu2/cpufreq/scaling_cur_freq": "3000000\n",
    f"{CPU}/cpu0/thermal_throttle/core_throttle_count": "4\n",
    f"{CPU}/cpu1/thermal_throttle/core_throttle_count": "1\n",
    "sys/class/thermal/thermal_zone0/temp": "54000\n",
    "sys/class/hwmon/hwmon1/temp1_input": "61500\n",
}


def plant_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """A program of that name that prints these lines."""
    program = folder / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", *(f"echo '{line}'" for line in lines)]) + "\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


class TestCpu:
    def test_files_are_read_in_their_units(self, tmp_path: Path) -> None:
        found = read_sensors(system(tmp_path, FILES))
        assert found == {"cpu_mhz": 3000.0, "cpu_celsius": 61.5, "cpu_throttle_events": 5, "gpu": None}


def gpu(*values: Any) -> dict[str, Any]:
    return dict(zip(("mhz", "celsius", "watts", "slowed"), values, strict=True))


class TestGpu:
    @pytest.mark.parametrize(
        ("line", "found"),
        [
            ("1755, 47, 251.50, 0x0000000000000001", gpu(1755, 47, 251.5, False)),
            ("1755, 47, [N/A], 0x0000000000000040", gpu(1755, 47, None, True)),
            ("1755, 47, 251.50, [Not Supported]", gpu(1755, 47, 251.5, None)),
            ("No devices were found", None),
        ],
    )
    def test_what_nvidia_smi_says(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: dict[str, Any] | None
    ) -> None:
        plant_nvidia_smi(tmp_path, monkeypatch, line)
        assert read_gpu() == found


class TestWarnings:
    FIRST: ClassVar[dict[str, Any]] = {
        "cpu_mhz": 3000.0, "cpu_celsius": None, "cpu_throttle_events": 5, "gpu": gpu(1755, 40, 250.0, False)
    }  # fmt: skip

    @pytest.mark.parametrize("last", [{"cpu_throttle_events": 7}, {"gpu": gpu(1755, 80, 300.0, True)}])
    def test_each_cause_is_a_warning_with_a_remedy(self, last: dict[str, Any]) -> None:
        (warning,) = find_sensor_warnings(compare_sensors(self.FIRST, {**self.FIRST, **last}))
        assert "throttled" in warning.message
        assert warning.remedy.endswith(".")
        assert find_sensor_warnings(compare_sensors(self.FIRST, {**self.FIRST, "cpu_mhz": None})) == []


class TestIdleThreads:
    def planted(self, monkeypatch: pytest.MonkeyPatch, busy: float | None) -> int:
        monkeypatch.setattr(machine, "usable_cpus", lambda: list(range(8)))
        monkeypatch.setattr(machine, "cpu_quota", lambda: None)
        reading = None if busy is None else machine.LoadReading(busy, 8)
        monkeypatch.setattr(machine.LoadWatch, "__call__", lambda self: reading)
        return machine.idle_threads(0.0)

    @pytest.mark.parametrize(("busy", "threads"), [(0.1, 8), (1.0, 7), (3.4, 5), (8.0, 1), (20.0, 1), (None, 8)])
    def test_no_more_than_idle_cpus(self, monkeypatch: pytest.MonkeyPatch, busy: float | None, threads: int) -> None:
        assert self.planted(monkeypatch, busy) == threads
