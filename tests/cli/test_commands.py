"""The command line as scripts see it: exit codes, JSON on stdout and nothing else, files whole or not at all."""

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from latfit._version import __version__
from latfit.cli.app import run
from latfit.trace.parquet import write_trace
from latfit.trace.table import Trace
from tests.conftest import planted_trace

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def trace(in_tmp: Path) -> Path:
    target = in_tmp / "trace.parquet"
    write_trace(target, planted_trace(0.02, repeats=5))
    return target


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


class TestProgram:
    def test_version(self, capsys: Captured) -> None:
        assert latfit("--version") == 0
        own, runs_on = capsys.readouterr().out.splitlines()
        assert own == f"latfit {__version__}"
        assert runs_on.startswith(f"Python {platform.python_version()}, numpy {version('numpy')}, scipy ")
        assert f"numba {version('numba')}; {platform.system()}" in runs_on

    @pytest.mark.parametrize(
        "arguments",
        [
            ["nonsense"],
            ["fit"],
            ["plan"],
            ["plan", "--sla", "20"],
            ["plan", "--nonsense"],
            ["profile", "--budget", "x"],
        ],
    )
    def test_wrong_usage_is_2(self, arguments: list[str], in_tmp: Path, capsys: Captured) -> None:
        assert latfit(*arguments) == 2
        assert "Traceback" not in capsys.readouterr().err


class TestStraightLine:
    def test_fit_plan_report(self, trace: Path, in_tmp: Path, capsys: Captured) -> None:
        assert latfit("fit", trace, "--model", "saturation") == 0
        assert latfit("plan", "--sla", "30ms") == 0
        assert latfit("report", "--sla", "30ms") == 0
        out = capsys.readouterr().out
        assert "Read 215 rows, used 215." in out
        assert "Within 30 ms" in out
        names = {file.name for file in in_tmp.iterdir()}
        assert names == {"trace.parquet", "trace.fit.json", "hardware.json", "reports"}
        assert any(file.suffix == ".html" for file in (in_tmp / "reports").iterdir())
        assert any(file.suffix == ".png" for file in (in_tmp / "reports").iterdir())

    def test_answers_about_steps_wait_for_no_compiler(self, fitted: Path) -> None:
        asked = (["hardware", "show"], ["predict", "trace.fit.json", "-B", "4"], ["plan", "--sla", "30ms"])
        program = (
            f"import sys; from latfit.cli.app import run; print([run(c) for c in {asked}], 'numba' in sys.modules)"
        )
        told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        assert told.splitlines()[-1] == "[0, 0, 0] False"

    def test_two_paths_in_one_trace(self, in_tmp: Path, capsys: Captured) -> None:
        cpu, gpu = planted_trace(0.02, 5, 1), planted_trace(0.02, 5, 2)
        both = Trace(
            {
                **{name: np.concatenate([cpu[name], gpu[name]]) for name in ("B", "S")},
                "T_ms": np.concatenate([cpu["T_ms"] * cpu["B"] / 8, gpu["T_ms"]]),
                "path": np.repeat(np.array(["cpu", "gpu"], dtype=object), len(cpu)),
            }
        )
        write_trace(in_tmp / "trace.parquet", both)
        assert latfit("fit", "trace.parquet") == 0
        assert (in_tmp / "trace.cpu.fit.json").exists()
        assert (in_tmp / "trace.gpu.fit.json").exists()
        capsys.readouterr()
        assert latfit("plan", "--sla", "30ms", "--json") == 0
        plan = json.loads(capsys.readouterr().out)
        # T_cpu = T_gpu B/8: the paths are equal at B = 8 up to the noise of the two fits
        assert plan["B1"]["value"] in (8, 9)
        assert plan["B2"]["value"] >= 1


class TestExitCodes:
    def test_bad_input_is_3(self, in_tmp: Path, capsys: Captured) -> None:
        (in_tmp / "empty.parquet").touch()
        for arguments in (["fit", "none.parquet"], ["fit", "empty.parquet"], ["plan", "--sla", "20ms"], ["report"]):
            assert latfit(*arguments) == 3
            _, _, error = capsys.readouterr().err.partition("error: ")
            assert 0 < error.count("\n") <= 3

    def test_a_fit_that_is_not_usable_is_4_with_json(self, in_tmp: Path, capsys: Captured) -> None:
        (in_tmp / "t.csv").write_text("B,S,T_ms\n1,1,5\n")
        assert latfit("fit", "t.csv", "--json") == 4
        printed = capsys.readouterr()
        assert json.loads(printed.out)["status"]["ok"] is False
        assert len(printed.err.strip().splitlines()) == 2
        assert {file.name for file in in_tmp.iterdir()} == {"t.csv"}

    def test_an_sla_out_of_reach_is_5_with_json(self, fitted: Path, capsys: Captured) -> None:
        assert latfit("plan", "--sla", "1ms", "--json") == 5
        printed = capsys.readouterr()
        assert json.loads(printed.out)["feasible"] is False
        assert "Ask for at least" in printed.err

    @pytest.mark.parametrize("device", ["torch-cuda"])
    def test_missing_hardware_is_6(self, device: str, in_tmp: Path, capsys: Captured) -> None:
        assert latfit("profile", "--device", device, "--budget", "1s") == 6
        assert list(in_tmp.iterdir()) == []

    def test_an_unwritable_target_is_7_before_the_work(self, trace: Path, in_tmp: Path, capsys: Captured) -> None:
        assert latfit("fit", trace, "--out", "no/such/folder/a.fit.json") == 7
        assert latfit("profile", "--out", "no/such/folder/t.parquet") == 7
        (in_tmp / "file").touch()
        assert latfit("demo", "--out", "file/inside", "--budget", "1s") == 7
        assert {file.name for file in in_tmp.iterdir()} == {"trace.parquet", "file"}

    @pytest.mark.nightly
    def test_the_demo_goes_all_the_way(self, in_tmp: Path, capsys: Captured) -> None:
        assert latfit("demo", "--out", "shown", "--budget", "2s", "--quiet") == 0
        written = {file.name for file in (in_tmp / "shown").iterdir()}
        assert {"trace.parquet", "trace.fit.json", "hardware.json", "report.html"} <= written
        assert "[4/4] latfit report" in capsys.readouterr().out

    def test_a_broken_profile_is_found_before_the_fit_and_kept(self, trace: Path, in_tmp: Path) -> None:
        (in_tmp / "hardware.json").write_text("precious, though broken")
        assert latfit("fit", trace) == 3
        assert (in_tmp / "hardware.json").read_text() == "precious, though broken"
