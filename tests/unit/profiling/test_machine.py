"""What the profiler says about the machine agrees with what the system says elsewhere."""

import os
import subprocess
import sys

import pytest

from latfit.errors import HardwareMissing, WrongUsage
from latfit.profiling.host import isa, machine
from latfit.profiling.host.blas import blas_threads, set_blas_threads


class TestFacts:
    def test_without_proc_all_is_null(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "_lines", lambda path: [])
        facts = machine.machine_facts()
        assert facts["governor"] is facts["cpu_quota"] is facts["memory_bytes"] is None
        assert facts["cpu"]
        assert machine.LoadWatch()() is None
        assert machine.sensible_threads() == len(machine.usable_cpus())

    @pytest.mark.parametrize(
        ("files", "quota"),
        [
            ({"cpu.max": "150000 100000"}, 1.5),
            ({"cpu.max": "max 100000"}, None),
            ({}, None),
        ],
    )
    def test_quota_of_a_container(
        self, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None
    ) -> None:
        monkeypatch.setattr(machine, "_lines", lambda path: [files[path.name]] if path.name in files else [])
        assert machine.cpu_quota() == quota
        most = len(machine.usable_cpus())
        assert machine.sensible_threads() == (most if quota is None else max(1, min(most, int(quota))))


class TestLoadWatch:
    def planted(
        self, monkeypatch: pytest.MonkeyPatch, *moments: tuple[float, float, float]
    ) -> machine.LoadReading | None:
        """The reading between two (wall, busy, own)."""
        readings = iter(moments)
        monkeypatch.setattr(machine.LoadWatch, "_counters", lambda self: next(readings))
        return machine.LoadWatch()()

    def test_others_are_busy_less_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reading = self.planted(monkeypatch, (100.0, 50.0, 3.0), (110.0, 63.0, 8.0))
        assert reading is not None
        assert reading.other_cpus == pytest.approx(0.8)
        assert reading.share == pytest.approx(0.8 / len(machine.usable_cpus()))

    def test_work_of_child_processes_is_not_others(self) -> None:
        """A child that still runs, and its own child, compute for 0.4 s each; each says so by its own clock."""
        compute = "import time; [None for _ in iter(lambda: time.process_time() < 0.4, False)]"
        script = (
            f"import subprocess, sys; {compute}\n"
            f"subprocess.run([sys.executable, '-c', {compute!r}])\n"
            "print('done', flush=True); sys.stdin.read()"
        )
        watch = machine.LoadWatch()
        before = watch._counters()
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            after = watch._counters()
            child.communicate()
        if before is None or after is None:
            pytest.skip("this system has no /proc/stat")
        assert after[2] - before[2] >= 0.8 - 0.06


class TestBlas:
    def test_threads_are_set_and_read_back(self) -> None:
        before = blas_threads()
        if before is None:
            pytest.skip("NumPy does not use OpenBLAS here")
        try:
            assert set_blas_threads(1)
            assert blas_threads() == 1
        finally:
            set_blas_threads(before)
        assert blas_threads() == before


class TestInstructionSets:
    @pytest.mark.parametrize(
        ("core", "runs"),
        [("Haswell", "avx2"), ("Zen", "avx2"), ("SkylakeX", "avx512"), ("Cooperlake", "avx512"),
         ("SapphireRapids", "avx512"), ("neoversen1", "neon"), ("unheard-of", None), (None, None)],
    )  # fmt: skip
    def test_what_float32_runs_on(self, core: str | None, runs: str | None) -> None:
        assert isa.isa_of_core(core) == runs

    @pytest.mark.parametrize("asked", ["amx", "avx512_bf16"])
    def test_numpy_never_runs_on_matrix_units(self, asked: str) -> None:
        with pytest.raises(HardwareMissing, match="float32"):
            isa.environment_for(asked, "numpy")

    def test_unknown_is_wrong_usage(self) -> None:
        with pytest.raises(WrongUsage, match="auto, amx"):
            isa.environment_for("mmx", "numpy")

    @pytest.mark.parametrize("asked", ["avx2", "avx512"])
    def test_what_was_asked_for_really_runs(self, asked: str) -> None:
        """In a fresh process, OpenBLAS itself reports the kernel set that was asked for."""
        if not set(isa.FLAGS_FOR[asked]) <= set(isa.cpu_flags()):
            pytest.skip(f"this CPU has no {asked}")
        if blas_threads() is None:
            pytest.skip("NumPy does not use OpenBLAS here")
        program = "from latfit.profiling.host.blas import blas_facts; print(blas_facts()['isa'])"
        environment = {**os.environ, **isa.environment_for(asked, "numpy")}
        found = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
        )
        assert found.stdout.strip() == asked
