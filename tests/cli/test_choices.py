"""Choices of the command line are those of the rooms, and no command shows more than a reader takes in."""

import re
from typing import Any

import pytest

from latfit.cli.app import run
from latfit.policies import POLICIES
from latfit.profiling.devices.device import PRECISIONS
from latfit.profiling.host.isa import CHOICES
from latfit.profiling.request import CACHES, DEVICES, ENGINES as PROFILED
from latfit.profiling.shapes import PARTS
from latfit.simulation.engine.cluster.replicas import ROUTES
from latfit.simulation.engine.settings import ENGINES, ORDERS
from latfit.simulation.policies.service import SERVICES
from tests.docs.reference import commands

COMMANDS = dict(commands())


@pytest.mark.parametrize(
    ("command", "option", "known"),
    [
        ("simulate policies", "--policy", POLICIES),
        ("simulate policies", "--service", SERVICES),
        ("simulate engine", "--batching", ENGINES),
        ("simulate engine", "--order", ORDERS),
        ("simulate engine", "--route", ROUTES),
        ("validate", "--batching", ENGINES),
        ("profile", "--device", DEVICES),
        ("profile", "--isa", CHOICES),
        ("profile", "--dtype", ("auto", *PRECISIONS)),
        ("profile", "--kernel", PARTS),
        ("profile", "--engine", PROFILED),
        ("profile", "--cache", CACHES),
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
