"""How hot loops are compiled: by numba, cached on disk, without the interpreter's lock, dividing as NumPy does.

The simulators' cores make no arrays, so that nothing in them needs to count references, and their functions are inlined
into one: both would cost more than the work itself, since a call passes every array's bounds and an access counts its
owners. Making every function callable from Python would take most of the compiling.

What was compiled is kept in the package's own `__pycache__`, or in the user's cache folder (`$XDG_CACHE_HOME/latfit`)
where that is not writable; where neither is, it is compiled anew in every process. Each function knows the sources of
all modules that take part in compiled code (MODULES) by their hash: numba looks at a function's own file alone, but
what is inlined into it, and the constants it reads, may stand in another.

A function that is found in the cache is loaded without numba's registries of what it could compile, whose import takes
longer than everything else that numba does then.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
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

MODULES = (
    "compiled",
    "fitting/solver/compiled",
    "histogram",
    "model/noise/draws",
    "policies/codes",
    "policies/dispatch",
    "policies/marginal_cost",
    "queueing/sampled",
    "simulation/engine/cluster/fleet",
    "simulation/engine/cluster/router",
    "simulation/engine/loop",
    "simulation/engine/prefix_cache",
    "simulation/engine/queue",
    "simulation/engine/scheduler",
    "simulation/engine/state",
    "simulation/engine/statistics",
    "simulation/engine/step_cost",
    "simulation/heap",
    "simulation/policies/event_loop",
    "simulation/policies/replication",
)
"""Modules with compiled functions, or with constants that those read."""

ONCE = "Compiling once for this machine, which may take half a minute."
EVERY_TIME = "Compiling, for this command alone: no cache folder can be written; XDG_CACHE_HOME may name one."


@cache
def sources() -> str:
    """Hash of everything that compiled code is made from, and of what it is compiled by."""
    found = sha256(f"{numba.__version__} {sys.version}".encode())
    for module in MODULES:
        found.update((PACKAGE / f"{module}.py").read_bytes())
    return found.hexdigest()


@cache
def folder() -> Path | None:
    """Where compiled code is kept; None where no folder can be written."""
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
    """Said once a process, on stderr; a progress bar of the command goes on below it."""
    tell(ONCE if folder() else EVERY_TIME)


class _Place:
    """Where a function is kept and what it depends on, as numba asks for it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = f"{function.__module__}-"

    @classmethod
    def from_function(cls, function: Callable[..., Any], _: str) -> "_Place":
        return cls(function)

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), exist_ok=True)

    def get_cache_path(self) -> str:
        return str(folder())

    def get_source_stamp(self) -> str:
        return sources()

    def get_disambiguator(self) -> str:
        return self.name


class _Implementation(parts.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Place,)


class _Cache(parts.FunctionCache):  # type: ignore[misc]
    """Compiled code on disk. A cache that cannot be read or written is none."""

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
    """Compiles a function by numba's `njit` with `options`, kept as the module says."""

    def decorate(function: Callable[..., Any]) -> Any:
        made = njit(**options)(function)
        if made is not function:  # numba may be switched off
            made._cache = _Cache(function)
        return made

    return decorate


_COMMON: Any = {"nogil": True, "error_model": "numpy"}
_WITHOUT_ARRAYS: Any = {**_COMMON, "_nrt": False}
_INNER: Any = {**_WITHOUT_ARRAYS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

compiled: Callable[..., Any] = cached(**_COMMON)
"""For a loop that stands alone and may make arrays."""

entry: Callable[..., Any] = cached(**_WITHOUT_ARRAYS, forceinline=True)
"""For the function of a core that Python calls."""

shared: Callable[..., Any] = cached(**_WITHOUT_ARRAYS)
"""The same for one that another core calls, too: it is linked to that one, not copied into it."""

inner: Callable[..., Any] = cached(**_INNER, forceinline=True)
"""For what only other functions of a core call."""

rare: Callable[..., Any] = cached(**_INNER)
"""The same for what runs seldom: a call then costs less than one more copy to compile."""


@inner
def first_beyond(reached, low, high, u):  # type: ignore[no-untyped-def]
    """The first place in low..high whose cumulated share is above u, high where none is: a draw from a discrete law
    by a uniform number."""
    while low < high:
        middle = (low + high) // 2
        if reached[middle] > u:
            high = middle
        else:
            low = middle + 1
    return low


@inner
def mixed(x):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64: neighbouring integers (uint64) become unrelated ones."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
