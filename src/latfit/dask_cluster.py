"""Run tasks on a Dask cluster, or on workers of this host."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

from latfit.errors import LatfitError, WrongUsage, first_line

PATIENCE_S = 20.0  # for an answer of the scheduler, and without any worker


def run_on_dask(
    tasks: Mapping[int, tuple[Any, ...]], scheduler: str | None, workers: int | None = None
) -> Iterator[tuple[int, Any]]:
    """Yield (number, result) of each task as it finishes. Raises WrongUsage without a scheduler, LatfitError."""
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
        left = {client.submit(*task, pure=False): number for number, task in tasks.items()}
        while left:
            try:
                with client.as_current():
                    done = distributed.wait(list(left), timeout=PATIENCE_S, return_when="FIRST_COMPLETED").done
            except TimeoutError:
                if not _count_workers(client):
                    raise _lost(f"no worker for {PATIENCE_S:.0f} s") from None
                continue
            except distributed.CancelledError as error:
                raise _lost(first_line(error)) from None
            yield from ((left.pop(future), _result_of(future)) for future in done)


def _result_of(future: Any) -> Any:
    try:
        return future.result(timeout=PATIENCE_S)
    except LatfitError:
        raise
    except ImportError as error:
        remedy = "Install the same version of latfit, and of what it needs, on every worker."
        raise LatfitError(f"a worker cannot run its task ({error})", where="--scheduler", remedy=remedy) from None
    except Exception as error:  # noqa: BLE001 - whatever Dask calls the loss of workers or of itself
        raise _lost(f"{type(error).__name__}: {first_line(error)}") from None


def _count_workers(client: Any) -> int:
    with suppress(Exception):  # a lost connection has many names
        return len(client.sync(client.scheduler.ncores, callback_timeout=PATIENCE_S / 4))
    return 0


def _lost(reason: str) -> LatfitError:
    remedy = "See the logs of its workers: they may lack memory (about 1 GiB each is needed), or have been stopped."
    return LatfitError(f"the cluster lost the work ({reason})", where="--scheduler", remedy=remedy)


def _close(client: Any) -> None:
    with suppress(Exception):
        client.close(timeout=PATIENCE_S / 4)
