"""Ways to run a load on the paths there are, each with the law of its response at a rate.

- PATH, batches: an idle machine takes all that wait (greedy);
- PATH, amortised batches: it first waits for B requests, B by the amortised rule at the rate, where that is above 1;
- CPU, one at a time;
- GPU + CPU: waiting cut off at T_cut, overflow to the CPU's queue.

T(b) is the mean step, typical latency times the mean of the measured ratios to it, and single steps scatter as
measured. Where nobody measured that (a quoted path), steps of batches take T(b) and a CPU that serves one at a time is
taken as exponential. A batch is at most the largest measured one, in requests and in tokens, unless a smaller one is
asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from latfit.errors import SlaOutOfReach
from latfit.hardware import (
    CPU_PATHS,
    GPU_PATHS,
    ExecutionPath,
    HardwareProfile,
    batch_steps,
    mean_ms,
    phase_of,
    scatter,
    typical_ms,
)
from latfit.model import StepRatios, latency_draws, parameter_draws
from latfit.planning.request import Wishes
from latfit.planning.steps.thresholds import batches_of
from latfit.policies import stopping_batch
from latfit.queueing import (
    POISSON,
    QUICK,
    USUAL,
    Arrivals,
    Effort,
    OverflowLaw,
    ResponseLaw,
    ServiceTimes,
    batch_response,
    closed_form,
    cutoff_response,
    measured_times,
    run_batches,
    single_response,
)
from latfit.stats import FloatArray

MOST_WAITED_FOR = 256
ONE_AT_A_TIME = "one at a time"
GREEDY = "greedy batches"
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
class System:
    """A way to run the load. law: (rate per ms, effort) -> law; rate_limit: its stability limit per ms.  rises: whether
    its responses can only take longer at a higher rate.  run_at: where they may not, the law at a rate by a short run.
    times: of its batches, where it serves greedily on one path.
    """

    name: str
    paths: tuple[ExecutionPath, ...]
    law: Callable[[float, Effort], ResponseLaw]
    rate_limit: float
    rises: bool = True
    run_at: Callable[[float], ResponseLaw] | None = None
    times: ServiceTimes | None = None

    def law_at(self, rate: float) -> ResponseLaw:
        """The law at a rate per ms, with the usual effort."""
        return self.law(rate, USUAL)

    @property
    def price_per_hour(self) -> float | None:
        """Of all its paths together; None where one has no price."""
        prices = [path.price_per_hour for path in self.paths]
        return None if None in prices else sum(price for price in prices if price is not None)


@dataclass(frozen=True)
class Part:
    """A path with its mean times T(b) of batches and how they scatter; transfer included on the GPU."""

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
        return replace(self, times=replace(self.times, at=lambda b: factor * self.times.at(b)))


@dataclass(frozen=True)
class Both:
    """The two paths of a machine that has both."""

    gpu: Part
    cpu: Part
    arrivals: Arrivals = POISSON

    def law(self, rate: float, cutoff_ms: float, effort: Effort = USUAL) -> ResponseLaw:
        """The law at a rate per ms and a T_cut. Raises SlaOutOfReach where the CPU is overloaded."""
        return cutoff_response(rate, cutoff_ms, self.gpu.times, self.cpu.times, self.arrivals, effort)

    def overflow_share(self, rate: float, cutoff_ms: float) -> float:
        """Share of the requests that the CPU serves."""
        law = self.law(rate, cutoff_ms)
        assert isinstance(law, OverflowLaw)
        return law.overflow_share

    @property
    def closed_form(self) -> bool:
        """Whether the law is exact and the proved bounds hold: see `queueing.responses`."""
        return closed_form(self.gpu.times, self.cpu.times, self.arrivals)

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
    arrivals: Arrivals = POISSON

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


@dataclass(frozen=True)
class Variation:
    """One of the machines that the data allow: the fit's curve and scatter as they are (None), or drawn by a seed."""

    seed: int | None = None


AS_FITTED = Variation()


def machine_of(profile: HardwareProfile, tokens: int, wishes: Wishes, variation: Variation = AS_FITTED) -> Machine:
    """The CPU and the GPU of a profile; a path of another name plays the GPU where there is neither."""
    cpu, gpu = profile.first_of(CPU_PATHS), profile.first_of(GPU_PATHS)
    if cpu is None and gpu is None and profile.paths:
        gpu = next(iter(profile.paths.values()))
    alone = replace(wishes, max_batch=None, transfer_ms=0.0)
    return Machine(
        None if cpu is None else Part(cpu, _path_times(cpu, tokens, alone, variation)),
        None if gpu is None else Part(gpu, _path_times(gpu, tokens, wishes, variation)),
        wishes.arrivals if variation.seed is None else wishes.arrivals.drawn(np.random.default_rng(variation.seed)),
    )


