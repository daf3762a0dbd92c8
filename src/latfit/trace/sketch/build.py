"""Rows to cells: one pass over a trace of any length, in flat memory, here or on a cluster.

Steps of next to no time are told by the medians of all rows, as in `trace/clean.py`, so they are dropped from the
finished cells, a bin of ln T at a time.

On a cluster, parts become cells where the workers are, and cells are merged in a tree.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.dask_cluster import dask_client, finished, result_of
from latfit.errors import BadInput, WrongUsage
from latfit.trace.clean import CleanOptions, check_not_most, check_reasons, shortest_believable_ms
from latfit.trace.columns import IDENTITY
from latfit.trace.period import COMPUTE, MOSTLY, PERIOD, no_periods
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
from latfit.trace.sketch.scan import Dataset, Scan, engine_of, open_dataset, share_with_period, summarise, unreadable
from latfit.trace.table import Trace
from latfit.units import MS_PER_UNIT

Progress = Callable[[int, int], None]

FAN_IN = 4


def summarise_on_cluster(
    dataset: Dataset, scan: Scan, scheduler: str | None = None, progress: Progress | None = None
) -> Cells:
    """The cells of all parts, merged in a tree. Raises what the pass raises here, WrongUsage without Dask or a
    scheduler, LatfitError where the workers are lost."""
    if not dataset.parts:
        return Cells(limit=scan.limit)
    with dask_client(scheduler) as client:
        leaves = [client.submit(summarise, dataset.filesystem, part, scan, pure=False) for part in dataset.parts]
        layers = [leaves]
        while len(layers[-1]) > 1:
            below = layers[-1]
            layers.append(
                [client.submit(merged, below[i : i + FAN_IN], pure=False) for i in range(0, len(below), FAN_IN)]
            )
        top = layers[-1][0]
        rows = {id(leaf): part.rows for part, leaf in zip(dataset.parts, leaves, strict=True)}
        done = 0
        for future in finished(client, leaves if top is leaves[0] else [*leaves, top]):
            done += rows.get(id(future), 0)
            if progress and future is not top and future.status == "finished":
                progress(done, dataset.rows)
        cells: Cells = result_of(top)
        if progress:
            progress(dataset.rows, dataset.rows)
        return cells


BACKENDS = ("local", "dask")


@dataclass(frozen=True)
class Compressed:
    """The cells of a source, the facts of the pass that a fit stores, and what records say of their engine."""

    cells: Cells
    facts: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trace(self) -> Trace:
        """Rows with weights (column `cell_rows`) that fit as the rows read would, with the facts as provenance."""
        return weighted_rows(self.cells).with_provenance(**{**self.engine, "cells": dict(self.facts)})


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
    scan = _with_time(scan, dataset, str(source))
    if backend == "dask":
        cells = summarise_on_cluster(dataset, scan, scheduler, progress)
    else:
        cells = _summarise_here(dataset, scan, progress)
    cells = replace(cells, unreadable=tuple(sorted({*cells.unreadable, *dataset.unreadable})))
    cells = _without_absurd_times(cells, scan.cleaning)
    _check_used(cells, scan, str(source))
    facts = _facts(cells, str(source), dataset) | _host_facts(cells, scan)
    return Compressed(cells, facts, engine_of(dataset) if cells.host else {})


def _with_time(scan: Scan, dataset: Dataset, where: str) -> Scan:
    """What T is, decided before the pass. Raises BadInput where periods are asked for and no step has one."""
    if scan.time == COMPUTE:
        return scan
    share = share_with_period(dataset, scan)
    if scan.time == PERIOD and share == 0:
        raise no_periods(where)
    return replace(scan, time=PERIOD if scan.time == PERIOD or share >= MOSTLY else COMPUTE)


def _host_facts(cells: Cells, scan: Scan) -> dict[str, Any]:
    """What T is, and the means of T and of the period by phase, of steps that know theirs."""
    if not cells.host:
        return {}
    means = {
        phase: {"T_ms": T / steps / 1e3, "period_ms": period / steps / 1e3}
        for phase, (steps, T, period) in sorted(cells.host.items())
    }
    return {"time": scan.time, "host": means}


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
