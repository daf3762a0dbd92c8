"""Only printable characters reach a terminal: names in files may hold escapes that move its cursor, set its title, hide
lines or reverse their direction."""

import ast
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from latfit.cli.app import run
from latfit.trace import write_trace
from tests.conftest import ROOT, planted_trace
from tests.unit.exporting.plans import of_requests

HOSTILE = "n\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\x7f\u202e\u2066\u200b"
"""Title, clear screen, colour by a control character of 8 bits, return, backspace, delete; right to left, no width."""

LATFIT = ROOT / "src" / "latfit"
PRINT = {"cli/output.py", "errors.py", "reporting/table.py"}
PIPE = {"profiling/host/executed_isa.py"}
"""Writes for the process that started it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile with a hostile path, steps with hostile labels, a plan whose binding constraint is hostile."""
    found = tmp_path_factory.mktemp("hostile")
    assert (
        run(["hardware", "add", "n", "--nominal", "launch=8ms,slope=0.05ms", "--hardware", f"{found}/h.json", "-q"])
        == 0
    )
    profile = json.loads((found / "h.json").read_text())
    profile["paths"] = {HOSTILE: profile["paths"]["n"]}
    (found / "h.json").write_text(json.dumps(profile))
    (found / "plan.json").write_text(json.dumps(of_requests(feasible=False, binding=HOSTILE)))
    write_trace(found / "t.parquet", planted_trace(0.03))
    steps = ({"B": b, "S": b, "T_ms": 5 + b, "path": HOSTILE, "model": HOSTILE} for b in (1, 2, 4, 8) * 9)
    (found / "labels.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["hardware", "show", "--hardware", "h.json"],
        ["hardware", "show", "--hardware", "h.json", "-v"],
        ["hardware", "show", "--hardware", "h.json", "--json"],
        ["hardware", "remove", "x", "--hardware", "h.json"],
        ["plan", "--sla", "20ms", "--hardware", "h.json", "--rate", "5/s", "--laws-only"],
        ["plan", "--sla", "20ms", "--hardware", "h.json", "-v"],
        ["plan", "--sla", "20ms", "--hardware", "h.json", "--json"],
        ["export", "vllm", "plan.json"],
        ["fit", "labels.jsonl", "--model", "linear", "--out", "f.fit.json", "--hardware", "f.json"],
        ["trace", "show", HOSTILE],
        ["export", HOSTILE, "plan.json"],
        ["hardware", "show", f"--{HOSTILE}"],
        [HOSTILE],
    ],
    ids=lambda words: " ".join(words[:2]).replace(HOSTILE, "HOSTILE"),
)  # fmt: skip
def test_only_printable_letters_leave(
    words: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    run(words)
    said = "".join(capsys.readouterr())
    assert "]0;owned" in said
    assert {letter for letter in said if not letter.isprintable()} == {"\n"}


@pytest.mark.parametrize(
    "name", ["two words.parquet", "x;touch owned.parquet", "$(touch owned).parquet", "it's.parquet"]
)
def test_suggested_commands_can_be_pasted_into_a_shell(
    name: str, in_tmp: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_trace(Path("steps.parquet"), planted_trace(0.03))
    for words, suggested in (
        (["ingest", "steps.parquet", "--out", name], ["latfit", "fit", name]),
        (["trace", "show", name], ["latfit", "fit", name]),
        (["trace", "show", name, "--figure", f"{name}.d/x.png"], ["mkdir", "-p", str(in_tmp.resolve() / f"{name}.d")]),
    ):
        run(words)
        said = "".join(capsys.readouterr()).splitlines()[-1]
        assert shlex.split(said.rpartition(": ")[2]) == suggested


def test_printing_is_in_one_place() -> None:
    """No module prints but the one that makes letters printable, and the one below it for those who wait."""
    printing = set()
    for file in LATFIT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "typer.echo", "typer.secho", "Text"):
                printing.add(str(file.relative_to(LATFIT)))
    assert printing - PIPE == PRINT
