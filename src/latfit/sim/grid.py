"""Points of a sweep: every policy at every rate with every combination of settings."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.scheduling.named import Settings, Solve, named_policy
from latfit.sim.hardware import path_times
from latfit.sim.machine import System
from latfit.sim.simulate import Options, load_rate
from latfit.sim.sweep import Point
from latfit.workload.load import ClosedLoad, Load

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
