"""Files that appear whole or not at all, and errors of the file system in a user's words."""

import errno
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from latfit.errors import BadInput, TargetNotWritable

_UMASK = os.umask(0)
os.umask(_UMASK)
"""Read once, while the program has one thread: reading it means setting it for an instant."""


def check_writable(target: Path) -> None:
    """Fail now, before a long run, where `target` could not be written at its end."""
    folder = target.parent
    if target.is_dir():
        raise TargetNotWritable("is a folder", where=str(target), remedy="Name a file inside it.")
    if not folder.is_dir():
        raise TargetNotWritable("its folder does not exist", where=str(target), remedy=f"Make it: mkdir -p {folder}")
    with _file_system_errors(target):
        descriptor, probe = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.")
        os.close(descriptor)
        os.unlink(probe)


def write_whole(target: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a temporary neighbour of `target`, then move it into place in one step.

    Whatever goes wrong on the way, `target` keeps its old content and no half file stays behind.
    """
    check_writable(target)
    with _file_system_errors(target):
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        partial = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            partial.chmod(0o666 & ~_UMASK)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)


def write_bytes(target: Path, content: bytes) -> None:
    def fill(stream: BinaryIO) -> None:
        stream.write(content)

    write_whole(target, fill)


def write_text(target: Path, text: str) -> None:
    write_bytes(target, text.encode())


def write_json(target: Path, document: Any) -> None:
    write_text(target, dumps(document) + "\n")


def dumps(document: Any) -> str:
    """Strict JSON: a number that is not finite becomes null, because `NaN` is not JSON."""
    return json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)


def read_json(source: Path, *, what: str, made_by: str) -> Any:
    """The document in `source`; `made_by` names the command that makes such a file, for the error."""
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"no such {what}", where=str(source), remedy=f"Make one with `{made_by}`.") from None
    except OSError as error:
        raise unreadable(source, error) from None
    except ValueError as error:
        raise BadInput(
            f"not a {what} ({error})", where=str(source), remedy=f"Make it again with `{made_by}`."
        ) from None


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetNotWritable(
            f"the folder cannot be made ({error.strerror})", where=str(folder), remedy="Choose another folder."
        ) from None


def unreadable(source: Path, error: OSError) -> BadInput:
    """The error for a file that is there in name only, or not at all."""
    if isinstance(error, FileNotFoundError):
        return BadInput("no such file", where=str(source), remedy="Check the name; paths are relative to this folder.")
    if isinstance(error, IsADirectoryError):
        return BadInput("is a folder", where=str(source), remedy="Name a file inside it.")
    return BadInput(f"cannot be read ({error.strerror or error})", where=str(source), remedy="Check its permissions.")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        return _finite(value.item())
    return value


@contextmanager
def _file_system_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TargetNotWritable(
                "no space left on the device",
                where=str(target),
                remedy="Free some space, or write elsewhere with --out.",
            ) from None
        raise TargetNotWritable(
            f"cannot be written ({error.strerror or error})", where=str(target), remedy="Name another place."
        ) from None
