"""`simulate`: replications of a policy against a load, until there are as many as asked or the answer is sure enough.

Replication r draws its load from (seed, r) alone, whatever the policy: results of several policies with one seed are on
common random numbers, and nothing depends on what else is run beside it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from latfit.errors import WrongUsage
from latfit.scheduling.policy import Policy
from latfit.sim.estimate import (
    PERCENTILES,
    Interval,
    Summary,
    batches_wanted,
    difference,
    interval,
    statistics,
    summarise,
)
from latfit.sim.machine import System
from latfit.sim.replication import FEWEST, check_paths, draw, run
from latfit.sim.result import Asked, SimResult, make_result
from latfit.workload.arrivals import Piecewise
from latfit.workload.load import ClosedLoad, Load, OpenLoad, RecordedLoad
from latfit.workload.randomness import Streams


@dataclass(frozen=True)
class Options:
    """requests: in each replication.  warmup: share of them left out at the start.  sla_ms: what attainment is counted
    against where classes have no deadlines.  precision: stop once the interval of `statistic` is within this share
    of its value, after `replications` at least and `most_replications` at most.  level: of the intervals."""

    requests: int = 200_000
    warmup: float = 0.1
    replications: int = 5
    seed: int = 0
    sla_ms: float = math.inf
    precision: float | None = None
    statistic: str = "p99"
    most_replications: int = 200
    level: float = 0.95
    percentiles: tuple[float, ...] = PERCENTILES

    def __post_init__(self) -> None:
        if self.requests < FEWEST or self.replications < 1:
            raise WrongUsage(
                f"{self.requests} requests in {self.replications} replications",
                where="--requests",
                remedy=f"Give {FEWEST} requests or more, in one replication or more.",
            )
        if self.precision is not None and not 0 < self.precision < 1:
            raise WrongUsage(
                f"a precision of {self.precision:g}", where="--precision", remedy="Give a share, such as 0.01."
            )
        if not 0 < self.level < 1:
            raise WrongUsage(f"a level of {self.level:g}", where="--level", remedy="Give a share, such as 0.95.")
        if not all(0 < p < 1 for p in self.percentiles):
            raise WrongUsage(
                "a percentile is not between 0 and 100 %", where="--percentile", remedy="Give one that is."
            )
        if self.statistic not in statistics(self.percentiles):
            known = ", ".join(statistics(self.percentiles))
            raise WrongUsage(f"{self.statistic!r} is not known", where="statistic", remedy=f"Take one of {known}.")


def simulate(policy: Policy, system: System, load: Load, options: Options = Options()) -> SimResult:
    """Run the policy. Raises WrongUsage for one without the path it needs, BadInput for a load that cannot be served.

    An unstable system is no error: every replication is finite, and the result says `stable=False` and why.
    """
    check_paths(policy, system)
    summaries: list[Summary] = []
    if isinstance(load, RecordedLoad) and not _random(system):
        # Every replication would be the same.
        options = replace(options, replications=1, precision=None)
    fewest = most = options.replications
    if options.precision is not None:
        most = max(fewest, options.most_replications)
    while len(summaries) < most:
        summaries.append(one_replication(policy, system, load, options, len(summaries)))
        if options.precision is not None and len(summaries) >= fewest:
            if interval(summaries, options.statistic, options.level).relative_half_width <= options.precision:
                break
            if load_rate(load) >= system.capacity(policy):
                break
    asked = Asked(load_rate(load), _class_names(load), options.level, options.seed, _steady(load))
    return make_result(policy, system, summaries, asked)


def one_replication(policy: Policy, system: System, load: Load, options: Options, replication: int) -> Summary:
    """The summary of replication 0, 1, ..., the same wherever and whenever it is run."""
    streams = Streams(options.seed, replication)
    served = run(policy, system, draw(load, options.requests, options.warmup, system, streams), streams)
    return summarise(served, batches_wanted(options.replications), options.sla_ms, options.percentiles)


def compared(first: SimResult, other: SimResult) -> Mapping[str, Interval]:
    """other - first in ms, by statistic, from results with one seed and the same options."""
    return {name: difference(first.summaries, other.summaries, name, first.level) for name in first.latency}


def load_rate(load: Load) -> float:
    """Arrivals per ms; NaN for a closed loop, whose rate is what the service makes of it."""
    return math.nan if isinstance(load, ClosedLoad) else load.rate


def _steady(load: Load) -> bool:
    """Whether the load is the same at the start and at the end."""
    return isinstance(load, OpenLoad) and not isinstance(load.arrivals, Piecewise)


def _random(system: System) -> bool:
    return any(path.exponential or len(path.factors) for path in system.paths)


def _class_names(load: Load) -> list[str]:
    if isinstance(load, RecordedLoad):
        return [f"class {c}" for c in range(int(load.requests.class_id.max()) + 1)]
    classes = load.classes if isinstance(load, OpenLoad | ClosedLoad) else ()
    return [each.name or f"class {c}" for c, each in enumerate(classes)]
