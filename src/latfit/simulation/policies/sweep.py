"""Sweeps of policies: every policy at every rate with every combination of settings."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.policies import POLICIES, SPECIAL, Policy, Settings, Solve, named_policy
from latfit.simulation.points import MOST_POINTS, Progress, Running, digest, simulate_points
from latfit.simulation.policies.result import Difference, SimResult, p99_difference
from latfit.simulation.policies.run import Options, load_rate, simulate
from latfit.simulation.policies.service import System, path_times
from latfit.workload import ClosedLoad, Load


@dataclass(frozen=True, eq=False)
class Point:
    """One simulation of a sweep, see `SweepPoint`."""

    policy: Policy
    system: System
    load: Load
    options: Options
    labels: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return digest((self.policy, self.system, self.load, self.options))

    def run(self, threads: int, begun: Callable[[float], None] | None) -> SimResult:
        """Return the result without its replications, which take memory."""
        found = simulate(self.policy, self.system, self.load, self.options, threads=threads, progress=begun)
        return structs.replace(found, summaries=())

    def restored(self, document: Any) -> SimResult:
        return SimResult.from_json(document)


def sweep(
    points: Sequence[Point],
    running: Running = Running(),
    *,
    out: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> list[SimResult]:
    """Return the results of the points, as `simulate_points` makes them.

    Each but the first at its rate has the difference of its p99 to the first's: both met the same requests, so the
    difference is surer than its parts.
    """
    found: list[SimResult] = []
    first: dict[float, SimResult] = {}
    for result in simulate_points(points, running, out=out, resume=resume, progress=progress):
        base = result if math.isnan(result.rate_per_s) else first.setdefault(result.rate_per_s, result)
        gap = None if base is result else p99_difference(base, result)
        if gap is not None:
            result = structs.replace(result, vs_baseline=Difference(base.policy, gap.value, (gap.low, gap.high)))
        found.append(result)
    return found


def points_of(
    policies: Sequence[str],
    system: System,
    load: Load,
    options: Options = Options(),
    *,
    rates: Sequence[float] = (),
    varied: Mapping[str, Sequence[Any]] | None = None,
    settings: Settings = Settings(),
    solve: Solve | None = None,
    skipped: list[SlaOutOfReach],
) -> list[Point]:
    """Return points in the order of the rates (per ms), then the policies, then the settings. Raises WrongUsage.

    skipped: takes the points that have no policy, as the optimal one has none above its capacity.
    """
    if not policies:
        raise WrongUsage("no policy", where="--policy", remedy="Give at least one.")
    if rates and isinstance(load, ClosedLoad):
        raise WrongUsage("a closed loop has no rate to set", where="--rate", remedy="Vary --users instead.")
    found: list[Point] = []
    for rate, name in itertools.product(rates or (math.nan,), policies):
        offered = load if math.isnan(rate) or isinstance(load, ClosedLoad) else load.at_rate(rate)
        expected = load_rate(offered)
        if isinstance(offered, ClosedLoad):  # what users send if nobody waits
            expected = offered.users / (offered.think_ms + float(system.main.typical_ms[1]))
        own = {
            key: values
            for key, values in (varied or {}).items()
            if key not in SPECIAL or key in POLICIES[name].settings
        }
        for values in itertools.product(*own.values()):
            chosen = dict(zip(own, values, strict=True))
            try:
                policy = named_policy(name, expected, path_times(system), replace(settings, **chosen), solve)
            except SlaOutOfReach as error:
                skipped.append(error)
                continue
            found.append(Point(policy, system, offered, options, chosen))
            if len(found) > MOST_POINTS:
                remedy = "Give fewer values of each setting."
                raise WrongUsage(f"more than {MOST_POINTS:,} points", where="--sweep", remedy=remedy)
    return found
