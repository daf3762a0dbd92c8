"""What the engine's page shows works: its Python runs, its commands and options exist."""

import re

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "engine.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_examples_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "engine.md", "exec"), {})
    assert "ms to the first token" in capsys.readouterr().out


def test_every_option_it_names_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb in ("simulate", "validate", "fit"):
        run([verb, "--help"])
    known = capsys.readouterr().out
    missing = {option for option in re.findall(r"--[a-z][a-z-]+", PAGE) if option not in known}
    assert not missing
