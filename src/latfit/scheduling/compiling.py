"""How decisions and the simulator's core are compiled: one loop in the end, without calls or counted references in it.

Functions compiled with it make no arrays, so that nothing needs reference counts, and are inlined into their callers:
both together make the loop over small batches about twice as fast.
"""

from typing import Any

from numba import njit

_OPTIONS: Any = {"cache": True, "nogil": True, "error_model": "numpy", "forceinline": True, "_nrt": False}

compiled: Any = njit(**_OPTIONS)
