"""Many simulations: a grid of policies, rates and settings on all cores or on a Dask cluster, into one Parquet file.

Each point is simulated by itself from its own seed, so that the table is the same whatever the number of workers and
the order in which they finish. The compiled core runs without Python's lock: threads of one program use all cores and
share its memory. The file is rewritten every few seconds; a sweep that finds it again takes over the points with
the same key, a digest of all that a point's result depends on, and computes the rest.

Points of a sweep: every policy at every rate with every combination of settings.

A sweep on a Dask cluster: a task a point, results as they come. Only this module knows Dask.
"""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from latfit._version import __version__
from latfit.errors import BadInput, LatfitError, SlaOutOfReach, WrongUsage
from latfit.files import check_writable, dumps, write_whole
from latfit.policies import Policy, Settings, Solve, named_policy
from latfit.simulation.policies.estimate import Parts, error_parts, paired
from latfit.simulation.policies.result import SimResult
from latfit.simulation.policies.run import Options, load_rate, simulate
from latfit.simulation.policies.service import System, path_times
from latfit.workload import ClosedLoad, Load

PATIENCE_S = 60


def finished_on_cluster(
    points: "Sequence[Point]", left: Sequence[int], scheduler: str | None, workers: int | None
) -> "Iterator[tuple[int, Row]]":
    """Points as they finish, on the cluster at an address, or on workers that live as long as the sweep."""

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


BACKENDS = ("local", "dask")
SAVE_EVERY_S = 5.0

Progress = Callable[[float, int], None]
"""Told how many points are done, parts of them included, and how many there are."""

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Point:
    """One simulation of a sweep. labels: more columns for its row, such as the settings that were varied."""

    policy: Policy
    system: System
    load: Load
    options: Options
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        digest = hashlib.sha256(f"latfit {__version__}".encode())
        for part in _parts((self.policy, self.system, self.load, self.options)):
            digest.update(part)
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Running:
    """How a sweep runs. workers: None for one a core.  scheduler: address of a Dask cluster, else workers here."""

    workers: int | None = None
    backend: str = "local"
    scheduler: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise WrongUsage(f"{self.backend!r} is no backend", where="--backend", remedy="Take local or dask.")
        if self.scheduler is not None and self.backend != "dask":
            raise WrongUsage("a scheduler belongs to Dask", where="--scheduler", remedy="Add --backend dask.")
        if self.workers is not None and self.workers < 1:
            raise WrongUsage(f"{self.workers} workers", where="--workers", remedy="Give 1 or more.")


def sweep(
    points: Sequence[Point],
    running: Running = Running(),
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[Row]:
    """Rows, one a point and in their order, written to `out` as Parquet. Raises what the simulations raise.

    resume: take over what `out` holds already of these points.
    """
    if not points:
        raise WrongUsage("the sweep has no point", where="--sweep", remedy="Give at least one policy and one rate.")
    keys = [point.key for point in points]
    rows: dict[int, Row] = {}
    if out is not None:
        check_writable(out)
        known = _known(out) if resume and out.exists() else {}
        rows = {i: {**known[key], **points[i].labels} for i, key in enumerate(keys) if key in known}
    left = [i for i in range(len(points)) if i not in rows]
    saved = time.monotonic()
    parts: dict[int, float] = {}

    def begun(i: int, share: float) -> None:
        parts[i] = max(share, parts.get(i, 0.0))
        if progress and share < 1:
            progress(min(len(points), len(rows) + sum(parts.copy().values())), len(points))

    try:
        for i, row in _finished(points, left, running, begun):
            parts.pop(i, None)
            rows[i] = {"key": keys[i], **points[i].labels, **row}
            if progress:
                progress(len(rows), len(points))
            if out is not None and time.monotonic() - saved > SAVE_EVERY_S:
                _save(out, rows)
                saved = time.monotonic()
    finally:
        if out is not None and rows:
            _save(out, rows)
    return [rows[i] for i in range(len(points))]


def run_point(point: Point, threads: int = 1, begun: Callable[[float], None] | None = None) -> Row:
    """The row of a point: flat, plain numbers and words; `document` holds the JSON of its result. threads: for its
    replications; begun: is told the share of them that is done."""
    result = simulate(point.policy, point.system, point.load, point.options, threads=threads, progress=begun)
    return {**flat(result), "document": dumps(result.to_json())}


def flat(result: SimResult) -> Row:
    """A result as one row; times in ms, rates per second, columns of paths called NAME_PATH."""
    document = result.to_json()
    latency = document["latency_ms"]
    row: Row = {name: document[name] for name in ("policy", "rate_per_s", "requests", "throughput_per_s")}
    for name in result.latency:
        row[f"{name}_ms"] = latency[name]
        row[f"{name}_low_ms"], row[f"{name}_high_ms"] = latency["ci"][name]
    for name in ("utilisation", "share", "batch_size"):
        row |= {f"{name}_{key}": value for key, value in document[name].items()}
    row["slo_attainment"] = document["slo_attainment"]
    row |= {name: document[name] for name in ("stable", "capacity_per_s", "unserved", "replications", "seed")}
    row["settings"] = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in document["settings"].items()
    )
    row["notes"] = " ".join(document["notes"])
    if "p99" in result.latency:
        row["p99_error"] = error_parts(result.summaries, "p99", result.level)[1].to_json()
    return row


