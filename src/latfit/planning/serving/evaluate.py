"""Simulate engine configurations under a load until each target is clearly met or missed.

All see the same requests and step noise. Large fleets are simulated by a sample of their engines. Derivation:
docs/theory/planning.md, "Evaluating a configuration".
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from msgspec import structs

from latfit.planning.serving.result import Reached
from latfit.planning.serving.targets import Targets
from latfit.simulation import (
    SENT_LEAST,
    Cluster,
    EngineRun,
    EngineSettings,
    EngineSummary,
    Options,
    Replications,
    Routing,
    Schedule,
    StepCosts,
    Transfer,
    linear_costs,
    replicate,
)
from latfit.stats import IntArray
from latfit.threads import map_on_threads
from latfit.workload import (
    ClosedLoad,
    Dealt,
    LengthDistribution,
    Load,
    OpenLoad,
    Poisson,
    PrefixBlocks,
    RecordedLoad,
    Requests,
    Resampled,
)

FIRST, MORE, MOST, VERIFIED = 4, 2, 8, 64  # replications: at first, per extension, in a search, for the final answer
TOGETHER, SAMPLED = 64, 16  # largest fleet simulated whole; engines simulated of a larger one under round-robin routing
FEWEST_REQUESTS, MOST_REQUESTS = 3_000, 100_000
TIMES_HELD = 20  # requests of a replication per concurrently served request
FEW = 10
DRAWN = 10_000  # requests whose lengths represent those of all
CROWDED, MOST_LONGER = 0.9, 12.0  # utilisation above which replications get longer, and the largest factor
ALONE, FLOOD, LONG_FLOOD = 1_000, 4_000, 60_000  # requests for latency alone, throughput, throughput near saturation
NEAR_SATURATION = 0.05  # of utilisation 1: there a throughput of FLOOD requests does not decide
RARE = 1e-9  # arrivals per ms at which requests never overlap
FREE = linear_costs(0.0, 0.0, 0.0)
RATES = ("throughput_per_s", "output_tokens_per_s", "goodput_per_s", "queue", "replica_hours")  # sums over engines


@dataclass(frozen=True)
class Setup:
    """Engine settings and replicas. prefill: additional engines that only prefill."""

    settings: EngineSettings
    replicas: int = 1
    schedule: Schedule | None = None
    start_up_ms: float = 0.0
    prefill: int = 0

    @property
    def most(self) -> int:
        return self.replicas if self.schedule is None else self.schedule.most

    @property
    def total(self) -> int:
        return self.replicas + self.prefill


@dataclass(frozen=True, eq=False)
class Measured:
    """A simulated setup. carried: whether it sustains the load. outcome: None unless a final answer."""

    setup: Setup
    reached: tuple[Reached, ...]
    carried: bool
    first: EngineRun
    outcome: EngineSummary | None = None
    distributions_ms: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def summary(self) -> EngineSummary:
        assert self.outcome is not None
        return self.outcome

    @property
    def met(self) -> bool:
        return self.carried and all(each.met for each in self.reached)

    @property
    def certain(self) -> bool:
        """Whether the intervals decide that all targets are met, or that one is missed."""
        if not self.carried:
            return True
        if self.met:
            return all(each.certain for each in self.reached)
        return any(each.certain and not each.met for each in self.reached)

    @property
    def precise(self) -> bool:
        return all(each.precise for each in self.reached)

    @property
    def tightest(self) -> Reached:
        return max(self.reached, key=lambda each: each.ratio)

    @property
    def ratio(self) -> float:
        return self.tightest.ratio if self.carried else math.inf


@dataclass(eq=False)
class Evaluator:
    """Simulate setups under one load and cache the results.

    alone_ms: latency without contention. lead: share of requests that only warm up. apart: costs of prefill engines,
    and the KV transfer.
    """

    load: Load
    costs: StepCosts
    targets: Targets
    route: str = "round-robin"
    seed: int = 0
    tick: Callable[[int], None] = lambda count: None
    work: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    alone_ms: float = 0.0
    lead: float | None = None
    apart: tuple[StepCosts, Transfer] | None = None
    # A changed copy (`replace`) begins with empty caches.
    known: dict[tuple[Setup, float, int], Measured] = field(default_factory=dict, init=False)
    floods: dict[tuple[EngineSettings, int], "Saturated"] = field(default_factory=dict, init=False)
    kinds: dict[EngineSettings, tuple[float, float]] = field(default_factory=dict, init=False)

    @cached_property
    def rate_per_s(self) -> float:
        """Offered request rate; of a closed load without contention."""
        if isinstance(self.load, ClosedLoad):
            return 1e3 * self.load.users / (self.load.think_ms + self.alone_ms)
        return self.load.rate * 1e3

    def measure(self, setup: Setup, scale: float = 1.0, *, replications: int = MOST) -> Measured:
        """Simulate at `scale` times the load until the targets are decided."""
        key = (setup, scale, replications)
        if key not in self.known:
            found, done = self._decide(setup, scale, replications)
            self.known[key] = found if replications < VERIFIED else self._summarise(found, done)
        return self.known[key]

    def measure_sustained(
        self, setups: Sequence[Setup], scale: float = 1.0, *, replications: int = MOST
    ) -> list[Measured]:
        sustain = map_on_threads(lambda setup: self.carries(setup, scale), setups)
        kept = [setup for setup, carried in zip(setups, sustain, strict=True) if carried]
        return map_on_threads(lambda setup: self.measure(setup, scale, replications=replications), kept)

    def _decide(self, setup: Setup, scale: float, most: int) -> tuple[Measured, Replications]:
        # Replications of a recording differ only by the noise of many steps, so one is enough. An unstable load is
        # missed without simulation; one run is made for the report.
        once = isinstance(self.load, RecordedLoad) and most <= MOST
        if once or not self.carries(setup, scale):
            most = 1
        count = min(FIRST, most)
        load, requests = scaled(self.load, scale), self._requests(setup, scale)
        done = self._runs(setup, load, range(count), requests)
        found = self._judge(setup, scale, done)
        while count < most and not (found.certain and (most < VERIFIED or not found.met or found.precise)):
            more = min(max(MORE, count // 4), most - count)
            done = replace(done, runs=[*done.runs, *self._runs(setup, load, range(count, count + more), requests).runs])
            count += more
            found = self._judge(setup, scale, done)
        self.work["setups"] += 1
        self.work["steps"] += sum(run.counters.steps for run in done.runs)
        self.tick(self.work["setups"])
        return found, done

    def _summarise(self, found: Measured, done: Replications) -> Measured:
        summary, times = done.summary(self.targets.promise), found.setup.replicas / self._count_simulated(found.setup)
        outcome = structs.replace(summary, **{n: times * getattr(summary, n) for n in RATES})
        return replace(found, outcome=outcome, distributions_ms=done.distributions_ms())

    def _judge(self, setup: Setup, scale: float, done: Replications) -> Measured:
        # A finite run can end before the queue of a slight overload has grown.
        carried = self.lead is not None or (done.stable and self.carries(setup, scale))
        reached = self.targets.reached(done.runs, done.warmup if self.lead is None else self.lead)
        return Measured(setup, reached, carried, done.runs[0])

    def _requests(self, setup: Setup, scale: float) -> int:
        most = self.requests or FEWEST_REQUESTS
        if isinstance(self.load, ClosedLoad):
            return max(most, requests_for(scaled(self.load, scale), self.alone_ms))
        if not isinstance(self.load, OpenLoad) or setup.schedule is not None:
            return most
        together, used = self._count_simulated(setup), self.used(setup, scale)
        if together < setup.replicas:
            held = TIMES_HELD * self.load.rate * scale * self.alone_ms * together / setup.replicas
            most = int(np.clip(held, together * FEWEST_REQUESTS, MOST_REQUESTS))
        longer = ((1 - CROWDED) / max(1 - used, 1e-9)) ** 2 if used < 1 else 1.0
        return max(most, min(int(most * np.clip(longer, 1.0, MOST_LONGER)), MOST_REQUESTS))

    def _runs(self, setup: Setup, load: Load, which: range, requests: int) -> Replications:
        together = self._count_simulated(setup)
        routing = Routing(together, self.route, scaling=setup.schedule, start_up_ms=setup.start_up_ms)
        cluster = self._cluster(routing, setup.prefill)
        if together < setup.replicas:
            load = dealt(load, together, setup.replicas, in_turn=self.route == "round-robin")
        options = Options(requests=requests, seed=self.seed)

        def one(number: int) -> Replications:
            return replicate(load, self.costs, setup.settings, options, cluster, [number])

        found = map_on_threads(one, list(which))
        return replace(found[0], runs=[each.runs[0] for each in found])

    def _count_simulated(self, setup: Setup) -> int:
        whole = isinstance(self.load, RecordedLoad) or setup.schedule is not None or setup.prefill > 0
        if whole or setup.replicas <= TOGETHER:
            return setup.replicas
        return SAMPLED if self.route == "round-robin" else TOGETHER

    def _cluster(self, routing: Routing, prefill: int = 1) -> Cluster:
        return Cluster(routing) if self.apart is None else Cluster(routing, *self.apart, prefill)

    def alone(self, settings: EngineSettings) -> Measured:
        """Simulate requests without contention: a lower bound on every latency."""
        key = (Setup(settings, prefill=0 if self.apart is None else 1), 0.0, ALONE)
        if key not in self.known:
            options = Options(requests=ALONE, replications=FIRST, seed=self.seed, warmup=0.0)
            done = replicate(self._rare(), self.costs, settings, options, self._cluster(Routing()))
            self.known[key] = self._summarise(self._judge(key[0], 0.0, done), done)
            self.work["setups"] += 1
        return self.known[key]

    def _rare(self) -> Load:
        if not isinstance(self.load, RecordedLoad):
            return OpenLoad(Poisson(RARE), self.load.lengths, self.load.classes)
        # All of them in their order, as prompts share prefixes.
        arrival_ms = np.linspace(0.0, ALONE / RARE, len(self.load.requests))
        return replace(self.load, requests=replace(self.load.requests, arrival_ms=arrival_ms))

    def saturated(self, settings: EngineSettings, least: int = FLOOD) -> "Saturated":
        """Simulate one engine that never runs out of work."""
        if (settings, least) in self.floods:
            return self.floods[settings, least]
        count = max(least, 6 * settings.max_num_seqs)
        options = Options(requests=count, seed=self.seed, warmup=0.0)
        flood: Load = OpenLoad(Poisson(1e6), lengths_of(self.load))
        if isinstance(self.load, RecordedLoad) and self.load.requests.prefix is not None:
            flood = RecordedLoad(_flood_of(self.load.requests, self.load.requests.prefix, count))
        done = replicate(flood, self.costs, settings, options, numbers=[0])
        self.floods[settings, least] = saturated_in(done.runs[0])
        return self.floods[settings, least]

    def carries(self, setup: Setup, scale: float = 1.0) -> bool:
        """Return whether the engines sustain the load; users of a closed load wait."""
        return isinstance(self.load, ClosedLoad) or self.lead is not None or self.used(setup, scale) < 1

    def used(self, setup: Setup, scale: float = 1.0) -> float:
        """Return offered load over saturated throughput."""
        offered = self.rate_per_s * scale
        if self.apart is None:
            used = offered / (setup.most * self.saturated(setup.settings).requests_per_s)
            if abs(used - 1) > NEAR_SATURATION or not isinstance(self.load, OpenLoad):
                return used
            return offered / (setup.most * self.saturated(setup.settings, LONG_FLOOD).requests_per_s)
        prefill, decode = self.of_kinds(setup.settings)
        return offered / min(setup.prefill * prefill, setup.replicas * decode)

    def of_kinds(self, settings: EngineSettings) -> tuple[float, float]:
        assert self.apart is not None
        if settings not in self.kinds:
            first_tokens = with_lengths(self.load, lambda prompt, output: (prompt, np.ones_like(output)))
            prefills = replace(self, load=first_tokens, costs=self.apart[0], apart=None)
            prefill = prefills.saturated(settings).requests_per_s
            options = Options(requests=max(FLOOD, 6 * settings.max_num_seqs), seed=self.seed, warmup=0.0)
            flood, free = OpenLoad(Poisson(1e6), lengths_of(self.load)), Cluster(prefill=FREE)
            run = replicate(flood, self.costs, settings, options, free, [0]).runs[0]
            decoded = run.requests.output_tokens > 1
            decode = math.inf
            if decoded.sum() > FEW:
                decode = saturated_in(run, np.flatnonzero(decoded)).requests_per_s / float(decoded.mean())
            self.kinds[settings] = prefill, decode
        return self.kinds[settings]


def _flood_of(requests: Requests, prefix: PrefixBlocks, count: int) -> Requests:
    rows = np.arange(len(requests) * math.ceil(count / len(requests))) % len(requests)
    many = replace(requests, prefix=None).select(rows)
    repeated = prefix.repeated(len(rows) // len(requests))
    arrival_ms = 1e-6 * np.arange(len(rows), dtype=np.float64)
    return replace(many, arrival_ms=arrival_ms, prefix=repeated).select(slice(0, count))


@dataclass(frozen=True)
class Saturated:
    requests_per_s: float
    output_tokens_per_s: float
    tpot_ms: float


def saturated_in(run: EngineRun, rows: IntArray | None = None) -> Saturated:
    """Measure the middle half of a run whose requests all arrive at once. rows: requests that count."""
    counted = np.arange(len(run.requests)) if rows is None else rows
    order = counted[np.argsort(run.last_ms[counted], kind="stable")]
    kept = order[len(order) // 4 : 3 * len(order) // 4]
    span_s = float(run.last_ms[kept[-1]] - run.last_ms[kept[0]]) / 1e3
    tpot = run.tpot_ms[kept]
    tpot = tpot[np.isfinite(tpot)]
    tokens = float(run.requests.output_tokens[kept[1:]].sum())
    return Saturated((len(kept) - 1) / span_s, tokens / span_s, float(tpot.mean()) if len(tpot) else math.nan)


def lengths_of(load: Load) -> LengthDistribution:
    """Return the distribution of request lengths; recorded ones are resampled."""
    if isinstance(load, RecordedLoad):
        return Resampled(load.requests.prompt_tokens, load.requests.output_tokens)
    return load.lengths


Lengths = tuple[IntArray, IntArray]
"""Prompt and output tokens (n,)."""


def draw_lengths(load: Load) -> Lengths:
    """Return prompt and output tokens of many requests."""
    if isinstance(load, RecordedLoad):
        return load.requests.prompt_tokens, load.requests.output_tokens
    return load.lengths.lengths(DRAWN, np.random.default_rng(0))


@dataclass(frozen=True)
class ChangedLengths:
    lengths_of: LengthDistribution
    change: Callable[[IntArray, IntArray], Lengths]

    def lengths(self, count: int, rng: np.random.Generator) -> Lengths:
        return self.change(*self.lengths_of.lengths(count, rng))


def with_lengths(load: Load, change: Callable[[IntArray, IntArray], Lengths]) -> Load:
    if not isinstance(load, RecordedLoad):
        return replace(load, lengths=ChangedLengths(load.lengths, change))
    prompt, output = change(load.requests.prompt_tokens, load.requests.output_tokens)
    return replace(load, requests=replace(load.requests, prompt_tokens=prompt, output_tokens=output))


def dealt(load: Load, kept: int, among: int, *, in_turn: bool) -> Load:
    """Return the load of `kept` engines when it is routed among `among`."""
    if isinstance(load, ClosedLoad):
        return replace(load, users=max(round(load.users * kept / among), 1))
    assert isinstance(load, OpenLoad)
    return replace(load, arrivals=Dealt(load.arrivals, kept, among, in_turn))


def scaled(load: Load, scale: float) -> Load:
    if scale == 1.0:
        return load
    if isinstance(load, ClosedLoad):
        return replace(load, users=max(round(load.users * scale), 1))
    return load.at_rate(load.rate * scale)


def requests_for(load: Load, latency_ms: float) -> int:
    if isinstance(load, RecordedLoad):
        return len(load.requests)
    held, least = (load.users, SENT_LEAST * load.users) if isinstance(load, ClosedLoad) else (load.rate * latency_ms, 0)
    return max(int(np.clip(TIMES_HELD * held, FEWEST_REQUESTS, MOST_REQUESTS)), least)
