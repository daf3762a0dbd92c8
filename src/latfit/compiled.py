"""Numba decorators for hot loops: compiled without the GIL, cached on disk, dividing as NumPy does.

The cache depends on the sources of all MODULES, because numba's own misses changes in inlined functions.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from numba import config, njit
from numba.core import caching, runtime
from numba.misc import appdirs

from latfit.errors import tell

# Parts of numba have types and others not, by version.
settings: Any = config
folders: Any = appdirs
parts: Any = caching
memory: Any = runtime

PACKAGE = Path(__file__).parent

MODULES = ("compiled.py", "histogram.py", "model/**/*.py", "policies/*.py", "queueing/sampled.py", "simulation/**/*.py")
"""Modules with compiled functions, or with constants that these read."""

ONCE = "Compiling once for this machine, which may take half a minute."
EVERY_TIME = "Compiling, for this command alone: no cache folder can be written; XDG_CACHE_HOME may name one."


@cache
def sources() -> str:
    """Hash the sources of compiled code, and the versions of numba and Python."""
    found = sha256(f"{numba.__version__} {sys.version}".encode())
    for file in sorted({file for pattern in MODULES for file in PACKAGE.glob(pattern)}):
        found.update(file.read_bytes())
    return found.hexdigest()


@cache
def folder() -> Path | None:
    """Return the cache folder; None if none is writable."""
    own = sha256(str(PACKAGE).encode()).hexdigest()[:16]
    chosen = settings.CACHE_DIR
    users = Path(chosen or folders.AppDirs("latfit", appauthor=False).user_cache_dir) / f"compiled-{own}"
    for place in (users,) if chosen else (PACKAGE / "__pycache__" / "compiled", users):
        with suppress(OSError, RuntimeError):
            place.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=place).close()
            return place
    return None


@cache
def _announce() -> None:
    tell(ONCE if folder() else EVERY_TIME)


def _locate(function: Callable[..., Any], _: str) -> SimpleNamespace:
    """Return numba's cache locator of a function."""
    return SimpleNamespace(
        ensure_cache_path=lambda: os.makedirs(str(folder()), exist_ok=True),
        get_cache_path=lambda: str(folder()),
        get_source_stamp=sources,
        get_disambiguator=lambda: f"{function.__module__}-",
    )


class _Implementation(parts.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (SimpleNamespace(from_function=_locate),)


class _Cache(parts.FunctionCache):  # type: ignore[misc]
    """numba's on-disk cache; an unreadable file counts as missing."""

    _impl_class = _Implementation

    def load_overload(self, signature: Any, target: Any) -> Any:
        found = None
        if folder() is not None:
            memory.rtsys.initialize(target)
            try:
                found = self._load_overload(signature, target)
            except Exception:  # noqa: BLE001  a file that was cut off, or written by something else
                with suppress(OSError):
                    self.flush()
        if found is None:
            _announce()
        return found

    def save_overload(self, signature: Any, data: Any) -> None:
        if folder() is not None:
            with suppress(OSError):  # a full disk
                self._save_overload(signature, data)


def cached(**options: Any) -> Callable[..., Any]:
    """Return a decorator that compiles with numba's `njit(**options)` and this module's cache."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = njit(**options)(function)
        if made is not function:  # numba may be switched off
            made._cache = _Cache(function)
        return made

    return decorate


_COMMON: Any = {"nogil": True, "error_model": "numpy"}
_WITHOUT_ARRAYS: Any = {**_COMMON, "_nrt": False}
_INNER: Any = {**_WITHOUT_ARRAYS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

compiled: Callable[..., Any] = cached(**_COMMON)  # for a self-contained loop that may allocate arrays

entry: Callable[..., Any] = cached(**_WITHOUT_ARRAYS, forceinline=True)  # for a core's function that Python calls

shared: Callable[..., Any] = cached(**_WITHOUT_ARRAYS)
"""For a core's function that another core also calls: linked there, not copied."""

inner: Callable[..., Any] = cached(**_INNER, forceinline=True)  # for functions that only a core calls: inlined

uncached: Callable[..., Any] = njit(**_INNER, forceinline=True)  # for inner functions made at import

rare: Callable[..., Any] = cached(**_INNER)
"""For inner functions that run seldom: a call costs less than compiling another copy."""


@inner
def first_beyond(reached, low, high, u):  # type: ignore[no-untyped-def]
    """Return the first index in low..high whose cumulative share exceeds u, else high."""
    while low < high:
        middle = (low + high) // 2
        if reached[middle] > u:
            high = middle
        else:
            low = middle + 1
    return low


@inner
def mixed(x):  # type: ignore[no-untyped-def]
    """Apply the finaliser of splitmix64 (uint64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
