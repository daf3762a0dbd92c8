"""What surrounds a command: closed streams, terminals without letters, readers that go away, Ctrl-C, warnings of
libraries, errors that nobody foresaw. Each run is a process of its own where streams matter."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from latfit.cli import app as cli
from latfit.cli.app import run
from latfit.errors import silent
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
        ("latfit trace show - <&-", 3, "standard input"),
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


def test_a_terminal_without_letters(trace: Path) -> None:
    latin = {"PYTHONIOENCODING": "latin-1"}
    Path("数.csv").write_text("B,S,T_ms\n1,1,0.5\n1,1,0.51\n2,2,0.7\n2,2,0.71\n")
    found = shell("latfit trace show 数.csv", **latin)
    assert found.returncode == 0, found.stderr
    assert shell("latfit trace show 数.csv", PYTHONIOENCODING="ascii").returncode == 0
    assert "latfit fit '?.csv'" in found.stdout
    document = shell("latfit ingest 数.csv --out 数.parquet --json", **latin)
    assert json.loads(document.stdout)["out"] == "数.parquet"
    nothing = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    refused = shell("latfit trace show 数.parquet", **nothing)
    assert refused.returncode == 2
    assert "letters that this locale lacks" in refused.stderr


def test_ctrl_c_while_modules_load(trace: Path) -> None:
    """Pressed until it works: of the modules in C some lose an interrupt that comes while they load."""
    begun = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(2, signal.default_int_handler);"
         "from latfit.__main__ import main; import sys; sys.argv[1:] = ['fit', 'steps.parquet']; print(1, flush=True);"
         "main()"],
        env=QUICK, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert begun.stdout is not None
    begun.stdout.readline()
    while begun.poll() is None:
        time.sleep(0.1)
        begun.send_signal(signal.SIGINT)
    _, error = begun.communicate(timeout=60)
    assert begun.returncode in (130, -signal.SIGINT)
    assert error == ""


def test_ctrl_c_while_a_module_in_c_loads() -> None:
    """Such a module prints the error of an import of its own, as `PyRun_SimpleString` does, and raises another."""
    program = (
        "import ctypes, signal; signal.signal(2, signal.default_int_handler); from latfit.cli import terminal;"
        "terminal.prepare(); ctypes.pythonapi.PyRun_SimpleString(b'{}')"
    )
    loading = [sys.executable, "-c", program.format("import os; os.kill(os.getpid(), 2)")]
    assert subprocess.run(loading, capture_output=True, text=True, timeout=60).stderr == ""
    failing = [sys.executable, "-c", program.format("import nowhere")]
    assert "ModuleNotFoundError" in subprocess.run(failing, capture_output=True, text=True, timeout=60).stderr


def test_ctrl_c_where_nothing_can_be_raised_comes_again() -> None:
    """As in a callback of the import of a module; with a bound on what is waited for."""
    program = (
        "import os, signal, time, weakref; from latfit.cli import terminal\n"
        "signal.signal(2, signal.default_int_handler)\n"
        "class Lock: pass\n"
        "def gone(_): os.kill(os.getpid(), 2); [None for _ in range(1000)]\n"
        "terminal.prepare(); lock = Lock(); held = weakref.ref(lock, gone)\n"
        "try:\n    del lock\n    print('lost', flush=True)\n    time.sleep(30)\n"
        "except KeyboardInterrupt:\n    print('came again')"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (found.stdout, found.stderr) == ("lost\ncame again\n", "")


def test_quiet_ends_with_its_command(trace: Path, tmp_path: Path) -> None:
    assert run(["fit", str(trace), "--model", "linear", "--force", "--out", str(tmp_path / "fit.json"), "--quiet"]) == 0
    assert not silent.get()


class TestTheLastResort:
    @pytest.mark.parametrize(
        ("error", "code", "words"),
        [
            (RecursionError("maximum recursion depth exceeded"), 1, "defect of latfit (RecursionError"),
            (np.linalg.LinAlgError("Singular matrix"), 1, "defect of latfit (LinAlgError: Singular matrix)"),
            (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), 1, "defect of latfit (UnicodeDecodeError"),
            (OverflowError(), 1, "defect of latfit (OverflowError)"),
            (OSError(errno.EIO, "Input/output error", "x.csv"), 1, "x.csv: the operating system refused"),
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


def test_warnings_of_libraries_stay_inside(trace: Path) -> None:
    """Shown to who looks for them, never to who runs a command; the filters of a program that imports latfit stay."""
    warns = (
        "import warnings, latfit, latfit.cli.app as a\n"
        "def app(**_): warnings.warn('of a library', FutureWarning)\n"
        "a.app = app; latfit.Trace; assert ('ignore', None, Warning, None, 0) not in warnings.filters; a.main([])"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", warns], env={**QUICK, **more}, capture_output=True, text=True, check=False
        )
        for more in ({}, {"LATFIT_DEBUG": "1"})
    ]
    assert [each.returncode for each in found] == [0, 0]
    assert found[0].stderr == ""
    assert "of a library" in found[1].stderr
