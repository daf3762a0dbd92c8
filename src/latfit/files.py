"""Write files atomically, and report file system errors in the user's terms.

A file is written under a temporary name and renamed: after a full disk or a crash it has the old content or the new.
`rewrite` serves read-modify-write: writers lock the folder, and retry if the content changed meanwhile.
"""

import errno
import functools
import json
import math
import os
import re
import shlex
import stat
import sys
import tempfile
import time
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

TEMPORARY = (".latfit-", ".part")
"""Prefix and suffix of temporary files."""
STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
MAYBE_UNPRINTABLE = re.compile(r"[^ -~\n\w]")
"""Characters that may control a terminal: all but printable ASCII, letters and digits."""
ABANDONED_S = 60.0  # age of a temporary file that nobody locks
GIVEN_UP_AFTER_S, POLL_S = 60.0, 0.005  # waiting for a folder that another process has locked
TRIES = 100


def check_writable(target: Path) -> None:
    """Raise TargetNotWritable before a long run if `target` cannot be written at its end."""
    if str(target) == "-":
        raise TargetNotWritable(
            "is no file's name", where=str(target), remedy="Name a file; standard output is /dev/stdout."
        )
    with file_system_errors(target):
        place = _place(target)
        if place.is_dir():
            raise TargetNotWritable("is a folder", where=str(target), remedy="Name a file inside it.")
        if not place.parent.is_dir():
            raise TargetNotWritable(
                "its folder does not exist",
                where=str(target),
                remedy=f"Make it: mkdir -p {shlex.quote(str(place.parent))}",
            )
        if place.exists() and not os.access(place, os.W_OK):
            raise TargetNotWritable("is read-only", where=str(target), remedy=f"chmod u+w {shlex.quote(str(target))}")
        if not _is_special(place):
            with _temporary(place.parent):
                pass


def write_whole(target: Path, write: Callable[[BinaryIO], None]) -> None:
    """Let `write` fill a temporary file next to `target`, then rename it.

    On any error `target` keeps its content and the temporary file is removed. Mode and links are preserved. A device or
    a pipe gets the content once it is complete.
    """
    check_writable(target)
    with file_system_errors(target):
        _replace(_place(target), write)


def rewrite(target: Path, content: Callable[[], str]) -> None:
    """Replace the text in `target` by `content()`, which reads it, without losing another writer's change.

    Writers in one folder take turns. If other programs changed the file meanwhile (an editor, a file system without
    locks), `content` is called again.

    Raises
    ------
    TargetNotWritable
        If the file keeps changing, or its folder stays locked.
    """
    check_writable(target)
    with file_system_errors(target):
        place = _place(target)
        with _locked(place.parent):
            for _ in range(TRIES):
                before = _version(place)
                text = content().encode()
                if _replace(place, lambda stream: _fill(stream, text), lambda: _version(place) == before):  # noqa: B023
                    sync_folder(place.parent)
                    return
    raise TargetNotWritable(
        f"changed {TRIES} times while it was written", where=str(target), remedy="End what else writes it."
    )


def lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed; return whether that succeeded, None on file systems without locks."""
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
    """Open a lock or journal that latfit keeps next to a user's file, and return its descriptor.

    Raises TargetNotWritable unless it is a regular file with one link: another user may have placed a link or a pipe.
    """
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
    """Flush a folder's entries to disk, where possible: a rename is not durable before."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _place(target: Path) -> Path:
    """Resolve links of `target`; an open stream of this process stays."""
    if str(target).startswith(STREAMS):
        return target
    place = Path(os.path.realpath(target))
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return place


def _is_special(place: Path) -> bool:
    """Whether it exists and cannot be replaced: a device, a pipe, an open stream."""
    return place.exists() and (not place.is_file() or str(place).startswith(STREAMS))


def _replace(place: Path, write: Callable[[BinaryIO], None], allowed: Callable[[], bool] = lambda: True) -> bool:
    """Write to a temporary file and rename it if `allowed()`; return whether it was."""
    if _is_special(place):
        whole = BytesIO()
        write(whole)
        with place.open("ab") as stream:
            stream.write(whole.getbuffer())
        return True
    _remove_abandoned(place.parent)
    with _temporary(place.parent) as (stream, partial):
        write(stream)
        stream.flush()
        _take_after(place, partial)
        os.fsync(stream.fileno())
        if not allowed():
            return False
        partial.replace(place)
    return True


@contextmanager
def _temporary(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Create a file that is locked while open and deleted at the end unless renamed."""
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=TEMPORARY[0], suffix=TEMPORARY[1])
    try:
        with os.fdopen(descriptor, "wb") as stream:
            lock(descriptor)
            yield stream, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@functools.cache
def _remove_abandoned(folder: Path) -> None:
    """Delete old temporary files that nobody locks, once per process."""
    for left in folder.glob("*".join(TEMPORARY)):
        with suppress(OSError, TargetNotWritable), os.fdopen(open_own(left, os.O_RDWR), "rb") as stream:
            if lock(stream.fileno()) and time.time() - os.fstat(stream.fileno()).st_mtime > ABANDONED_S:
                left.unlink()


def _take_after(place: Path, partial: Path) -> None:
    """Copy mode and, if permitted, owner and group of the replaced file."""
    try:
        before = place.stat()
    except FileNotFoundError:
        partial.chmod(0o666 & ~_UMASK)
        return
    if sys.platform != "win32":
        for owner in ((-1, before.st_gid), (before.st_uid, -1)):
            with suppress(PermissionError):
                os.chown(partial, *owner)
    partial.chmod(stat.S_IMODE(before.st_mode))


def _version(place: Path) -> tuple[int, int, int] | None:
    """Return what changes whenever the file is written; None if it does not exist."""
    try:
        found = place.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, where the file system has locks. Raises TargetNotWritable after GIVEN_UP_AFTER_S."""
    if sys.platform == "win32":
        yield
        return
    descriptor, begun = os.open(folder, os.O_RDONLY), time.monotonic()
    try:
        while lock(descriptor) is False:
            if time.monotonic() - begun > GIVEN_UP_AFTER_S:
                raise TargetNotWritable(
                    f"its folder is locked by another process for more than {GIVEN_UP_AFTER_S:.0f} s",
                    where=str(folder),
                    remedy="Wait for it or end it, then repeat the command.",
                )
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def _fill(stream: BinaryIO, content: bytes) -> None:
    stream.write(content)


def write_bytes(target: Path, content: bytes) -> None:
    write_whole(target, lambda stream: _fill(stream, content))


def write_text(target: Path, text: str) -> None:
    write_bytes(target, text.encode())


def write_json(target: Path, document: Any) -> None:
    write_text(target, dumps(document) + "\n")


def dumps(document: Any) -> str:
    """Return strict JSON of printable characters; a number that is not finite becomes null."""
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)
    return MAYBE_UNPRINTABLE.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetNotWritable(
            f"the folder cannot be made ({error.strerror})", where=str(folder), remedy="Choose another folder."
        ) from None


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
def file_system_errors(target: Path) -> Iterator[None]:
    """Convert OSError while `target` is written to TargetNotWritable."""
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
