"""The tables of options in docs/cli.md, made from the commands: `python -m tests.docs.reference` writes them anew."""

import copy
import re
import sys
from collections.abc import Iterator
from typing import Any

import typer

from latfit.cli.app import app
from latfit.cli.options import OutputOptions
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "cli.md"
SHARED = frozenset({"--json", "--quiet", "--verbose", "--help", "--help-all"})
"""What every command takes; told of once, at the head of the page."""

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


def table(command: Any) -> str:
    """The options of a command by panel: those that help shows, then those for experts."""
    lines = ["| option | default | |", "|---|---|---|"]
    panel = None
    context = typer.Context(command)
    for option in sorted(options(command), key=lambda each: bool(each.hidden)):
        own = "For experts" if option.hidden else option.rich_help_panel or OutputOptions.PANEL
        if own != panel:
            lines.append(f"| **{own}** | | |")
            panel = own
        shown = copy.copy(option)
        shown.hidden = False
        name, told = shown.get_help_record(context)
        lines.append(f"| {_name(option, name)} | {_default(told)} | {_cell(told.partition('  [')[0])} |")
    return "\n".join(lines)


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
    parts = [page[: starts[0].start()]]
    for here, following in zip(starts, [*starts[1:], None], strict=True):
        section = page[here.start() : following.start() if following else len(page)]
        prose = section.partition("\n| option | default |")[0].rstrip()
        parts.append(f"{prose}\n\n{table(known[here[1]])}\n" + ("\n" if following else ""))
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.stdout.write(f"Wrote {PAGE}\n")
