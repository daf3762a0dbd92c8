"""Readers and their sources: a file, a pipe or standard input, compressed or not; delimited text and JSON in them.

Lines that cannot be parsed are counted. JSON lines are parsed one by one, so that the longest line bounds the memory.
"""

import csv
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from latfit.errors import BadInput, first_line
from latfit.inputs import LARGEST_NUMBER, regular_file, spooled, unreadable
from latfit.memory import check_memory
from latfit.trace.parquet import columns_of, label
from latfit.trace.table import Array, Trace

HEAD_BYTES = 1 << 16
MEMORY_PER_BYTE = 12  # of the text of a table of short numbers, while it is read
COMPRESSION = 10  # plain over compressed bytes of such a table

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class Source:
    """A file under the user's name, which readers open as often as they like; it may be compressed."""

    name: str
    path: Path

    @cached_property
    def compression(self) -> str | None:
        with self._raw() as stream:
            start = stream.read(4)
        return next((kind for magic, kind in COMPRESSIONS.items() if start.startswith(magic)), None)

    @cached_property
    def head(self) -> bytes:
        with self.open() as stream:
            return stream.read(HEAD_BYTES)

    def open(self) -> BinaryIO:
        """Open the decompressed bytes. Reading raises BadInput if they are broken."""
        raw = self._raw()
        if self.compression is None:
            return raw
        import pyarrow as pa

        raw.close()
        # Arrow opens the file itself: its threads may outlive a Python file.
        plain = pa.CompressedInputStream(pa.OSFile(str(self.path)), self.compression)
        return cast(BinaryIO, io.BufferedReader(_Decompressed(plain, self)))

    def content(self) -> bytes:
        """Return all decompressed bytes. Raises BadInput if what they hold would not fit in the free memory."""
        size = self.path.stat().st_size * (COMPRESSION if self.compression else 1)
        check_memory(MEMORY_PER_BYTE * size, self.name, "Summarise it in flat memory with --cells, or read a part.")
        with self.open() as stream:
            return stream.read()

    def _raw(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise unreadable(Path(self.name), error) from None


class _Decompressed(io.RawIOBase):
    def __init__(self, plain: Any, source: Source) -> None:
        self.plain = plain
        self.source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import pyarrow as pa

        try:
            block = self.plain.read(len(buffer))
        except (OSError, pa.ArrowException) as error:
            raise BadInput(
                f"not a whole {self.source.compression} file ({first_line(error)})",
                where=self.source.name,
                remedy="It may be cut short or damaged: copy or make it again.",
            ) from None
        buffer[: len(block)] = block
        return len(block)


def open_source(name: str | Path) -> Source:
    """Open a file, a named pipe, or standard input for `-`. Raises BadInput if there is no content."""
    if str(name) != "-":
        return Source(str(name), regular_file(Path(name)))
    if sys.stdin is None:
        raise BadInput("is closed", where="standard input", remedy="Pipe a trace or a log into latfit, or name a file.")
    return Source("standard input", spooled(sys.stdin.buffer, "standard input"))


@dataclass(frozen=True)
class Options:
    """How to read a table: {latfit's name: the file's name}, and the unit of the latency column."""

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None


@dataclass(frozen=True)
class Reader:
    """One format: what recognises its first bytes (decompressed, up to 64 KiB, perhaps cut inside a line) and reads it.

    read returns all steps in file order, and marks what cleaning may drop (`dummy`, `idle`). path: the execution path
    that the format implies.
    """

    name: str
    describes: str
    recognises: Callable[[bytes], bool]
    read: Callable[[Source, Options], Trace]
    path: str | None = None


MAX_LINE_BYTES = 1 << 26
MAX_LABELS = 1 << 16  # different texts of a column that Arrow encodes as a dictionary
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
BLANK = " \t\r\n"
CONTROLS = re.compile(r"[\0-\x08\x0e-\x1a\x1c-\x1f]")  # without layout and colours; no header has one

_DECODER = json.JSONDecoder()

Tally = Counter[str]
"""Lines without a record, as a provenance counts them: `bad_lines`, and `cut_lines` at the end of a file."""


def starts_as_json(head: bytes) -> bool:
    """Return whether the first character that is not blank opens an object or a list."""
    return _decode(head[:4096])[:1] in ("{", "[")


def has_keys(head: bytes, *keys: str) -> bool:
    """Return whether `head` is JSON (its first line may have lost its beginning) and contains every key."""
    begins = starts_as_json(head) or starts_as_json(head.partition(b"\n")[2])
    return begins and all(f'"{key}"'.encode() in head for key in keys)


def records(source: Source, tally: Tally) -> Iterator[dict[str, Any]]:
    """Yield the objects of the file in order, unpacking lists. Raises BadInput if a document is too large."""
    for value in _document(source, tally) if _is_document(source.head) else _lines(source, tally):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield item
            else:
                tally["bad_lines"] += 1


def member(record: Any, *path: str) -> Any:
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def number(record: Any, *path: str) -> float:
    """Return the number under a path of keys; NaN if there is none, or one beyond any quantity."""
    value = member(record, *path)
    found = math.nan if isinstance(value, bool) else _to_number(value)
    return found if abs(found) <= LARGEST_NUMBER or found == math.inf else math.nan


def text(record: Any, *path: str) -> str:
    value = member(record, *path)
    return "" if isinstance(value, (dict, list)) else _to_text(value)


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", errors="replace").lstrip("\ufeff" + BLANK)


def _is_document(head: bytes) -> bool:
    """Return whether the first line is no whole value: one that spans several lines, or as long as the file may be."""
    line = _decode(head).partition("\n")[0]
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith("[") or (line.startswith("{") and not line.rstrip().endswith("}"))
    return False


def _document(source: Source, tally: Tally) -> Iterator[Any]:
    """Yield the values of a document, those of a list one by one, so that a cut one has its first."""
    document = _decode(source.content())
    position = 1 if document.startswith("[") else 0
    while True:
        while position < len(document) and document[position] in f"{BLANK},]":
            position += 1
        if position == len(document):
            return
        try:
            value, position = _DECODER.raw_decode(document, position)
        except (ValueError, RecursionError):
            tally["cut_lines"] += 1
            return
        yield value


def _lines(source: Source, tally: Tally) -> Iterator[Any]:
    with source.open() as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            plain = _decode(line)
            try:
                yield json.loads(plain) if plain else []
            except (ValueError, RecursionError):
                ended = line.endswith(b"\n") or len(line) == MAX_LINE_BYTES
                tally["bad_lines" if ended else "cut_lines"] += 1


def header_of(head: bytes) -> list[str]:
    """Return the names in the first line; empty if it is not the header of a table."""
    line, names = _first_line(head), list[str]()
    with suppress(csv.Error):
        names = next(csv.reader([line], delimiter=delimiter_of(line)), [])
    return [name.strip() for name in names] if len(names) > 1 and not CONTROLS.search(line) else []


def _first_line(head: bytes) -> str:
    return _as_utf8(head).decode(errors="replace").lstrip("\r\n").partition("\n")[0].rstrip("\r")


def has_columns(head: bytes, *names: str) -> bool:
    return set(names) <= set(header_of(head))


def delimiter_of(line: str) -> str:
    return max(",\t;", key=line.count)


def read_delimited(source: Source, tally: Tally) -> dict[str, Array]:
    """Return the columns of a table; bad lines are counted. Raises BadInput if most are bad."""
    import pyarrow as pa

    try:
        if CONTROLS.search(_first_line(source.head)):
            raise ValueError("it holds bytes that are no text")
        table, bad = _parse(_as_utf8(source.content()).lstrip(b"\r\n"))
        if bad > table.num_rows:
            raise ValueError(
                f"{bad} of {bad + table.num_rows} rows have an open quote or not as many cells as the header"
            )
    except MemoryError:
        raise
    except (pa.ArrowException, ValueError) as error:
        raise BadInput(
            f"not a table ({first_line(error)})",
            where=source.name,
            remedy="Give a trace in Parquet, or CSV with a header line.",
        ) from None
    tally["bad_lines"] += bad
    return columns_of(table, source.name)


def numbers(column: Array) -> Array:
    if column.dtype.kind in "iuf":
        return column.astype(np.float64)
    return np.array([_to_number(value) for value in column.tolist()], dtype=np.float64)


def texts(column: Array) -> Array:
    """Return the column as text; empty for what is missing."""
    if column.dtype == object and set(map(type, column.tolist())) == {str}:
        return column
    return np.array([_to_text(value) for value in column.tolist()], dtype=object)


def _as_utf8(content: bytes) -> bytes:
    if content.isascii():
        return content
    return content.decode("utf-16" if content.startswith(UTF16_MARKS) else "utf-8-sig", "replace").encode()


def _parse(content: bytes) -> tuple[Any, int]:
    """Return (Arrow table, number of lines left out): those with an open quote or the wrong number of cells."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    header, *lines = content.split(b"\n", 2)
    delimiter, bad = delimiter_of(header.decode(errors="replace")), []
    if b'"' in content:  # an open quote would swallow all lines up to the next one
        every = content.split(b"\n")
        bad = [line for line in every[1:] if line.count(b'"') % 2]
        content = b"\n".join([header, *(line for line in every[1:] if line.count(b'"') % 2 == 0)])

    def skip(row: Any) -> str:
        bad.append(row)
        return "skip"

    # A semicolon separates where the comma marks decimals.
    decimal = "," if delimiter == ";" and lines and b"," in lines[0] else "."
    # A copy that no Python object owns: Arrow's threads may outlive the interpreter.
    buffer = pa.allocate_buffer(len(content))
    np.frombuffer(buffer, dtype=np.uint8)[:] = np.frombuffer(content, dtype=np.uint8)
    del content  # the memory is needed for the table
    table = arrow_csv.read_csv(
        pa.BufferReader(buffer),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter, invalid_row_handler=skip),
        convert_options=arrow_csv.ConvertOptions(
            decimal_point=decimal, auto_dict_encode=True, auto_dict_max_cardinality=MAX_LABELS
        ),
    )
    return table, len(bad)


def seconds_of(moment: str) -> float:
    """Return the seconds of an ISO date and time; NaN for anything else."""
    try:
        return datetime.fromisoformat(f"{moment}+00:00").timestamp()
    except (ValueError, OverflowError):
        return math.nan


def _to_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _to_text(value: object) -> str:
    if value is None:
        return ""
    try:
        return label(value.decode(errors="replace") if isinstance(value, bytes) else str(value))
    except ValueError:
        return ""  # an integer with more digits than Python prints
