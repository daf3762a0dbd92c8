"""Free memory, and checks against it."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from latfit.errors import BadInput

GIB = 1 << 30


def check_memory(needed: float, where: str, remedy: str) -> None:
    """Raise BadInput if `needed` bytes exceed the free memory, as far as that is known."""
    free = free_memory_bytes()
    if free is not None and needed > free:
        raise BadInput(
            f"takes about {needed / GIB:.3g} GiB of memory to read; {free / GIB:.2g} GiB are free",
            where=where,
            remedy=remedy,
        )


def free_memory_bytes() -> int | None:
    """Return the memory free without swapping, within the limits of container and process; None if unknown."""
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
