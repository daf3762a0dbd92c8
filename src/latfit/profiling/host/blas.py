"""The BLAS behind NumPy: its name, and for OpenBLAS the kernels it chose and its threads.

OpenBLAS exports functions for both, with prefixes and suffixes that differ between wheels and distributions. The
library that the interpreter has loaded is asked, never a second copy."""

import ctypes
from contextlib import suppress
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
        name: bytes | None = self._call("get_corename", ctypes.c_char_p)
        return name.decode(errors="replace") if name else None

    @property
    def threads(self) -> int | None:
        found: int | None = self._call("get_num_threads", ctypes.c_int)
        return found

    def set_threads(self, threads: int) -> bool:
        """Use `threads` threads from now on; False if this OpenBLAS takes no number."""
        self._call("set_num_threads", None, ctypes.c_int(threads))
        return self.threads is not None

    def _call(self, name: str, result: Any, *arguments: Any) -> Any:
        for spelling in _SPELLINGS:
            if function := getattr(self._library, spelling.format(name), None):
                function.restype = result
                return function(*arguments)
        return None


def find_openblas() -> OpenBlas | None:
    """Return the OpenBLAS that NumPy uses; None if it uses another BLAS, or cannot be found."""
    try:  # files mapped into this process, NumPy's own first (SciPy has a second)
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        mapped = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line.lower()}
        paths = sorted(mapped, key=lambda path: ("numpy" not in path, path))
    except OSError:
        package = Path(np.__file__).parent
        folders = (package.parent / "numpy.libs", package / ".dylibs")
        paths = sorted(str(path) for folder in folders for path in folder.glob("*openblas*"))
    for path in paths:
        with suppress(OSError):
            found = OpenBlas(ctypes.CDLL(path))
            if found.threads is not None:
                return found
    return None


def blas_facts() -> dict[str, Any]:
    """Return name and version as NumPy was built, kernel set, what float32 runs on, and threads; None if unknown."""
    config = np.show_config(mode="dicts")
    built = config.get("Build Dependencies", {}).get("blas", {}) if isinstance(config, dict) else {}
    loaded = find_openblas()
    core, threads = (loaded.core, loaded.threads) if loaded else (None, None)
    facts = {"name": built.get("name"), "version": built.get("version")}
    return {**facts, "core": core, "isa": isa_of_core(core), "threads": threads}
