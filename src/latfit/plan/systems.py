"""Ways to run a load on the paths there are, each with the law of its response at a rate.

- PATH, batches: an idle machine takes all that wait (greedy);
- PATH, amortised batches: it first waits for B requests, B by the amortised rule at the rate, where that is above 1;
- CPU, one at a time: M/M/1 with the mean service of one request;
- GPU + CPU: waiting cut off at T_cut, overflow to the CPU's queue.

T(b) is the mean step, typical latency times the mean of the fit's spread; steps are taken as deterministic. A batch is
at most the largest measured one, in requests and in tokens, unless a smaller one is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware.estimate import phase_of, spread
from latfit.hardware.profile import CPU_PATHS, GPU_PATHS, ExecutionPath, HardwareProfile
from latfit.plan.thresholds import batches_of, curve_range
from latfit.plan.wishes import Wishes
from latfit.queueing.batch_service import batch_queue
from latfit.queueing.law import ResponseLaw
from latfit.queueing.service import ServiceTimes, measured_times
from latfit.queueing.single_server import mm1
from latfit.scheduling.marginal_cost import stopping_batch

MOST_WAITED_FOR = 256
ONE_AT_A_TIME = "one at a time"
GREEDY = "greedy batches"


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
class System:
    """A way to run the load. law_at: rate per ms -> law; rate_limit: its stability limit per ms."""

    name: str
    paths: tuple[ExecutionPath, ...]
    law_at: Callable[[float], ResponseLaw]
    rate_limit: float

    @property
    def price_per_hour(self) -> float | None:
        """Of all its paths together; None where one has no price."""
        prices = [path.price_per_hour for path in self.paths]
        return None if None in prices else sum(price for price in prices if price is not None)


@dataclass(frozen=True)
class Part:
    """A path with its mean times T(b) of batches; transfer included on the GPU."""

    path: ExecutionPath
    times: ServiceTimes

    @property
    def label(self) -> str:
        return self.path.label

    @property
    def mean_ms(self) -> float:
        """Mean service of one request alone."""
        return self.times(1)

    def scaled(self, factor: float) -> "Part":
        return replace(self, times=ServiceTimes(lambda b: factor * self.times.at(b), self.times.max_batch))


@dataclass(frozen=True)
class Both:
    """The two paths of a machine that has both."""

    gpu: Part
    cpu: Part

    @property
    def cpu_rate(self) -> float:
        """Requests per ms of the CPU, one at a time."""
        return 1 / self.cpu.mean_ms

    @property
    def label(self) -> str:
        return f"{self.gpu.label} + {self.cpu.label}"


@dataclass(frozen=True)
class Machine:
    """The paths of a plan by the part they play; there is at least one."""

    cpu: Part | None
    gpu: Part | None

    @property
    def both(self) -> Both | None:
        return None if self.cpu is None or self.gpu is None else Both(self.gpu, self.cpu)

    @property
    def main(self) -> Part:
        """The GPU where there is one."""
        part = self.gpu or self.cpu
        assert part is not None
        return part

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.gpu, self.cpu) if part is not None]


TYPICAL, FAST, SLOW = 0, 1, 2
"""Which of the curves that the data allow: the fitted one, or an end of their 95 % range at every batch."""


def machine_of(
    profile: HardwareProfile, tokens: int, wishes: Wishes, curve: int = TYPICAL, level: float | None = None
) -> Machine:
    """The CPU and the GPU of a profile; a path of another name plays the GPU where there is neither.

    level: steps take this quantile of their spread, or the highest known one below it, in place of their mean.
    """
    cpu, gpu = profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS)
    if cpu is None and gpu is None and profile.paths:
        gpu = next(iter(profile.paths.values()))
    alone = replace(wishes, max_batch=None, transfer_ms=0.0)
    return Machine(
        None if cpu is None else Part(cpu, _path_times(cpu, tokens, alone, curve, level)),
        None if gpu is None else Part(gpu, _path_times(gpu, tokens, wishes, curve, level)),
    )


def _path_times(path: ExecutionPath, tokens: int, wishes: Wishes, curve: int, level: float | None) -> ServiceTimes:
    """T(b) in ms of batches of such requests, up to the largest measured, transfer included."""
    top = int(batches_of(path, tokens=tokens)[-1])
    largest = top if wishes.max_batch is None else min(top, wishes.max_batch)
    known = spread(path, phase_of(tokens))
    factor = path.quote.mean_factor() if path.quote else known.mean_factor
    if level is not None and known.known:
        factor = max(factor, known.highest(level))
    table = factor * curve_range(path, np.arange(1.0, largest + 1), tokens, wishes.context)[curve]
    return measured_times(table + wishes.transfer_ms)


def simple_systems(machine: Machine, rate: float) -> list[System]:
    """Every system of one path that differs from the others at a rate per ms."""
    found = [] if machine.gpu is None else _batching(machine.gpu, rate)
    if machine.cpu is not None:
        found.append(_one_at_a_time(machine.cpu))
        # A quoted median says nothing of batches.
        if machine.cpu.path.quote is None or not machine.cpu.path.quote.median:
            found += _batching(machine.cpu, rate)
    return found


def _one_at_a_time(part: Part) -> System:
    rate = 1 / part.mean_ms
    return System(f"{part.label}, {ONE_AT_A_TIME}", (part.path,), lambda load: mm1(load, rate), rate)


def _batching(part: Part, rate: float) -> list[System]:
    best = part.times.best_batch()
    times = part.times if best == part.times.max_batch else replace(part.times, max_batch=best)
    limit = times.rate_limit()
    T = times.table(1, min(best, MOST_WAITED_FOR)).tolist()

    def amortised(load: float) -> ResponseLaw:
        return batch_queue(load, times, stopping_batch("amortised", T, load))

    greedy = System(f"{part.label}, {GREEDY}", (part.path,), lambda load: batch_queue(load, times), limit)
    if stopping_batch("amortised", T, rate) == 1:
        return [greedy]
    return [greedy, System(f"{part.label}, amortised batches", (part.path,), amortised, limit)]


def law_or_none(system: System, rate: float) -> ResponseLaw | None:
    """The law at a rate per ms; None where the system cannot carry it or it cannot be computed."""
    try:
        return system.law_at(rate)
    except SlaOutOfReach:
        return None
