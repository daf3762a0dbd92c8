"""Strategies to run a load on the paths there are, each with the distribution of its response at a rate.

- PATH, greedy batches: an idle machine takes all that wait;
- PATH, amortised batches: it first waits for B requests, B by the amortised rule at the rate, where that is above 1;
- CPU, one at a time;
- GPU + CPU: waiting cut off at T_cut, overflow to the CPU's queue.

T(b) is the typical step, and single steps have the measured noise. Where nobody measured that (a path of nominal
numbers), steps of batches take T(b) and a CPU that serves one at a time is taken as exponential. A batch is at most the
largest measured one, in requests and in tokens, unless a smaller one is asked for. Where only closed forms are asked
for, nothing scatters and arrivals are Poisson.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile, PathLatency
from latfit.model import StepNoise
from latfit.planning.request import PlanRequest
from latfit.planning.result import Kind, Strategy
from latfit.policies import stopping_batch
from latfit.queueing import (
    POISSON,
    QUICK,
    USUAL,
    Arrivals,
    Effort,
    OverflowDistribution,
    ResponseDistribution,
    ServiceTimes,
    batch_response,
    closed_form,
    cutoff_response,
    measured_times,
    run_batches,
    scatters,
    single_response,
)
from latfit.stats import FloatArray

MOST_WAITED_FOR = 256
ROUNDING = 1e-9


@dataclass(frozen=True)
class Target:
    """A response time of `sla_ms` for a share `q` of the requests, each of so many tokens."""

    sla_ms: float
    q: float
    tokens: int

    @property
    def percentile(self) -> float:
        return round(100 * self.q, 6)


@dataclass(frozen=True)
class Part:
    """A path with the times of its batches, noise and, on the GPU, the transfer included."""

    latency: PathLatency
    times: ServiceTimes
    transfer_ms: float = 0.0

    @property
    def path(self) -> ExecutionPath:
        return self.latency.path

    @property
    def label(self) -> str:
        return self.latency.label

    @property
    def mean_ms(self) -> float:
        """Mean service of one request alone."""
        return self.times(1)

    def scaled(self, factor: float) -> "Part":
        return replace(self, times=replace(self.times, at=lambda b: factor * self.times.at(b)))

    def drawn(self, seed: int) -> "Part":
        """The same path as the data allow it to be, by a seed."""
        assert self.times.max_batch is not None
        rng = np.random.default_rng([seed, *self.path.name.encode()])
        T, law = self.latency.drawn_ms(np.arange(1.0, self.times.max_batch + 1), rng)
        return replace(self, times=_times(T, law, self.transfer_ms))


@dataclass(frozen=True)
class Both:
    """The two paths of a machine that has both."""

    gpu: Part
    cpu: Part
    arrivals: Arrivals = POISSON

    def law(self, rate: float, cutoff_ms: float, effort: Effort = USUAL) -> ResponseDistribution:
        """The distribution at a rate per ms and a T_cut. Raises SlaOutOfReach where the CPU is overloaded."""
        return cutoff_response(rate, cutoff_ms, self.gpu.times, self.cpu.times, self.arrivals, effort)

    def overflow_share(self, rate: float, cutoff_ms: float) -> float:
        """Share of the requests that the CPU serves."""
        law = self.law(rate, cutoff_ms)
        assert isinstance(law, OverflowDistribution)
        return law.overflow_share

    @property
    def closed_form(self) -> bool:
        """Whether the distribution is exact and the proved bounds hold: see `queueing.responses`."""
        return closed_form(self.gpu.times, self.cpu.times, self.arrivals)

    @property
    def cpu_rate(self) -> float:
        """Requests per ms of the CPU, one at a time."""
        return 1 / self.cpu.mean_ms

    @property
    def rate_limit(self) -> float:
        return self.gpu.times.rate_limit() + self.cpu_rate

    def strategy(self, cutoff_ms: float) -> Strategy:
        return Strategy(Kind.CUTOFF, (self.gpu.label, self.cpu.label), cutoff_ms)


@dataclass(frozen=True)
class Machine:
    """The paths of a plan by the part they play; there is at least one. runs: whether queues may be run."""

    cpu: Part | None
    gpu: Part | None
    arrivals: Arrivals = POISSON
    runs: bool = True

    @property
    def both(self) -> Both | None:
        return None if self.cpu is None or self.gpu is None else Both(self.gpu, self.cpu, self.arrivals)

    @property
    def main(self) -> Part:
        """The GPU where there is one."""
        part = self.gpu or self.cpu
        assert part is not None
        return part

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.gpu, self.cpu) if part is not None]

    def part(self, label: str) -> Part:
        return next(part for part in self.parts if part.label == label)

    def drawn(self, seed: int) -> "Machine":
        """A machine that the data allow, its arrivals drawn anew from the recording."""
        cpu, gpu = (None if part is None else part.drawn(seed) for part in (self.cpu, self.gpu))
        return replace(self, cpu=cpu, gpu=gpu, arrivals=self.arrivals.drawn(np.random.default_rng(seed)))


@dataclass(frozen=True)
class System:
    """A strategy on a machine. law: (rate per ms, effort) -> distribution; rate_limit: its stability limit per
    ms.  rises: whether its responses can only take longer at a higher rate.  sampled: whether its distribution is read
    off runs.  run_at: the distribution of batches at a rate by a short run, which is quicker than one in closed form.
    times: of its batches, where it is greedy on one path.  both: the paths of a T_cut.
    """

    strategy: Strategy
    parts: tuple[Part, ...]
    law: Callable[[float, Effort], ResponseDistribution] = field(repr=False)
    rate_limit: float
    sampled: bool
    rises: bool = True
    run_at: Callable[[float], ResponseDistribution] | None = None
    times: ServiceTimes | None = None
    both: Both | None = None

    @property
    def price_per_hour(self) -> float | None:
        """Of all its paths together; None where one has no price."""
        prices = [part.path.price_per_hour for part in self.parts]
        return None if None in prices else sum(price for price in prices if price is not None)


def machine_of(profile: HardwareProfile, tokens: int, request: PlanRequest) -> Machine:
    """The CPU and the GPU of a profile; a path of another name plays the GPU where there is neither."""
    cpu, gpu = profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS)
    if cpu is None and gpu is None and profile.paths:
        gpu = next(iter(profile.paths.values()))

    def part(path: ExecutionPath, transfer_ms: float, most: int | None) -> Part:
        latency = PathLatency(path, tokens, request.context)
        B = latency.batches[:most]
        if request.laws_only:
            return Part(latency, _times(latency.mean_ms(B), None, transfer_ms), transfer_ms)
        return Part(latency, _times(latency.noisy_ms(B), latency.noise, transfer_ms), transfer_ms)

    return Machine(
        None if cpu is None else part(cpu, 0.0, None),
        None if gpu is None else part(gpu, request.transfer_ms, request.max_batch),
        request.arrivals,
        not request.laws_only,
    )


def _times(T: FloatArray, noise: StepNoise | None, transfer_ms: float) -> ServiceTimes:
    """Batches 1, 2, ... of typical times T (n,), transfer included."""
    return measured_times(T, None if noise is None else noise.up_to(len(T)), transfer_ms)


def simple_systems(machine: Machine, rate: float) -> list[System]:
    """Every system of one path that differs from the others at a rate per ms."""
    found = [] if machine.gpu is None else _batching(machine.gpu, rate, machine)
    if machine.cpu is not None:
        found.append(_one_at_a_time(machine.cpu, machine.arrivals))
        # A nominal median, or mean of an exponential service, says nothing of batches.
        given = machine.cpu.path.nominal
        if given is None or not (given.median or given.exponential):
            found += _batching(machine.cpu, rate, machine)
    return found


def cutoff_system(both: Both, cutoff_ms: float) -> System:
    """GPU + CPU at one T_cut."""

    def law(rate: float, effort: Effort) -> ResponseDistribution:
        return both.law(rate, cutoff_ms, effort)

    return System(both.strategy(cutoff_ms), (both.gpu, both.cpu), law, both.rate_limit, not both.closed_form, both=both)


def system_of(strategy: Strategy, machine: Machine, rate: float) -> System | None:
    """A strategy on a machine at a rate per ms; None where it is none there."""
    if strategy.T_cut_ms is not None:
        return None if machine.both is None else cutoff_system(machine.both, strategy.T_cut_ms)
    return next((system for system in simple_systems(machine, rate) if system.strategy == strategy), None)


def _one_at_a_time(part: Part, arrivals: Arrivals) -> System:
    def law(rate: float, effort: Effort) -> ResponseDistribution:
        return single_response(rate, part.times, arrivals, effort)

    sampled = part.times.noise is not None or not arrivals.poisson
    return System(Strategy(Kind.ONE_AT_A_TIME, (part.label,)), (part,), law, 1 / part.mean_ms, sampled)


def _batching(part: Part, rate: float, machine: Machine) -> list[System]:
    arrivals = machine.arrivals
    best = part.times.best_batch()
    times = part.times if best == part.times.max_batch else replace(part.times, max_batch=best)
    limit, sampled = times.rate_limit(), scatters(times) or not arrivals.poisson
    whole = times.table(1, best)
    T = whole[:MOST_WAITED_FOR].tolist()
    # A batch that is quicker than a smaller one, or has less noise, makes more load the better load.
    root_squares = whole * np.sqrt(1 + times.cv(best) ** 2)
    rises = all(bool(np.all(np.diff(each) >= -ROUNDING * each[:-1])) for each in (whole, root_squares))

    def system(kind: Kind, threshold: Callable[[float], int], batch: int | None = None) -> System:
        def law(load: float, effort: Effort) -> ResponseDistribution:
            return batch_response(load, times, threshold(load), arrivals, effort)

        def run(load: float) -> ResponseDistribution:
            return run_batches(load, times, threshold(load), arrivals, QUICK)

        strategy = Strategy(kind, (part.label,), batch=batch)
        greedy = times if kind is Kind.GREEDY else None
        return System(strategy, (part,), law, limit, sampled, rises, run if machine.runs else None, greedy)

    found = [system(Kind.GREEDY, lambda _: 1)]
    stop = stopping_batch("amortised", T, rate)
    if stop > 1:
        found.append(system(Kind.AMORTISED, lambda load: stopping_batch("amortised", T, load), stop))
    return found


def law_or_none(system: System, rate: float, effort: Effort = USUAL) -> ResponseDistribution | None:
    """The distribution at a rate per ms; None where the system cannot carry it or it cannot be computed."""
    try:
        return system.law(rate, effort)
    except SlaOutOfReach:
        return None
