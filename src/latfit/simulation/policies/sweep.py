"""Grids of policies, rates and settings: every policy at every rate with every combination of settings."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.files import dumps
from latfit.inputs import decode_json
from latfit.policies import POLICIES, SPECIAL, Policy, Settings, Solve, named_policy
from latfit.simulation.points import MOST_POINTS, Progress, Row, Running, digest, simulate_points
from latfit.simulation.policies.estimate import BatchErrors, error_parts, paired
from latfit.simulation.policies.result import Difference, SimResult
from latfit.simulation.policies.run import Options, load_rate, simulate
from latfit.simulation.policies.service import System, path_times
from latfit.simulation.summary import Interval
from latfit.workload import ClosedLoad, Load


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
        return digest((self.policy, self.system, self.load, self.options))

    def run(self, threads: int, begun: Callable[[float], None] | None) -> SimResult:
        """The result, without what only more replications would need; see `SweepPoint`."""
        result = simulate(self.policy, self.system, self.load, self.options, threads=threads, progress=begun)
        error = error_parts(result.summaries, "p99", result.level)[1] if "p99" in result.latency else None
        return replace(result, p99_error=error, summaries=())

    def row(self, result: SimResult) -> Row:
        return row_of(result)

    def restored(self, row: Row) -> SimResult:
        error = row.get("p99_error")
        found = SimResult.from_json(decode_json(row["document"].encode()))
        return replace(found, p99_error=None if error is None else BatchErrors.from_json(error))


def sweep(
    points: Sequence[Point],
    running: Running = Running(),
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[SimResult]:
    """Results of the points, as `simulate_points` makes them.

    Each but the first at its rate says by how much its p99 differs from the first's: both met the same requests, so
    that the difference is surer than its parts.
    """
    return _compared(simulate_points(points, running, out=out, resume=resume, progress=progress))


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
