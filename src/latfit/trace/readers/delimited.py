"""Text tables: CSV, TSV and semicolon-separated files with a header line, in whatever encoding they come."""

import csv
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.trace.readers.source import Source
from latfit.trace.store import columns_of
from latfit.trace.table import Array

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Delimited:
    """Columns by name, and how many lines had another number of cells than the header."""

    columns: Mapping[str, Array]
    bad_lines: int


def header_of(head: bytes) -> list[str]:
    """The names in the first line; empty where it is not the header of a table."""
    if head.startswith(UTF16_MARKS):
        plain = head[: len(head) & ~1].decode("utf-16", errors="replace")
    elif b"\0" in head:
        return []
    else:
        plain = head.decode("utf-8-sig", errors="replace")
    line = plain.lstrip("\r\n").partition("\n")[0].rstrip("\r")
    try:
        names = next(csv.reader([line], delimiter=_delimiter(line)), [])
    except csv.Error:
        return []
    return [name.strip() for name in names] if len(names) > 1 else []


def has_columns(head: bytes, *names: str) -> bool:
    """Whether the first line names all of these columns."""
    return set(names) <= set(header_of(head))


def read_delimited(source: Source) -> Delimited:
    """The table. Bytes that are not text become U+FFFD. Raises BadInput where it is not a table."""
    import pyarrow as pa

    if b"\0" in source.head and not source.head.startswith(UTF16_MARKS):
        raise _not_a_table(source, "it holds bytes that are no text")
    names = header_of(source.head)
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise BadInput(f"two columns are called {twice!r}", where=source.name, remedy="Rename one of them.")
    skipped: list[str] = []
    try:
        with source.open() as stream:
            table = _parsed(stream, source.head, names, skipped)
    except (pa.ArrowException, ValueError, csv.Error) as error:
        raise _not_a_table(source, error) from None
    if skipped and len(skipped) > table.num_rows:
        raise _not_a_table(source, skipped[0])
    columns = columns_of(table, source.name)
    return Delimited({name: _decoded(column) for name, column in columns.items()}, len(skipped))


def numbers(column: Array) -> Array:
    """The column as float64; what is not a number becomes NaN."""
    if column.dtype.kind in "iuf":
        return column.astype(np.float64)
    return np.array([_number(value) for value in column.tolist()], dtype=np.float64)


def texts(column: Array) -> Array:
    """The column as text; what is missing becomes empty."""
    return np.array([_text(value) for value in column.tolist()], dtype=object)


def _parsed(stream: Any, head: bytes, names: list[str], skipped: list[str]) -> Any:
    from pyarrow import csv as arrow_csv

    plain = head.decode("utf-16" if head.startswith(UTF16_MARKS) else "utf-8-sig", errors="replace")
    lines = plain.split("\n", 2)
    delimiter = _delimiter(lines[0])
    # A semicolon separates where the comma marks decimals.
    decimal = "," if delimiter == ";" and len(lines) > 1 and "," in lines[1] else "."
    reading = arrow_csv.ReadOptions(encoding="utf-16" if head.startswith(UTF16_MARKS) else "utf8")
    if "\ufffd" in "".join(names):
        reading.column_names, reading.skip_rows = names, 1
    return arrow_csv.read_csv(
        stream,
        read_options=reading,
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=_counting(skipped)),
        convert_options=arrow_csv.ConvertOptions(decimal_point=decimal),
    )


def _counting(skipped: list[str]) -> Callable[[Any], str]:
    def skip(row: Any) -> str:
        skipped.append(f"a line of {row.actual_columns} cells under a header of {row.expected_columns}")
        return "skip"

    return skip


def _not_a_table(source: Source, reason: object) -> BadInput:
    first = (str(reason).splitlines() or ["nothing in it"])[0][:200]
    return BadInput(
        f"not a table ({first})", where=source.name, remedy="Give a trace in Parquet, or CSV with a header line."
    )


def _delimiter(line: str) -> str:
    return max(",\t;", key=line.count)


def _decoded(column: Array) -> Array:
    """Arrow gives a column with bytes outside UTF-8 as bytes."""
    if column.dtype.kind != "O" or not any(isinstance(value, bytes) for value in column.tolist()):
        return column
    return texts(column)


def _number(value: object) -> float:
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _text(value: object) -> str:
    if value is None:
        return ""
    try:
        return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)
    except ValueError:
        return ""  # an integer of more digits than Python turns into text
