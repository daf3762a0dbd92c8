"""docs/cli.md and the commands agree: every command has a section, and each section the table of its options."""

import re

import pytest

from tests.docs.reference import PAGE, SECTION, SHARED, commands, options, written

COMMANDS = dict(commands())
TEXT = PAGE.read_text()
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")


def test_every_command_has_a_section() -> None:
    assert [found[1] for found in SECTION.finditer(TEXT)] == [*COMMANDS]


def test_the_list_of_commands_names_all() -> None:
    listed = set(re.findall(r"`([a-z ]+)`", TEXT.split("| to | command |")[1].split("\n\n")[0]))
    assert listed == set(COMMANDS)


def test_tables_are_those_of_the_commands() -> None:
    """`python -m tests.docs.reference` writes them anew."""
    assert written(TEXT) == TEXT


def test_prose_names_options_that_are_there() -> None:
    known = {name for command in COMMANDS.values() for each in command.params for name in each.opts} | SHARED
    own = re.sub(r"`python -m [^`]*`", "", TEXT)
    assert set(OPTION.findall(own)) - known == {"--version"} & set(OPTION.findall(own))


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_says_what_it_does(name: str) -> None:
    for each in options(COMMANDS[name]):
        assert each.help, f"{name} {each.opts[0]} says nothing"


def test_an_option_means_the_same_in_every_command() -> None:
    """A name is of one kind everywhere: a flag, a value, or a list of values."""
    kinds: dict[str, dict[tuple[bool, bool], list[str]]] = {}
    for name, command in COMMANDS.items():
        for each in options(command):
            for option in each.opts:
                kinds.setdefault(option, {}).setdefault((bool(each.is_flag), bool(each.multiple)), []).append(name)
    mixed = {option: found for option, found in kinds.items() if len(found) > 1}
    assert set(mixed) <= MAY_REPEAT, mixed


MAY_REPEAT = {"--rate", "--policy", "--order", "--batching", "--engine", "--trace", "--path", "--nominal", "--quoted"}
"""Options that some commands take several times and others once."""
