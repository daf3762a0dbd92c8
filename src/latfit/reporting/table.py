"""Tables as column specifications, rendered as text or HTML."""

import base64
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from markupsafe import Markup, escape

from latfit.errors import printable
from latfit.messages import Message
from latfit.units import format_ms, format_percent, number, unbroken

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console


Column = tuple[str, str | Callable[[Any], Any]] | tuple[str, str | Callable[[Any], Any], Callable[[Any], str]]
"""Name, value (an attribute or a function of the row's record), and how to write the value; None is an empty cell."""

Bar = tuple[str, str, float]
State = Literal["good", "doubt", "bad"]
STATE_COLOURS = {"good": "#0a6a39", "doubt": "#b87a00", "bad": "#a5002f"}
CARD_DPI = 110
MAX_CARD_ROWS = 8  # a longer table hides the figure of a card
MIN_WORD_COLUMN = 12  # letters that a column of words keeps on a narrow terminal
WIDEST = 1000
BROAD = 3  # columns above which a table takes the page's whole width

_OPTION = re.compile(r"--[a-z][\w-]*")  # no line ends in it


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; the first column and those in `words` align left, numbers align right."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()
    note: str = ""

    def only(self, *names: str) -> "Table":
        kept = [i for i, name in enumerate(self.columns) if name in names]
        return replace(
            self, columns=[self.columns[i] for i in kept], rows=[[row[i] for i in kept] for row in self.rows]
        )

    def without_empty(self) -> "Table":
        return self.only(*(name for i, name in enumerate(self.columns) if any(row[i] for row in self.rows)))


class CommandLine(str):
    """A sentence that ends with a command to paste: printed on one line."""


class Verdict(NamedTuple):
    text: str
    state: State


@dataclass(frozen=True)
class KeyNumber:
    """One number of an answer, and its condition."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Shown:
    """What an answer shows on a terminal, in a notebook, on a page."""

    verdict: str = ""
    state: State = "good"
    lines: Sequence[str] = ()
    details: Sequence[str] = ()  # with --verbose
    messages: Sequence[Message | str] = ()  # a plain sentence is a warning
    brief: Sequence[Table] = ()  # without --verbose
    tables: Sequence[Table] = ()  # empty: the brief ones
    numbers: Sequence[KeyNumber] = ()  # on a page


@dataclass(frozen=True)
class Card:
    """An answer."""

    asked: str
    verdict: str
    sentence: str
    state: State | Literal["open"]
    beside: Sequence[str] = ()
    numbers: Sequence[KeyNumber] = ()
    command: str = ""
    at: str = ""  # the limit or the load that a slider shows for this answer
    facts: Sequence[tuple[str, str]] = ()  # what decides about it, by name


def make_bars(values: Iterable[tuple[str, float | None]], write: Callable[[float], str] = format_ms) -> list[Bar]:
    """Return (label, value as text, length in percent of the longest)."""
    known = [(label, value) for label, value in values if value is not None]
    longest = max((value for _, value in known), default=0.0) or 1.0
    return [(label, write(value), 100 * value / longest) for label, value in known]


def make_table(
    caption: str, records: Iterable[Any], *columns: Column, words: Sequence[str] = (), note: str = ""
) -> Table:
    """Return a table with a row a record, without empty columns."""
    rows = [[_write_cell(record, *column[1:]) for column in columns] for record in records]
    return Table(caption, [column[0] for column in columns], rows, words, note).without_empty()


def _write_cell(record: Any, value: str | Callable[[Any], Any], write: Callable[[Any], str] = str) -> str:
    found = attrgetter(value)(record) if isinstance(value, str) else value(record)
    return "" if found is None else write(found)


def facts_table(caption: str, *facts: tuple[str, Any, Callable[[Any], str]], note: str = "") -> Table:
    """Return a table of (name, value, formatter), without values of None."""
    rows = [(name, write(value)) for name, value, write in facts if value is not None]
    return Table(caption, ("", "value"), rows, note=note)


def table_text(table: Table, console: "Console | None" = None) -> str:
    """console: columns of words give way to its width, numbers do not."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    console = console or Console(width=WIDEST, color_system=None, force_terminal=False)
    shown = RichTable(box=None, pad_edge=False, show_header=any(map(str.strip, table.columns)))
    for i, column in enumerate(table.columns):
        least = max(map(len, [*column.split(), *(row[i] for row in table.rows)]), default=0)
        left = i == 0 or column in table.words
        least = min(least, MIN_WORD_COLUMN) if left and i else least  # numbers stay whole, words give way
        justify: Literal["left", "right"] = "left" if left else "right"
        shown.add_column(Text(printable(column)), justify=justify, overflow="fold", no_wrap=i == 0, min_width=least)
    for row in table.rows:
        shown.add_row(*(Text(printable(each)) for each in row))
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), shown).minimum
    if needed > console.width:
        console = Console(width=needed)
    with console.capture() as captured:
        if table.caption:
            console.print(Text(printable(table.caption), style="bold"))
        console.print(shown)
        if table.note:
            console.print(Text(printable(table.note), style="dim"))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def table_html(table: Table) -> Markup:
    kinds = ["words" if i == 0 or name in table.words else "number" for i, name in enumerate(table.columns)]
    cell = Markup('<td class="{}" data-name="{}">{}</td>').format
    head = Markup("").join(
        Markup('<th scope="col" class="{}">{}</th>').format(kind, name)
        for kind, name in zip(kinds, table.columns, strict=True)
    )
    rows = Markup("\n").join(
        Markup('<tr><th scope="row" class="words" data-name="{}">{}</th>{}</tr>').format(
            table.columns[0],
            prose(row[0]),
            Markup("").join(
                cell(*each, prose(text)) for *each, text in zip(kinds[1:], table.columns[1:], row[1:], strict=True)
            ),
        )
        for row in table.rows
    )
    broad = " broad" if len(table.columns) > BROAD or len(table.words) > 1 else ""
    note = Markup('<p class="quiet">{}</p>').format(prose(table.note)) if table.note else ""
    return Markup(
        '<div class="grid{}"><div class="scroll" role="region" aria-label="{}" tabindex="0"><table>'
        "<caption>{}</caption><thead><tr>{}</tr></thead>\n<tbody>{}</tbody></table></div>{}</div>"
    ).format(broad, table.caption, prose(table.caption), head, rows, note)


