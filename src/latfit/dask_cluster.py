"""Tasks on a Dask cluster, or on workers of this host: a client, tasks as they finish, and their results.

A scheduler that does not answer, or has no workers, ends the work after PATIENCE_S. Any error or interrupt closes the
client, which cancels its tasks and ends the workers that it started.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

from latfit.errors import LatfitError, WrongUsage, first_line

POLL_S = 0.1
PATIENCE_S = 20.0  # for an answer of the scheduler, and without any worker


@contextmanager
def dask_client(scheduler: str | None, workers: int | None = None) -> Iterator[Any]:
    """Yield a client of the cluster at an address, or of `workers` on this host (default: one a core).

    Raises WrongUsage if Dask is not installed or no scheduler answers.
    """
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        remedy = "Install it: pip install 'latfit[dask]'."
        raise WrongUsage("Dask is not installed", where="--scheduler", remedy=remedy) from None
    with ExitStack() as opened:
        address = scheduler
        if scheduler is None:
            own = distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
            address = opened.enter_context(own)
        try:
            client = distributed.Client(address, timeout=PATIENCE_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise WrongUsage(
                f"no scheduler answers at {scheduler} ({first_line(error)})",
                where="--scheduler",
                remedy="Start one with `dask scheduler`, and give its address: --scheduler tcp://host:8786.",
            ) from None
        opened.callback(_close, client)
        yield client


def finished(client: Any, futures: Sequence[Any]) -> Iterator[Any]:
    """Yield futures as they finish or fail. Raises LatfitError after PATIENCE_S without workers."""
    left = list(futures)
    alive = checked = time.monotonic()
    while left:
        done = {id(future) for future in left if future.done()}
        yield from (future for future in left if id(future) in done)
        left = [future for future in left if id(future) not in done]
        if done or not left:
            continue
        time.sleep(POLL_S)
        now = time.monotonic()
        if now - checked > PATIENCE_S / 10:
            checked = now
            alive = now if _workers(client) else alive
        if now - alive > PATIENCE_S:
            raise _lost(f"no worker for {PATIENCE_S:.0f} s")


def result_of(future: Any) -> Any:
    """Return the result of a finished task. Raises its LatfitError, or LatfitError if the task was lost."""
    from concurrent.futures import CancelledError

    try:
        return future.result(timeout=PATIENCE_S)
    except LatfitError:
        raise
    except ImportError as error:
        remedy = "Install the same version of latfit, and of what it needs, on every worker."
        raise LatfitError(f"a worker cannot run its task ({error})", where="--scheduler", remedy=remedy) from None
    except (CancelledError, Exception) as error:  # noqa: BLE001 - whatever Dask calls the loss of workers or of itself
        raise _lost(f"{type(error).__name__}: {first_line(error)}") from None


def _workers(client: Any) -> int:
    """Return the number of workers; 0 if the scheduler does not answer."""
    try:
        return len(client.sync(client.scheduler.ncores, callback_timeout=PATIENCE_S / 4))
    except Exception:  # noqa: BLE001 - a lost connection has many names
        return 0


def _lost(reason: str) -> LatfitError:
    return LatfitError(
        f"the cluster lost the work ({reason})",
        where="--scheduler",
        remedy="See the logs of its workers: they may lack memory (about 1 GiB each is needed), or have been stopped.",
    )


def _close(client: Any) -> None:
    with suppress(Exception):
        client.close(timeout=PATIENCE_S / 4)
