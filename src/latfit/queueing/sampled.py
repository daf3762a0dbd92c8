"""The batch queue, simulated on common random numbers: docs/theory/planning.md.

A run draws from (seed, run) alone, so results differ by what was changed (rate, T, noise) and not by luck.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from latfit.compiled import entry, inner
from latfit.histogram import histogram_of
from latfit.model import drawn_step_ms, noise_table
from latfit.queueing.arrivals import POISSON, SEED, Arrivals
from latfit.queueing.distribution import ResponseDistribution, require_stable
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray

CACHED_ARRAYS = 44  # of random numbers: those of two efforts
WARMUP, LENGTH = 12, 40  # relaxation times that a run leaves out, and counts


@dataclass(frozen=True)
class Effort:
    """Independent runs from empty, of `shortest` to `longest` requests as the load requires."""

    runs: int = 20
    shortest: int = 50_000
    longest: int = 400_000
    seed: int = SEED


USUAL = Effort()
COARSE = Effort(20, 20_000, 80_000)  # bisection
QUICK = Effort(20, 6_000, 24_000)  # a grid of points, and ratios of runs on the same numbers
FINE = Effort(20, 100_000, 800_000)  # a number that is reported


class Server(NamedTuple):
    typical_ms: Any
    fixed_ms: Any
    noise: Any


@inner
def _service_ms(server, batch, u):  # type: ignore[no-untyped-def]
    return server.fixed_ms + drawn_step_ms(server.noise, server.noise.group[0, batch], server.typical_ms[batch], u)


@entry
def serve_batches(arrive, server, threshold, u, response):  # type: ignore[no-untyped-def]
    """Write the response of every arrival (n,), batches from `threshold` on; return the number of batches."""
    n, largest = len(arrive), len(server.typical_ms) - 1
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


def simulate_batches(
    rate: float, times: ServiceTimes, threshold: int = 1, arrivals: Arrivals = POISSON, effort: Effort = USUAL
) -> ResponseDistribution:
    """Simulate one server that takes all waiting requests, up to `times.max_batch`, once `threshold` of them wait."""
    limit = times.rate_limit()
    require_stable(rate, limit)
    start, n, settled = run_length(rate / limit, times, arrivals, _first_wave(rate, times), effort)
    T = np.concatenate([[0.0], times.typical_ms])
    server = Server(T, times.fixed_ms, noise_table([times.noise], times.max_batch))
    response, runs, served = np.empty(n), [], 0
    for run in range(effort.runs):
        arrive = arrival_moments(arrivals, rate, n, effort.seed, run)
        served += serve_batches(arrive, server, threshold, _uniform(n, effort.seed, run), response)
        runs.append(histogram_of(response[start:]))
    return ResponseDistribution(tuple(runs), rate / limit, limit, settled, effort.runs * n / served)


def run_length(
    load: float, times: ServiceTimes, arrivals: Arrivals, wave: float, effort: Effort
) -> tuple[int, int, bool]:
    """Return (requests left out, requests of a run, whether the effort allows as many as the load requires).

    load: share of the stability limit. wave: requests that a slow start from empty takes in addition.
    """
    wanted = _relaxation(min(load, 0.99), times, arrivals)
    start = WARMUP * wanted + wave
    n = int(min(max(start + max(LENGTH * wanted, 2 * wave), effort.shortest), effort.longest))
    left_out = min(int(start) + n // 50, n // 2)
    return left_out, n, n - left_out >= LENGTH * wanted


def _relaxation(load: float, times: ServiceTimes, arrivals: Arrivals) -> float:
    """Return the requests until the queue forgets its state, by a random walk with its drift and variance."""
    variance = load + load**2 * times.max_batch * float(times.cv.max()) ** 2
    return variance * max(arrivals.dispersion, 1.0) / (1 - load) ** 2


def _first_wave(rate: float, times: ServiceTimes) -> float:
    """Return twice the requests that come while the slowest batch is served, and then at the spare rate."""
    load = rate / times.rate_limit()
    return 2 * rate * float(times.mean_ms.max()) * (1 + 1 / (1 - load))


def arrival_moments(arrivals: Arrivals, rate: float, n: int, seed: int, run: int) -> FloatArray:
    if arrivals.gaps is None:
        return np.asarray(_unit_moments(n, seed, run) / rate)
    start = int(np.random.default_rng([seed, run, 2]).integers(len(arrivals.gaps)))
    return np.asarray(np.cumsum(np.resize(np.roll(arrivals.gaps, -start), n)) / rate)


@lru_cache(maxsize=CACHED_ARRAYS)
def _unit_moments(n: int, seed: int, run: int) -> FloatArray:
    return np.cumsum(np.random.default_rng([seed, run, 0]).standard_exponential(n))


@lru_cache(maxsize=CACHED_ARRAYS)
def _uniform(n: int, seed: int, run: int) -> FloatArray:
    return np.random.default_rng([seed, run, 1]).random(n)