def prose(text: str) -> Markup:
    """Return escaped HTML with commands between backticks as code."""
    whole = unbroken(text)
    parts = [Markup(_OPTION.sub(r'<span class="whole">\g<0></span>', str(escape(part)))) for part in whole.split("`")]
    if len(parts) % 2 == 0:
        return escape(whole)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


def card_html(
    verdict: str, state: str, tables: Sequence[Table], sentences: Sequence[str], figure: "Figure | None"
) -> str:
    """Return a card for a notebook, everything escaped."""
    image = Markup("")
    if figure is not None:
        from latfit.reporting import style

        data = base64.b64encode(style.png(figure, CARD_DPI)).decode("ascii")
        width = 0.8 * CARD_DPI * figure.get_figwidth()
        image = Markup(
            '<img alt="" style="width:100%;max-width:{:.0f}px;background:#fff" src="data:image/png;base64,{}">'
        ).format(width, data)
    folded = Markup("<details><summary>{}</summary>{}</details>").format
    grids = [
        table_html(each) if len(each.rows) <= MAX_CARD_ROWS else folded(each.caption, table_html(each))
        for each in tables
    ]
    texts = [Markup('<p style="margin:3px 0">{}</p>').format(prose(each)) for each in sentences]
    return Markup(
        '<div style="border-left:4px solid {};padding:1px 14px;max-width:860px"><p><b>{}</b></p>{}</div>'
    ).format(STATE_COLOURS[state], verdict, Markup("").join([*grids, *texts, image]))


_UNDRAWABLE = re.compile(r"[^\x20-\x7e\u00a0-\u00ff]")
_NOT_A_FILE_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def count(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def span(ends: Sequence[float]) -> str:
    low, high = map(number, ends)
    return low if low == high else f"{low} to {high}"


def signed_percent(value_pct: float) -> str:
    return format_percent(value_pct, signed=True)


def of_share(share: float) -> str:
    return format_percent(100 * share)


def shorthand(value: float) -> str:
    """Return an axis label: 20,000 as `20k`; 32,768 stays."""
    for size, suffix, unit in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3)):
        if abs(value) >= size and f"{value / unit:.3g}" == f"{value / unit:.9g}":
            return f"{value / unit:,.3g}{suffix}"
    return f"{value:,.7g}"


def drawable(text: str, most: int = 40) -> str:
    """Return text that matplotlib can draw."""
    plain = _UNDRAWABLE.sub("?", text)
    plain = plain if len(plain) <= most else plain[: most - 3] + "..."
    # Matplotlib leaves out legend entries that start with an underscore.
    return (" " + plain if plain.startswith("_") else plain).replace("$", r"\$")


def file_stem(text: str) -> str:
    """Return text as part of a file name."""
    return _NOT_A_FILE_NAME.sub("-", text).strip("-.")[:60] or "path"
