"""Choices of the command line are those of the rooms, and no command shows more than a reader takes in."""

import re
from typing import Any

import pytest

from latfit.cli.app import run
from latfit.policies import POLICIES
from latfit.profiling.devices.device import PRECISIONS
from latfit.profiling.grid import DEVICES
from latfit.profiling.host.isa import CHOICES
from latfit.simulation.engine.settings import ENGINES, ORDERS
from tests.docs.reference import commands

COMMANDS = dict(commands())


@pytest.mark.parametrize(
    ("command", "option", "known"),
    [
        ("simulate policies", "--policy", POLICIES),
        ("simulate engine", "--batching", ENGINES),
        ("simulate engine", "--order", ORDERS),
        ("profile", "--device", DEVICES),
        ("profile", "--isa", CHOICES),
        ("profile", "--dtype", ("auto", *PRECISIONS)),
    ],
)
def test_choices_are_those_of_the_room(
    command: str, option: str, known: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run([*command.split(), "--help-all"]) == 0
    found = re.search(rf"^  {option} (\S+\|.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    assert found
    assert set(found[1].split("|")) == set(known)
