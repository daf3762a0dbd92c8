"""What the README shows works: its Python runs, its commands print what is shown, its files exist."""

import re
import shlex
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_python_examples_run(code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    assert "tokens a step" in capsys.readouterr().out


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def commands() -> list[tuple[list[str], list[str]]]:
    """(arguments, lines that must be printed) of every command that the README shows with its output, in order."""
    found: list[tuple[list[str], list[str]]] = []
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ latfit "):
                found.append((shlex.split(line.removeprefix("$ latfit ")), []))
            else:
                found[-1][1].append(line)
    return found


def test_commands_print_what_is_shown(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_tmp / "sample_traces").symlink_to(ROOT / "sample_traces")
    assert len(commands()) >= 6
    for arguments, expected in commands():
        run(arguments)
        told = capsys.readouterr()
        printed = [line.rstrip() for line in (told.out + told.err).splitlines()]
        assert [line for line in expected if line not in printed] == [], arguments
