"""Text tables (CSV, TSV, semicolon-separated, with a header line, in whatever encoding they come), and JSON as engines
write it: one object a line, a list in one document, or a list a line where an endpoint was polled.

JSON lines are parsed one by one, so that memory is bounded by the longest line. What cannot be parsed is counted in a
`Tally`, never raised: a log that was cut, or that has a foreign line in it, still has its other steps.
"""

import csv
import json
import math
import re
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.errors import BadInput, first_line
from latfit.inputs import LARGEST_NUMBER
from latfit.trace.parquet import columns_of, label
from latfit.trace.readers.source import HEAD_BYTES, Source
from latfit.trace.table import Array

MOST_LINE_BYTES = 1 << 26
MOST_DOCUMENT_BYTES = 1 << 29
MOST_LABELS = 1 << 16
LONGEST_WAIT_S = 5.0

NO_TEXT = bytes({*range(1, 9), *range(14, 27), *range(28, 32)})
"""Control characters, without those that lay out text, colour it, or are NUL."""

FEW_CONTROLS = 0.02
FEW_NULS = 0.01
"""Share of bytes."""

_OPENING_QUOTE = re.compile(rb'(^|[,;\t])"')
_DECODER = json.JSONDecoder()


@dataclass
class Tally:
    """Lines that hold no record: broken ones, and the last one where the file ends inside it."""

    bad: int = 0
    cut: int = 0

    def facts(self) -> dict[str, int]:
        """What a provenance says of them; nothing where there are none."""
        counts = {"bad_lines": self.bad, "cut_lines": self.cut}
        return {name: count for name, count in counts.items() if count}


def starts_as_json(head: bytes) -> bool:
    """Whether the first character that is not blank opens an object or a list."""
    return _plain(head[:4096])[:1] in ("{", "[")


def has_keys(head: bytes, *keys: str) -> bool:
    """Whether `head` is JSON, but for a first line that may have lost its beginning, and holds every key."""
    begins = starts_as_json(head) or starts_as_json(head.partition(b"\n")[2])
    return begins and all(f'"{key}"'.encode() in head for key in keys)


