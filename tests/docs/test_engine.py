"""The engine's page names options that exist."""

import re

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "engine.md").read_text()


def test_every_option_it_names_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb in (["simulate", "engine"], ["validate"], ["fit"]):
        run([*verb, "--help-all"])
    known = capsys.readouterr().out
    missing = {option for option in re.findall(r"--[a-z][a-z-]+", PAGE) if option not in known}
    assert not missing
