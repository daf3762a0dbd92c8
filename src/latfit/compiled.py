"""How hot loops are compiled: by numba, cached on disk, without the interpreter's lock, dividing as NumPy does.

The simulators' cores make no arrays, so that nothing in them needs to count references, and their functions are inlined
into one: both would cost more than the work itself, since a call passes every array's bounds and an access counts its
owners. Making every function callable from Python would take most of the compiling.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

_COMMON: Any = {"cache": True, "nogil": True, "error_model": "numpy"}
_WITHOUT_ARRAYS: Any = {**_COMMON, "_nrt": False}
_INNER: Any = {**_WITHOUT_ARRAYS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

compiled: Callable[..., Any] = njit(**_COMMON)
"""For a loop that stands alone and may make arrays."""

entry: Callable[..., Any] = njit(**_WITHOUT_ARRAYS, forceinline=True)
"""For the function of a core that Python calls."""

inner: Callable[..., Any] = njit(**_INNER, forceinline=True)
"""For what only other functions of a core call."""

rare: Callable[..., Any] = njit(**_INNER)
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
