"""Many simulations on all cores or on a Dask cluster, into one Parquet file.

Each point has its own seed, so the table is the same whatever the number of workers.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from latfit._version import __version__
from latfit.dask_cluster import run_on_dask
from latfit.errors import BadInput, first_line, refuse
from latfit.files import check_writable, dumps, write_whole
from latfit.inputs import decode_json
from latfit.threads import on_threads

BACKENDS = ("local", "dask")
SAVE_EVERY_S = 5.0
MOST_POINTS = 100_000

Progress = Callable[[float, int], None]
"""Called with the number of points done, parts of them included, and the number of all."""

Row = dict[str, Any]


SweepPoint = Any
"""One simulation of a sweep. labels: varied settings. key: a digest of what the result depends on.

`run(threads, begun)` calls `begun` with the share that is done. Its result has `notes`, a `row()` for the sweep's file,
and the `document()` from which the point's `restored(document)` makes it again.
"""


@dataclass(frozen=True)
class Running:
    workers: int | None = None
    backend: str = "local"
    scheduler: str | None = None

    def __post_init__(self) -> None:
        backend, alone = self.backend, self.scheduler is not None and self.backend != "dask"
        refuse(backend not in BACKENDS, f"{backend!r} is no backend", "--set backend", "Take local or dask.")
        refuse(alone, "a scheduler belongs to Dask", "--set scheduler", "Add --set backend=dask.")
        few = self.workers is not None and self.workers < 1
        refuse(few, f"{self.workers} workers", "--set workers", "Give 1 or more.")


def simulate_points(
    points: Sequence[SweepPoint],
    running: Running = Running(),
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[Any]:
    """Return the results of the points in order, written to `out` as Parquet, a row each.

    Raises what the simulations raise. resume: take over what `out` holds of these points.
    """
    remedy = f"Give values of settings for 1 to {MOST_POINTS:,} points."
    refuse(not 0 < len(points) <= MOST_POINTS, f"{len(points):,} points", "--sweep", remedy)
    results: dict[int, Any] = {}
    rows: dict[int, Row] = {}
    keys: list[str] = []
    if out is not None:
        check_writable(out)
        keys = [point.key for point in points]
        known = _resumed(points, keys, out) if resume and out.exists() else {}
        for i, (row, result) in known.items():
            rows[i], results[i] = {**row, **points[i].labels}, result
    parts: dict[int, float] = {}

    def begun(i: int, share: float) -> None:
        parts[i] = max(share, parts.get(i, 0.0))
        if progress and share < 1:
            progress(min(len(points), len(results) + sum(parts.copy().values())), len(points))

    saved = time.monotonic()
    try:
        for i, result in _simulated(points, [i for i in range(len(points)) if i not in results], running, begun):
            parts.pop(i, None)
            results[i] = result
            if out is not None:
                notes, document = " ".join(result.notes), dumps(result.document())
                rows[i] = {"key": keys[i], **points[i].labels, **result.row(), "notes": notes, "document": document}
            if progress:
                progress(len(results), len(points))
            if time.monotonic() - saved > SAVE_EVERY_S:
                _save(rows, out)
                saved = time.monotonic()
    finally:
        _save(rows, out)
    return [results[i] for i in range(len(points))]


def run_point(point: SweepPoint, threads: int = 1, begun: Callable[[float], None] | None = None) -> Any:
    return point.run(threads, begun)


def _simulated(
    points: Sequence[SweepPoint], left: Sequence[int], running: Running, begun: Callable[[int, float], None]
) -> Iterator[tuple[int, Any]]:
    if running.backend == "dask":
        tasks = {i: (run_point, points[i]) for i in left}
        yield from run_on_dask(tasks, running.scheduler, running.workers)
        return
    workers = running.workers or os.cpu_count() or 1
    # Few points leave processors idle: these take replications of one.
    threads = max(1, workers // max(1, len(left)))
    with on_threads(workers) as pool:
        waiting = {pool.submit(run_point, points[i], threads, partial(begun, i)): i for i in left}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: waiting[future]):
                yield waiting.pop(future), future.result()


def _save(rows: Mapping[int, Row], out: Path | None) -> None:
    if out is None or not rows:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    ordered = [rows[i] for i in sorted(rows)]
    names = list(dict.fromkeys(name for row in ordered for name in row))
    table = pa.table({name: [row.get(name) for row in ordered] for name in names})
    table = table.replace_schema_metadata({"latfit": f'{{"schema": "latfit.sweep/1", "version": "{__version__}"}}'})
    write_whole(out, lambda stream: pq.write_table(table, stream, compression="zstd"))


def _resumed(points: Sequence[SweepPoint], keys: Sequence[str], out: Path) -> dict[int, tuple[Row, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        known = {str(row["key"]): row for row in pq.read_table(out).to_pylist()}
        return {
            i: (known[key], points[i].restored(decode_json(known[key]["document"].encode())))
            for i, key in enumerate(keys)
            if key in known
        }
    except (pa.ArrowException, BadInput, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        found, remedy = f"not a table of a sweep ({first_line(error)})", "Name another --out, or leave out --resume."
        raise BadInput(found, where=str(out), remedy=remedy) from None


def digest(*values: Any) -> str:
    text = msgspec.json.encode(values, enc_hook=_as_text)
    return hashlib.sha256(f"latfit {__version__}".encode() + text).hexdigest()[:32]


def _as_text(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return f"{value.dtype}{value.shape}{hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()}"
