"""Tables outside a page: as lines of text, and as plain HTML for notebooks."""

from collections.abc import Iterator
from html import escape

from latfit.reporting.fit.tables import Table


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
