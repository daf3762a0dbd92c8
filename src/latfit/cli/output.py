"""Results on stdout, notes on stderr. Without --verbose an answer fits a terminal of 24 lines and 80 columns."""

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from latfit.cli.terminal import drop_output
from latfit.errors import printable, silent
from latfit.units import unbroken

if TYPE_CHECKING:
    from rich.text import Text

    from latfit import reporting
    from latfit.api.answer import Answer, State
    from latfit.cli.options import OutputOptions
    from latfit.messages import Message

MAX_WARNINGS = 2  # without --verbose
COLOURS = {"good": typer.colors.GREEN, "doubt": typer.colors.YELLOW, "bad": typer.colors.RED}
LABEL_COLOURS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "hint": typer.colors.CYAN}


def _coloured(err: bool = False) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty() and not os.environ.get("NO_COLOR")


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Wrap a text at words."""
    whole = textwrap.fill(
        unbroken(text),
        max(40, shutil.get_terminal_size().columns),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return whole.replace("\xa0", " ")


def echo(text: str = "", *, err: bool = False, **style: Any) -> None:
    _print(typer.style(printable(text), **style) if style else printable(text), err=err)


def _print(text: str, *, err: bool = False) -> None:
    """Print; a reader that went away does not stop the work."""
    try:
        typer.echo(text, err=err)
    except BrokenPipeError:
        drop_output(sys.stderr if err else sys.stdout)


def styled(text: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(printable(text), style=style)


def say(text: str, indent: str = "") -> None:
    echo(wrapped(text, indent, indent))


def suggest(*commands: str) -> None:
    """Print the next commands, each whole on a line, to be pasted."""
    echo("\n  ".join(["Next:", *commands]) if len(commands) > 1 else f"Next: {commands[0]}")


def note(text: str, *, quiet: bool) -> None:
    """Print something that is not the result, on stderr."""
    if not quiet:
        echo(wrapped(text), err=True)


@contextmanager
def progress_bar(purpose: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Show a bar on a terminal; call it with (done, total, activity)."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(purpose), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(purpose, total=None, now="")
        yield lambda done, total, now="": bar.update(task, completed=done, total=total, now=now)


def print_json(document: Any) -> None:
    """Print JSON; letters that the encoding of stdout lacks as escapes."""
    import json

    from latfit.files import dumps

    text = dumps(document)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeError:
        text = json.dumps(json.loads(text), indent=1)
    echo(text)


def print_table(table: "reporting.table.Table") -> None:
    from rich.console import Console

    from latfit import reporting

    _print(reporting.table.table_text(table, Console()))


def print_messages(messages: "Iterable[Message | str]", *, verbose: bool = True, kind: str = "warning") -> None:
    """Print messages with their hints; a plain sentence is of `kind`."""
    every = list(messages)
    shown = every if verbose else every[:MAX_WARNINGS]
    for each in shown:
        if isinstance(each, str):
            labelled(kind, each)
            continue
        labelled("warning" if each.needs_action else "note", each.message)
        if each.needs_action and each.remedy:
            labelled("hint", each.remedy, indent="  ")
    if len(every) > len(shown) and not silent.get():
        labelled("note", f"{len(every) - len(shown)} more with --verbose.")


def labelled(label: str, text: str, *, indent: str = "", err: bool = False) -> None:
    """Print `warning: ...`; on stderr paths stay whole."""
    line = f"{indent}{label}: "
    shown = printable(line + text if err else wrapped(text, indent + "  ", line))
    if _coloured(err) and label in LABEL_COLOURS:
        start = len(line) - 1
        shown = typer.style(shown[:start], fg=LABEL_COLOURS[label], bold=True) + shown[start:]
    _print(shown, err=err)


def print_error(text: str) -> None:
    """Print the first line as `error:` on stderr, the others as `hint:`."""
    found, _, remedy = text.partition("\n")
    labelled("error", found, err=True)
    if remedy:
        labelled("hint", remedy, err=True)


def print_answer(found: "Answer", options: "OutputOptions", state: "State | None" = None) -> None:
    if options.json:
        print_json(found.to_json())
        return
    from latfit.reporting import table

    # Some lines are simulated, which takes a while and may fail: before anything is printed.
    lines = [*found.lines, *(found.details if options.verbose else ())]
    sentence, tables = found.verdict, found.tables(brief=not options.verbose)
    if sentence:
        style: dict[str, Any] = {"fg": COLOURS[state or found.state], "bold": True} if _coloured() else {}
        echo(wrapped(sentence), **style)
    for i, each in enumerate(tables):
        if sentence or i:
            echo()
        print_table(each)
    for line in lines:
        text = line.lstrip(" ")
        if isinstance(line, table.CommandLine):
            echo(line)
        else:
            say(text, " " * (len(line) - len(text)))
    print_messages(found.messages, verbose=options.verbose)