def _path_times(path: ExecutionPath, tokens: int, wishes: Wishes, variation: Variation) -> ServiceTimes:
    """T(b) of batches of such requests, up to the largest measured, transfer included."""
    top = int(batches_of(path, tokens=tokens)[-1])
    largest = top if wishes.max_batch is None else min(top, wishes.max_batch)
    B = np.arange(1.0, largest + 1)
    law, T = scatter(path, phase_of(tokens)), mean_ms(path, B, tokens, wishes.context)
    if variation.seed is not None:
        T, law = _drawn_times(
            path, B, (tokens, wishes.context), law, np.random.default_rng([variation.seed, *path.name.encode()])
        )
    law = None if law is None else law.up_to(largest).scaled()
    if law is None or wishes.transfer_ms == 0:
        return measured_times(T + wishes.transfer_ms, law)
    # What moving a request takes does not scatter: the step's share of the time does.
    return measured_times(T + wishes.transfer_ms, law.damped(float(np.median(T / (T + wishes.transfer_ms)))))


def _drawn_times(
    path: ExecutionPath,
    B: FloatArray,
    each: tuple[int, float | None],
    law: StepRatios | None,
    rng: np.random.Generator,
) -> tuple[FloatArray, StepRatios | None]:
    """Mean times (n,) of batches B (n,) of requests of so many tokens on such a context, and their scatter, of a
    machine that the data allow."""
    tokens, context = each
    vectors = parameter_draws(path.fit)
    if vectors is None and law is None:
        return mean_ms(path, B, tokens, context), None
    curve = typical_ms(path, B, tokens, context)
    if vectors is not None:
        one = vectors[int(rng.integers(len(vectors)))]
        curve = latency_draws(path.fit, one[None], **batch_steps(B, tokens, context))[0]
    if law is None:
        return curve * (path.quote.mean_factor() if path.quote else 1.0), None
    found = law.drawn(rng)
    return np.asarray(curve * law.levels.drawn_factors(B * tokens, rng) * found.means(B)), found


def simple_systems(machine: Machine, rate: float) -> list[System]:
    """Every system of one path that differs from the others at a rate per ms."""
    found = [] if machine.gpu is None else _batching(machine.gpu, rate, machine.arrivals)
    if machine.cpu is not None:
        found.append(_one_at_a_time(machine.cpu, machine.arrivals))
        # A quoted median says nothing of batches.
        if machine.cpu.path.quote is None or not machine.cpu.path.quote.median:
            found += _batching(machine.cpu, rate, machine.arrivals)
    return found


def _one_at_a_time(part: Part, arrivals: Arrivals) -> System:
    def law(rate: float, effort: Effort) -> ResponseLaw:
        return single_response(rate, part.times, arrivals, effort)

    return System(f"{part.label}, {ONE_AT_A_TIME}", (part.path,), law, 1 / part.mean_ms)


def _batching(part: Part, rate: float, arrivals: Arrivals) -> list[System]:
    best = part.times.best_batch()
    times = part.times if best == part.times.max_batch else replace(part.times, max_batch=best)
    limit = times.rate_limit()
    whole = times.table(1, best)
    T = whole[:MOST_WAITED_FOR].tolist()
    # A batch that is quicker than a smaller one, or scatters less, makes more load the better load.
    rises = all(bool(np.all(np.diff(each) >= -ROUNDING * each[:-1])) for each in (whole, whole * times.spread(best)))

    def law(load: float, effort: Effort) -> ResponseLaw:
        return batch_response(load, times, 1, arrivals, effort)

    def amortised(load: float, effort: Effort) -> ResponseLaw:
        return batch_response(load, times, stopping_batch("amortised", T, load), arrivals, effort)

    def run(load: float) -> ResponseLaw:
        return run_batches(load, times, 1, arrivals, QUICK)

    def run_amortised(load: float) -> ResponseLaw:
        return run_batches(load, times, stopping_batch("amortised", T, load), arrivals, QUICK)

    greedy = System(f"{part.label}, {GREEDY}", (part.path,), law, limit, rises, None if rises else run, times)
    if stopping_batch("amortised", T, rate) == 1:
        return [greedy]
    name = f"{part.label}, amortised batches"
    return [greedy, System(name, (part.path,), amortised, limit, rises, None if rises else run_amortised)]


def law_or_none(system: System, rate: float, effort: Effort = USUAL) -> ResponseLaw | None:
    """The law at a rate per ms; None where the system cannot carry it or it cannot be computed."""
    try:
        return system.law(rate, effort)
    except SlaOutOfReach:
        return None
