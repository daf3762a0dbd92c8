"""Files that a user brings, opened so that nothing hangs and nothing is read without an end.

Regular files are read as they are. A pipe (standard input, `<(zcat log.gz)`, a FIFO) is copied into a temporary file
first, because readers look at a file more than once; it ends at `MOST_PIPED` bytes or at half of the disk. A pipe into
which nobody writes is refused after `SILENCE_S`, devices and folders at once. What is decoded as a whole is bounded by
`MOST_JSON`, and by the memory that is free (`memory.py`).
"""

import json
import os
import select
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from latfit.errors import BadInput

MOST_JSON = 1 << 27
"""Bytes of a JSON document that is read at once; a fit has some 60 KiB."""
DEEPEST = 50
"""Lists and objects within each other; a hardware profile has eight."""
LARGEST_NUMBER = 1e30
"""Of a document, of metrics, of a record: above every quantity in its unit, and products of several stay finite."""
LARGEST_WHOLE_NUMBER = (1 << 63) - 1
"""What an array holds."""
MOST_PIPED = 1 << 36
SILENCE_S = 10.0
BLOCK_BYTES = 1 << 20
GIB = 1 << 30
SHOWN_DIGITS = 24
"""Of a number in an error; one of 64 bits has 20 with its sign."""
PARQUET = b"PAR1"

_SPOOLED: list[Any] = []
"""Temporary files with what came through pipes; they vanish when the program ends."""


def regular_file(source: Path) -> Path:
    """The file itself, or where what comes through the pipe was put. Raises BadInput, also where it is empty."""
    stream, mode = _opened(source)
    with stream:
        if stat.S_ISFIFO(mode):
            return spooled(stream, str(source), _first_bytes(stream, str(source)))
        if not stat.S_ISREG(mode):
            raise _not_a_file(source, mode)
        if os.fstat(stream.fileno()).st_size == 0:
            # files of the kernel say that they have no bytes, and have some
            try:
                begun = stream.read(1)
            except OSError as error:
                raise unreadable(source, error) from None
            if begun:
                stream.seek(0)
                return spooled(stream, str(source))
            raise BadInput("the file is empty", where=str(source), remedy="Check how it was made, and make it again.")
    return source


