"""Run replications of a serving engine, or of several together, under a load.

Replication r draws its load from (seed, r) only, so engines with one seed meet the same requests.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from msgspec import structs

from latfit.errors import refuse
from latfit.simulation.engine.replicas import Routing, Transfer, serve_apart, serve_replicas
from latfit.simulation.engine.result import EngineResult, Promise, backlogged, counted_in, grows, summarise
from latfit.simulation.engine.run import EngineRun
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import StepCosts
from latfit.simulation.points import digest
from latfit.simulation.policies.estimate import STEADY, reach_in
from latfit.simulation.policies.run import Options, kind_of
from latfit.simulation.summary import EngineSummary
from latfit.stats import FloatArray
from latfit.threads import on_threads
from latfit.workload import ClosedLoad, Load, RecordedLoad, Requests, Streams

REQUESTS = 100_000  # requests of each replication by default
WARM_SHARE, WARM_REACHES = 0.02, 20  # left out at the start: a share, or correlation lengths, the larger of both
SENT_LEAST, SENT_FIRST = 5, 2  # smallest number of requests per user in a closed loop, and of these in the warm-up


@dataclass(frozen=True, eq=False)
class Cluster:
    """Engines that serve together: equal ones behind a router, or `prefill_replicas` that prefill for them."""

    routing: Routing = field(default_factory=Routing)
    prefill: StepCosts | None = None
    transfer: Transfer = field(default_factory=Transfer)
    prefill_replicas: int = 1

    def __post_init__(self) -> None:
        both = self.prefill is not None and self.routing.scaling is not None
        refuse(both, "replicas that come and go prefill for themselves", "--prefill-on", "Leave it out.")

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
        closed = think_ms is not None
        refuse(closed, "prefill apart takes no closed loop", "--users", "Give --rate or --arrivals.")
        routing = (replace(self.routing, replicas=self.prefill_replicas), self.routing)
        costs_of, limits = (self.prefill, costs), (settings, settings)
        return serve_apart(requests, costs_of, limits, self.transfer, seed, routing)


@dataclass(frozen=True, eq=False)
class Replications:
    load: Load
    runs: Sequence[EngineRun]
    warmup: float

    def summary(self, promise: Promise = Promise()) -> EngineSummary:
        names = [] if isinstance(self.load, RecordedLoad) else [each.name for each in self.load.classes]
        return structs.replace(summarise(self.runs, promise, self.warmup, names), stable=self.stable)

    def distributions_ms(self) -> dict[str, list[float]]:
        found = {}
        for name in ("ttft", "tpot"):
            times = np.concatenate([getattr(run, f"{name}_ms")[counted_in(run, self.warmup)] for run in self.runs])
            if len(times := times[np.isfinite(times)]):
                found[name] = [float(f"{value:.6g}") for value in np.quantile(times, np.linspace(0, 1, 101))]
        return found

    @property
    def stable(self) -> bool:
        """Whether waits neither grow over the runs nor leave a backlog at the last arrival."""
        if isinstance(self.load, ClosedLoad):
            return True
        return not (grows(self.runs) or (0 < self.load.rate < math.inf and backlogged(self.runs)))


def replicate(
    load: Load,
    costs: StepCosts,
    settings: EngineSettings,
    options: Options = Options(),
    cluster: Cluster = Cluster(),
    numbers: Sequence[int] = (),
    threads: int = 1,
) -> Replications:
    """Run the replications with these numbers; by default as many as the options say, for recorded requests one.

    Raises BadInput for a request larger than the KV cache, WrongUsage for too few requests of users.
    """
    recorded, count = isinstance(load, RecordedLoad), options.requests or REQUESTS
    if isinstance(load, RecordedLoad):
        count = len(load.requests)
    elif isinstance(load, ClosedLoad):
        least = SENT_LEAST * load.users
        count = options.requests or max(REQUESTS, 4 * least)
        found, remedy = f"{count:,} requests of {load.users:,} users", f"{least:,} or more: {SENT_LEAST} of each user."
        refuse(count < least, found, "--requests", f"Give {remedy}")

    def one(replication: int) -> EngineRun:
        streams = Streams(options.seed, replication)
        requests = load.sample(count, streams)
        think = load.thinking(count, streams) if isinstance(load, ClosedLoad) else None
        return cluster.serve(requests, costs, settings, options.seed + replication, think)

    with on_threads(threads) as pool:
        runs = list(pool.map(one, numbers or range(1 if recorded else options.replications)))
    warmup = 0.0 if recorded else options.warmup or 0.0
    if options.warmup is None and kind_of(load) == STEADY and cluster.routing.scaling is None:
        warmup = min(max(WARM_SHARE, WARM_REACHES * reach_in(runs[0].latency_ms) / count), 0.5)
        if isinstance(load, ClosedLoad):
            warmup = min(max(warmup, SENT_FIRST * load.users / count), 0.5)
    return Replications(load, runs, warmup)


@dataclass(frozen=True, eq=False)
class EnginePoint:
    load: Load
    costs: StepCosts
    settings: EngineSettings
    options: Options = field(default_factory=Options)
    promise: Promise = field(default_factory=Promise)
    cluster: Cluster = field(default_factory=Cluster)
    labels: Mapping[str, Any] = field(default_factory=dict)  # the settings that a sweep varies
    told: Callable[[EngineRun, EngineSettings], Sequence[str]] | None = None  # returns notes on the first replication
    whole: bool = True  # whether the result keeps the first replication

    @property
    def key(self) -> str:
        return digest((self.load, self.costs, self.settings, self.options, self.promise, self.cluster))

    def run(self, threads: int = 1, begun: Callable[[float], None] | None = None) -> EngineResult:
        found = replicate(self.load, self.costs, self.settings, self.options, self.cluster, threads=threads)
        first = found.runs[0]
        notes = list(self.told(first, self.settings)) if self.told else []
        return replace(self._result(found.summary(self.promise)), first=first if self.whole else None, notes=notes)

    def restored(self, document: Any) -> EngineResult:
        return replace(self._result(EngineSummary.from_json(document)), notes=document["notes"])

    def _result(self, summary: EngineSummary) -> EngineResult:
        closed = self.load if isinstance(self.load, ClosedLoad) else None
        return EngineResult(
            settings=self.settings,
            routing=self.cluster.routing,
            prefill_replicas=0 if self.cluster.prefill is None else self.cluster.prefill_replicas,
            rate_per_s=self.load.rate * 1e3 if closed is None else summary.throughput_per_s,
            summary=summary,
            users=0 if closed is None else closed.users,
            seed=self.options.seed,
            labels=self.labels,
        )
