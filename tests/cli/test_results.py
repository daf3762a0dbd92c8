"""`latfit predict`, `evaluate` and `compare`: contracts and exit codes."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.trace.parquet import write_trace
from latfit.trace.table import Trace
from tests.conftest import planted_trace

Captured = pytest.CaptureFixture[str]


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


class TestPredict:
    def test_strict_refuses_what_was_not_measured(self, fitted: Path, capsys: Captured) -> None:
        assert latfit("predict", fitted, "-B", 8, "-S", 10**6, "--strict") == 3
        assert "outside" in capsys.readouterr().err
        assert latfit("predict", fitted, "-B", 8, "-S", 512, "--strict") == 0

    def test_impossible_combinations_are_left_out_with_a_note(self, fitted: Path, capsys: Captured) -> None:
        capsys.readouterr()
        assert latfit("predict", fitted, "-B", 8, "-B", 32, "-S", 8, "-S", 64) == 0
        assert "1 combination of -B and -S left out" in capsys.readouterr().err
        assert latfit("predict", fitted, "-B", 8, "-B", 32, "-S", 8, "-S", 64, "--json") == 0
        printed = capsys.readouterr()
        rows = json.loads(printed.out)["rows"]
        assert [(row["B"], row["S"]) for row in rows] == [(8, 8), (8, 64), (32, 64)]
        assert printed.err == ""


class TestEvaluate:
    def test_steps_of_another_machine_are_refused(self, fitted: Path, in_tmp: Path, capsys: Captured) -> None:
        """Planted 2.3 times slower: the verdict says so first, exit code 4; --force goes on."""
        trace = planted_trace(0.05, repeats=10, seed=9)
        write_trace(in_tmp / "slow.parquet", trace.with_columns(T_ms=trace["T_ms"] * 2.3))
        assert latfit("evaluate", fitted, "slow.parquet") == 4
        printed = capsys.readouterr()
        assert printed.out.startswith("These steps are not of the fitted machine: 2.")
        assert "times slower in decode" in printed.out
        assert "--force" in printed.err
        assert latfit("evaluate", fitted, "slow.parquet", "--json") == 4
        assert json.loads(capsys.readouterr().out)["machine"]["state"] == "other"
        assert latfit("evaluate", fitted, "slow.parquet", "--force", "-v") == 0
        assert "Whether they are of one machine" in capsys.readouterr().out


@pytest.fixture
def runs(fitted: Path, in_tmp: Path) -> Path:
    """Beside the fitted trace: the same again, one that decodes 30 % slower, and both of two systems in one file."""
    again = planted_trace(0.05, repeats=10, seed=4)
    decode = again["B"] == again["S"]
    slow = again.with_columns(T_ms=np.where(decode, 1.3 * again["T_ms"], again["T_ms"]))
    write_trace(in_tmp / "again.parquet", again)
    write_trace(in_tmp / "slow.parquet", slow)
    for name, second in (("two", again), ("two_slow", slow)):
        named = [
            part.with_columns(hardware=np.full(len(part), machine, dtype=object))
            for machine, part in (("a100", again), ("h100", second))
        ]
        both = {column: np.concatenate([part[column] for part in named]) for column in named[0].columns}
        write_trace(in_tmp / f"{name}.parquet", Trace(both))
    return in_tmp


class TestCompare:
    def test_slower_decode_is_8_and_a_faster_one_is_not(self, fitted: Path, runs: Path, capsys: Captured) -> None:
        assert latfit("compare", fitted, "slow.parquet", "--json") == 8
        (found,) = json.loads(capsys.readouterr().out)["compared"]
        decode, other = found["phases"]
        assert (found["verdict"], decode["phase"], decode["by"], decode["verdict"]) == (
            "slower",
            "decode",
            "steps",
            "slower",
        )
        assert decode["change_pct"] == pytest.approx(30, abs=3)
        assert decode["low_pct"] < 30 < decode["high_pct"]
        assert other["verdict"] == "as fast"
        assert latfit("compare", "slow.parquet", fitted) == 0
        assert "in decode." in " ".join(capsys.readouterr().out.split())
        assert latfit("compare", fitted, "slow.parquet", "--tolerance", 50) == 0

    @pytest.mark.nightly
    def test_each_system_with_its_own(self, runs: Path, capsys: Captured) -> None:
        assert latfit("compare", "two.parquet", "two_slow.parquet", "--each", "--json") == 8
        document = json.loads(capsys.readouterr().out)
        verdicts = {each["system"]: each["verdict"] for each in document["compared"]}
        assert verdicts == {"a100": "as fast", "h100": "slower"}
        assert latfit("compare", "two.parquet", "two_slow.parquet") == 3


@pytest.mark.parametrize(
    "command",
    [
        ("ingest", "new.parquet", "--out", "clean.parquet"),
        ("trace", "show", "new.parquet"),
        ("fit", "new.parquet", "--model", "saturation"),
        ("fit", "many.parquet", "--model", "linear", "--each", "--force"),
        ("evaluate", "trace.fit.json", "new.parquet"),
        ("predict", "trace.fit.json", *(each for B in range(1, 33) for each in ("-B", B))),
        ("predict", "trace.fit.json", "--sensitivity"),
        ("compare", "trace.fit.json", "new.parquet", "trace.fit.json"),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
def test_an_answer_fits_a_terminal(
    command: tuple[object, ...], fitted: Path, in_tmp: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 lines of 80 columns; --verbose says more."""
    monkeypatch.setenv("COLUMNS", "80")
    trace = planted_trace(0.05, repeats=4, seed=9)
    write_trace(in_tmp / "new.parquet", trace)
    write_trace(in_tmp / "many.parquet", trace.with_columns(tp=np.tile(np.arange(4.0), 43)))
    assert latfit(*command) == 0
    short = capsys.readouterr().out.splitlines()
    assert len(short) <= 24
    assert max(map(len, short)) <= 80
    assert latfit(*command, "-v") == 0
    assert len(capsys.readouterr().out.splitlines()) >= len(short)
