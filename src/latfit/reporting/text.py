"""Answers outside a page: tables as lines of text, and cards of HTML for notebooks."""

import base64
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from latfit.reporting.fit.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATE_COLOURS = {"good": "#0a6a39", "doubt": "#b87a00", "bad": "#a5002f"}
MOST_ROWS = 8  # a longer table hides the figure of a card


def table_text(table: Table) -> str:
    """The table in lines, its caption first where it has one; words align left, numbers right."""
    return "\n".join(_lines(table))


def table_html(table: Table) -> str:
    """The table as HTML without styles; everything in it is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    caption = f"<caption>{escape(table.caption)}</caption>" if table.caption else ""
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return f"<table>{caption}<tr>{head}</tr>{rows}</table>{note}"


def card_html(
    verdict: str, state: str, tables: Sequence[Table], sentences: Sequence[str], figure: "Figure | None"
) -> str:
    """Return a card for a notebook: the verdict, tables, sentences and a figure; every text is escaped."""
    image = ""
    if figure is not None:
        from latfit.reporting import style

        data = base64.b64encode(style.png(figure)).decode("ascii")
        image = f'<img alt="" style="width:100%;max-width:560px;background:#fff" src="data:image/png;base64,{data}">'
    texts = "".join(f"<p>{escape(each)}</p>" for each in sentences)
    look = f"border-left:4px solid {STATE_COLOURS[state]};padding:1px 14px;max-width:860px"
    return f'<div style="{look}"><p><b>{escape(verdict)}</b></p>{"".join(map(_folded, tables))}{texts}{image}</div>'


def _folded(table: Table) -> str:
    """Return the table as HTML; a long one behind its caption."""
    if len(table.rows) <= MOST_ROWS:
        return table_html(table)
    return f"<details><summary>{escape(table.caption)}</summary>{table_html(table)}</details>"


def _lines(table: Table) -> Iterator[str]:
    if table.caption:
        yield table.caption
    cells = [list(table.columns), *map(list, table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.columns))]
    left = [i == 0 or name in table.words for i, name in enumerate(table.columns)]
    for row in cells:
        aligned = (
            cell.ljust(wide) if words else cell.rjust(wide) for cell, wide, words in zip(row, widths, left, strict=True)
        )
        yield "  ".join(aligned).rstrip()
    if table.note:
        yield table.note
