"""What every verb does with its results: results on stdout, notes on stderr, tables that survive a pipe."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from latfit.report import Table
    from latfit.warning import LatfitWarning


LEAST_WORDS = 12
"""Letters that a column of words keeps on a narrow terminal."""

WIDEST = 1000


def note(text: str, *, quiet: bool) -> None:
    """Something worth knowing that is not the result."""
    if not quiet:
        typer.echo(text, err=True)


@contextmanager
def progress_bar(purpose: str, *, quiet: bool) -> Iterator[Callable[[float, int], None]]:
    """A bar on stderr with the time left, to be called with (done, total); nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn(purpose), BarColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(purpose, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_json(document: Any) -> None:
    from latfit.files import dumps

    typer.echo(dumps(document))


def print_table(table: "Table") -> None:
    """A table on stdout: words align left, numbers right."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=None, pad_edge=False)
    widest = [max(len(name), *(len(row[i]) for row in table.rows), 0) for i, name in enumerate(table.columns)]
    for i, column in enumerate(table.columns):
        left = i == 0 or column in table.words
        # Where a column of words can give way, numbers stay whole.
        whole = i == 0 or (bool(table.words) and not left)
        least = widest[i] if whole else min(widest[i], LEAST_WORDS) if left else None
        shown.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=whole, min_width=least)
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    console = Console()
    # A line that runs over the edge still says what it has to say; a column without room would be gone.
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), shown).minimum
    if needed > console.width:
        console = Console(width=needed)
    console.print(Text(table.caption, style="bold"))
    console.print(shown)
    if table.note:
        console.print(Text(table.note, style="dim"))


def print_warnings(warnings: "Iterable[LatfitWarning | str]") -> None:
    """On stdout: they are part of the result. A sentence alone has no remedy."""
    for warning in warnings:
        typer.echo(f"  ! {warning}" if isinstance(warning, str) else f"  ! {warning.message}\n    {warning.remedy}")
