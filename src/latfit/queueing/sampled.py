"""Response times where services scatter, or arrivals are no Poisson stream: the queue itself, run.

With T(b) F in place of T(b), F i.i.d. from a measured distribution, the chains of `batch_limited` and `cutoff_law` have
no closed form that would be quicker than the queue: a step that takes fifty times as long leaves hundreds of requests
behind, each with a place in one of many batches of random length. So the queue is run on drawn arrivals and services,
RUNS times from empty, and what follows is read off the responses of all runs together:

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
F (the largest of all batches); its relaxation time, in requests, is about

    B (a + a^2 c^2)/(B - a)^2 = (x + x^2 B c^2)/(1 - x)^2,   x = a/B

((1 + x)/(1 - x)^2 for M/M/1, with x near 1). A run leaves out START of them and then counts LENGTH, as far as a budget
goes; where it does not go so far, the interval says so by its width. Where T falls in b a start from empty is slow: the
first request alone takes longest, and all who come meanwhile wait for it; so the wave that follows is left out too.

Everything random is drawn before a run: moments of arrival, and uniform numbers for the services, one a service in the
order in which they begin. All runs draw from the same numbers whatever the rate, T and the scatter: two results differ
by what was changed. Both queues are compiled: batches on one server, and a cut-off with a second server behind it.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import entry, first_beyond, inner
from latfit.histogram import PIECES, Pool, Sketch, at_most, pooled, sketch_of
from latfit.model import StepRatios
from latfit.queueing.distribution import OverflowDistribution, positive, stable
from latfit.queueing.responses import POISSON, USUAL, Arrivals, Effort
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray

GUIDES = 4096
"""Equal parts of 0 to 1, a power of two, for which it is known between which points a uniform number of theirs falls.
Next to all hold a single point, so that a draw is no search, whose turns no processor foresees."""


class Points(NamedTuple):
    """Ratios of a service's time to T(b): values (n,), rising in each group of batch sizes, and the share of the
    group's services up to each, reached (n,); the group of batches of b is group[b], (largest + 1,); a number in part k
    of GUIDES falls on points guide[group, k]..guide[group, k + 1]. No value: every service takes its mean time."""

    values: Any
    reached: Any
    group: Any
    guide: Any


@inner
def _ratio(points, batch, u):  # type: ignore[no-untyped-def]
    """The ratio that a share u of the services of such batches does not exceed; none known (no value): one."""
    if len(points.values) == 0:
        return 1.0
    group, part = points.group[batch], int(u * GUIDES)
    return points.values[first_beyond(points.reached, points.guide[group, part], points.guide[group, part + 1], u)]


@entry
def serve_batches(arrive, T, threshold, points, u, response):  # type: ignore[no-untyped-def]
    """Response in ms of every arrival (n,), batches of threshold..len(T) - 1; returns how many batches were served.
    T[0] is not used."""
    n, largest = len(arrive), len(T) - 1
    free, served, i = 0.0, 0, 0
    while i < n:
        take = min(threshold, n - i)
        start = max(free, arrive[i + take - 1])
        while take < largest and i + take < n and arrive[i + take] <= start:
            take += 1
        free = start + T[take] * _ratio(points, take, u[served])
        for k in range(i, i + take):
            response[k] = free - arrive[k]
        i += take
        served += 1
    return served


@entry
def serve_with_cutoff(arrive, cutoff, main, side, u, out):  # type: ignore[no-untyped-def]
    """Greedy batches on a main server; a request that has waited for `cutoff` goes to a side server, one at a time.

    main: (T, Points of its ratios), T[0] not used; side: (mean ms, Points of its ratios, exponential where it has no
    values); u (2, n): for services on either. out: response (n,) in ms and whether the side server served it (n,).
    Returns the ms that the side server worked.
    """
    (T, of_main), (side_ms, of_side), (response, aside) = main, side, out
    n, largest = len(arrive), len(T) - 1
    free = side_free = 0.0
    served = overflowed = i = 0
    worked = 0.0
    exponential = len(of_side.values) == 0
    while i < n:
        if arrive[i] + cutoff < free:
            begin = max(side_free, arrive[i] + cutoff)
            factor = -np.log1p(-u[1, overflowed]) if exponential else _ratio(of_side, 1, u[1, overflowed])
            side_free = begin + side_ms * factor
            worked += side_ms * factor
            response[i] = side_free - arrive[i]
            aside[i] = True
            overflowed += 1
            i += 1
            continue
        start = max(free, arrive[i])
        take = 1
        while take < largest and i + take < n and arrive[i + take] <= start:
            take += 1
        free = start + T[take] * _ratio(of_main, take, u[0, served])
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
    """The batch queue of `batch_service` with services T(b) F. rate per ms below `times.rate_limit()`; F of mean 1;
    `times.max_batch` is set. Raises SlaOutOfReach above the limit."""
    rate, limit = positive(rate, "rate"), times.rate_limit()
    stable(rate, limit, "the batch queue")
    T = _table(times)
    points = _points(times.scatter, len(T) - 1)
    wanted = relaxation(rate / limit, len(T) - 1, times.scatter, arrivals)
    start, n = _length(wanted, _first_wave(rate, T, rate / limit), effort)
    responses, served = _Responses(effort, n, start), 0
    for run in range(effort.runs):
        arrive = _moments(arrivals, rate, n, effort.seed, run)
        u = _uniform(n, effort.seed, run)[0]
        served += serve_batches(arrive, T, threshold, points, u, responses.room)
        responses.take()
    runs = responses.sketches
    pool = pooled(runs)
    return SampledDistribution(
        mean_ms=pool.mean,
        tail=pool.above,
        utilisation=rate / limit,
        rate_limit=limit,
        conditions=f"{arrivals.label}, FIFO, one server, batches up to {len(T) - 1}, T(b) times the measured scatter",
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
    """GPU + CPU with waiting cut off at T_cut (see `cutoff`); cpu: T(1) of one request at a time, its scatter None for
    an exponential service. Any largest batch, any load that both carry.

    Raises SlaOutOfReach where what overflows is more than the CPU serves.
    """
    rate, cutoff = positive(rate, "rate"), positive(cutoff_ms, "T_cut", "in ms")
    T, side_ms = _table(gpu), cpu(1)
    wanted = relaxation(min(rate / (gpu.rate_limit() + 1 / side_ms), 0.99), len(T) - 1, gpu.scatter, arrivals)
    start, n = _length(max(wanted, relaxation(0.9, 1, cpu.scatter, arrivals)), 0.0, effort)
    responses, aside = _Responses(effort, n, start), np.zeros(n, dtype=np.bool_)
    main, side = (T, _points(gpu.scatter, len(T) - 1)), (side_ms, _points(cpu.scatter, 1))
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
        conditions=f"{arrivals.label}, both FIFO, overflow stays on the CPU, measured scatter",
        source=f"simulated, {pool.size:,} requests",
        exact=False,
        runs=runs,
        settled=n - start >= LENGTH * wanted,
        overflow_share=overflow / effort.runs,
    )


def relaxation(load: float, largest: int, scatter: StepRatios | None, arrivals: Arrivals = POISSON) -> float:
    """Requests after which a queue at so much of its limit has about forgotten its state (see the module)."""
    variance = load + load**2 * largest * (scatter.up_to(largest).cv ** 2 if scatter is not None else 0.0)
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


def _points(scatter: StepRatios | None, largest: int) -> Points:
    """The ratios of batches up to `largest`."""
    if scatter is None:
        return Points(np.empty(0), np.empty(0), np.zeros(largest + 1, dtype=np.int64), np.zeros((1, 1), dtype=np.int32))
    first, last = scatter.points_of(largest)
    starts, group = np.unique(first, return_inverse=True)
    guide = [
        _guide(scatter.reached[start : end + 1], start) for start, end in zip(starts, np.unique(last), strict=True)
    ]
    return Points(scatter.values, scatter.reached, group.astype(np.int64), np.array(guide))


def _guide(reached: FloatArray, start: int) -> FloatArray:
    """How many of the shares (n,), the last of which is 1, are at or below k/GUIDES for k = 0..GUIDES, n - 1 at the
    most, as places from `start` on."""
    within = np.cumsum(np.bincount(np.ceil(reached * GUIDES).astype(np.int64), minlength=GUIDES + 1))
    return (start + np.minimum(within, len(reached) - 1)).astype(np.int32)


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
