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


class TestResume:
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
