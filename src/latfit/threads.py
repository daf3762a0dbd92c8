"""A thread pool that ends at once on Ctrl-C or an error."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def on_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool of `count` threads.

    An error in the block cancels pending work and does not wait for running work: a compiled loop, which no signal
    stops, may take minutes.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
