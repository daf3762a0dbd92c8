"""The BLAS behind NumPy: its name, and OpenBLAS's kernels and threads.

Names of OpenBLAS's functions differ between wheels and distributions. Only the library that the interpreter has loaded
is asked.
"""

import ctypes
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from latfit.profiling.host.isa import isa_of_core

_SPELLINGS = ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}")


def blas_threads() -> int | None:
    threads: int | None = _call("get_num_threads", ctypes.c_int)
    return threads


def set_blas_threads(threads: int) -> bool:
    _call("set_num_threads", None, ctypes.c_int(threads))
    return blas_threads() is not None


def blas_facts() -> dict[str, Any]:
    config = np.show_config(mode="dicts")
    built = config.get("Build Dependencies", {}).get("blas", {}) if isinstance(config, dict) else {}
    name: bytes = _call("get_corename", ctypes.c_char_p) or b""
    core = name.decode(errors="replace") or None  # of the kernel set, such as Haswell or SkylakeX
    facts = {"name": built.get("name"), "version": built.get("version"), "core": core}
    return {**facts, "isa": isa_of_core(core), "threads": blas_threads()}


def _call(name: str, result: Any, *arguments: Any) -> Any:
    functions = (getattr(_openblas(), spelling.format(name), None) for spelling in _SPELLINGS)
    function = next(filter(None, functions), None)
    if function is None:
        return None
    function.restype = result
    return function(*arguments)


@cache
def _openblas() -> ctypes.CDLL | None:
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
            library = ctypes.CDLL(path)
            if any(hasattr(library, spelling.format("get_num_threads")) for spelling in _SPELLINGS):
                return library
    return None
