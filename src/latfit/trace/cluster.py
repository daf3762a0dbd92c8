"""The pass over a trace on Dask: parts become cells where the workers are, and cells are merged in a tree.

Nothing waits for ever: a scheduler that does not answer, or that has no workers, ends the pass after PATIENCE_S, and a
part whose worker dies again and again is given up by Dask itself. Whatever ends the pass, an interrupt too, closes the
client, and with it go its tasks, and the workers that were started here.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

from latfit import errors
from latfit.errors import LatfitError, WrongUsage
from latfit.trace.cells import Cells, merged
from latfit.trace.dataset import Dataset, Part, first_line
from latfit.trace.summarise import Scan, summarise

Progress = Callable[[int, int], None]

FAN_IN = 4
POLL_S = 0.1
PATIENCE_S = 20.0
"""How long to wait for an answer of the scheduler, and for a first worker or the return of the last one."""


def summarise_on_cluster(
    dataset: Dataset, scan: Scan, scheduler: str | None = None, progress: Progress | None = None
) -> Cells:
    """The cells of all parts. Raises what the pass raises here, WrongUsage without Dask or a scheduler, LatfitError
    where the workers are lost."""
    if not dataset.parts:
        return Cells(limit=scan.limit)
    with _client(scheduler) as client:
        leaves = [client.submit(_summarised, dataset.filesystem, part, scan, pure=False) for part in dataset.parts]
        layers = [leaves]
        while len(layers[-1]) > 1:
            below = layers[-1]
            layers.append(
                [client.submit(merged, below[i : i + FAN_IN], pure=False) for i in range(0, len(below), FAN_IN)]
            )
        return _awaited(client, leaves, layers[-1][0], dataset, progress)


class CarriedError(Exception):
    """A latfit error on its way from a worker: (class, found, where, remedy), as arguments, which survive pickling."""


def _summarised(filesystem: Any, part: Part, scan: Scan) -> Cells:
    try:
        return summarise(filesystem, part, scan)
    except LatfitError as error:
        raise CarriedError(type(error).__name__, error.found, error.where, error.remedy) from None


def _awaited(client: Any, leaves: Sequence[Any], top: Any, dataset: Dataset, progress: Progress | None) -> Cells:
    """The cells of `top`, once they are there."""
    alive = asked = time.monotonic()
    done = -1
    while not top.done():
        time.sleep(POLL_S)
        now = time.monotonic()
        if now - asked > PATIENCE_S / 10:
            asked = now
            alive = now if _workers(client) else alive
        if now - alive > PATIENCE_S:
            raise _lost(f"no worker for {PATIENCE_S:.0f} s")
        rows = sum(part.rows for part, leaf in zip(dataset.parts, leaves, strict=True) if leaf.status == "finished")
        if progress and rows != done:
            done = rows
            progress(done, dataset.rows)
    cells = _result(top)
    if progress and done != dataset.rows:
        progress(dataset.rows, dataset.rows)
    return cells


def _result(future: Any) -> Cells:
    from concurrent.futures import CancelledError

    try:
        cells: Cells = future.result(timeout=PATIENCE_S)
    except CarriedError as error:
        name, found, where, remedy = error.args
        raise getattr(errors, name)(found, where=where, remedy=remedy) from None
    except ImportError as error:
        remedy = "Install the same version of latfit, and of what it needs, on every worker."
        raise LatfitError(f"a worker cannot run the pass ({error})", where="--scheduler", remedy=remedy) from None
    except (CancelledError, Exception) as error:  # noqa: BLE001 - whatever Dask calls the loss of workers or of itself
        raise _lost(f"{type(error).__name__}: {first_line(error)}") from None
    return cells


def _workers(client: Any) -> int:
    """How many workers the scheduler has; none where it does not answer."""
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


@contextmanager
def _client(scheduler: str | None) -> Iterator[Any]:
    """A client of the cluster at an address, or of workers that live as long as it, one a core."""
    try:
        distributed: Any = import_module("distributed")
    except ImportError:
        remedy = "Install it: pip install 'latfit[dask]'."
        raise WrongUsage("Dask is not installed", where="--backend dask", remedy=remedy) from None
    with ExitStack() as opened:
        address = scheduler
        if scheduler is None:
            own = distributed.LocalCluster(threads_per_worker=1, dashboard_address="127.0.0.1:0")
            address = opened.enter_context(own)
        try:
            client = distributed.Client(address, timeout=PATIENCE_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise WrongUsage(
                f"no scheduler answers at {scheduler} ({first_line(error)})",
                where="--scheduler",
                remedy="Start one with `dask scheduler`, and give its address: --scheduler tcp://host:8786.",
            ) from None
        opened.callback(_closed, client)
        yield client


def _closed(client: Any) -> None:
    with suppress(Exception):
        client.close(timeout=PATIENCE_S / 4)
