"""Ctrl-C in commands that work on several cores: they end with 130, without a traceback or a process left behind, and
what they had done is there."""

import os
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.soak.interrupts import INTERRUPTED, marked, processes_of

from latfit.hardware import HardwareProfile
from latfit.model import FitResult
from latfit.trace import Trace, write_trace

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are looked for in /proc")

SYSTEMS = 60


def interrupted(command: str, when: Callable[[], object], within_s: float = 60) -> str:
    """Stderr of a command that is interrupted once something is so, and that then ends within a time and leaves no
    process behind."""
    mark = str(uuid.uuid4())
    child = marked(Path.cwd(), command, mark)
    try:
        while not when():
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        told = child.communicate(timeout=within_s)[1].decode()
    finally:
        child.kill()
    assert child.returncode in INTERRUPTED, told
    assert "Traceback" not in told
    assert processes_of(mark) == []
    return told


def write_systems(file: str, systems: int) -> None:
    """Forty steps of each of some systems."""
    rng = np.random.default_rng(0)
    number = np.repeat(np.arange(systems), 40)
    B = rng.integers(1, 65, len(number)).astype(np.float64)
    T = (1 + number % 5) * (3 + 0.05 * B) * rng.lognormal(0, 0.03, len(B))
    write_trace(Path(file), Trace({"B": B, "S": B, "T_ms": T, "model": number.astype(str)}))


def test_fits_of_many_systems_that_are_done_are_kept(in_tmp: Path) -> None:
    write_systems("many.parquet", SYSTEMS)
    told = interrupted("fit many.parquet --each --path {model}", lambda: list(Path.cwd().glob("many.*.fit.json")))
    assert "Stopped: " in told
    done = [FitResult.read(file) for file in Path.cwd().glob("many.*.fit.json")]
    assert 1 <= len(done) < SYSTEMS
    assert len(HardwareProfile.read(Path("hardware.json")).paths) <= len(done)
    left = {file.name for file in Path.cwd().iterdir() if ".fit.json" not in file.name}
    assert left <= {"many.parquet", "hardware.json"}
