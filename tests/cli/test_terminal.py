"""What surrounds a command: closed streams, terminals without letters, readers that go away, Ctrl-C, warnings of
libraries, errors that nobody foresaw. Each run is a process of its own where streams matter."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from latfit.cli import app as cli
from latfit.cli.app import run
from latfit.trace import write_trace
from tests.conftest import planted_trace

LATFIT = f"{sys.executable} -m latfit"
QUICK = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def trace(in_tmp: Path) -> Path:
    write_trace(Path("steps.parquet"), planted_trace(0.03))
    return in_tmp


def shell(line: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("latfit", LATFIT, 1)],
        env={**QUICK, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("latfit trace show steps.parquet >&-", 0, ""),
        ("latfit trace show steps.parquet --json >&- 2>&-", 0, ""),
        ("latfit trace show nothing.csv 2>&-", 3, ""),
        ("latfit trace show steps.parquet --json | head -c 1 >/dev/null", 0, ""),
        ("latfit ingest steps.parquet --out kept.parquet 2>&1 | true", 0, ""),
        ("latfit trace show nothing.csv 2>&1 | true", 3, ""),
        ("latfit trace show steps.parquet >/dev/full", 7, "no space left"),
    ],
)
def test_streams(line: str, code: int, words: str, trace: Path) -> None:
    """Whoever reads no more stops nothing: the work is done and the exit code is the command's."""
    found = shell(line)
    assert found.returncode == code, found.stderr
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert "Exception" not in found.stderr
    assert ("kept" in line) == Path("kept.parquet").exists()


class TestTheLastResort:
    @pytest.mark.parametrize(
        ("error", "code", "words"),
        [
            (RecursionError("maximum recursion depth exceeded"), 1, "defect of latfit (RecursionError"),
            (np.linalg.LinAlgError("Singular matrix"), 1, "defect of latfit (LinAlgError: Singular matrix)"),
            (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), 1, "defect of latfit (UnicodeDecodeError"),
            (OverflowError(), 1, "defect of latfit (OverflowError)"),
            (OSError(errno.EIO, "Input/output error", "x.csv"), 1, "x.csv: input/output error"),
            (OSError(errno.ENAMETOOLONG, "File name too long", "y" * 300), 2, "file name too long"),
            (OSError(errno.ENOSPC, "No space", "z.csv"), 7, "z.csv: no space left"),
            (MemoryError("Unable to allocate 183. MiB for an array"), 2, "summarise it with --cells"),
        ],
    )
    def test_no_traceback(
        self,
        error: Exception,
        code: int,
        words: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def fails(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(cli, "app", fails)
        assert run(["plan"]) == code
        told = capsys.readouterr().err
        assert words in told
        assert "allocate" not in told
        assert "Traceback" not in told
        monkeypatch.setenv("LATFIT_DEBUG", "1")
        assert run(["plan"]) == code
        assert ("Traceback" in capsys.readouterr().err) == (not isinstance(error, MemoryError))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["trace", "show", "n" * 300], 2, "too long"),
        (["ingest", "steps.parquet", "--out", "n" * 300 + ".parquet"], 7, "too long"),
        (["fit", "steps.parquet", "--seed", str(2**63)], 2, "4294967295"),
        (["fit", "steps.parquet", "--seed", "-1"], 2, "'--seed': "),
        (["trace", "show", "\udcff.csv"], 2, "is not UTF-8"),
        (["trace", "show", "steps.parquet", "--where", "(" * 3000 + "B = 1"], 2, "too many nested parentheses"),
    ],
)
def test_what_is_too_much(
    arguments: list[str], code: int, words: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    told = capsys.readouterr().err
    assert words in told
    assert max(map(len, told.splitlines())) < 400
