"""The law of a response by the quickest way that is right: in closed form where every service of b takes T(b) and
arrivals are Poisson, by running the queue where services scatter or arrivals come in bursts (see `sampled`).
"""

from dataclasses import dataclass, replace

import numpy as np

from latfit.queueing.batch_service import batch_queue
from latfit.queueing.cutoff import cutoff_queue
from latfit.queueing.cutoff_law import exact_law
from latfit.queueing.law import ResponseLaw
from latfit.queueing.service import ServiceTimes
from latfit.queueing.single_server import mm1
from latfit.stats import FloatArray

STEADY = 0.002
"""A coefficient of variation below which every service takes the same time: less than T(b) is known to."""

SEED = 20_240_601


@dataclass(frozen=True, eq=False)
class Arrivals:
    """A stationary stream at any rate: gaps (n,) between arrivals with mean 1, drawn in stretches of `stretch` that
    follow each other in the recording; None for a Poisson stream.  label: what it is, in words."""

    gaps: FloatArray | None = None
    stretch: int = 200
    label: str = "Poisson arrivals"

    @property
    def poisson(self) -> bool:
        return self.gaps is None

    def split(self, replicas: int) -> "Arrivals":
        """What each of so many replicas gets of it, every request going to one of them at random."""
        if self.gaps is None or replicas == 1:
            return self
        rng = np.random.default_rng(SEED)
        ends = np.cumsum(np.tile(self.gaps, replicas))[rng.random(replicas * len(self.gaps)) < 1 / replicas]
        gaps = np.diff(ends, prepend=0.0)
        return replace(self, gaps=gaps / gaps.mean())


POISSON = Arrivals()


@dataclass(frozen=True)
class Effort:
    """How much is run. runs: from empty each.  shortest, longest: requests of a run, which lasts as the load asks
    between them.  seed: of everything drawn."""

    runs: int = 20
    shortest: int = 50_000
    longest: int = 400_000
    seed: int = SEED


USUAL = Effort()
COARSE = Effort(shortest=20_000, longest=80_000)
"""For the points of a search."""

FINE = Effort(shortest=400_000, longest=1_600_000)
"""For a number that is promised."""


def scatters(times: ServiceTimes) -> bool:
    """Whether services of one batch differ by more than T(b) is known."""
    return times.scatter is not None and times.scatter.cv > STEADY


def batch_response(
    rate: float, times: ServiceTimes, threshold: int = 1, arrivals: Arrivals = POISSON, effort: Effort = USUAL
) -> ResponseLaw:
    """Batches on one server that waits for `threshold` (1: greedy). rate per ms. Raises SlaOutOfReach at a rate that is
    not carried."""
    if arrivals.poisson and not scatters(times):
        return batch_queue(rate, times, threshold)
    return run_batches(rate, times, threshold, arrivals, effort)


def run_batches(rate: float, times: ServiceTimes, threshold: int, arrivals: Arrivals, effort: Effort) -> ResponseLaw:
    """The same by running the queue, whether its law has a closed form or not."""
    from latfit.queueing.sampled import sampled_queue

    return sampled_queue(rate, times, threshold, arrivals, effort)


def single_response(
    rate: float, times: ServiceTimes, arrivals: Arrivals = POISSON, effort: Effort = USUAL
) -> ResponseLaw:
    """One request at a time, in T(1) on average: exponential where nobody measured how it scatters."""
    if times.scatter is None and arrivals.poisson:
        return mm1(rate, 1 / times(1))
    from latfit.queueing.sampled import sampled_queue

    return sampled_queue(rate, times.alone(), 1, arrivals, effort)


def cutoff_response(
    rate: float,
    cutoff_ms: float,
    gpu: ServiceTimes,
    cpu: ServiceTimes,
    arrivals: Arrivals = POISSON,
    effort: Effort = USUAL,
) -> ResponseLaw:
    """GPU + CPU with waiting cut off at T_cut; the CPU serves one at a time, exponential where nobody measured how it
    scatters. Raises SlaOutOfReach where the CPU is overloaded, or the law in closed form cannot tell."""
    if closed_form(gpu, cpu, arrivals):
        return exact_law(cutoff_queue(rate, cutoff_ms, gpu, 1 / cpu(1)))
    from latfit.queueing.sampled import sampled_cutoff

    return sampled_cutoff(rate, cutoff_ms, gpu, cpu, arrivals, effort)


def closed_form(gpu: ServiceTimes, cpu: ServiceTimes, arrivals: Arrivals = POISSON) -> bool:
    """Whether the law of `cutoff_law`, and with it the proved bounds, describes a GPU and a CPU: Poisson arrivals,
    steps of the GPU that take T(b), and an exponential service of the CPU."""
    return arrivals.poisson and not scatters(gpu) and cpu.scatter is None
