"""Rows to cells: one pass over a trace of any length, in flat memory, here or on a cluster.

Steps of next to no time are told by the medians of all rows, as in `trace/clean.py`, so they are dropped from the
finished cells, a bin of ln T at a time.

The pass over a trace on Dask: parts become cells where the workers are, and cells are merged in a tree.

Nothing waits for ever: a scheduler that does not answer, or that has no workers, ends the pass after PATIENCE_S, and a
part whose worker dies again and again is given up by Dask itself. Whatever ends the pass, an interrupt too, closes the
client, and with it go its tasks, and the workers that were started here.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit import errors
from latfit.errors import BadInput, LatfitError, WrongUsage
from latfit.trace.clean import CleanOptions, check_not_most, check_reasons, shortest_believable_ms
from latfit.trace.columns import IDENTITY
from latfit.trace.sketch.histogram import (
    LADDER,
    RELATIVE_ERROR,
    WEIGHT,
    Atoms,
    Cells,
    Label,
    Pool,
    cell_starts,
    merged,
    weighted_rows,
    without,
)
from latfit.trace.sketch.scan import Dataset, Part, Scan, first_line, open_dataset, summarise, unreadable
from latfit.trace.table import Trace
from latfit.units import MS_PER_UNIT

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


BACKENDS = ("local", "dask")


@dataclass(frozen=True)
class Compressed:
    """The cells of a source, and the facts of the pass that a fit stores."""

    cells: Cells
    facts: Mapping[str, Any]

    @property
    def trace(self) -> Trace:
        """Rows with weights (column `cell_rows`) that fit as the rows read would, with the facts as provenance."""
        return weighted_rows(self.cells).with_provenance(cells=dict(self.facts))


def compress(
    source: str | Path,
    scan: Scan | None = None,
    *,
    filesystem: Any = None,
    backend: str = "local",
    scheduler: str | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Summarise all Parquet files of a folder (or one file) into cells. Raises BadInput, WrongUsage, LatfitError.

    filesystem: of pyarrow; without it, found from a URI such as s3://bucket/folder. scheduler: address of a Dask
    cluster; without it, backend="dask" starts workers on this machine.
    """
    scan = scan or Scan()
    _check_options(scan, backend, scheduler)
    dataset = open_dataset(source, scan.column_map, filesystem)
    if dataset.unreadable and not scan.skip_unreadable:
        raise unreadable(*dataset.unreadable[0])
    if backend == "dask":
        cells = summarise_on_cluster(dataset, scan, scheduler, progress)
    else:
        cells = _summarise_here(dataset, scan, progress)
    cells = replace(cells, unreadable=tuple(sorted({*cells.unreadable, *dataset.unreadable})))
    cells = _without_absurd_times(cells, scan.cleaning)
    _check_used(cells, scan, str(source))
    return Compressed(cells, _facts(cells, str(source), dataset))


def _summarise_here(dataset: Dataset, scan: Scan, progress: Progress | None) -> Cells:
    pool = Pool(scan.limit)
    done = 0
    for part in dataset.parts:
        pool.add(summarise(dataset.filesystem, part, scan, pool.level))
        done += part.rows
        if progress:
            progress(done, dataset.rows)
    return pool.total()


def _check_options(scan: Scan, backend: str, scheduler: str | None) -> None:
    check_reasons(scan.cleaning)
    if backend not in BACKENDS:
        raise WrongUsage(f"{backend!r} is not known", where="--backend", remedy=f"Choose: {', '.join(BACKENDS)}.")
    if scheduler is not None and backend != "dask":
        raise WrongUsage("a scheduler belongs to Dask", where="--scheduler", remedy="Add --backend dask.")
    if scan.unit is not None and scan.unit not in MS_PER_UNIT:
        raise WrongUsage(f"{scan.unit!r} is not a unit", where="--unit", remedy=f"Choose: {', '.join(MS_PER_UNIT)}.")


def _without_absurd_times(cells: Cells, options: CleanOptions) -> Cells:
    """Without the steps that `zero_time` drops because no step is so fast."""
    if "zero_time" in options.keep:
        return cells
    systems: dict[Label, dict[Label, Atoms]] = {}
    for label, atoms in cells.atoms.items():
        if len(atoms):
            systems.setdefault(label[: len(IDENTITY)], {})[label] = atoms
    absurd: dict[Label, NDArray[np.bool_]] = {}
    for phases in systems.values():
        rows = weighted_rows(replace(cells, atoms=phases))
        limit = shortest_believable_ms(rows.floats("S"), rows.floats("T_ms"), rows.floats(WEIGHT))
        absurd |= {label: atoms.high < limit for label, atoms in phases.items()}
    return without(cells, "zero_time", absurd)


def _check_used(cells: Cells, scan: Scan, where: str) -> None:
    """Something is left, and more than half of what is no warm-up, unless that was agreed to."""
    if cells.rows_read == 0:
        remedy = "Correct --where." if scan.where else "Check how it was made, and make it again."
        raise BadInput("no row was found", where=where, remedy=remedy)
    check_not_most(cells, scan.cleaning, where)


def _facts(cells: Cells, source: str, dataset: Dataset) -> dict[str, Any]:
    size, context = LADDER[cells.level]
    exact = f"exact up to {2 ** (size + 1):,}, then in bins of 1/{2**size}"
    facts: dict[str, Any] = {
        "source": source,
        "files": dataset.files - len(dataset.unreadable),
        "rows_read": cells.rows_read,
        "rows_used": cells.rows_used,
        "dropped": dict(sorted(cells.dropped.items())),
        "cells": sum(len(cell_starts(atoms)) for atoms in cells.atoms.values()),
        "counters": len(cells),
        "resolution": {
            "level": cells.level,
            "B and S": exact,
            "context_tokens": _context_words(context),
            "quantiles of T": f"within {RELATIVE_ERROR:.1%}",
        },
        "unreadable": [{"file": file, "reason": reason} for file, reason in cells.unreadable],
    }
    if cells.level:
        facts["coarser"] = f"Telling all cells apart would take more than {cells.limit:,} counters."
    return facts


def _context_words(cut: int) -> str:
    bins = {0: "8 bins an octave", 1: "4 bins an octave", 2: "2 bins an octave", 3: "a bin an octave"}
    return bins.get(cut, "not told apart" if cut == 8 else f"a bin for {2 ** (cut - 3)} octaves") + ", means kept"
