"""Many simulations: a grid of policies, rates and settings on all cores or on a Dask cluster, into one Parquet file.

Each point is simulated by itself from its own seed, so that the table is the same whatever the number of workers and
the order in which they finish. The compiled core runs without Python's lock: threads of one program use all cores and
share its memory. The file is rewritten every few seconds; a sweep that finds it again takes over the points with
the same key, a digest of all that a point's result depends on, and computes the rest.

Points come from a grid: every policy at every rate with every combination of settings.
"""

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from latfit._version import __version__
from latfit.dask_cluster import dask_client, finished, result_of
from latfit.errors import BadInput, SlaOutOfReach, WrongUsage
from latfit.files import check_writable, dumps, write_whole
from latfit.policies import POLICIES, SPECIAL, Policy, Settings, Solve, named_policy
from latfit.simulation.policies.estimate import Interval, Parts, error_parts, paired
from latfit.simulation.policies.result import Difference, SimResult
from latfit.simulation.policies.run import Options, load_rate, simulate
from latfit.simulation.policies.service import System, path_times
from latfit.threads import on_threads
from latfit.workload import ClosedLoad, Load

BACKENDS = ("local", "dask")
SAVE_EVERY_S = 5.0

Progress = Callable[[float, int], None]
"""Called with the number of points done, parts of them included, and the number of all."""

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
) -> list[SimResult]:
    """Results of the points in their order, written to `out` as Parquet, a row each. Raises what the simulations raise.

    Each but the first at its rate says by how much its p99 differs from the first's: both met the same requests, so
    that the difference is surer than its parts. resume: take over what `out` holds already of these points.
    """
    if not points:
        raise WrongUsage("the sweep has no point", where="--sweep", remedy="Give at least one policy and one rate.")
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
    return _compared([table.results[i] for i in range(len(points))])


def run_point(point: Point, threads: int = 1, begun: Callable[[float], None] | None = None) -> SimResult:
    """The result of a point, without what only more replications would need. threads: for its replications; begun: is
    told the share of them that is done."""
    result = simulate(point.policy, point.system, point.load, point.options, threads=threads, progress=begun)
    error = error_parts(result.summaries, "p99", result.level)[1] if "p99" in result.latency else None
    return replace(result, p99_error=error, summaries=())


def _compared(results: Sequence[SimResult]) -> list[SimResult]:
    """With the difference of p99 to that of the first result at the same rate, where both are stable."""
    found: list[SimResult] = []
    first: dict[float, SimResult] = {}
    for result in results:
        base = result if math.isnan(result.rate_per_s) else first.setdefault(result.rate_per_s, result)
        gap = None if base is result else p99_difference(base, result)
        found.append(result if gap is None else replace(result, against=Difference(base.policy, gap)))
    return found


def p99_difference(base: SimResult, other: SimResult) -> Interval | None:
    """p99 of another run less that of a base, ms, with its interval; None where either is unstable or keeps no error.
    Both have to be of one sweep at one rate: on the same random numbers the difference is surer than its parts."""
    if not base.stable or not other.stable or base.p99_error is None or other.p99_error is None:
        return None
    return paired((base.latency["p99"].value, base.p99_error), (other.latency["p99"].value, other.p99_error))


def _simulated(
    points: Sequence[Point], left: Sequence[int], running: Running, begun: Callable[[int, float], None]
) -> Iterator[tuple[int, SimResult]]:
    """Points as they finish. begun: is told of a point here and the share of it that is done."""
    if running.backend == "dask":
        with dask_client(running.scheduler, running.workers) as client:
            tasks = {client.submit(run_point, points[i], key=f"latfit-{points[i].key}-{i}"): i for i in left}
            for task in finished(client, list(tasks)):
                yield tasks[task], result_of(task)
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


class _Table:
    """Results by point, and the Parquet file with their rows where there is one."""

    def __init__(self, points: Sequence[Point], out: Path | None) -> None:
        self.results: dict[int, SimResult] = {}
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
        for i, key in enumerate(self._keys):
            if key in known:
                self._rows[i] = {**known[key], **self._points[i].labels}
                error = known[key].get("p99_error")
                self.results[i] = replace(
                    SimResult.from_json(json.loads(known[key]["document"])),
                    p99_error=None if error is None else Parts.from_json(error),
                )

    def add(self, i: int, result: SimResult) -> None:
        self.results[i] = result
        if self._out is not None:
            self._rows[i] = {"key": self._keys[i], **self._points[i].labels, **row_of(result)}

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


def row_of(result: SimResult) -> Row:
    """A result as one flat row of numbers and words, `document` being its JSON; times in ms, rates per second, columns
    of paths called NAME_PATH."""
    row: Row = {name: getattr(result, name) for name in ("policy", "rate_per_s", "requests", "throughput_per_s")}
    for name, each in result.latency.items():
        row |= {f"{name}_ms": each.value, f"{name}_low_ms": each.low, f"{name}_high_ms": each.high}
    for name in ("utilisation", "share", "batch_size"):
        row |= {f"{name}_{key}": value for key, value in getattr(result, name).items()}
    alike = ("slo_attainment", "stable", "capacity_per_s", "unserved", "replications", "seed")
    row |= {name: getattr(result, name) for name in alike}
    row["settings"] = ", ".join(
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in result.settings.items()
    )
    row["notes"] = " ".join(result.notes)
    if result.p99_error is not None:
        row["p99_error"] = result.p99_error.to_json()
    return {**row, "document": dumps(result.to_json())}


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


@dataclass(frozen=True)
class Grid:
    """policies: names.  rates: per ms, empty for the load's own.  varied: settings by name, each with its values;
    settings: those of all points."""

    policies: Sequence[str]
    rates: Sequence[float] = ()
    varied: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)

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
        own = {
            key: values for key, values in grid.varied.items() if key not in SPECIAL or key in POLICIES[name].settings
        }
        for values in itertools.product(*own.values()):
            chosen = dict(zip(own, values, strict=True))
            asked = replace(grid.settings, **chosen)
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
