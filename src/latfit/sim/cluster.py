"""A sweep on a Dask cluster: a task a point, results as they come. Only this module knows Dask."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import TYPE_CHECKING, Any

from latfit.errors import LatfitError, WrongUsage

if TYPE_CHECKING:
    from latfit.sim.sweep import Point, Row

PATIENCE_S = 60


def finished_on_cluster(
    points: "Sequence[Point]", left: Sequence[int], scheduler: str | None, workers: int | None
) -> "Iterator[tuple[int, Row]]":
    """Points as they finish, on the cluster at an address, or on workers that live as long as the sweep."""
    from latfit.sim.sweep import run_point

    distributed = _dask()
    with ExitStack() as opened:
        address: Any = scheduler
        if scheduler is None:
            address = opened.enter_context(
                distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address="127.0.0.1:0")
            )
        try:
            client = opened.enter_context(distributed.Client(address, timeout=PATIENCE_S, set_as_default=False))
        except (OSError, ValueError) as error:
            raise WrongUsage(
                f"no scheduler answers at {scheduler} ({error})",
                where="--scheduler",
                remedy="Start one with `dask scheduler`, and give its address: --scheduler tcp://host:8786.",
            ) from None
        futures = {client.submit(run_point, points[i], key=f"latfit-{points[i].key}-{i}"): i for i in left}
        for future in distributed.as_completed(futures, loop=client.loop):
            if future.status != "finished":
                raise _lost(future)
            yield futures[future], future.result()


def _dask() -> Any:
    try:
        return import_module("distributed")
    except ImportError:
        raise WrongUsage(
            "Dask is not installed", where="--backend dask", remedy="Install it: pip install 'latfit[dask]'."
        ) from None


def _lost(future: Any) -> Exception:
    error = future.exception()
    if isinstance(error, LatfitError):
        return error
    return LatfitError(
        f"a worker could not run its point ({type(error).__name__}: {error})",
        where="--backend dask",
        remedy="See the workers' logs; they need the same version of latfit, and about 1 GiB each.",
    )