def spooled(stream: BinaryIO, name: str, begun: bytes = b"") -> Path:
    """All that comes out of a stream, in a temporary file that is kept until the program ends. Raises BadInput.

    begun: what has been read of it.
    """
    if _is_device(stream):
        raise _not_a_file(Path(name), stat.S_IFCHR)
    try:
        kept = tempfile.NamedTemporaryFile(prefix="latfit-piped-")  # noqa: SIM115  lives as long as the program
        _SPOOLED.append(kept)
        most = min(MOST_PIPED, shutil.disk_usage(kept.name).free // 2)
        kept.write(begun)
        while kept.tell() <= most and (block := stream.read(BLOCK_BYTES)):
            kept.write(block)
        kept.flush()
    except OSError as error:
        raise BadInput(
            f"cannot be kept in a temporary file ({error.strerror or error})",
            where=name,
            remedy="Set TMPDIR to a folder with room, or give a file.",
        ) from None
    size = kept.tell()
    if 0 < size <= most:
        return Path(kept.name)
    _SPOOLED.pop().close()
    if size:
        remedy = "Give a file, or set TMPDIR to a folder with more room."
        raise BadInput(f"more than {most / GIB:.3g} GiB come through the pipe", where=name, remedy=remedy)
    raise BadInput("nothing came in", where=name, remedy="Pipe a trace or a log into latfit.")


def _is_device(stream: BinaryIO) -> bool:
    """Whether it is one that never ends, unlike a terminal."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return False  # no file of the system, as in a test
    return stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number)


def _not_a_file(source: Path, mode: int) -> BadInput:
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    return BadInput(f"is {kind}, not a file", where=str(source), remedy="Give a file.")


def read_json(source: Path, *, what: str, made_by: str, infinite: bool = False) -> Any:
    """Return the document in `source`; `made_by` names the command that makes such a file, for the error. infinite: see
    `decode_json`."""
    try:
        with regular_file(source).open("rb") as stream:
            content = stream.read(MOST_JSON + 1)
        if len(content) > MOST_JSON:
            raise BadInput(
                f"has more than {MOST_JSON >> 20} MiB, so it is no {what}",
                where=str(source),
                remedy=f"Check the name, or make one with `{made_by}`.",
            )
        return decode_json(content, infinite=infinite)
    except BadInput as error:
        found = error.found if source.exists() else f"no such {what}"
        raise BadInput(found, where=error.where, remedy=f"Make one with `{made_by}`.") from None
    except UnicodeDecodeError:
        told = f"a Parquet file, not a {what}" if content.startswith(PARQUET) else f"not a {what}: it is no text"
        raise BadInput(told, where=str(source), remedy=f"Make one with `{made_by}`.") from None
    except ValueError as error:
        raise BadInput(
            f"not a {what} ({error})", where=str(source), remedy=f"Make it again with `{made_by}`."
        ) from None


def decode_json(content: bytes, *, infinite: bool = False) -> Any:
    """Return the document in `content`.

    Parameters
    ----------
    infinite
        Accept NaN and Infinity, which Python writes although JSON has no such numbers.

    Raises
    ------
    ValueError
        Also for a number, or a nesting, too large to work with, and for text that could not be written again.
    """
    try:
        document = json.loads(
            content.decode(),
            parse_int=_whole_number,
            parse_float=_number,
            parse_constant=float if infinite else _refuse_constant,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [document]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
    if level:
        raise ValueError("it is nested too deep")
    if b"\\ud" in content.lower():
        try:
            json.dumps(document, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("half of a surrogate pair stands alone") from None
    return document


def _whole_number(text: str) -> int:
    if len(text) > SHOWN_DIGITS or abs(value := int(text)) > LARGEST_WHOLE_NUMBER:
        raise ValueError(f"{_shown(text)} is beyond 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text)
    if abs(value) > LARGEST_NUMBER:
        raise ValueError(f"{_shown(text)} is beyond {LARGEST_NUMBER:g}")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_DIGITS else f"{text[:SHOWN_DIGITS]}..."


def unreadable(source: Path, error: OSError) -> BadInput:
    """The error for a file that is there in name only, or not at all."""
    if isinstance(error, FileNotFoundError):
        return BadInput("no such file", where=str(source), remedy="Check the name; paths are relative to this folder.")
    if isinstance(error, IsADirectoryError):
        return BadInput("is a folder", where=str(source), remedy="Name a file inside it.")
    remedy = "Check its permissions." if isinstance(error, PermissionError) else "Check its name and its disk."
    return BadInput(f"cannot be read ({error.strerror or error})", where=str(source), remedy=remedy)


def _opened(source: Path) -> tuple[BinaryIO, int]:
    """What is there, open, and its mode; a FIFO without a writer does not keep us waiting."""
    try:
        descriptor = os.open(source, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:
        # a name may hold a NUL, which is no error of the system
        raise unreadable(source, error if isinstance(error, OSError) else OSError(str(error))) from None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        os.close(descriptor)
        raise unreadable(source, IsADirectoryError())
    return os.fdopen(descriptor, "rb"), mode


def _first_bytes(stream: BinaryIO, name: str) -> bytes:
    """Wait until something is in the pipe. Raises BadInput where nobody is at its other end."""
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    begun = b""
    while not begun and not poll.poll(1e3 * SILENCE_S):
        # nothing to read so far: without a writer this is the end of the file, else it would have to wait
        with suppress(BlockingIOError):
            begun = os.read(stream.fileno(), 1)
            if not begun:
                raise BadInput(
                    f"is a pipe into which nobody writes (for {SILENCE_S:.0f} s)",
                    where=name,
                    remedy="Start the command that writes into it first, or give a file.",
                )
    os.set_blocking(stream.fileno(), True)
    return begun
