"""JSON as engines write it: one object a line, a list in one document, or a list a line where an endpoint was polled.

Lines are parsed one by one, so that memory is bounded by the longest line. What cannot be parsed is counted in a
`Tally`, never raised: a log that was cut, or that has a foreign line in it, still has its other steps.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from latfit.errors import BadInput
from latfit.trace.readers.source import Source

MOST_LINE_BYTES = 1 << 26
MOST_DOCUMENT_BYTES = 1 << 29

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
    """The number under a path of keys, NaN where there is none."""
    value = member(record, *path)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def text(record: Any, *path: str) -> str:
    """The value under a path of keys as text, empty where there is none."""
    value = member(record, *path)
    try:
        return "" if value is None or isinstance(value, (dict, list)) else str(value)
    except ValueError:
        return ""  # an integer of more digits than Python turns into text


def _plain(raw: bytes) -> str:
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
    plain = _plain(bytes(content))
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
