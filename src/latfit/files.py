"""Write files atomically, and report file system errors in the user's terms."""

import errno
import json
import math
import os
import re
import shlex
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from latfit.errors import TargetNotWritable

if sys.platform != "win32":
    import fcntl

_UMASK = os.umask(0)
os.umask(_UMASK)
"""Read once, while the program has one thread: reading it means setting it for an instant."""

TEMPORARY = (".latfit-", ".part")  # prefix and suffix of temporary files
STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
MAYBE_UNPRINTABLE = re.compile(r"[^ -~\n\w]")
"""Characters that may control a terminal: all but printable ASCII, letters and digits."""


def check_writable(target: Path) -> None:
    """Raise TargetNotWritable before a long run if `target` cannot be written at its end."""
    where = str(target)
    if where == "-":
        raise TargetNotWritable("is no file's name", where=where, remedy="Name a file; standard output is /dev/stdout.")
    with file_system_errors(target):
        place = _resolve(target)
        if place.is_dir():
            raise TargetNotWritable("is a folder", where=where, remedy="Name a file inside it.")
        if not place.parent.is_dir():
            remedy = f"Make it: mkdir -p {shlex.quote(str(place.parent))}"
            raise TargetNotWritable("its folder does not exist", where=where, remedy=remedy)
        if place.exists() and not os.access(place, os.W_OK):
            raise TargetNotWritable("is read-only", where=where, remedy=f"chmod u+w {shlex.quote(where)}")
        if not _is_special(place):
            with _temporary(place.parent):
                pass


def write_whole(target: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Let `write` fill a temporary file, then rename it. Mode, owner and links are preserved."""
    check_writable(target)
    with file_system_errors(target):
        place = _resolve(target)
        if _is_special(place):
            whole = BytesIO()
            write(whole)
            with place.open("ab") as stream:
                stream.write(whole.getbuffer())
            return
        with _temporary(place.parent) as (stream, partial):
            write(stream)
            stream.flush()
            _copy_mode(place, partial)
            os.fsync(stream.fileno())
            partial.replace(place)


def rewrite(target: Path, content: Callable[[], str]) -> None:
    """Replace the text in `target` by `content()`; several writers take turns."""
    check_writable(target)
    with file_system_errors(target):
        folder = _resolve(target).parent
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            if sys.platform != "win32":
                with suppress(OSError):  # file systems without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
            write_text(target, content())
            sync_folder(folder)
        finally:
            os.close(descriptor)


def lock(descriptor: int) -> bool | None:
    """Lock an open file; None on file systems without locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def open_own(file: Path, flags: int) -> int:
    """Open a journal next to a user's file. Raises TargetNotWritable for links."""
    try:
        descriptor = os.open(file, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
        found = os.fstat(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    else:
        if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
    raise TargetNotWritable(
        "is no file of latfit but a link, a pipe or the like",
        where=str(file),
        remedy="Delete it, then repeat the command.",
    )


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk: a rename is not durable before."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _resolve(target: Path) -> Path:
    if str(target).startswith(STREAMS):
        return target
    place = Path(os.path.realpath(target))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return place


def _is_special(place: Path) -> bool:
    """Return whether it cannot be replaced: a device, a pipe, an open stream."""
    return place.exists() and (not place.is_file() or str(place).startswith(STREAMS))


@contextmanager
def _temporary(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=TEMPORARY[0], suffix=TEMPORARY[1])
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _copy_mode(place: Path, partial: Path) -> None:
    if not place.exists():
        partial.chmod(0o666 & ~_UMASK)
        return
    before = place.stat()
    if sys.platform != "win32":
        for owner in ((-1, before.st_gid), (before.st_uid, -1)):
            with suppress(PermissionError):
                os.chown(partial, *owner)
    partial.chmod(stat.S_IMODE(before.st_mode))


def write_bytes(target: Path, content: bytes) -> None:
    write_whole(target, lambda stream: stream.write(content))


def write_text(target: Path, text: str) -> None:
    write_bytes(target, text.encode())


def write_json(target: Path, document: Any) -> None:
    write_text(target, dumps(document) + "\n")


def dumps(document: Any) -> str:
    """Return strict JSON of printable characters; NaN and infinities become null."""
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)
    return MAYBE_UNPRINTABLE.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)


def make_folder(folder: Path) -> None:
    with file_system_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(value.item()) if hasattr(value, "item") else value


@contextmanager
def file_system_errors(target: Path) -> Iterator[None]:
    """Convert OSError while `target` is written to TargetNotWritable."""
    try:
        yield
    except OSError as error:
        found, remedy = f"cannot be written ({error.strerror or error})", "Name another place."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            found, remedy = "no space left on the device", "Free some space, or write elsewhere with --out."
        raise TargetNotWritable(found, where=str(target), remedy=remedy) from None
