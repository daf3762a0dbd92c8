"""`latfit profile` as users and scripts see it: files, streams, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from latfit.cli.app import run
from latfit.trace.parquet import read_parquet

QUICK = ["profile", "--layers", "1", "--grid", "B=1,2;S=2,8", "--context", "16", "--budget", "10s"]
QUICK += ["--precision", "0.9", "--threads", "1", "--device", "numpy", "--processes", "1"]

AT_A_TERMINAL = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from latfit.cli.app import main; main()"
)
"""A shell's background jobs ignore Ctrl-C and hand that down; a user at a terminal does not."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestResult:
    def test_writes_a_trace_and_says_what_comes_next(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(QUICK) == 0
        captured = capsys.readouterr()
        assert "Next: latfit fit trace.parquet" in captured.out
        assert "Measuring 4 cells of tiny-1layers on numpy" in captured.err
        trace = read_parquet(Path("trace.parquet"))
        pairs = set(zip(trace["B"].tolist(), trace["S"].tolist(), strict=True))
        assert pairs == {(1, 2), (1, 8), (2, 2), (2, 8)}

    def test_a_config_can_be_measured(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
        (tmp_path / "config.json").write_text(json.dumps({**sizes, "vocab_size": 100}))
        assert run([*QUICK, "--quiet", "--model", "config.json"]) == 0
        assert read_parquet(Path("trace.parquet")).provenance["model"]["hidden"] == 64


class TestResume:
    def test_nothing_to_resume_is_a_new_run(self) -> None:
        assert run([*QUICK, "--quiet", "--resume"]) == 0
        assert [path.name for path in Path.cwd().iterdir()] == ["trace.parquet"]

    def test_killed_at_any_moment_loses_at_most_a_visit(self, capsys: pytest.CaptureFixture[str]) -> None:
        """kill -9 in the middle; what the journal holds is in the trace of the run that goes on."""
        options = ["1e-9" if before == "--precision" else option for before, option in pairwise(["", *QUICK])]
        options[options.index("10s")] = "10min"
        child = subprocess.Popen([sys.executable, "-m", "latfit", *options], stderr=subprocess.PIPE)
        journal = Path("trace.parquet.journal")
        try:
            for _ in range(600):
                if journal.exists() and len(journal.read_bytes().splitlines()) > 12:
                    break
                time.sleep(0.1)
        finally:
            child.kill()
            child.communicate()
        assert not Path("trace.parquet").exists()
        rows = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
        kept = [sample for row in rows for sample in row.get("samples", [])]
        assert len(kept) > 20
        assert run([*QUICK, "--quiet"]) == 2
        assert "--resume" in capsys.readouterr().err
        assert run([*QUICK, "--quiet", "--resume", "--budget", "20s"]) == 0
        trace = read_parquet(Path("trace.parquet"))
        samples = [sample[3] for sample in kept if not sample[4]]
        assert trace["T_ms"][: len(samples)].tolist() == samples
        assert len(trace) >= len(samples)
        assert len(set(trace["run"])) == 2
        assert not journal.exists()


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "code", "found"),
        [
            (["--budget", "60"], 2, "--budget"),
            (["--budget", "-3s"], 2, "--budget"),
            (["--quiet", "--budget", "1ms"], 2, "--budget"),
            (["--grid", "B=0;S=4"], 2, "--grid"),
            (["--context", "many"], 2, "--context"),
            (["--threads", "0"], 2, "--threads"),
            (["--layers", "0"], 2, "--layers"),
            (["--precision", "0"], 2, "--precision"),
            (["--device", "abacus"], 2, "--device"),
            (["--isa", "mmx"], 2, "--isa"),
            (["--model", "gigantic"], 3, "tiny"),
            (["--model", "missing.json"], 3, "missing.json"),
            (["--device", "torch-cuda"], 6, "torch-cuda"),
            (["--device", "torch-cuda", "--isa", "avx2"], 6, "torch-cuda"),
            (["--dtype", "bf16"], 6, "numpy does not compute in bf16"),
            (["--dtype", "int3"], 2, "--dtype"),
            (["--set", "kernel=conv"], 2, "no value of kernel"),
            (["--set", "cache=lukewarm"], 2, "no value of cache"),
            (["--set", "history=few"], 2, "--set history"),
            (["--processes", "0"], 2, "--processes"),
            (["--engine", "transformers"], 2, "--engine"),
            (["--engine", "steam"], 2, "--engine"),
            (["--pin", "9999"], 2, "--pin"),
            (["--pin", "one"], 2, "--pin"),
            (["--isa", "amx"], 6, "float32"),
            (["--out", "no/such/folder.parquet"], 7, "mkdir"),
        ],
    )
    def test_with_its_exit_code_and_at_most_four_lines(
        self, options: list[str], code: int, found: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run([*QUICK, *options]) == code
        captured = capsys.readouterr()
        assert found in captured.err
        assert len(captured.err.strip().splitlines()) <= 3
        assert captured.out == ""
        assert list(Path.cwd().iterdir()) == []

    def test_an_unwritable_folder_is_found_before_the_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("folder").mkdir()
        assert run(["profile", "--budget", "1h", "--out", "folder"]) == 7
        assert "Measuring" not in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name != "posix", reason="signals are POSIX's")
class TestCtrlC:
    def interrupted(self, *options: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `latfit profile` interrupted once steps are in its journal."""
        asked = ["profile", "--budget", "10min", "--precision", "1e-6", "--threads", "1", "--device", "numpy"]
        command = [sys.executable, "-c", AT_A_TERMINAL, *asked]
        journal = Path("trace.parquet.journal")
        child = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            while not journal.exists() or len(journal.read_bytes().splitlines()) < 3:
                assert child.poll() is None, child.communicate()
                time.sleep(0.02)
            child.send_signal(signal.SIGINT)
            out, err = child.communicate(timeout=60)
        finally:
            child.kill()
        return child.returncode, out, err

    def test_keeps_what_was_measured(self) -> None:
        code, out, err = self.interrupted()
        assert code == 130
        assert err.startswith("Measuring")
        assert "kept in trace.parquet" in err
        assert "Traceback" not in err
        assert "latfit fit trace.parquet" in out
        trace = read_parquet(Path("trace.parquet"))
        assert len(trace) > 0
        assert trace.provenance["stop"] == "interrupted"
        assert {path.name for path in Path.cwd().iterdir()} == {"trace.parquet", "trace.parquet.journal"}
        assert "--resume goes on" in err

    @pytest.mark.nightly
    def test_json_says_interrupted(self) -> None:
        code, out, _ = self.interrupted("--json")
        assert code == 130
        assert json.loads(out)["interrupted"] is True


def test_the_verb_loads_nothing_heavy_for_its_help() -> None:
    program = (
        "import sys; from latfit.cli import profile;"
        "print([m for m in ('numpy', 'pyarrow', 'rich', 'scipy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
