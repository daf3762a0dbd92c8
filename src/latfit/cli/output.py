"""What every verb does with its results: results on stdout, notes on stderr, tables that survive a pipe.

Without --verbose an answer fits a terminal of 24 lines and 80 columns: the verdict, the numbers that matter, warnings
that need action, the next command. The rest is behind --verbose, in --json and in the report.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import typer

from latfit.errors import printable

if TYPE_CHECKING:
    from rich.text import Text

    from latfit.api.answer import Answer, State
    from latfit.cli.options import OutputOptions
    from latfit.messages import Message as LatfitWarning
    from latfit.reporting import Table


MAX_WARNINGS = 2
"""Warnings and notes that are shown without --verbose."""

LEAST_WORDS = 12
"""Letters that a column of words keeps on a narrow terminal."""

WIDEST = 1000

NUMBER_AND_UNIT = re.compile(r"(\d) (%|(?:ns|µs|ms|s|min|h|req/s)\b)")
"""What stays on one line."""


COLOURS = {"good": typer.colors.GREEN, "doubt": typer.colors.YELLOW, "bad": typer.colors.RED}
"""How sure a verdict is, and the colour that it has on a terminal."""


LABEL_COLOURS = {"error": typer.colors.RED, "warning": typer.colors.YELLOW, "hint": typer.colors.CYAN}


def _coloured(err: bool = False) -> bool:
    """Return whether the stream is a terminal that takes colours."""
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty() and not os.environ.get("NO_COLOR")


def width() -> int:
    """Columns of the terminal, or what COLUMNS says; 80 where there is none."""
    return max(40, shutil.get_terminal_size().columns)


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """`text` in lines that break between words; `first` before the first line, `indent` before the others."""
    whole = textwrap.fill(
        NUMBER_AND_UNIT.sub("\\1\xa0\\2", text),
        width(),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return whole.replace("\xa0", " ")


def echo(text: str = "", *, err: bool = False, **style: Any) -> None:
    """Print lines on stdout, or on stderr. All that commands print goes through here or through `styled`."""
    shown = printable(text)
    typer.echo(typer.style(shown, **style) if style else shown, err=err)


def styled(text: str, style: str = "") -> "Text":
    """Text for a table or a live display of Rich."""
    from rich.text import Text

    return Text(printable(text), style=style)


def say(text: str, indent: str = "") -> None:
    """A sentence of the result, wrapped at words."""
    echo(wrapped(text, indent, indent))


def verdict(text: str, state: Literal["good", "doubt", "bad"]) -> None:
    """The answer of a command, first and coloured on a terminal (not where NO_COLOR is set)."""
    style: dict[str, Any] = {"fg": COLOURS[state], "bold": True} if _coloured() else {}
    echo(wrapped(text), **style)


def note(text: str, *, quiet: bool) -> None:
    """Something worth knowing that is not the result."""
    if not quiet:
        echo(wrapped(text), err=True)


@contextmanager
def progress_bar(purpose: str, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """A bar on stderr with the time left, to be called with (done, total, what goes on); nothing where stderr is no
    terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(purpose), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(purpose, total=None, now="")
        yield lambda done, total, now="": bar.update(task, completed=done, total=total, now=now)


def print_json(document: Any) -> None:
    """On stdout; where its encoding lacks letters, as the escapes that JSON has for them."""
    import json

    from latfit.files import dumps

    text = dumps(document)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeError:
        text = json.dumps(json.loads(text), indent=1)
    echo(text)


def print_table(table: "Table") -> None:
    """A table on stdout: words align left, numbers right."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable

    shown = RichTable(box=None, pad_edge=False)
    widest = [max(len(name), *(len(row[i]) for row in table.rows), 0) for i, name in enumerate(table.columns)]
    for i, column in enumerate(table.columns):
        left = i == 0 or column in table.words
        # Where a column of words can give way, numbers stay whole.
        whole = i == 0 or (bool(table.words) and not left)
        least = widest[i] if whole else min(widest[i], LEAST_WORDS) if left else None
        shown.add_column(
            styled(column), justify="left" if left else "right", overflow="fold", no_wrap=whole, min_width=least
        )
    for row in table.rows:
        shown.add_row(*map(styled, row))
    console = Console()
    # A line that runs over the edge still says what it has to say; a column without room would be gone.
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), shown).minimum
    if needed > console.width:
        console = Console(width=needed)
    console.print(styled(table.caption, "bold"))
    console.print(shown)
    if table.note:
        console.print(styled(table.note, "dim"))


def print_messages(messages: "Iterable[LatfitWarning | str]", *, verbose: bool = True, kind: str = "warning") -> None:
    """Print `warning:` lines with their `hint:`, and `note:` lines, on stdout: they are part of the result.

    Parameters
    ----------
    messages
        A sentence alone has no hint and is of `kind`.
    verbose
        Whether all are printed, not the first MAX_WARNINGS.
    """
    every = list(messages)
    shown = every if verbose else every[:MAX_WARNINGS]
    for each in shown:
        if isinstance(each, str):
            labelled(kind, each)
            continue
        labelled("warning" if each.needs_action else "note", each.message)
        if each.needs_action and each.remedy:
            labelled("hint", each.remedy, indent="  ")
    if len(every) > len(shown):
        labelled("note", f"{len(every) - len(shown)} more with --verbose.")


def labelled(label: str, text: str, *, indent: str = "", err: bool = False) -> None:
    """Print a line such as `warning: ...`; on stdout it is wrapped at words, on stderr paths stay whole."""
    line = f"{indent}{label}: "
    shown = printable(line + text if err else wrapped(text, indent + "  ", line))
    if _coloured(err) and label in LABEL_COLOURS:
        start = len(line) - 1
        shown = typer.style(shown[:start], fg=LABEL_COLOURS[label], bold=True) + shown[start:]
    typer.echo(shown, err=err)


def print_error(text: str) -> None:
    """Print what was found as `error:` on stderr, and the lines below it as `hint:`."""
    found, _, remedy = text.partition("\n")
    labelled("error", found, err=True)
    if remedy:
        labelled("hint", remedy, err=True)


def print_answer(found: "Answer", options: "OutputOptions", state: "State | None" = None) -> None:
    """Print an answer as options say: as JSON; else its verdict, tables, sentences and messages.

    state: how sure the verdict is, in place of the answer's own.
    """
    if options.json:
        print_json(found.to_json())
        return
    # Some lines are simulated, which takes a while and may fail: before anything is printed.
    lines = [*found.lines, *(found.details if options.verbose else ())]
    verdict(found.verdict, found.state if state is None else state)
    tables = found.tables(brief=not options.verbose)
    for table in tables:
        echo()
        print_table(table)
    for line in lines:
        text = line.lstrip(" ")
        say(text, " " * (len(line) - len(text)))
    print_messages(found.messages, verbose=options.verbose)
