"""How much memory is free, and whether that is enough for what is about to be read."""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from latfit.errors import BadInput

GIB = 1 << 30
MOST_EXPANSION = 1000
"""Of a column that is compressed inside its file."""


def check_memory(needed: float, where: str, remedy: str) -> None:
    """Raises BadInput where so many bytes are more than what is free, as far as that is known."""
    free = free_memory_bytes()
    if free is not None and needed > free:
        raise BadInput(
            f"takes about {needed / GIB:.3g} GiB of memory to read; {free / GIB:.2g} GiB are free",
            where=where,
            remedy=remedy,
        )


def absurd_size(error: MemoryError, source: Path) -> bool:
    """Whether so much was asked for that the file cannot hold it: its sizes are damaged, and no memory would do."""
    asked = re.search(r"size (\d+)", str(error))
    return asked is not None and int(asked[1]) > MOST_EXPANSION * source.stat().st_size + GIB


def free_memory_bytes() -> int | None:
    """Memory that can still be taken without swapping, within the limits of the container and the process; None where
    it is not known."""
    return min(_free_memory(), default=None)


def _free_memory() -> Iterator[int]:
    proc, group = Path("/proc"), Path("/sys/fs/cgroup")
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) * 1024
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and limit[0].isdigit() and used and used[0].isdigit():
        yield max(0, int(limit[0]) - int(used[0]))
    with suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            pages = int(_lines(proc / "self" / "statm")[0].split()[0])
            yield max(0, most - pages * resource.getpagesize())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
