"""The examples of docs/planning.md run, and say what the page says."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "planning.md").read_text()


def examples() -> list[tuple[list[str], list[str]]]:
    """(arguments, lines that must be printed) of every command, in order."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ latfit "):
                found.append((shlex.split(line.removeprefix("$ latfit ")), []))
            else:
                found[-1][1].append(line)
    return found


def test_commands(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_tmp / "sample_traces").mkdir()
    shutil.copy(ROOT / "sample_traces" / "cpu_numpy_tiny.parquet", in_tmp / "sample_traces")
    assert len(examples()) >= 8
    for arguments, expected in examples():
        run(arguments)
        told = capsys.readouterr()
        printed = (told.out + told.err).splitlines()
        for line in expected:
            assert line in printed, f"{arguments}: {line}"


def test_the_table_of_methods_is_what_is_printed(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = next(b for b in re.findall(r"\n\n```\n(.*?)```", PAGE, flags=re.DOTALL) if b.startswith("method"))
    for arguments, _ in examples()[:3]:
        run([*arguments, "-v"])
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in block.splitlines():
        assert " ".join(line.split()) in printed


def test_library_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(block, {})
