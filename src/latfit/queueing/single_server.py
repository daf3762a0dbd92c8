"""Queues that serve one request at a time: M/M/1, M/M/c, M/G/1 and M/D/1. Poisson arrivals, first come first served.

M/M/1: the response is exponential with rate mu - lambda. M/M/c: with Erlang's C the chance to wait, the wait of those
who do is exponential with rate d = c mu - lambda, and the own service is added to it. M/G/1: Pollaczek and Khinchine's
mean wait lambda E[S^2] / (2 (1 - rho)); where the service has exponential moments, Kingman's martingale gives
P(W > t) <= e^(-theta t) with lambda (E e^(theta S) - 1) = theta.

M/D/1: Crommelin's alternating sum loses all digits at large t. Franx (2001) has the same law as a sum of positive
terms: for (k-1) D <= t < k D, P(W <= t) = sum_j Q_(k-1-j) Poisson(j; lambda (kD - t)), where Q_n is the chance of at
most n + 1 in the system. Those chances follow from level crossings, again with positive terms only:
pi_n a_0 = pi_0 P(A >= n) + sum_(0<k<n) pi_k P(A > n - k), A ~ Poisson(lambda D).

None of these describes a machine that serves batches: there the service depends on the queue (`batch_service`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.distribution import ResponseLaw, percentile_of, positive, stable
from latfit.stats import FloatArray

LARGEST_CHAIN = 200_000
NEGLIGIBLE = 1e-16


@dataclass(frozen=True)
class MeanResponse:
    """Means of an M/G/1 queue in ms; its percentiles depend on more than two moments of the service."""

    wait_ms: float
    response_ms: float
    utilisation: float
    conditions: str
    source: str


@dataclass(frozen=True)
class ExponentialBound:
    """P(W > t) <= e^(-decay t) for the wait W in queue; `decay` per ms."""

    decay: float
    source: str

    def tail(self, t_ms: float) -> float:
        return math.exp(-self.decay * max(t_ms, 0.0))

    def percentile(self, q: float) -> float:
        return percentile_of(self.tail, q)


def mm1(rate: float, service_rate: float) -> ResponseLaw:
    """M/M/1: exponential service. rate < service_rate, both per ms."""
    rate, mu = positive(rate, "rate"), positive(service_rate, "service rate")
    stable(rate, mu, "one server")
    return ResponseLaw(
        mean_ms=1 / (mu - rate),
        tail=lambda t: math.exp(-(mu - rate) * max(t, 0.0)),
        utilisation=rate / mu,
        rate_limit=mu,
        conditions="Poisson arrivals, exponential service, one server, FIFO",
        source="M/M/1, closed form",
    )


def erlang_c(servers: int, load: float) -> float:
    """Chance that an arrival waits in M/M/c; load = rate / service rate < servers. Recursion over Erlang's B."""
    blocked = 1.0
    for i in range(1, servers + 1):
        blocked = load * blocked / (i + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def mmc(rate: float, service_rate: float, servers: int) -> ResponseLaw:
    """M/M/c: `servers` equal servers with exponential service. rate < servers * service_rate, per ms."""
    rate, mu = positive(rate, "rate"), positive(service_rate, "service rate")
    if servers < 1:
        raise WrongUsage(f"{servers} servers", where="servers", remedy="Give at least one server.")
    stable(rate, servers * mu, f"a queue of {servers} servers")
    waits, spare = erlang_c(servers, rate / mu), servers * mu - rate

    def tail(t: float) -> float:
        t = max(t, 0.0)
        # (d e^-mt - m e^-dt)/(d - m) = e^-mt + m e^-mt (1 - e^-(d-m)t)/(d - m): no cancellation as d -> m.
        gap = spare - mu
        both = t if abs(gap) * t < 1e-12 else -math.expm1(-gap * t) / gap
        return math.exp(-mu * t) * (1 + waits * mu * both)

    return ResponseLaw(
        mean_ms=waits / spare + 1 / mu,
        tail=tail,
        utilisation=rate / (servers * mu),
        rate_limit=servers * mu,
        conditions=f"Poisson arrivals, exponential service, {servers} servers, FIFO",
        source="M/M/c, Erlang C",
    )


def mg1(rate: float, mean_service_ms: float, second_moment_ms2: float) -> MeanResponse:
    """M/G/1 means from E[S] in ms and E[S^2] in ms^2 (Pollaczek-Khinchine). rate * E[S] < 1."""
    rate, mean = positive(rate, "rate"), positive(mean_service_ms, "mean service", "in ms")
    if not second_moment_ms2 >= mean**2 * (1 - 1e-12):
        raise WrongUsage(
            f"E[S^2] = {second_moment_ms2:g} is below E[S]^2 = {mean**2:g}",
            where="second moment",
            remedy="Give the mean of the squared service times.",
        )
    stable(rate, 1 / mean, "one server")
    wait = rate * second_moment_ms2 / (2 * (1 - rate * mean))
    conditions = "Poisson arrivals, i.i.d. service independent of the queue, one server, FIFO"
    return MeanResponse(wait, wait + mean, rate * mean, conditions, "M/G/1, Pollaczek-Khinchine")


def kingman_bound(rate: float, mean_service_ms: float, excess_mgf: Callable[[float], float]) -> ExponentialBound:
    """Kingman's bound on the wait in M/G/1: theta > 0 with rate * excess_mgf(theta) = theta.

    excess_mgf: theta -> E e^(theta S) - 1, infinite (or overflowing) where the moment does not exist; a service
    without exponential moments is refused. Source: Kingman (1964).
    """
    rate = positive(rate, "rate")
    stable(rate, 1 / positive(mean_service_ms, "mean service", "in ms"), "one server")

    def drift(theta: float) -> float:
        try:
            return min(rate * excess_mgf(theta) - theta, 1e300)
        except OverflowError:
            return 1e300

    low = 1e-9 / mean_service_ms
    if drift(low) >= 0:
        raise SlaOutOfReach(
            "the service time has no exponential moment, or the load is within 1e-9 of its limit: no such bound",
            where="service time",
            remedy="Use the mean (mg1), or simulate.",
        )
    high = 1 / mean_service_ms
    while drift(high) < 0:
        high *= 2
    return ExponentialBound(float(optimize.brentq(drift, low, high, xtol=1e-14)), "Kingman's bound on the wait")


def md1_wait(rate: float, service_ms: float) -> ResponseLaw:
    """Wait in queue of M/D/1: every service takes `service_ms`. rate * service_ms < 1."""
    rate, D = positive(rate, "rate"), positive(service_ms, "service", "in ms")
    stable(rate, 1 / D, "one server")
    at_most = np.cumsum(_md1_numbers(rate * D))

    def tail(t: float) -> float:
        if t < 0:
            return 1.0
        k = math.floor(t / D) + 1
        mean = rate * (k * D - t)
        j = np.arange(min(k, int(mean + 12 * math.sqrt(mean) + 40)))
        known = at_most[np.minimum(k - j, len(at_most) - 1)]
        poisson = np.exp(special.xlogy(j, mean) - mean - special.gammaln(j + 1))
        return max(0.0, 1 - float(known @ poisson))

    return ResponseLaw(
        mean_ms=rate * D * D / (2 * (1 - rate * D)),
        tail=tail,
        utilisation=rate * D,
        rate_limit=1 / D,
        conditions="Poisson arrivals, constant service, one server, FIFO; the wait, without the service",
        source="M/D/1, Crommelin's law in Franx's form",
    )


def md1(rate: float, service_ms: float) -> ResponseLaw:
    """Response (wait and service) of M/D/1."""
    wait = md1_wait(rate, service_ms)
    return ResponseLaw(
        mean_ms=wait.mean_ms + service_ms,
        tail=lambda t: wait.tail(t - service_ms),
        utilisation=wait.utilisation,
        rate_limit=wait.rate_limit,
        conditions="Poisson arrivals, constant service, one server, FIFO",
        source=wait.source,
    )


def _md1_numbers(rho: float) -> FloatArray:
    """P(N = n) in the system of M/D/1, n = 0, 1, ..., until 1e-16 is left."""
    slack = math.log(1 / NEGLIGIBLE) / _log_ratio(rho)
    if slack > LARGEST_CHAIN:
        raise SlaOutOfReach(
            f"utilisation {rho:.9g} is too near 1 for the exact law",
            where="rate",
            remedy="Lower the rate, or use the mean (mg1) and Kingman's bound.",
        )
    counts = np.arange(int(rho + 12 * math.sqrt(rho) + 40))
    at_least = special.gammainc(np.maximum(counts, 1), rho)  # P(A >= n) for n >= 1
    more_than = at_least[1:]  # [i] = P(A > i), i = 0, 1, ...
    size = int(slack) + 50
    pi = np.zeros(size)
    pi[0] = 1 - rho
    for n in range(1, size):
        reach = min(n - 1, len(more_than) - 1)  # k = n - reach ... n - 1 contribute P(A > n - k)
        flow = float(pi[n - reach : n] @ more_than[reach:0:-1]) if reach else 0.0
        start = pi[0] * at_least[n] if n < len(at_least) else 0.0
        pi[n] = (start + flow) * math.exp(rho)
    return pi


def _log_ratio(rho: float) -> float:
    """ln z > 0 with rho (z - 1) = ln z: the queue of M/D/1 thins out as z^-n."""
    high = 1.0
    while rho * math.expm1(high) < high:
        high *= 2
    low = min(1e-9, (1 - rho) / 10)
    root: float = optimize.brentq(lambda u: rho * math.expm1(u) / u - 1, low, high)
    return root
