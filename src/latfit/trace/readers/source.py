"""Readers and their sources: a file, a pipe or standard input, compressed or not."""

import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from latfit.errors import BadInput, first_line
from latfit.inputs import regular_file, spooled, unreadable
from latfit.memory import check_memory
from latfit.trace.table import Trace

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
