"""Does a plan hold? The response time percentile of a policy at a load, with an interval, until it is sure enough."""

import math
from dataclasses import dataclass, replace
from typing import Any

from latfit.errors import WrongUsage
from latfit.scheduling.policy import Policy
from latfit.sim.estimate import Interval, statistics
from latfit.sim.machine import System
from latfit.sim.result import SimResult
from latfit.sim.simulate import Options, simulate
from latfit.workload.arrivals import Poisson
from latfit.workload.load import Load, OpenLoad

PRECISION = 0.01


@dataclass(frozen=True, eq=False)
class Checked:
    """percentile: simulated, in ms.  holds: True where its whole interval lies within the SLA, the interval is to be
    trusted and the system stable; False where the whole interval lies beyond or the system is unstable; None where the
    runs cannot tell, or no SLA was given."""

    percentile: Interval
    level: float
    sla_ms: float | None
    holds: bool | None
    result: SimResult

    def to_json(self) -> dict[str, Any]:
        low, high = self.percentile.low, self.percentile.high
        return {
            "percentile_ms": self.percentile.value,
            "ci": [low, high],
            "level": self.level,
            "sla_ms": self.sla_ms,
            "holds": self.holds,
            "stable": self.result.stable,
            "requests": self.result.requests,
            "seed": self.result.seed,
            "notes": list(self.result.notes),
        }


def check(
    policy: Policy,
    system: System,
    load: Load | float,
    percentile: float = 99.0,
    sla_ms: float | None = None,
    options: Options = Options(precision=PRECISION, most_replications=40),
) -> Checked:
    """Simulate until the percentile (in percent) is known within `options.precision`.

    load: any, or a rate per ms for Poisson arrivals. Raises WrongUsage for a policy without the path it needs.
    """
    if 0 < percentile < 1:
        meant = f"{100 * percentile:g}"
        raise WrongUsage(
            f"{percentile:g} % of them, next to none", where="--percentile", remedy=f"Was --percentile {meant} meant?"
        )
    if not 0 < percentile < 100:
        raise WrongUsage(
            f"{percentile:g} is not a percentile", where="--percentile", remedy="Give one above 0, below 100."
        )
    offered = OpenLoad(Poisson(load)) if isinstance(load, float | int) else load
    share = round(percentile / 100, 12)
    (_, name) = statistics((share,))
    percentiles = tuple(sorted({*options.percentiles, share}))
    asked = replace(options, statistic=name, percentiles=percentiles, sla_ms=sla_ms or math.inf)
    result = simulate(policy, system, offered, asked)
    found = result.latency[name]
    return Checked(found, options.level, sla_ms, _verdict(found, sla_ms, result.stable), result)


def _verdict(found: Interval, sla_ms: float | None, stable: bool) -> bool | None:
    if sla_ms is None:
        return None
    if not stable or found.low > sla_ms:
        return False
    return True if found.trusted and found.high <= sla_ms else None
