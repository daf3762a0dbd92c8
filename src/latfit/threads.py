"""A thread pool that ends at once on Ctrl-C or an error."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from latfit.errors import silent

A = TypeVar("A")
B = TypeVar("B")


@contextmanager
def on_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool; an error in the block does not wait for running work."""
    pool = ThreadPoolExecutor(count, initializer=silent.set, initargs=(silent.get(),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def map_on_threads(work: Callable[[A], B], items: Sequence[A]) -> list[B]:
    workers = min(len(items), os.cpu_count() or 1)
    if workers < 2:
        return [work(item) for item in items]
    with on_threads(workers) as pool:
        return list(pool.map(work, items))
