"""docs/cli.md and the commands agree: every command has a section, and what a section names is there."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from latfit.cli.app import app
from tests.conftest import ROOT

OPTION = re.compile(r"--[a-z][a-z0-9-]*[a-z0-9]")
PAGE = (ROOT / "docs" / "cli.md").read_text()
SECTIONS = {
    re.match(r"`latfit ([a-z ]*[a-z])", section).group(1): re.sub(r"`python -m [^`]*`", "", section)  # type: ignore[union-attr]
    for section in PAGE.split("\n## ")[1:]
}


def commands(group: Any, before: str = "") -> Iterator[tuple[str, set[str]]]:
    """(name, options) of every command."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            told = (option for each in command.params for option in (*each.opts, *each.secondary_opts))
            yield f"{before}{name}", {option for option in told if option.startswith("--")}


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_every_command_has_a_section() -> None:
    assert sorted(COMMANDS) == sorted(SECTIONS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_section_names_options_that_are_there(name: str) -> None:
    assert set(OPTION.findall(SECTIONS[name])) - COMMANDS[name] == set()


def test_every_option_is_told_of() -> None:
    pages = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    known = {option for options in COMMANDS.values() for option in options}
    assert known - set(OPTION.findall(pages)) == set()


def test_the_list_of_commands_names_all() -> None:
    listed = set(re.findall(r"`([a-z ]+)`", PAGE.split("| to | command |")[1].split("\n\n")[0]))
    assert listed == set(COMMANDS)
