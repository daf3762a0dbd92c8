"""Response times where services scatter, or arrivals are no Poisson stream: the queue itself, run.

With a measured noise on T(b) (see `model.noise`), independent from service to service, the chains of
`batch_limited` and `cutoff_law` have no closed form that would be quicker than the queue: a step that takes fifty times
as long leaves hundreds of requests behind, each with a place in one of many batches of random length. So the queue is
run on drawn arrivals and services, RUNS times from empty, and what follows is read off the responses of all runs
together:

    P(R > x)     the share of responses above x
    percentile   the smallest x that a share q of all responses does not exceed

Percentiles are those of all runs together, with an equal weight for every response and not for every run: an average
of the runs' own percentiles is too low wherever runs differ, as they do in a queue near saturation. With p_i the share
of run i at or below the pooled percentile x_q, the standard error s of the share is the p_i's standard deviation over
the root of the number m of runs, and the interval of x_q is [x at q - t s, x at q + t s] with Student's t on m - 1
degrees. Responses are kept as counts by bin (`latfit.histogram`): exact where a bin holds one value (those of an idle
machine are all alike), off by less than a bin's width of 0.2 % elsewhere.

How long a run must be follows from how slowly the queue forgets. Near saturation the number left behind is a random
walk that loses B - a requests a service, a = lambda T(B), with variance a + a^2 c^2, c the coefficient of variation of
F a service (the largest of all batches); its relaxation time, in requests, is about

    B (a + a^2 c^2)/(B - a)^2 = (x + x^2 B c^2)/(1 - x)^2,   x = a/B

((1 + x)/(1 - x)^2 for M/M/1, with x near 1). A run leaves out START of them and then counts LENGTH, as far as a budget
goes; where it does not go so far, the interval says so by its width. Where T falls in b a start from empty is slow: the
first request alone takes longest, and all who come meanwhile wait for it; so the wave that follows is left out too.

Everything random is drawn before a run: moments of arrival, and uniform numbers for the services, one a service in the
order in which they begin. All runs draw from the same numbers whatever the rate, T and the scatter: two results differ
by what was changed. Both queues are compiled: batches on one server, and a cut-off with a second server behind it.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import entry, inner
from latfit.histogram import PIECES, Pool, Sketch, at_most, pooled, sketch_of
from latfit.model import drawn_step_ms, noise_table
from latfit.queueing.distribution import OverflowDistribution, positive, stable
from latfit.queueing.responses import POISSON, USUAL, Arrivals, Effort
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray


class Server(NamedTuple):
    """T (largest + 1,): typical ms of a batch, T[0] unused.  fixed: ms added to each.  noise: a `NoiseTable` of one
    kind.  exponential: every service is exponential about T instead."""

    T: Any
    fixed: Any
    noise: Any
    exponential: Any


@inner
def _service_ms(server, batch, u):  # type: ignore[no-untyped-def]
    if server.exponential:
        return -server.T[batch] * np.log1p(-u)
    return server.fixed + drawn_step_ms(server.noise, server.noise.group[0, batch], server.T[batch], u)


@entry
def serve_batches(arrive, server, threshold, u, response):  # type: ignore[no-untyped-def]
    """Response in ms of every arrival (n,), batches from `threshold` on; returns how many batches were served."""
    n, largest = len(arrive), len(server.T) - 1
    free, served, i = 0.0, 0, 0
    while i < n:
        take = min(threshold, n - i)
        start = max(free, arrive[i + take - 1])
        while take < largest and i + take < n and arrive[i + take] <= start:
            take += 1
        free = start + _service_ms(server, take, u[served])
        for k in range(i, i + take):
            response[k] = free - arrive[k]
        i += take
        served += 1
    return served


@entry
def serve_with_cutoff(arrive, cutoff, main, side, u, out):  # type: ignore[no-untyped-def]
    """Greedy batches on a main server; a request that has waited for `cutoff` goes to a side server, one at a time.

    u (2, n): for services on either. out: response (n,) in ms and whether the side server served it (n,). Returns the
    ms that the side server worked.
    """
    response, aside = out
    n, largest = len(arrive), len(main.T) - 1
    free = side_free = 0.0
    served = overflowed = i = 0
    worked = 0.0
    while i < n:
        if arrive[i] + cutoff < free:
            begin = max(side_free, arrive[i] + cutoff)
            lasts = _service_ms(side, 1, u[1, overflowed])
            side_free = begin + lasts
            worked += lasts
            response[i] = side_free - arrive[i]
            aside[i] = True
            overflowed += 1
            i += 1
            continue
        start = max(free, arrive[i])
        take = 1
        while take < largest and i + take < n and arrive[i + take] <= start:
            take += 1
        free = start + _service_ms(main, take, u[0, served])
        for k in range(i, i + take):
            response[k] = free - arrive[k]
            aside[k] = False
        i += take
        served += 1
    return worked


KEPT = 44
"""Arrays of random numbers that are kept: those of the runs of one effort, and a few more."""

START, LENGTH = 12, 40
"""Relaxation times that a run leaves out at its start, and counts."""


@dataclass(frozen=True, eq=False)
class SampledDistribution(OverflowDistribution):
    """A distribution read off runs of the queue. runs: responses of each, one batch; all of them together: `pool`.
    settled: whether the runs were as long as the load asks."""

    runs: tuple[Sketch, ...] = field(default=(), repr=False)
    settled: bool = True
    mean_batch: float = math.nan

    @cached_property
    def pool(self) -> Pool:
        return pooled(self.runs)

    def percentile(self, q: float) -> float:
        return self.pool.value(q)

    def percentile_interval(self, q: float, level: float = 0.95) -> tuple[float, float]:
        """Where the percentile lies as far as the runs tell, in ms; the upper end is infinite where they cannot."""
        from scipy.special import stdtrit

        half = float(stdtrit(len(self.runs) - 1, 0.5 + level / 2)) * self.tail_error(self.percentile(q))
        return self.percentile(max(q - half, 1e-12)), self.percentile(q + half) if q + half < 1 else math.inf

    def tail_error(self, x: float) -> float:
        """Standard error of P(R > x), from the differences between the runs; infinite for one run."""
        m = len(self.runs)
        if m < 2:
            return math.inf
        place = self.pool.place_of(x)
        below = np.array([at_most(run, self.pool, place)[0].sum() for run in self.runs])
        sizes = np.array([run.totals.sum() for run in self.runs], dtype=np.float64)
        shares, weights = below / sizes, sizes / sizes.sum()
        return math.sqrt(float(weights**2 @ (shares - float(weights @ shares)) ** 2) * m / (m - 1))


def sampled_queue(
    rate: float, times: ServiceTimes, threshold: int = 1, arrivals: Arrivals = POISSON, effort: Effort = USUAL
) -> SampledDistribution:
    """The batch queue of `batch_service` with noise. rate per ms below `times.rate_limit()`; `times.max_batch` is set.
    Raises SlaOutOfReach above the limit."""
    rate, limit = positive(rate, "rate"), times.rate_limit()
    stable(rate, limit, "the batch queue")
    server, T = _server(times), _table(times)
    wanted = relaxation(rate / limit, times, arrivals)
    start, n = _length(wanted, _first_wave(rate, T, rate / limit), effort)
    responses, served = _Responses(effort, n, start), 0
    for run in range(effort.runs):
        arrive = _moments(arrivals, rate, n, effort.seed, run)
        u = _uniform(n, effort.seed, run)[0]
        served += serve_batches(arrive, server, threshold, u, responses.room)
        responses.take()
    runs = responses.sketches
    pool = pooled(runs)
    return SampledDistribution(
        mean_ms=pool.mean,
        tail=pool.above,
        utilisation=rate / limit,
        rate_limit=limit,
        conditions=f"{arrivals.label}, FIFO, one server, batches up to {len(T) - 1}, T(b) with the measured noise",
        source=f"simulated, {pool.size:,} requests",
        exact=False,
        runs=runs,
        settled=n - start >= LENGTH * wanted,
        mean_batch=effort.runs * n / served,
    )


def sampled_cutoff(
    rate: float,
    cutoff_ms: float,
    gpu: ServiceTimes,
    cpu: ServiceTimes,
    arrivals: Arrivals = POISSON,
    effort: Effort = USUAL,
) -> SampledDistribution:
    """GPU + CPU with waiting cut off at T_cut (see `cutoff`); cpu: T(1) of one request at a time, its noise None for
    an exponential service. Any largest batch, any load that both carry.

    Raises SlaOutOfReach where what overflows is more than the CPU serves.
    """
    rate, cutoff = positive(rate, "rate"), positive(cutoff_ms, "T_cut", "in ms")
    side_ms, one = cpu(1), replace(cpu, max_batch=1)
    wanted = relaxation(min(rate / (gpu.rate_limit() + 1 / side_ms), 0.99), gpu, arrivals)
    start, n = _length(max(wanted, relaxation(0.9, one, arrivals)), 0.0, effort)
    responses, aside = _Responses(effort, n, start), np.zeros(n, dtype=np.bool_)
    main, side = _server(gpu), _server(one)._replace(exponential=cpu.noise is None)
    worked = until = overflow = 0.0
    for run in range(effort.runs):
        arrive = _moments(arrivals, rate, n, effort.seed, run)
        u = _uniform(n, effort.seed, run)
        worked += serve_with_cutoff(arrive, cutoff, main, side, u, (responses.room, aside))
        until += float(arrive[-1])
        overflow += float(aside[start:].mean())
        responses.take()
    load = worked / until
    stable(load / side_ms, 1 / side_ms, "the CPU's queue", "A larger T_cut sends less to it.")
    runs = responses.sketches
    pool = pooled(runs)
    return SampledDistribution(
        mean_ms=pool.mean,
        tail=pool.above,
        utilisation=load,
        rate_limit=math.nan,
        conditions=f"{arrivals.label}, both FIFO, overflow stays on the CPU, measured noise",
        source=f"simulated, {pool.size:,} requests",
        exact=False,
        runs=runs,
        settled=n - start >= LENGTH * wanted,
        overflow_share=overflow / effort.runs,
    )


def relaxation(load: float, times: ServiceTimes, arrivals: Arrivals = POISSON) -> float:
    """Requests after which a queue at so much of its limit has about forgotten its state (see the module)."""
    assert times.max_batch is not None
    variance = load + load**2 * times.max_batch * float(times.cv(times.max_batch).max()) ** 2
    return variance * max(arrivals.dispersion, 1.0) / (1 - load) ** 2


def _first_wave(rate: float, T: FloatArray, load: float) -> float:
    """Requests until a start from empty is forgotten where one request alone takes longest: those that come meanwhile,
    and while they are served at the spare rate, twice over."""
    return 2 * rate * float(T[1:].max()) * (1 + 1 / (1 - load))


def _length(wanted: float, wave: float, effort: Effort) -> tuple[int, int]:
    """(requests left out, requests) of a run."""
    start = START * wanted + wave
    n = int(min(max(start + max(LENGTH * wanted, 2 * wave), effort.shortest), effort.longest))
    return min(int(start) + n // 50, n // 2), n


class _Responses:
    """The responses of runs of n requests, `start` of them left out. room: where those of the next run go (n,)."""

    def __init__(self, effort: Effort, n: int, start: int) -> None:
        self._start, self._apart, self._taken = start, effort.apart, 0
        self._rooms = np.empty((1 if effort.apart else effort.runs, n))
        self._sketches: list[Sketch] = []

    @property
    def room(self) -> FloatArray:
        return np.asarray(self._rooms[0 if self._apart else self._taken])

    def take(self) -> None:
        """The run in the room has ended."""
        if self._apart:
            self._sketches.append(_as_one_batch(self.room, self._start))
        else:
            self.room[: self._start] = np.nan
            self._taken += 1

    @property
    def sketches(self) -> tuple[Sketch, ...]:
        """One a run, or one of all together where they are not told apart."""
        return tuple(self._sketches) if self._apart else (_as_one_batch(self._rooms.ravel(), 0),)


def _as_one_batch(response: FloatArray, start: int) -> Sketch:
    """The responses (n,) in ms from `start` on."""
    return sketch_of(response, start, PIECES * math.ceil(len(response) / PIECES))


def _table(times: ServiceTimes) -> FloatArray:
    assert times.max_batch is not None
    return np.concatenate([[0.0], times.table(1, times.max_batch)])


def _server(times: ServiceTimes) -> Server:
    """Services of batches up to `times.max_batch` as the loops take them."""
    assert times.max_batch is not None
    batches = np.arange(1.0, times.max_batch + 1)
    T = np.concatenate([[0.0], np.asarray(times.at(batches), dtype=np.float64)])
    return Server(T, times.fixed_ms, noise_table([times.noise], times.max_batch), False)


def _moments(arrivals: Arrivals, rate: float, n: int, seed: int, run: int) -> FloatArray:
    """Arrivals (n,) in ms at a rate per ms."""
    return (
        np.asarray(_unit_moments(n, seed, run) if arrivals.gaps is None else _recorded(arrivals, n, seed, run)) / rate
    )


@lru_cache(maxsize=KEPT)
def _unit_moments(n: int, seed: int, run: int) -> FloatArray:
    return np.cumsum(np.random.default_rng([seed, run, 0]).standard_exponential(n))


@lru_cache(maxsize=KEPT)
def _uniform(n: int, seed: int, run: int) -> FloatArray:
    return np.random.default_rng([seed, run, 1]).random((2, n))


def _recorded(arrivals: Arrivals, n: int, seed: int, run: int) -> FloatArray:
    """The recording in a circle, from a place drawn at random."""
    assert arrivals.gaps is not None
    start = int(np.random.default_rng([seed, run, 2]).integers(len(arrivals.gaps)))
    return np.cumsum(np.resize(np.roll(arrivals.gaps, -start), n))
