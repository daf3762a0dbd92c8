"""Free memory, and checks against it."""

from pathlib import Path

from latfit.errors import BadInput

GIB = 1 << 30


def check_memory(needed: float, where: str, remedy: str) -> None:
    """Raise BadInput if `needed` bytes exceed the free memory."""
    free = free_memory_bytes()
    if free is not None and needed > free:
        raise BadInput(
            f"takes about {needed / GIB:.3g} GiB of memory to read; {free / GIB:.2g} GiB are free",
            where=where,
            remedy=remedy,
        )


def free_memory_bytes() -> int | None:
    """Return the free memory within the container's limit; None if unknown."""
    group = Path("/sys/fs/cgroup")
    available = (line.split() for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:"))
    free = [1024 * int(words[1]) for words in available]
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and limit[0].isdigit() and used and used[0].isdigit():
        free.append(max(0, int(limit[0]) - int(used[0])))
    return min(free, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
