"""Where bytes come from: a file, a pipe or standard input, compressed or not, always bounded.

A compressed file is decompressed as a stream. Its size is bounded against archives that are made to explode: beyond
`SAFE_BYTES` the plain bytes may be at most `MOST_EXPANSION` times the compressed ones, which no log reaches: engine
logs compress 10 to 30 times. What is read as a whole is bounded by the memory that is free, too.
"""

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from latfit.errors import BadInput
from latfit.inputs import regular_file, spooled, unreadable
from latfit.memory import GIB, free_memory_bytes

HEAD_BYTES = 1 << 16
BLOCK_BYTES = 1 << 24
SAFE_BYTES = 1 << 27
MOST_EXPANSION = 50
MEMORY_PER_BYTE = 12
"""What a table of short numbers takes while it is read, for each byte of its text."""

_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True)
class Source:
    """A file that readers open as often as they like. Make one with `open_source`.

    name: what the user calls it.  path: the file that holds the bytes, perhaps compressed.
    """

    name: str
    path: Path

    @cached_property
    def compression(self) -> str | None:
        with self._raw() as stream:
            start = stream.read(4)
        return next((kind for magic, kind in _COMPRESSIONS.items() if start.startswith(magic)), None)

    @cached_property
    def head(self) -> bytes:
        """The first 64 KiB, decompressed: what recognisers look at."""
        with self.open() as stream:
            return stream.read(HEAD_BYTES)

    def open(self) -> BinaryIO:
        """The decompressed bytes as a stream. Reading raises BadInput where they are broken or explode."""
        raw = self._raw()
        if self.compression is None:
            return raw
        import pyarrow as pa

        raw.close()
        # Arrow opens the file itself: a Python file that its threads read may be gone when the program ends
        plain = pa.CompressedInputStream(pa.OSFile(str(self.path)), self.compression)
        return cast(BinaryIO, io.BufferedReader(_Bounded(plain, self)))

    def blocks(self, size: int = BLOCK_BYTES) -> Iterator[bytes]:
        """The decompressed bytes in blocks of at most `size`."""
        with self.open() as stream:
            while block := stream.read(size):
                yield block

    def content(self) -> bytes:
        """All decompressed bytes, for formats that are no streams. Raises BadInput where memory is short."""
        free = free_memory_bytes()
        most = sys.maxsize if free is None else free // MEMORY_PER_BYTE
        size, parts = 0, []
        for block in self.blocks():
            size += len(block)
            if size > most:
                raise BadInput(
                    f"more than {most / GIB:.2g} GiB of text, whose table has no room in the memory that is free",
                    where=self.name,
                    remedy="Read a part of it, or turn it into Parquet and summarise it with --cells.",
                )
            parts.append(block)
        return b"".join(parts)

    def _raw(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise unreadable(Path(self.name), error) from None


class _Bounded(io.RawIOBase):
    """Decompressed bytes, counted."""

    def __init__(self, plain: Any, source: Source) -> None:
        self.plain = plain
        self.source = source
        self.most = max(SAFE_BYTES, MOST_EXPANSION * source.path.stat().st_size)
        self.seen = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import pyarrow as pa

        try:
            block = self.plain.read(len(buffer))
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise BadInput(
                f"not a whole {self.source.compression} file ({reason})",
                where=self.source.name,
                remedy="It may be cut short: copy or make it again.",
            ) from None
        self.seen += len(block)
        if self.seen > self.most:
            raise BadInput(
                f"grows to more than {MOST_EXPANSION} times its size when decompressed",
                where=self.source.name,
                remedy="If that is right, decompress it yourself and give the plain file.",
            )
        buffer[: len(block)] = block
        return len(block)


def open_source(name: str | Path) -> Source:
    """The file called `name`, what comes through the pipe of that name, or standard input for `-`.

    Raises BadInput where there is no such file, or nothing in it.
    """
    if str(name) != "-":
        return Source(str(name), regular_file(Path(name)))
    if sys.stdin is None:
        raise BadInput("is closed", where="standard input", remedy="Pipe a trace or a log into latfit, or name a file.")
    return Source("standard input", spooled(sys.stdin.buffer, "standard input"))
