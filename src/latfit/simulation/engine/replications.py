"""Run replications of a serving engine, or of several engines together, under a load.

Replication r draws its load from (seed, r) only, so engines with one seed meet the same requests; recorded requests run
once. Statistics of a steady load leave out the start; recorded or varying loads and changing fleets include it. For
a closed loop the rate is the rate sent, and the end of a run, when some users have stopped, is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import structs

from latfit.errors import WrongUsage
from latfit.simulation.engine.cluster.replicas import (
    Routing,
    Transfer,
    serve_apart,
    serve_replicas,
)
from latfit.simulation.engine.result import EngineResult, Promise, backlogged, grows, summarise
from latfit.simulation.engine.run import EngineRun
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import StepCosts
from latfit.simulation.policies.estimate import STEADY, reach_in
from latfit.simulation.policies.run import Options, kind_of
from latfit.simulation.summary import EngineSummary
from latfit.stats import FloatArray
from latfit.workload import ClosedLoad, Load, RecordedLoad, Requests, Streams

REQUESTS = 100_000
"""Requests of each replication by default."""

WARM_SHARE, WARM_REACHES = 0.02, 20
"""Requests left out at the start: a share of the run, or correlation lengths, the larger of both."""

SENT_LEAST, SENT_FIRST = 5, 2
"""Smallest number of requests per user in a closed loop, and of these in the warm-up."""


@dataclass(frozen=True, eq=False)
class Cluster:
    """Engines that serve together.

    Either equal engines behind a router, or `prefill_replicas` engines with separate step costs that prefill and send
    the KV cache to the others.
    """

    routing: Routing = field(default_factory=Routing)
    prefill: StepCosts | None = None
    transfer: Transfer = field(default_factory=Transfer)
    prefill_replicas: int = 1

    def __post_init__(self) -> None:
        if self.prefill is not None and self.routing.scaling is not None:
            raise WrongUsage(
                "replicas that come and go prefill for themselves", where="--prefill-on", remedy="Leave it out."
            )

    def serve(
        self,
        requests: Requests,
        costs: StepCosts,
        settings: EngineSettings,
        seed: int = 0,
        think_ms: FloatArray | None = None,
    ) -> EngineRun:
        """Run all engines once; `think_ms` and errors as in `serve`."""
        if self.prefill is None:
            return serve_replicas(requests, costs, settings, self.routing, seed, think_ms)
        if think_ms is not None:
            raise WrongUsage("prefill apart takes no closed loop", where="--users", remedy="Give --rate or --arrivals.")
        routing = (replace(self.routing, replicas=self.prefill_replicas), self.routing)
        costs_of, limits = (self.prefill, costs), (settings, settings)
        return serve_apart(requests, costs_of, limits, self.transfer, seed, routing).whole(requests)


@dataclass(frozen=True, eq=False)
class Replications:
    """Runs of an engine under a load; statistics leave out the share `warmup` of each."""

    load: Load
    runs: Sequence[EngineRun]
    warmup: float

    def summary(self, promise: Promise = Promise()) -> EngineSummary:
        """Return statistics over the replications."""
        names = [] if isinstance(self.load, RecordedLoad) else [each.name for each in self.load.classes]
        return structs.replace(summarise(self.runs, promise, self.warmup, names), stable=self.stable)

    @property
    def stable(self) -> bool:
        """Whether waits neither grow over the runs nor leave a backlog at the last arrival."""
        return self.carried and (bool(self.runs[0].users) or not grows(self.runs))

    @property
    def carried(self) -> bool:
        """Whether the engine serves the load: no backlog at the last arrival, or a closed loop."""
        return isinstance(self.load, ClosedLoad) or not (
            self.load.rate > 0 and math.isfinite(self.load.rate) and backlogged(self.runs)
        )


def replicate(
    load: Load,
    costs: StepCosts,
    settings: EngineSettings,
    options: Options = Options(),
    cluster: Cluster = Cluster(),
    numbers: Sequence[int] = (),
) -> Replications:
    """Run the replications with these numbers.

    By default as many as the options say, for recorded requests one.

    Raises
    ------
    BadInput
        If a request is larger than the KV cache.
    """
    recorded = isinstance(load, RecordedLoad)
    count = _count(load, options)
    runs = []
    for replication in numbers or range(1 if recorded else options.replications):
        streams = Streams(options.seed, replication)
        requests = load.sample(count, streams)
        think = load.thinking(count, streams) if isinstance(load, ClosedLoad) else None
        runs.append(cluster.serve(requests, costs, settings, options.seed + replication, think))
    course = kind_of(load) != STEADY or cluster.routing.scaling is not None
    if recorded or (options.warmup is None and course):
        warmup = 0.0
    elif options.warmup is not None:
        warmup = options.warmup
    else:
        warmup = min(max(WARM_SHARE, WARM_REACHES * reach_in(runs[0].latency_ms) / count), 0.5)
        if isinstance(load, ClosedLoad):
            warmup = min(max(warmup, SENT_FIRST * load.users / count), 0.5)
    return Replications(load, runs, warmup)


def _count(load: Load, options: Options) -> int:
    """Return the requests of a replication.

    Raises
    ------
    WrongUsage
        If the requested number is below SENT_LEAST per user.
    """
    if isinstance(load, RecordedLoad):
        return len(load.requests)
    if not isinstance(load, ClosedLoad):
        return options.requests or REQUESTS
    if options.requests is not None and options.requests < SENT_LEAST * load.users:
        raise WrongUsage(
            f"{options.requests:,} requests of {load.users:,} users",
            where="--requests",
            remedy=f"Give {SENT_LEAST * load.users:,} or more: {SENT_LEAST} of each user.",
        )
    return options.requests or max(REQUESTS, 4 * SENT_LEAST * load.users)


def simulate_engine(
    load: Load,
    costs: StepCosts,
    settings: EngineSettings,
    options: Options = Options(),
    promise: Promise = Promise(),
    cluster: Cluster = Cluster(),
) -> EngineResult:
    """Run the replications and return their result.

    Raises
    ------
    BadInput
        If a request is larger than the KV cache.
    """
    found = replicate(load, costs, settings, options, cluster)
    return replace(result_of(load, found.summary(promise), settings, options, cluster), first=found.runs[0])


def result_of(
    load: Load, summary: EngineSummary, settings: EngineSettings, options: Options, cluster: Cluster
) -> EngineResult:
    """Make the result from the statistics of replications, without any single run."""
    return EngineResult(
        settings=settings,
        routing=cluster.routing,
        prefill_replicas=0 if cluster.prefill is None else cluster.prefill_replicas,
        rate_per_s=summary.throughput_per_s if isinstance(load, ClosedLoad) else load.rate * 1e3,
        summary=summary,
        users=load.users if isinstance(load, ClosedLoad) else 0,
        seed=options.seed,
    )
