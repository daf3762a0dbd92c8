"""The BLAS behind NumPy: its name, and where it is OpenBLAS, the kernels it chose and its threads.

OpenBLAS exports functions that tell its kernel set and thread count. Wheels of NumPy carry it with prefixed
or suffixed names, distributions without; the library that the interpreter has loaded already is asked, never
a second copy.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from latfit.profiling.host.isa import isa_of_core

_SPELLINGS = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


class OpenBlas:
    """A loaded OpenBLAS. Where a function is not exported, its fact is None and its setting does nothing."""

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
        """Use `threads` threads from now on; False where this OpenBLAS cannot be told."""
        function = self._function("set_num_threads")
        if function is None:
            return False
        function.restype = None
        function(ctypes.c_int(threads))
        return True

    def _function(self, name: str) -> Any:
        for spelling in _SPELLINGS:
            try:
                return getattr(self._library, spelling.format(name))
            except AttributeError:
                continue
        return None


def find_openblas() -> OpenBlas | None:
    """The OpenBLAS that NumPy uses; None where NumPy uses another BLAS, or it cannot be found."""
    for path in _candidates():
        try:
            found = OpenBlas(ctypes.CDLL(path))
        except OSError:
            continue
        if found.threads is not None:
            return found
    return None


def blas_facts() -> dict[str, Any]:
    """Name and version as NumPy was built, kernel set, what float32 runs on, threads; None where it cannot be
    known."""
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
    """Files that may be NumPy's OpenBLAS: those mapped into this process, NumPy's own first (SciPy carries a
    second)."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line.lower()}
        yield from sorted(mapped, key=lambda path: ("numpy" not in path, path))
    except OSError:
        package = Path(np.__file__).parent
        for folder in (package.parent / "numpy.libs", package / ".dylibs"):
            yield from sorted(str(path) for path in folder.glob("*openblas*"))
