"""Threads that work beside one another, and that nobody waits for once Ctrl-C is pressed or one of them has failed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def on_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of so many threads. Where an error leaves the block, work that waits is dropped, and work that has begun
    is left to end by itself: a compiled loop, which no signal stops, may take minutes."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
