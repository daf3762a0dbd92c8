"""The tables of options in docs/cli.md, made from the commands: `python -m tests.docs.reference` writes them anew."""

import copy
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import typer

from latfit.cli.app import app
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "cli.md"
SHARED = frozenset({"--json", "--quiet", "--verbose", "--set", "--help", "--help-all"})
"""What every command takes; told of once, at the head of the page."""

COMMON = 4
"""Commands from which on an option with one meaning is listed once, in a table of its own."""

SECTION = re.compile(r"^## `latfit ([a-z]+(?: [a-z]+)?)[^\n]*\n", re.M)


def commands(group: Any = None, before: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of every command, in the order of help."""
    group = group or typer.main.get_command(app)
    context = typer.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option" and not set(each.opts) & SHARED]


HEAD = ["| option | default | |", "|---|---|---|"]


def row(command: Any, option: Any) -> str:
    """Return the line of an option."""
    shown = copy.copy(option)
    shown.hidden = False
    name, told = shown.get_help_record(typer.Context(command))
    return f"| {_name(option, name)} | {_default(told)} | {_cell(told.partition('  [')[0])} |"


def common_rows() -> list[str]:
    """Return the lines of options that COMMON commands or more share, in the order of their first command."""
    count = Counter(row(command, option) for _, command in commands() for option in options(command))
    return [each for each, commands_with_it in count.items() if commands_with_it >= COMMON]


def table(command: Any) -> str:
    """Return the options of a command, those for experts last, and the names of its common ones."""
    common = set(common_rows())
    lines: list[str] = []
    shared: list[str] = []
    experts = False
    for option in sorted(options(command), key=lambda each: bool(each.hidden)):
        line = row(command, option)
        if line in common:
            shared.append(line.split("`")[1].split()[0])
            continue
        if option.hidden and not experts:
            lines.append("| **For experts** | | |")
            experts = True
        lines.append(line)
    told = f"[Common](#common-options): {', '.join(f'`{name}`' for name in shared)}." if shared else ""
    return "\n".join([*HEAD, *lines, *([""] if lines and told else []), *([told] if told else [])] if lines else [told])


def _name(option: Any, told: str) -> str:
    """The first name, with the values where they can be listed."""
    name = next((each for each in option.opts if each.startswith("--")), option.opts[0])
    choices = re.search(r"[<\[]([\w.+-]+(?:\|[\w.+-]+)+)[>\]]", told)
    return f"`{name}{' ' + _cell(choices[1]) if choices else ''}`"


def _default(told: str) -> str:
    found = re.search(r"\[(?:.*; )?default: ([^;\]]*)", told)
    return f"`{found[1]}`" if found else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def written(page: str) -> str:
    """The page with the table of each command at the end of its section."""
    known = dict(commands())
    starts = [*SECTION.finditer(page)]
    head, mark, rest = page[: starts[0].start()].partition("## Common options\n")
    introduction = rest.partition("\n| option | default |")[0].rstrip()
    parts = [f"{head}{mark}{introduction}\n\n" + "\n".join([*HEAD, *common_rows()]) + "\n\n"]
    for here, following in zip(starts, [*starts[1:], None], strict=True):
        section = page[here.start() : following.start() if following else len(page)]
        prose = re.split(r"\n(?:\| option \| default \||\[Common\]\()", section)[0].rstrip()
        parts.append(f"{prose}\n\n{table(known[here[1]])}\n" + ("\n" if following else ""))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.stdout.write(f"Wrote {PAGE}\n")
