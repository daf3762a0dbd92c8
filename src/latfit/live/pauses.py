"""Pauses of Python's garbage collector.

A full collection looks at every live object: with pandas and numba loaded it takes 60 ms, in which nothing else runs.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def short_pauses(*, none: bool = False) -> Iterator[None]:
    """Inside, collections pass over all that was alive before. none: there are none, for a time that is short."""
    enabled, before = gc.isenabled(), gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    immortal = gc.get_freeze_count()  # Python 3.12 counts immortal objects as frozen
    gc.freeze()
    if none:
        gc.disable()
    try:
        yield
    finally:
        if none and enabled:
            gc.enable()
        if before <= immortal:
            gc.unfreeze()
