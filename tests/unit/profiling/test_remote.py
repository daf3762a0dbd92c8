"""Devices in processes of their own: same answers, errors carried over, and a killed process is a limit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latfit.errors import HardwareMissing
from latfit.profiling.devices.device import DeviceFailed, DeviceOutOfMemory, DeviceSettings
from latfit.profiling.devices.remote import RemoteDevice
from latfit.profiling.devices.select import PathSpec, open_in_processes
from latfit.profiling.grid import ProfileRequest
from latfit.profiling.sampler import run_profile
from latfit.profiling.shapes import ModelShape, StepShape
from tests.unit.profiling.fake_device import FakeDevice
from tests.unit.profiling.planted import CELLS, saturation_ms

CELL = StepShape(2, 16)


def planted(seed: int) -> FakeDevice:
    return FakeDevice(saturation_ms, seed=seed)


class Hostile(FakeDevice):
    """A device that ends its own process, prints where answers go, or raises what pickle cannot carry."""

    def __init__(self) -> None:
        super().__init__(saturation_ms)

    def prepare(self, cell: StepShape) -> None:
        if cell.S >= 64:
            os.kill(os.getpid(), signal.SIGKILL)
        super().prepare(cell)

    def facts(self) -> dict[str, Any]:
        print("libraries print on standard output")
        return super().facts()

    def free_bytes(self) -> int | None:
        class Local(Exception):
            pass

        raise Local("not of a module")


class Pids(FakeDevice):
    def __init__(self) -> None:
        super().__init__(saturation_ms)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "pid": os.getpid()}


def refusing() -> FakeDevice:
    raise HardwareMissing("no such unit", where="--device fake", remedy="Buy one.")


def killed_at_once() -> FakeDevice:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_answers_are_those_of_the_device() -> None:
    here, there = planted(3), RemoteDevice(planted, (3,))
    try:
        for device in (here, there):
            device.prepare(CELL)
        assert [there.step_ms() for _ in range(5)] == [here.step_ms() for _ in range(5)]
        assert (there.name, there.path, there.facts(), there.free_bytes()) == ("fake", "cpu", here.facts(), None)
    finally:
        there.close()


def test_what_is_printed_there_is_no_answer() -> None:
    device = RemoteDevice(Hostile, ())
    try:
        assert device.facts()["device"] == "fake"
        with pytest.raises(RuntimeError, match="Local: not of a module"):
            device.free_bytes()
    finally:
        device.close()


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of traces may come from anybody."""
    for name in ("latfit", "random", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    RemoteDevice(planted, (0,)).close()
    assert not (tmp_path / "owned").exists()


def test_our_own_errors_keep_their_kind() -> None:
    with pytest.raises(HardwareMissing, match="no such unit") as caught:
        RemoteDevice(refusing, ())
    assert caught.value.remedy == "Buy one."


def test_killed_while_it_opens_is_one_clear_error() -> None:
    with pytest.raises(DeviceFailed, match="killed, most likely for memory"):
        RemoteDevice(killed_at_once, ())


def test_killed_at_a_large_cell_is_a_limit_and_the_run_goes_on() -> None:
    device = RemoteDevice(Hostile, ())
    cells = [StepShape(1, 16), StepShape(prefill=(64,)), StepShape(4, 16)]
    try:
        result = run_profile(device, cells, budget_s=30.0, precision=0.2)
    finally:
        device.close()
    assert [limit.cell for limit in result.limits] == [cells[1]]
    assert "killed" in result.limits[0].message
    assert result.measured == (True, False, True)


def test_the_child_ends_with_its_parents_pipe() -> None:
    device = RemoteDevice(planted, (0,))
    assert device._child is not None
    number = device._child.pid
    device.close()
    assert not Path(f"/proc/{number}").exists()
    with pytest.raises(DeviceOutOfMemory, match="gone"):
        device.step_ms()


def test_processes_take_turns_at_every_cell() -> None:
    devices = [planted(seed) for seed in range(3)]
    result = run_profile(devices, CELLS[:6], budget_s=60.0)
    for cell in range(6):
        assert {sample.process for sample in result.samples if sample.cell == cell} == {0, 1, 2}


def test_numpy_in_processes_of_its_own() -> None:
    shape = ModelShape("small", 64, 1, 4, 2, 16, 96, 128)
    spec = PathSpec("numpy", shape, DeviceSettings("fp32", threads=1), request=ProfileRequest(processes=2))
    devices = open_in_processes(spec)
    try:
        result = run_profile(devices, [CELL, StepShape(prefill=(8,))], budget_s=5.0, precision=0.5)
    finally:
        for device in devices:
            device.close()
    assert all(result.measured)
    assert result.between_processes is not None


def _state(pid: int) -> str | None:
    """The process's state as of proc(5), for example T where it is stopped; None where it is gone or unreaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else state


def _becomes(pid: int, wanted: Callable[[str | None], bool]) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if wanted(_state(pid)):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a stopped child with its parent")
class TestTurns:
    """Threads of a library spin on after a product: who has not the turn must not run at all."""

    def test_a_process_rests_while_another_has_the_turn(self) -> None:
        first, second = (RemoteDevice(Pids, ()) for _ in range(2))
        mine, theirs = int(first.facts()["pid"]), int(second.facts()["pid"])
        for _ in range(2):
            first.prepare(CELL)
            first.step_ms()
            second.prepare(CELL)
            assert _becomes(mine, lambda state: state == "T")
            second.step_ms()
            assert _state(theirs) != "T"
            first.prepare(CELL)
            assert _becomes(theirs, lambda state: state == "T")
            assert _state(mine) != "T"
            assert int(second.facts()["pid"]) == theirs  # asked out of turn, it answers
        first.prepare(CELL)
        second.prepare(CELL)
        first.close()
        second.close()
        assert _becomes(mine, lambda state: state is None)
        assert _becomes(theirs, lambda state: state is None)

    def test_a_resting_process_ends_with_a_killed_parent(self) -> None:
        script = (
            "import os, signal\n"
            "from latfit.profiling.devices.remote import RemoteDevice\n"
            "from tests.unit.profiling.test_remote import CELL, Pids\n"
            "devices = [RemoteDevice(Pids, ()) for _ in range(2)]\n"
            "for device in devices:\n"
            "    device.prepare(CELL)\n"
            "print(*(device.facts()['pid'] for device in devices[1:]), devices[0]._child.pid, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3]
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        for pid in map(int, done.stdout.split()):
            assert _becomes(pid, lambda state: state is None), f"{pid} is still there"
