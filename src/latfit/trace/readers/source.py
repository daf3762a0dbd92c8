"""Where bytes come from: a file or standard input, compressed or not, always bounded.

A compressed file is decompressed as a stream. Its size is bounded against archives that are made to explode: beyond
`SAFE_BYTES` the plain bytes may be at most `MOST_EXPANSION` times the compressed ones, which no log reaches: engine
logs compress 10 to 30 times.
"""

import io
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from latfit.errors import BadInput
from latfit.files import unreadable

HEAD_BYTES = 1 << 16
BLOCK_BYTES = 1 << 24
SAFE_BYTES = 1 << 28
MOST_EXPANSION = 200

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

        plain = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), self.compression)
        return cast(BinaryIO, io.BufferedReader(_Bounded(plain, self)))

    def blocks(self, size: int = BLOCK_BYTES) -> Iterator[bytes]:
        """The decompressed bytes in blocks of at most `size`."""
        with self.open() as stream:
            while block := stream.read(size):
                yield block

    def content(self) -> bytes:
        """All decompressed bytes; for formats that cannot be read as a stream."""
        with self.open() as stream:
            return stream.read()

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
    """The file called `name`, or standard input for `-`, which is kept in a temporary file until the program ends.

    Raises BadInput where there is no such file, or nothing in it.
    """
    if str(name) == "-":
        return Source("standard input", _spooled(sys.stdin.buffer))
    path = Path(name)
    try:
        empty = path.stat().st_size == 0 and path.is_file()
        with path.open("rb"):
            pass
    except OSError as error:
        raise unreadable(path, error) from None
    if empty:
        raise BadInput("the file is empty", where=str(path), remedy="Check how it was made, and make it again.")
    return Source(str(path), path)


_SPOOLED: list[Any] = []
"""Temporary files of standard input; they vanish when the program ends."""


def _spooled(stream: BinaryIO) -> Path:
    kept = tempfile.NamedTemporaryFile(prefix="latfit-stdin-")  # noqa: SIM115  lives as long as the program
    while block := stream.read(BLOCK_BYTES):
        kept.write(block)
    kept.flush()
    _SPOOLED.append(kept)
    if kept.tell() == 0:
        raise BadInput("nothing came in", where="standard input", remedy="Pipe a trace or a log into latfit.")
    return Path(kept.name)
