"""The examples of docs/planning.md run, and say what the page says."""

import re
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT
from tests.docs.examples import commands

PAGE = (ROOT / "docs" / "planning.md").read_text()


def test_the_table_of_methods_is_what_is_printed(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = next(b for b in re.findall(r"\n\n```\n(.*?)```", PAGE, flags=re.DOTALL) if b.startswith("method"))
    for arguments, _ in commands(ROOT / "docs" / "planning.md")[:3]:
        run([*arguments, "-v"])
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in block.splitlines():
        assert " ".join(line.split()) in printed
