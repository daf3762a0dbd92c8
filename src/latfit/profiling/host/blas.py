"""The BLAS behind NumPy: its name, and for OpenBLAS the kernels it chose and its threads.

OpenBLAS exports functions for both, with prefixes and suffixes that differ between wheels and distributions. The
library that the interpreter has loaded is asked, never a second copy."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from latfit.profiling.host.isa import isa_of_core

_SPELLINGS = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


class OpenBlas:
    """A loaded OpenBLAS. A function that is not exported gives None and sets nothing."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @property
    def core(self) -> str | None:
        """Name of the kernel set, such as Haswell or SkylakeX."""
        function = self._function("get_corename")
        if function is None:
            return None
        function.restype = ctypes.c_char_p
        name: bytes | None = function()
        return name.decode(errors="replace") if name else None

    @property
    def threads(self) -> int | None:
        function = self._function("get_num_threads")
        return None if function is None else int(function())

    def set_threads(self, threads: int) -> bool:
        """Use `threads` threads from now on; False if this OpenBLAS takes no number."""
        function = self._function("set_num_threads")
        if function is None:
            return False
        function.restype = None
        function(ctypes.c_int(threads))
        return True

    def _function(self, name: str) -> Any:
        names = (spelling.format(name) for spelling in _SPELLINGS)
        return next((getattr(self._library, each) for each in names if hasattr(self._library, each)), None)


def find_openblas() -> OpenBlas | None:
    """Return the OpenBLAS that NumPy uses; None if it uses another BLAS, or cannot be found."""
    for path in _candidates():
        try:
            found = OpenBlas(ctypes.CDLL(path))
        except OSError:
            continue
        if found.threads is not None:
            return found
    return None


def blas_facts() -> dict[str, Any]:
    """Return name and version as NumPy was built, kernel set, what float32 runs on, and threads; None if unknown."""
    config = np.show_config(mode="dicts")
    built = config.get("Build Dependencies", {}).get("blas", {}) if isinstance(config, dict) else {}
    loaded = find_openblas()
    core = loaded.core if loaded else None
    return {
        "name": built.get("name"),
        "version": built.get("version"),
        "core": core,
        "isa": isa_of_core(core),
        "threads": loaded.threads if loaded else None,
    }


def _candidates() -> Iterator[str]:
    """Files that may be NumPy's OpenBLAS: those mapped into this process, NumPy's own first (SciPy has a second)."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line.lower()}
        yield from sorted(mapped, key=lambda path: ("numpy" not in path, path))
    except OSError:
        package = Path(np.__file__).parent
        for folder in (package.parent / "numpy.libs", package / ".dylibs"):
            yield from sorted(str(path) for path in folder.glob("*openblas*"))
