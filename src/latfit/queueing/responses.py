"""The distribution of a response by the quickest way that is right: in closed form where every service of b takes T(b)
and arrivals are Poisson, by running the queue where services scatter or arrivals come in bursts (see `sampled`).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from latfit.queueing.batch import batch_queue
from latfit.queueing.distribution import ResponseDistribution, positive, stable
from latfit.queueing.overflow import cutoff_queue, exact_distribution
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray

STEADY = 0.002
"""A coefficient of variation below which every service takes the same time: less than T(b) is known to."""

SEED = 20_240_601

GROWTH = 4.0
"""Dispersion over an eighth of the time at which it still grows; the sums it is told from leave a third of it open."""

PIECES, FEWEST_SUMS = 40, 20
"""Pieces that a recording is drawn anew from; sums of gaps that a variance is told from."""


@dataclass(frozen=True, eq=False)
class Arrivals:
    """A stationary stream at any rate: gaps (n,) between arrivals with mean 1, in the order of the recording, which is
    run through in a circle; None for a Poisson stream.  label: what it is, in words."""

    gaps: FloatArray | None = None
    label: str = "Poisson arrivals"

    @property
    def poisson(self) -> bool:
        return self.gaps is None

    @cached_property
    def dispersion(self) -> float:
        """Variance over mean of how many come in a time, the largest over times up to a twentieth of the recording; 1
        for a Poisson stream."""
        return 1.0 if self.gaps is None else max((found for _, found in dispersions(self.gaps)), default=1.0)

    @property
    def grows(self) -> bool:
        """Whether the dispersion still grows with the time looked at when the recording ends: its bursts last longer
        than it tells."""
        found = [] if self.gaps is None else [each for _, each in dispersions(self.gaps)]
        return len(found) > 4 and found[-1] > GROWTH * found[-4]

    def split(self, replicas: int) -> "Arrivals":
        """What each of so many replicas gets of it, every request going to one of them at random."""
        if self.gaps is None or replicas == 1:
            return self
        rng = np.random.default_rng(SEED)
        ends = np.cumsum(np.tile(self.gaps, replicas))[rng.random(replicas * len(self.gaps)) < 1 / replicas]
        return self._of(np.diff(ends, prepend=0.0))

    def drawn(self, rng: np.random.Generator) -> "Arrivals":
        """Another recording of the same stream, as far as this one tells: PIECES long pieces of it, drawn at random."""
        if self.gaps is None:
            return self
        n = len(self.gaps)
        length = -(-n // PIECES)
        places = rng.integers(0, n, PIECES)
        return self._of(self.gaps[(places[:, None] + np.arange(length)).ravel()[:n] % n])

    def _of(self, gaps: FloatArray) -> "Arrivals":
        return replace(self, gaps=gaps / gaps.mean())


def dispersions(gaps: FloatArray) -> list[tuple[int, float]]:
    """(m, variance of the sum of m gaps over m times their squared mean) for m = 1, 2, 4, ..., as long as there are
    twenty sums: 1 for a Poisson stream, more where requests come in bursts of m or more."""
    found, m, square = [], 1, float(gaps.mean()) ** 2
    while len(gaps) // m >= FEWEST_SUMS:
        sums = gaps[: len(gaps) // m * m].reshape(-1, m).sum(axis=1)
        found.append((m, float(np.var(sums, ddof=1)) / (m * square)))
        m *= 2
    return found


POISSON = Arrivals()


@dataclass(frozen=True)
class Effort:
    """How much is run. runs: from empty each.  shortest, longest: requests of a run, which lasts as the load asks
    between them.  seed: of everything drawn.  apart: whether runs are counted apart, which tells how sure a percentile
    is and takes as long as the runs where these are short."""

    runs: int = 20
    shortest: int = 50_000
    longest: int = 400_000
    seed: int = SEED
    apart: bool = True


USUAL = Effort()
COARSE = Effort(shortest=20_000, longest=80_000, apart=False)
"""For the points of a search."""

QUICK = Effort(shortest=6_000, longest=24_000, apart=False)
"""For a first look, and for ratios of runs on the same numbers."""

FINE = Effort(shortest=100_000, longest=1_600_000)
"""For a number that is promised."""


def scatters(times: ServiceTimes) -> bool:
    """Whether services of one batch differ by more than T(b) is known."""
    return times.noise is not None and float(times.cv(times.max_batch or 1).max()) > STEADY


def batch_response(
    rate: float, times: ServiceTimes, threshold: int = 1, arrivals: Arrivals = POISSON, effort: Effort = USUAL
) -> ResponseDistribution:
    """Batches on one server that waits for `threshold` (1: greedy). rate per ms. Raises SlaOutOfReach at a rate that is
    not carried."""
    if arrivals.poisson and not scatters(times):
        return batch_queue(rate, times, threshold)
    return run_batches(rate, times, threshold, arrivals, effort)


def run_batches(
    rate: float, times: ServiceTimes, threshold: int, arrivals: Arrivals, effort: Effort
) -> ResponseDistribution:
    """The same by running the queue, whether its distribution has a closed form or not."""
    from latfit.queueing.sampled import sampled_queue

    return sampled_queue(rate, times, threshold, arrivals, effort)


def single_response(
    rate: float, times: ServiceTimes, arrivals: Arrivals = POISSON, effort: Effort = USUAL
) -> ResponseDistribution:
    """One request at a time, in T(1) on average: exponential where nobody measured how it scatters."""
    if times.noise is None and arrivals.poisson:
        return mm1(rate, 1 / times(1))
    from latfit.queueing.sampled import sampled_queue

    return sampled_queue(rate, times.alone(), 1, arrivals, effort)


def mm1(rate: float, service_rate: float) -> ResponseDistribution:
    """M/M/1, whose response is exponential with rate mu - lambda. rate < service_rate, both per ms."""
    rate, mu = positive(rate, "rate"), positive(service_rate, "service rate")
    stable(rate, mu, "one server")
    return ResponseDistribution(
        mean_ms=1 / (mu - rate),
        tail=lambda t: math.exp(-(mu - rate) * max(t, 0.0)),
        utilisation=rate / mu,
        rate_limit=mu,
        conditions="Poisson arrivals, exponential service, one server, FIFO",
        source="M/M/1, closed form",
    )


def cutoff_response(
    rate: float,
    cutoff_ms: float,
    gpu: ServiceTimes,
    cpu: ServiceTimes,
    arrivals: Arrivals = POISSON,
    effort: Effort = USUAL,
) -> ResponseDistribution:
    """GPU + CPU with waiting cut off at T_cut; the CPU serves one at a time, exponential where nobody measured how it
    scatters. Raises SlaOutOfReach where the CPU is overloaded, or the closed form cannot tell."""
    if closed_form(gpu, cpu, arrivals):
        return exact_distribution(cutoff_queue(rate, cutoff_ms, gpu, 1 / cpu(1)))
    from latfit.queueing.sampled import sampled_cutoff

    return sampled_cutoff(rate, cutoff_ms, gpu, cpu, arrivals, effort)


def closed_form(gpu: ServiceTimes, cpu: ServiceTimes, arrivals: Arrivals = POISSON) -> bool:
    """Whether the distribution of `cutoff_law`, and with it the proved bounds, describes a GPU and a CPU: Poisson
    arrivals, steps of the GPU that take T(b), and an exponential service of the CPU."""
    return arrivals.poisson and not scatters(gpu) and cpu.noise is None
