"""Open the files that a user names, and decode JSON, within bounds. Devices and folders are refused."""

import json
import math
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any, BinaryIO

from latfit.errors import BadInput

MAX_JSON_BYTES = 1 << 27  # of a document that is read at once; a fit has some 60 KiB
MAX_DEPTH = 50  # lists and objects within each other; a hardware profile has eight
LARGEST_NUMBER = 1e30
"""Of a document, of metrics, of a record: above every quantity in its unit, and products of several stay finite."""
LARGEST_WHOLE_NUMBER = (1 << 63) - 1  # what an array holds

_SPOOLED: list[Any] = []  # temporary files with the content of pipes; they vanish when the program ends


def regular_file(source: Path) -> Path:
    """Return the file, or a copy of a pipe. Raises BadInput, also if empty."""
    try:
        found = source.stat()
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError
        if stat.S_ISREG(found.st_mode) and found.st_size and os.access(source, os.R_OK):
            return source
        with _refuse_device(source, found.st_mode).open("rb") as stream:
            # Files of the kernel have a size of zero, and content.
            return spooled(stream, str(source))
    except (OSError, ValueError) as error:  # a name may hold a NUL, which is no error of the system
        raise unreadable(source, error if isinstance(error, OSError) else OSError(str(error))) from None


def spooled(stream: BinaryIO, name: str) -> Path:
    """Copy a stream into a temporary file. Raises BadInput."""
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        number = -1  # no file of the system, as in a test
    if number >= 0 and not os.isatty(number):
        _refuse_device(Path(name), os.fstat(number).st_mode)
    try:
        copy = tempfile.NamedTemporaryFile(prefix="latfit-piped-")  # noqa: SIM115  lives as long as the program
        shutil.copyfileobj(stream, copy)
        copy.flush()
    except OSError as error:
        raise BadInput(
            f"cannot be kept in a temporary file ({error.strerror or error})",
            where=name,
            remedy="Set TMPDIR to a folder with enough space, or give a file.",
        ) from None
    if not copy.tell():
        raise BadInput("the file is empty", where=name, remedy="Check how it was made, and make it again.")
    _SPOOLED.append(copy)
    return Path(copy.name)


def _refuse_device(source: Path, mode: int) -> Path:
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        kind = "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise BadInput(f"is {kind}, not a file", where=str(source), remedy="Give a file.")
    return source


def read_json(source: Path, *, what: str, made_by: str, infinite: bool = False) -> Any:
    """Return the document in a file. Raises BadInput. what, made_by: as of `Record`."""
    try:
        with regular_file(source).open("rb") as stream:
            content = stream.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise ValueError(f"it has more than {MAX_JSON_BYTES >> 20} MiB")
        return decode_json(content, infinite=infinite)
    except BadInput as error:
        found = error.found if source.exists() else f"no such {what}"
        raise BadInput(found, where=error.where, remedy=f"Make one with `{made_by}`.") from None
    except ValueError as error:
        reason = "it is Parquet" if content.startswith(b"PAR1") else str(error)
        remedy = f"Make it again with `{made_by}`."
        raise BadInput(f"not a {what} ({reason})", where=str(source), remedy=remedy) from None


def decode_json(content: bytes, *, infinite: bool = False) -> Any:
    """Return the document; infinite: accept NaN and Infinity. Raises ValueError."""
    import msgspec

    try:
        document = json.loads(content.decode()) if infinite else msgspec.json.decode(content)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [document]
    for _ in range(MAX_DEPTH):
        for value in level:
            limit = {int: LARGEST_WHOLE_NUMBER, float: LARGEST_NUMBER}.get(type(value))
            if limit is not None and limit < abs(value) < math.inf:
                raise ValueError(f"{str(value)[:24]} is too large a number")
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
    if level:
        raise ValueError("it is nested too deep")
    return document


def unreadable(source: Path, error: OSError) -> BadInput:
    if isinstance(error, FileNotFoundError):
        return BadInput("no such file", where=str(source), remedy="Check the name; paths are relative to this folder.")
    if isinstance(error, IsADirectoryError):
        return BadInput("is a folder", where=str(source), remedy="Name a file inside it.")
    remedy = "Check its permissions." if isinstance(error, PermissionError) else "Check its name and its disk."
    return BadInput(f"cannot be read ({error.strerror or error})", where=str(source), remedy=remedy)
