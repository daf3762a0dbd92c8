"""Many simulations on all cores or on a Dask cluster, into one Parquet file.

Each point is simulated by itself from its own seed, so that the table is the same whatever the number of workers and
the order in which they finish. The compiled core runs without Python's lock: threads of one program use all cores and
share its memory. The file is rewritten every few seconds; a sweep that finds it again takes over the points with
the same key, a digest of all that a point's result depends on, and computes the rest.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from latfit._version import __version__
from latfit.dask_cluster import run_on_dask
from latfit.errors import BadInput, WrongUsage, first_line
from latfit.files import check_writable, write_whole
from latfit.records import Record
from latfit.threads import on_threads

BACKENDS = ("local", "dask")
SAVE_EVERY_S = 5.0
MOST_POINTS = 100_000

Progress = Callable[[float, int], None]
"""Called with the number of points done, parts of them included, and the number of all."""

Row = dict[str, Any]
R = TypeVar("R")


class SweepPoint(Protocol[R]):
    """One simulation of a sweep. labels: more columns for its row, such as the settings that were varied."""

    @property
    def labels(self) -> Mapping[str, Any]: ...

    @property
    def key(self) -> str:
        """A digest of all that the result depends on."""
        ...

    def run(self, threads: int, begun: Callable[[float], None] | None) -> R:
        """The result. threads: for its replications; begun: is told the share of them that is done."""
        ...

    def row(self, result: R) -> Row:
        """A result as one flat row of numbers and words."""
        ...

    def restored(self, row: Row) -> R:
        """The result that a row is of."""
        ...


@dataclass(frozen=True)
class Running:
    """How a sweep runs. workers: None for one a core.  scheduler: address of a Dask cluster, else workers here."""

    workers: int | None = None
    backend: str = "local"
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise WrongUsage(f"{self.backend!r} is no backend", where="--set backend", remedy="Take local or dask.")
        if self.scheduler is not None and self.backend != "dask":
            raise WrongUsage("a scheduler belongs to Dask", where="--set scheduler", remedy="Add --set backend=dask.")
        if self.workers is not None and self.workers < 1:
            raise WrongUsage(f"{self.workers} workers", where="--set workers", remedy="Give 1 or more.")


def simulate_points(
    points: Sequence[SweepPoint[R]],
    running: Running = Running(),
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[R]:
    """Results of the points in their order, written to `out` as Parquet, a row each. Raises what the simulations raise.
    resume: take over what `out` holds already of these points."""
    if not points:
        raise WrongUsage("the sweep has no point", where="--sweep", remedy="Give one value or more of each.")
    if len(points) > MOST_POINTS:
        raise WrongUsage(
            f"more than {MOST_POINTS:,} points", where="--sweep", remedy="Give fewer values of each setting."
        )
    table = _Table(points, out)
    if resume:
        table.take_over()
    left = [i for i in range(len(points)) if i not in table.results]
    saved = time.monotonic()
    parts: dict[int, float] = {}

    def begun(i: int, share: float) -> None:
        parts[i] = max(share, parts.get(i, 0.0))
        if progress and share < 1:
            progress(min(len(points), len(table.results) + sum(parts.copy().values())), len(points))

    try:
        for i, result in _simulated(points, left, running, begun):
            parts.pop(i, None)
            table.add(i, result)
            if progress:
                progress(len(table.results), len(points))
            if time.monotonic() - saved > SAVE_EVERY_S:
                table.save()
                saved = time.monotonic()
    finally:
        table.save()
    return [table.results[i] for i in range(len(points))]


def run_point(point: SweepPoint[R], threads: int = 1, begun: Callable[[float], None] | None = None) -> R:
    """As `SweepPoint.run`, for workers."""
    return point.run(threads, begun)


def _simulated(
    points: Sequence[SweepPoint[R]], left: Sequence[int], running: Running, begun: Callable[[int, float], None]
) -> Iterator[tuple[int, R]]:
    """Points as they finish. begun: is told of a point here and the share of it that is done."""
    if running.backend == "dask":
        tasks = {i: (run_point, points[i]) for i in left}
        yield from run_on_dask(tasks, running.scheduler, running.workers)
        return
    workers = running.workers or os.cpu_count() or 1
    # Few points leave processors idle: these take replications of one.
    each = max(1, workers // max(1, len(left)))
    with on_threads(workers) as pool:
        waiting = {pool.submit(run_point, points[i], each, partial(begun, i)): i for i in left}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: waiting[future]):
                yield waiting.pop(future), future.result()


class _Table(Generic[R]):
    """Results by point, and the Parquet file with their rows where there is one."""

    def __init__(self, points: Sequence[SweepPoint[R]], out: Path | None) -> None:
        self.results: dict[int, R] = {}
        self._points, self._out = points, out
        self._keys = [point.key for point in points] if out is not None else []
        self._rows: dict[int, Row] = {}
        if out is not None:
            check_writable(out)

    def take_over(self) -> None:
        """What the file holds already of these points. Raises BadInput for a file of another kind."""
        if self._out is None or not self._out.exists():
            return
        known = _known(self._out)
        try:
            for i, key in enumerate(self._keys):
                if key in known:
                    self._rows[i] = {**known[key], **self._points[i].labels}
                    self.results[i] = self._points[i].restored(known[key])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise _no_sweep(f"a row is no simulation ({first_line(error)})", self._out) from None

    def add(self, i: int, result: R) -> None:
        self.results[i] = result
        if self._out is not None:
            self._rows[i] = {"key": self._keys[i], **self._points[i].labels, **self._points[i].row(result)}

    def save(self) -> None:
        """Write all rows so far, if there are any."""
        if self._out is None or not self._rows:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        ordered = [self._rows[i] for i in sorted(self._rows)]
        names = list(dict.fromkeys(name for row in ordered for name in row))
        table = pa.table({name: [row.get(name) for row in ordered] for name in names})
        table = table.replace_schema_metadata({"latfit": f'{{"schema": "latfit.sweep/1", "version": "{__version__}"}}'})
        write_whole(self._out, lambda stream: pq.write_table(table, stream, compression="zstd"))


def digest(*values: Any) -> str:
    """A key of all that the values hold."""
    found = hashlib.sha256(f"latfit {__version__}".encode())
    for part in _parts(values):
        found.update(part)
    return found.hexdigest()[:32]


def _known(out: Path) -> dict[str, Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(out)
        return {str(row["key"]): row for row in table.to_pylist()}
    except KeyError:
        raise _no_sweep("holds no simulations", out) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _no_sweep(f"not a table of a sweep ({first_line(error)})", out) from None


def _no_sweep(found: str, out: Path) -> BadInput:
    return BadInput(found, where=str(out), remedy="Name another --out, or leave out --resume.")


def _parts(value: Any) -> Iterator[bytes]:
    """All that a value holds, as bytes, in an order of its own."""
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif (is_dataclass(value) and not isinstance(value, type)) or isinstance(value, Record):
        yield type(value).__name__.encode()
        for name in value.__struct_fields__ if isinstance(value, Record) else [each.name for each in fields(value)]:
            yield name.encode()
            yield from _parts(getattr(value, name))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name).encode()
            yield from _parts(each)
    elif isinstance(value, list | tuple):
        yield f"{len(value)}".encode()
        for each in value:
            yield from _parts(each)
    else:
        yield repr(value).encode() + b";"