def documents(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The runs of `simulate --json`. Each but the first at its rate says by how much its p99 differs from the first's:
    both met the same load, so that the difference is surer than its parts."""
    found = [json.loads(row["document"]) for row in rows]
    first: dict[Any, int] = {}
    for i, (row, run) in enumerate(zip(rows, found, strict=True)):
        base = first.setdefault(row["rate_per_s"], i)
        if base == i or not (run["stable"] and found[base]["stable"]):
            continue
        a, b = ((each["p99_ms"], Parts.from_json(each["p99_error"])) for each in (rows[base], row))
        gap = paired(a, b)
        run["against"] = {"policy": found[base]["policy"], "p99_ms": gap.value, "ci": [gap.low, gap.high]}
    return found


def _finished(
    points: Sequence[Point], left: Sequence[int], running: Running, begun: Callable[[int, float], None]
) -> Iterator[tuple[int, Row]]:
    """Points as they finish. begun: is told of a point here and the share of it that is done."""
    if running.backend == "dask":
        yield from finished_on_cluster(points, left, running.scheduler, running.workers)
        return
    workers = running.workers or os.cpu_count() or 1
    # Few points leave processors idle: these take replications of one.
    threads = max(1, workers // max(1, len(left)))
    with ThreadPoolExecutor(workers) as pool:
        waiting = {pool.submit(run_point, points[i], threads, partial(begun, i)): i for i in left}
        try:
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: waiting[future]):
                    yield waiting.pop(future), future.result()
        finally:
            for future in waiting:
                future.cancel()


def _save(out: Path, rows: Mapping[int, Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ordered = [rows[i] for i in sorted(rows)]
    names = list(dict.fromkeys(name for row in ordered for name in row))
    table = pa.table({name: [row.get(name) for row in ordered] for name in names})
    table = table.replace_schema_metadata({"latfit": f'{{"schema": "latfit.sweep/1", "version": "{__version__}"}}'})
    write_whole(out, lambda stream: pq.write_table(table, stream, compression="zstd"))


def _known(out: Path) -> dict[str, Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(out)
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(
            f"not a table of a sweep ({error})", where=str(out), remedy="Name another --out, or leave out --resume."
        ) from None
    if "key" not in table.column_names:
        raise BadInput("holds no simulations", where=str(out), remedy="Name another --out, or leave out --resume.")
    return {row["key"]: row for row in table.to_pylist()}


def _parts(value: Any) -> Iterator[bytes]:
    """All that a value holds, as bytes, in an order of its own."""
    if isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__.encode()
        for each in fields(value):
            yield each.name.encode()
            yield from _parts(getattr(value, each.name))
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


MOST_POINTS = 100_000

USED_BY: Mapping[str, tuple[str, ...]] = {
    "batch": ("fixed",),
    "window_ms": ("window",),
    "t_cut_ms": ("cutoff", "three-stage"),
    "B1": ("three-stage",),
    "rule": ("marginal-cost",),
    "longest_ms": ("marginal-cost", "split"),
    "merge_below": ("split",),
}
"""Settings that only some policies have; varying one makes no more points of the others."""


@dataclass(frozen=True)
class Grid:
    """policies: names.  rates: per ms, empty for the load's own.  varied: settings by name, each with its values."""

    policies: Sequence[str]
    rates: Sequence[float] = ()
    varied: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.policies:
            raise WrongUsage("no policy", where="--policy", remedy="Give at least one.")
        known = {each.name for each in fields(Settings)}
        for name in self.varied:
            if name not in known:
                raise WrongUsage(
                    f"{name!r} is no setting", where="--sweep", remedy=f"Vary rate or {', '.join(sorted(known))}."
                )


def points_of(
    grid: Grid,
    system: System,
    load: Load,
    options: Options = Options(),
    *,
    settings: Settings = Settings(),
    solve: Solve | None = None,
    skipped: list[SlaOutOfReach] | None = None,
) -> list[Point]:
    """In the order of the rates, then the policies, then the settings. Raises WrongUsage, SlaOutOfReach.

    skipped: takes the points that have no policy, as the optimal one has none above its capacity, instead of raising.
    """
    if grid.rates and isinstance(load, ClosedLoad):
        raise WrongUsage("a closed loop has no rate to set", where="--rate", remedy="Vary --users instead.")
    rates = grid.rates or (math.nan,)
    found = []
    for rate, name in itertools.product(rates, grid.policies):
        offered = load if math.isnan(rate) or isinstance(load, ClosedLoad) else load.at_rate(rate)
        own = {key: values for key, values in grid.varied.items() if name in USED_BY.get(key, (name,))}
        for values in itertools.product(*own.values()):
            chosen = dict(zip(own, values, strict=True))
            asked = replace(settings, **chosen)
            try:
                policy = named_policy(name, _expected_rate(offered, system), path_times(system), asked, solve)
            except SlaOutOfReach as error:
                if skipped is None:
                    raise
                skipped.append(error)
                continue
            found.append(Point(policy, system, offered, options, chosen))
        if len(found) > MOST_POINTS:
            raise WrongUsage(
                f"more than {MOST_POINTS:,} points", where="--sweep", remedy="Give fewer values of each setting."
            )
    return found


def _expected_rate(load: Load, system: System) -> float:
    """Arrivals per ms that a policy's defaults go by; of a closed loop what it sends where nobody waits."""
    if isinstance(load, ClosedLoad):
        return load.users / (load.think_ms + float(system.main.typical_ms[1]))
    return load_rate(load)
