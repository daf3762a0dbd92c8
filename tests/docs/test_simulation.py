"""The page on simulation names every policy, and only options that exist."""

import re

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "concepts" / "simulation.md").read_text()


def test_every_policy_is_described() -> None:
    from latfit.policies.policy import POLICIES

    assert [name for name in POLICIES if f"`{name}`" not in PAGE] == []


def test_every_option_it_names_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb in (["simulate", "engine"], ["simulate", "policies"], ["validate"]):
        run([*verb, "--help-all"])
    known = capsys.readouterr().out
    assert {option for option in re.findall(r"--[a-z][a-z-]+", PAGE) if option not in known} == set()