def records(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    """The objects of the file in their order; lists are unpacked. Raises BadInput where a document is too large."""
    found = False
    if _is_document(source.head):
        for record in _of_document(source, tally):
            found = True
            yield record
    if not found:
        tally.bad = tally.cut = 0
        yield from _of_lines(source, tally)


def member(record: Any, *path: str) -> Any:
    """The value under a path of keys, None where there is none."""
    for key in path:
        if not isinstance(record, dict):
            return None
        record = record.get(key)
    return record


def number(record: Any, *path: str) -> float:
    """The number under a path of keys, NaN where there is none or one that no quantity reaches."""
    value = member(record, *path)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return math.nan
    return found if abs(found) <= LARGEST_NUMBER or found == math.inf else math.nan


def text(record: Any, *path: str) -> str:
    """The value under a path of keys as text, empty where there is none."""
    value = member(record, *path)
    return "" if isinstance(value, (dict, list)) else _text(value)


def _plain(raw: bytes | bytearray) -> str:
    return raw.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")


def _is_document(head: bytes) -> bool:
    """Whether a value goes on over several lines, or is a list in one line that may be as long as the file."""
    line, newline, _ = _plain(head).partition("\n")
    if not newline:
        return line.startswith("[")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith("[") or (line.startswith("{") and not line.rstrip().endswith("}"))
    return False


def _of_document(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    content = bytearray()
    for block in source.blocks():
        content += block
        if len(content) > MOST_DOCUMENT_BYTES:
            raise BadInput(
                f"a JSON document of more than {MOST_DOCUMENT_BYTES >> 20} MiB",
                where=source.name,
                remedy="Turn it into JSON lines, for example with: jq -c '.[]' FILE",
            )
    plain = _plain(content)
    del content
    position = 1 if plain.startswith("[") else 0
    while True:
        while position < len(plain) and plain[position] in " \t\r\n,]":
            position += 1
        if position == len(plain):
            return
        try:
            value, position = _DECODER.raw_decode(plain, position)
        except (ValueError, RecursionError):
            tally.cut += 1
            return
        yield from _objects(value, tally)


def _of_lines(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    with source.open() as stream:
        while line := stream.readline(MOST_LINE_BYTES):
            plain = _plain(line)
            if not plain:
                continue
            try:
                value = json.loads(plain)
            except (ValueError, RecursionError):
                ended = line.endswith(b"\n") or len(line) == MOST_LINE_BYTES
                tally.bad += ended
                tally.cut += not ended
                continue
            yield from _objects(value, tally)


def _objects(value: Any, tally: Tally) -> Iterator[dict[str, Any]]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict):
            yield item
        else:
            tally.bad += 1


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
    elif _is_binary(head):
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


def _is_binary(head: bytes) -> bool:
    """Whether it is no text: a NUL in its first line, or more than a few behind it, as a machine that went down writes
    them; or more than a few of the other bytes that no text holds."""
    if b"\0" in head.partition(b"\n")[0] or head.count(b"\0") > FEW_NULS * len(head):
        return True
    return len(head) - len(head.translate(None, NO_TEXT)) > FEW_CONTROLS * len(head)


def read_delimited(source: Source) -> Delimited:
    """The table. Bytes that are not text become U+FFFD; lines of another number of cells are left out and counted.

    Raises BadInput where it is not a table, and where more lines are wrong than right.
    """
    import pyarrow as pa

    if not source.head.startswith(UTF16_MARKS) and _is_binary(source.head):
        raise _not_a_table(source, "it holds bytes that are no text")
    names = header_of(source.head)
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise BadInput(f"two columns are called {label(twice)!r}", where=source.name, remedy="Rename one of them.")
    try:
        content = source.content()
        if source.head.startswith(UTF16_MARKS):
            content = content.decode("utf-16", "replace").encode()
        content = plain_text(content)
        table, wrong = parsed(content)
        if len(wrong) > table.num_rows:
            row, cells, expected = parsed(content, in_order=True)[1][0]
            counts = (
                f"row {row} has {cells} cells, the header {expected}; {len(wrong)} of {len(wrong) + table.num_rows}"
            )
            raise _not_a_table(source, f"{counts} rows are like that")
    except MemoryError:
        raise
    except (pa.ArrowException, ValueError, csv.Error) as error:
        raise _not_a_table(source, first_line(error)) from None
    return Delimited(columns_of(table, source.name), len(wrong))


def plain_text(content: bytes) -> bytes:
    """Whole lines of UTF-8, with what is no text replaced, and quotes removed that open a cell and are not closed in
    their line: they would swallow all lines up to the next one."""
    if not content.isascii():
        content = content.decode("utf-8-sig", "replace").encode()
    if b'"' not in content:
        return content
    letters = np.frombuffer(content, dtype=np.uint8)
    line_of = np.searchsorted(np.flatnonzero(letters == ord("\n")), np.flatnonzero(letters == ord('"')))
    unclosed = np.flatnonzero(np.bincount(line_of) % 2)
    if not len(unclosed):
        return content
    lines = content.split(b"\n")
    for i in unclosed:
        lines[i] = _OPENING_QUOTE.sub(b"\\1", lines[i])
    return b"\n".join(lines)


def numbers(column: Array) -> Array:
    """The column as float64; what is not a number becomes NaN."""
    if column.dtype.kind in "iuf":
        return column.astype(np.float64)
    return np.array([_number(value) for value in column.tolist()], dtype=np.float64)


def texts(column: Array) -> Array:
    """The column as text; what is missing becomes empty."""
    if column.dtype == object and set(map(type, column.tolist())) == {str}:
        return column
    return np.array([_text(value) for value in column.tolist()], dtype=object)


def parsed(content: bytes, *, in_order: bool = False) -> tuple[Any, list[tuple[int | None, int, int]]]:
    """The table, and (row, cells, cells of the header) of each line that is not in it; only in order rows have numbers,
    counted from 1 behind the header."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    lines = content[:HEAD_BYTES].decode(errors="replace").lstrip("\ufeff").split("\n", 2)
    delimiter = _delimiter(lines[0])
    # A semicolon separates where the comma marks decimals.
    decimal = "," if delimiter == ";" and len(lines) > 1 and "," in lines[1] else "."
    wrong: list[tuple[int | None, int, int]] = []

    def skip(row: Any) -> str:
        wrong.append((row.number and row.number - 1, row.actual_columns, row.expected_columns))
        return "skip"

    letters = np.frombuffer(content, dtype=np.uint8)
    lent = weakref.ref(letters), weakref.ref(skip)
    try:
        table = arrow_csv.read_csv(
            pa.BufferReader(letters),
            read_options=arrow_csv.ReadOptions(use_threads=not in_order),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip),
            convert_options=arrow_csv.ConvertOptions(
                decimal_point=decimal, auto_dict_encode=True, auto_dict_max_cardinality=MOST_LABELS
            ),
        )
    finally:
        del letters, skip
        _wait_for_threads(lent)
    return table, wrong


def _wait_for_threads(lent: Iterable["weakref.ref[Any]"]) -> None:
    """Until Arrow's threads have let go of what they were lent: they may hold it for a moment after a table is read,
    and a process that ends in that moment is aborted by them."""
    until = time.monotonic() + LONGEST_WAIT_S
    while any(each() is not None for each in lent) and time.monotonic() < until:
        time.sleep(1e-4)


def _not_a_table(source: Source, reason: str) -> BadInput:
    return BadInput(
        f"not a table ({reason or 'nothing in it'})",
        where=source.name,
        remedy="Give a trace in Parquet, or CSV with a header line.",
    )


def _delimiter(line: str) -> str:
    return max(",\t;", key=line.count)


def _number(value: object) -> float:
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def _text(value: object) -> str:
    try:
        return label(value if isinstance(value, str | bytes) or value is None else str(value)) or ""
    except ValueError:
        return ""  # an integer of more digits than Python turns into text
