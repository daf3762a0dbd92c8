"""Pauses of Python's garbage collector: with pandas and numba loaded, a full collection takes 60 ms."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def short_pauses(*, none: bool = False) -> Iterator[None]:
    """Skip objects that were alive before in collections. none: collect nothing at all."""
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
