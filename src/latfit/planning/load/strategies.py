"""The machine of a plan, and strategies to run a load on it, simulated on common random numbers.

- PATH, greedy batches: an idle path takes all that wait;
- PATH, amortised batches: it waits for B requests, B by the amortised rule at the rate;
- CPU, one at a time;
- GPU + CPU: a request that has waited for T_cut may go to the CPU.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from latfit.hardware import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile, PathLatency
from latfit.histogram import histogram_of
from latfit.planning.request import PlanOptions
from latfit.planning.result import Kind, Strategy
from latfit.policies import Limits, cutoff, stopping_batch
from latfit.queueing import (
    POISSON,
    USUAL,
    Arrivals,
    Effort,
    ResponseDistribution,
    ServiceTimes,
    arrival_moments,
    run_length,
    simulate_batches,
)
from latfit.simulation import ServicePath, System, serve_arrivals, table_path
from latfit.workload import Streams

MAX_AMORTISED_BATCH = 256
IDLE_LOAD = 1e-7  # of the stability limit, below which requests do not meet and clocks would round


@dataclass(frozen=True)
class Target:
    """A response time of `sla_ms` for a share `q` of the requests."""

    sla_ms: float
    q: float
    tokens: int

    @property
    def percentile(self) -> float:
        return round(100 * self.q, 6)

    def is_met(self, law: ResponseDistribution | None) -> bool:
        return law is not None and law.tail(self.sla_ms) <= 1 - self.q


@dataclass(frozen=True)
class Part:
    """A path with the times of its batches, on the GPU with the transfer. slowdown: factor on its steps."""

    latency: PathLatency
    times: ServiceTimes
    slowdown: float = 1.0

    @property
    def path(self) -> ExecutionPath:
        return self.latency.path

    @property
    def label(self) -> str:
        return self.latency.label

    @property
    def mean_ms(self) -> float:
        """Mean time of one request alone."""
        return float(self.times.mean_ms[0])

    @cached_property
    def best_times(self) -> ServiceTimes:
        return self.times.up_to_best()

    def scaled(self, factor: float) -> "Part":
        times = replace(self.times, typical_ms=factor * self.times.typical_ms)
        return replace(self, times=times, slowdown=factor * self.slowdown)

    def drawn(self, seed: int) -> "Part":
        """Return the path with a curve and a noise drawn from what the data allow."""
        rng = np.random.default_rng([seed, *self.path.name.encode()])
        T, noise = self.latency.drawn_ms(self.times.max_batch, rng)
        noise = None if noise is None else noise.up_to(len(T))
        return replace(self, times=ServiceTimes(self.slowdown * T, noise, self.times.fixed_ms))


@dataclass(frozen=True)
class Machine:
    """The paths of a plan. steady: steps last their mean time. seed: of all draws."""

    cpu: Part | None
    gpu: Part | None
    arrivals: Arrivals = POISSON
    steady: bool = False
    seed: int = 0

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.gpu, self.cpu) if part is not None]

    @property
    def main(self) -> Part:
        """The GPU where there is one."""
        return self.parts[0]

    def parts_of(self, strategy: Strategy) -> list[Part]:
        """Return the paths of a strategy, the GPU first."""
        return [part for part in self.parts if part.label in strategy.paths]

    def drawn(self, seed: int) -> "Machine":
        """Return a machine drawn from what the data allow, arrivals redrawn from the recording."""
        cpu, gpu = (None if part is None else part.drawn(seed) for part in (self.cpu, self.gpu))
        return replace(self, cpu=cpu, gpu=gpu, arrivals=self.arrivals.drawn(np.random.default_rng(seed)))

    def rate_limit(self, strategy: Strategy) -> float:
        main = self.parts_of(strategy)[0]
        if strategy.kind is Kind.CUTOFF:
            return main.times.rate_limit() + 1 / self.parts_of(strategy)[1].mean_ms
        return 1 / main.mean_ms if strategy.kind is Kind.ONE_AT_A_TIME else main.best_times.rate_limit()

    def price_per_hour(self, strategy: Strategy) -> float | None:
        prices = [part.path.price_per_hour for part in self.parts_of(strategy)]
        return None if None in prices else sum(price for price in prices if price is not None)

    def simulate(self, strategy: Strategy, rate: float, effort: Effort = USUAL) -> ResponseDistribution | None:
        """Return the responses at a rate per ms; None if the strategy is unstable there."""
        limit = self.rate_limit(strategy)
        if rate >= limit:
            return None
        rate = max(rate, IDLE_LOAD * limit)
        effort = replace(effort, seed=effort.seed + self.seed)
        main = self.parts_of(strategy)[0]
        match strategy.kind:
            case Kind.ONE_AT_A_TIME:
                return simulate_batches(rate, main.times.alone(), 1, self.arrivals, effort)
            case Kind.CUTOFF:
                return self._simulate_cutoff(strategy, rate, effort)
            case Kind.AMORTISED:
                return simulate_batches(rate, main.best_times, amortised_batch(main, rate), self.arrivals, effort)
            case Kind.GREEDY:
                return simulate_batches(rate, main.best_times, 1, self.arrivals, effort)

    def _simulate_cutoff(self, strategy: Strategy, rate: float, effort: Effort) -> ResponseDistribution:
        assert strategy.T_cut_ms is not None
        gpu, cpu = self.parts_of(strategy)
        limit = self.rate_limit(strategy)
        system = System(_service_path(gpu, gpu.times), _service_path(cpu, cpu.times.up_to(1), cpu.times.noise is None))
        policy = cutoff(strategy.T_cut_ms, Limits(gpu.times.max_batch, 1))
        effort = replace(effort, runs=max(2, effort.runs // 2), longest=effort.longest // 2)  # each request costs more
        start, n, settled = run_length(rate / limit, gpu.times, self.arrivals, 0.0, effort)
        runs, overflow, busy = [], 0.0, 0.0
        for run in range(effort.runs):
            arrive = arrival_moments(self.arrivals, rate, n, effort.seed, run)
            served = serve_arrivals(policy, system, arrive, start, Streams(effort.seed, run))
            runs.append(histogram_of(served.response_ms[start:]))
            overflow += float(served.path[start:].mean()) / effort.runs
            busy += float(served.totals.busy[1]) / effort.runs
        return ResponseDistribution(tuple(runs), busy, math.nan, settled, overflow_share=overflow)


def _service_path(part: Part, times: ServiceTimes, exponential: bool = False) -> ServicePath:
    T, fixed_ms = times.typical_ms, times.fixed_ms
    return table_path(part.path.name, T, noise=times.noise, fixed_ms=fixed_ms, exponential=exponential)


def amortised_batch(part: Part, rate: float) -> int:
    """Return the batch at which the amortised rule stops waiting."""
    return stopping_batch("amortised", part.best_times.mean_ms[:MAX_AMORTISED_BATCH].tolist(), rate)


def machine_of(profile: HardwareProfile, tokens: int, request: PlanOptions) -> Machine:
    """Return the CPU and the GPU of a profile; another path plays the GPU where there is neither."""
    cpu, gpu = profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS)
    if cpu is None and gpu is None and profile.paths:
        gpu = next(iter(profile.paths.values()))

    def part(path: ExecutionPath, transfer_ms: float, largest: int | None) -> Part:
        latency = PathLatency(path, tokens, request.context)
        B = latency.batches[:largest]
        noise = None if request.laws_only or latency.noise is None else latency.noise.up_to(len(B))
        T = latency.mean_ms(B) if request.laws_only else latency.noisy_ms(B)
        return Part(latency, ServiceTimes(T, noise, transfer_ms))

    return Machine(
        None if cpu is None else part(cpu, 0.0, None),
        None if gpu is None else part(gpu, request.transfer_ms, request.max_batch),
        request.arrivals,
        request.laws_only,
        request.seed,
    )


def single_path_strategies(machine: Machine, rate: float) -> list[Strategy]:
    """Return the strategies of one path; amortised batches only where they can differ from greedy ones."""
    found = []
    for part in machine.parts:
        if part is machine.cpu:
            found.append(Strategy(Kind.ONE_AT_A_TIME, (part.label,)))
            nominal = part.path.nominal
            if nominal is not None and (nominal.median or nominal.exponential):
                continue  # a nominal service of one request says nothing of batches
        found.append(Strategy(Kind.GREEDY, (part.label,)))
        if amortised_batch(part, part.best_times.rate_limit()) > 1:
            found.append(Strategy(Kind.AMORTISED, (part.label,), batch=amortised_batch(part, rate)))
    return found


def cutoff_strategy(machine: Machine, cutoff_ms: float) -> Strategy:
    return Strategy(Kind.CUTOFF, tuple(part.label for part in machine.parts), cutoff_ms)
