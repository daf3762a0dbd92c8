"""Read delimited text (CSV, TSV, semicolons; with a header line) and JSON (lines, a list, a list per line).

Lines that cannot be parsed are counted, not raised: a log that was cut still has its other steps. JSON lines are parsed
one by one, so that memory is bounded by the longest line.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.errors import BadInput, first_line
from latfit.inputs import LARGEST_NUMBER
from latfit.trace.parquet import columns_of, label
from latfit.trace.readers.source import Source
from latfit.trace.table import Array

MAX_LINE_BYTES = 1 << 26
MAX_DOCUMENT_BYTES = 1 << 29
MAX_LABELS = 1 << 16  # different texts of a column that Arrow encodes as a dictionary

CONTROLS = bytes({*range(1, 9), *range(14, 27), *range(28, 32)})  # without NUL, layout and colours
MAX_CONTROL_SHARE, MAX_NUL_SHARE = 0.02, 0.01  # of the bytes of a text
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

_DECODER = json.JSONDecoder()


@dataclass
class Tally:
    """Counts of lines without a record: broken ones, and a last one that the end of the file cuts."""

    bad: int = 0
    cut: int = 0

    def facts(self) -> dict[str, int]:
        """Return the nonzero counts for the provenance."""
        counts = {"bad_lines": self.bad, "cut_lines": self.cut}
        return {name: count for name, count in counts.items() if count}


# ------------------------------------------------------------------------------------------------------------- JSON


def starts_as_json(head: bytes) -> bool:
    """Return whether the first character that is not blank opens an object or a list."""
    return _decode(head[:4096])[:1] in ("{", "[")


def has_keys(head: bytes, *keys: str) -> bool:
    """Return whether `head` is JSON (its first line may have lost its beginning) and contains every key."""
    begins = starts_as_json(head) or starts_as_json(head.partition(b"\n")[2])
    return begins and all(f'"{key}"'.encode() in head for key in keys)


def records(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    """Yield the objects of the file in order, unpacking lists. Raises BadInput if a document is too large."""
    found = False
    if _is_document(source.head):
        for record in _records_of_document(source, tally):
            found = True
            yield record
    if not found:
        tally.bad = tally.cut = 0
        yield from _records_of_lines(source, tally)


def member(record: Any, *path: str) -> Any:
    """Return the value under a path of keys, None if there is none."""
    for key in path:
        if not isinstance(record, dict):
            return None
        record = record.get(key)
    return record


def number(record: Any, *path: str) -> float:
    """Return the number under a path of keys; NaN if there is none, or one beyond any quantity."""
    value = member(record, *path)
    found = math.nan if isinstance(value, bool) else _to_number(value)
    return found if abs(found) <= LARGEST_NUMBER or found == math.inf else math.nan


def text(record: Any, *path: str) -> str:
    """Return the value under a path of keys as text, empty if there is none."""
    value = member(record, *path)
    return "" if isinstance(value, (dict, list)) else _to_text(value)


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")


def _is_document(head: bytes) -> bool:
    """Return whether a value spans several lines, or is a list in one line that may be as long as the file."""
    line, newline, _ = _decode(head).partition("\n")
    if not newline:
        return line.startswith("[")
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith("[") or (line.startswith("{") and not line.rstrip().endswith("}"))
    return False


def _records_of_document(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    with source.open() as stream:
        content = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise BadInput(
            f"a JSON document of more than {MAX_DOCUMENT_BYTES >> 20} MiB",
            where=source.name,
            remedy="Turn it into JSON lines, for example with: jq -c '.[]' FILE",
        )
    document = _decode(content)
    del content
    position = 1 if document.startswith("[") else 0
    while True:
        while position < len(document) and document[position] in " \t\r\n,]":
            position += 1
        if position == len(document):
            return
        try:
            value, position = _DECODER.raw_decode(document, position)
        except (ValueError, RecursionError):
            tally.cut += 1
            return
        yield from _objects(value, tally)


def _records_of_lines(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    with source.open() as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            plain = _decode(line)
            if not plain:
                continue
            try:
                value = json.loads(plain)
            except (ValueError, RecursionError):
                ended = line.endswith(b"\n") or len(line) == MAX_LINE_BYTES
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


# --------------------------------------------------------------------------------------------------- delimited text


@dataclass(frozen=True)
class Delimited:
    """Columns by name, and how many lines were left out: an open quote, or too many or too few cells."""

    columns: Mapping[str, Array]
    bad_lines: int


def header_of(head: bytes) -> list[str]:
    """Return the names in the first line; empty if it is not the header of a table."""
    if head.startswith(UTF16_MARKS):
        plain = head[: len(head) & ~1].decode("utf-16", errors="replace")
    elif _is_binary(head):
        return []
    else:
        plain = head.decode("utf-8-sig", errors="replace")
    line = plain.lstrip("\r\n").partition("\n")[0].rstrip("\r")
    names = _cells(line, delimiter_of(line))
    return [name.strip() for name in names] if len(names) > 1 else []


def has_columns(head: bytes, *names: str) -> bool:
    """Return whether the first line names all of these columns."""
    return set(names) <= set(header_of(head))


def delimiter_of(line: str) -> str:
    return max(",\t;", key=line.count)


def read_delimited(source: Source) -> Delimited:
    """Read the table. Bytes that are not text become U+FFFD.

    Raises
    ------
    BadInput
        If it is not a table, or more lines are bad than good.
    """
    import pyarrow as pa

    if not source.head.startswith(UTF16_MARKS) and _is_binary(source.head):
        raise _not_a_table(source, "it holds bytes that are no text")
    names = header_of(source.head)
    if twice := next((name for name, times in Counter(names).items() if times > 1), None):
        raise BadInput(f"two columns are called {label(twice)!r}", where=source.name, remedy="Rename one of them.")
    try:
        table, bad = _parse(_utf8_content(source))
    except MemoryError:
        raise
    except (pa.ArrowException, ValueError) as error:
        raise _not_a_table(source, first_line(error)) from None
    if bad > table.num_rows:
        reason = f"{bad} of {bad + table.num_rows} rows have an open quote or not {len(names)} cells as the header"
        raise _not_a_table(source, reason)
    release = pa.default_memory_pool().release_unused  # parsing takes three times the memory of the table
    release()
    columns = columns_of(table, source.name)
    del table
    release()
    return Delimited(columns, bad)


def numbers(column: Array) -> Array:
    """Return the column as float64; NaN for what is not a number."""
    if column.dtype.kind in "iuf":
        return column.astype(np.float64)
    return np.array([_to_number(value) for value in column.tolist()], dtype=np.float64)


def texts(column: Array) -> Array:
    """Return the column as text; empty for what is missing."""
    if column.dtype == object and set(map(type, column.tolist())) == {str}:
        return column
    return np.array([_to_text(value) for value in column.tolist()], dtype=object)


def _is_binary(head: bytes) -> bool:
    """Return whether the bytes are no text. A few NULs behind the first line may come from a crash."""
    if b"\0" in head.partition(b"\n")[0] or head.count(b"\0") > MAX_NUL_SHARE * len(head):
        return True
    return len(head) - len(head.translate(None, CONTROLS)) > MAX_CONTROL_SHARE * len(head)


def _utf8_content(source: Source) -> bytes:
    """Return the whole text as UTF-8, without blank lines in front."""
    content = source.content()
    is_utf16 = content.startswith(UTF16_MARKS)
    if is_utf16 or not content.isascii():
        content = content.decode("utf-16" if is_utf16 else "utf-8-sig", "replace").encode()
    return content.lstrip(b"\r\n")


def _parse(content: bytes) -> tuple[Any, int]:
    """Return (Arrow table, number of lines left out): those with an open quote or the wrong number of cells."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    header, *lines = content.split(b"\n", 2)
    delimiter, bad = delimiter_of(header.decode(errors="replace")), []
    if b'"' in content and _has_open_quote(content):  # it would swallow all lines up to the next one
        every = content.split(b"\n")
        bad = [line for line in every[1:] if line.count(b'"') % 2]
        content = b"\n".join([header, *(line for line in every[1:] if line.count(b'"') % 2 == 0)])

    def skip(row: Any) -> str:
        bad.append(row)
        return "skip"

    # A semicolon separates where the comma marks decimals.
    decimal = "," if delimiter == ";" and lines and b"," in lines[0] else "."
    buffer = arrow_buffer(content)
    del content  # the memory is needed for the table
    table = arrow_csv.read_csv(
        pa.BufferReader(buffer),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip),
        convert_options=arrow_csv.ConvertOptions(
            decimal_point=decimal, auto_dict_encode=True, auto_dict_max_cardinality=MAX_LABELS
        ),
    )
    return table, len(bad)


def _has_open_quote(content: bytes) -> bool:
    """Return whether a line has an odd number of quotes."""
    text = np.frombuffer(content, dtype=np.uint8)
    starts = np.append(0, np.flatnonzero(text[:-1] == ord("\n")) + 1)
    return bool(np.any(np.add.reduceat(text == ord('"'), starts, dtype=np.uint8) & 1))


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        return []


def arrow_buffer(content: bytes) -> Any:
    """Return a copy that no Python object owns: Arrow's threads may outlive the interpreter."""
    import pyarrow as pa

    buffer = pa.allocate_buffer(len(content))
    np.frombuffer(buffer, dtype=np.uint8)[:] = np.frombuffer(content, dtype=np.uint8)
    return buffer


def _not_a_table(source: Source, reason: str) -> BadInput:
    return BadInput(
        f"not a table ({reason or 'nothing in it'})",
        where=source.name,
        remedy="Give a trace in Parquet, or CSV with a header line.",
    )


def _to_number(value: Any) -> float:
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _to_text(value: object) -> str:
    try:
        return label(value if isinstance(value, str | bytes) or value is None else str(value)) or ""
    except ValueError:
        return ""  # an integer with more digits than Python prints
