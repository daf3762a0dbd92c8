"""The record every queue returns: how long a request takes, from its arrival to its end.

A distribution is a mean and a tail P(R > t); percentiles follow as the smallest t with P(R > t) <= 1 - q, which is
right at atoms too (at low load many requests take exactly T(1)). Time is in ms, rates are per ms.

Kinds of requests, by what is left for them to wait, and the tail each adds to P(R > x).

Requests that arrive during a service of length s arrive at i.i.d. uniform moments, so what is left of the service is
uniform on (0, s) whatever happens after it. A kind is then: uniform residual, plus (where the batch waits to fill) an
Erlang time until the missing arrivals have come, plus a constant T of the batch it ends up in. With
G_k(c) = int_0^c P(Erlang(k) <= u) du = c P(k, rate c) - (k/rate) P(k + 1, rate c), P the incomplete gamma function, the
tail of uniform + Erlang is 1 - (G_k(y) - G_k(y - s))/s.

All arrays of a kind have one entry a request group; `weight` is the group's share of all requests.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.roots import root
from latfit.stats import FloatArray


@dataclass(frozen=True)
class Residual:
    """Uniform on (0, span), then an Erlang time of `missing` arrivals at `rate`, then `service`."""

    weight: FloatArray
    span: FloatArray
    missing: FloatArray
    service: FloatArray
    rate: float

    @property
    def mean_ms(self) -> float:
        """Contribution to the mean over all requests."""
        return float(self.weight @ (self.span / 2 + self.missing / self.rate + self.service))

    def tail(self, x: float) -> float:
        y = x - self.service
        left = 1 - np.clip(y / self.span, 0, 1)
        fill = np.flatnonzero(self.missing > 0)
        if len(fill):
            k, span, late = self.missing[fill], self.span[fill], y[fill]
            done = _erlang_integral(k, late, self.rate) - _erlang_integral(k, late - span, self.rate)
            left[fill] = np.clip(1 - done / span, 0, 1)
        return float(self.weight @ left)


@dataclass(frozen=True)
class Idle:
    """Arrivals at an idle server: an Erlang time of `missing` further arrivals (0: none), then `service`."""

    weight: FloatArray
    missing: FloatArray
    service: FloatArray
    rate: float

    @property
    def mean_ms(self) -> float:
        """Contribution to the mean over all requests."""
        return float(self.weight @ (self.missing / self.rate + self.service))

    def tail(self, x: float) -> float:
        y = x - self.service
        some = np.maximum(self.missing, 1)
        waits = scipy.special.gammaincc(some, self.rate * np.maximum(y, 0))
        return float(self.weight @ np.where(y < 0, 1.0, np.where(self.missing > 0, waits, 0.0)))


def poisson(counts: FloatArray, means: FloatArray) -> FloatArray:
    """Poisson probabilities (len(means), len(counts)); zero for a negative count."""
    n, mean = counts[None, :], means[:, None]
    inside = np.maximum(n, 0)
    mass = np.exp(scipy.special.xlogy(inside, mean) - mean - scipy.special.gammaln(inside + 1))
    return np.asarray(np.where(n < 0, 0.0, mass))


def poisson_reach(mean: float) -> int:
    """A count that a Poisson variable exceeds with a chance below 1e-16."""
    return int(mean + 9 * math.sqrt(mean) + 25)


def convolved(a: FloatArray, b: FloatArray) -> FloatArray:
    """Convolution (m, n + k - 1) of rows (m, n) with rows (m, k) or one row (1, k), by FFT."""
    n = a.shape[1] + b.shape[1] - 1
    length = scipy.fft.next_fast_len(n, real=True)
    return np.asarray(scipy.fft.irfft(scipy.fft.rfft(a, length) * scipy.fft.rfft(b, length), length)[:, :n])


def _erlang_integral(k: FloatArray, c: FloatArray, rate: float) -> FloatArray:
    c = np.maximum(c, 0)
    return np.asarray(c * scipy.special.gammainc(k, rate * c) - k / rate * scipy.special.gammainc(k + 1, rate * c))


LARGEST_MS = 1e12
"""No percentile is searched beyond this."""

ATOM = 1e-6
"""A share of the requests that all take the same time."""


@dataclass(frozen=True)
class ResponseDistribution:
    """Distribution of a response time, with what it was derived from.

    mean_ms: mean response.  tail: t in ms -> P(R > t), non-increasing.  utilisation: load over the highest stable
    load, below 1.  rate_limit: that highest rate per ms.  conditions: when the distribution holds.  source: the theorem
    or method.  exact: False for an approximation; a bound says so in `source`.
    """

    mean_ms: float
    tail: Callable[[float], float]
    utilisation: float
    rate_limit: float
    conditions: str
    source: str
    exact: bool = True

    def percentile(self, q: float) -> float:
        """Smallest t in ms with P(R <= t) >= q, for q in (0, 1)."""
        return percentile_of(self.tail, q)


@dataclass(frozen=True)
class OverflowDistribution(ResponseDistribution):
    """Of a system whose requests may overflow to a second server: also the share that does."""

    overflow_share: float = math.nan


def percentile_of(tail: Callable[[float], float], q: float) -> float:
    """Smallest t in ms with tail(t) <= 1 - q; infinite where there is none below 1e12 ms. Tail must not increase."""
    if not 0 < q < 1:
        raise WrongUsage(
            f"percentile {q:g} is not between 0 and 1", where="percentile", remedy="Write 0.99 for the 99th."
        )
    allowed = 1 - q
    if tail(0.0) <= allowed:
        return 0.0
    high = 1.0
    while tail(high) > allowed:
        high *= 2
        if high > LARGEST_MS:
            return math.inf
    low = high / 2 if high > 1 else 0.0
    found = root(lambda t: tail(t) - allowed, low, high, xtol=1e-10, rtol=1e-13)
    low, high = found - 2e-10 - 1e-12 * found, found + 2e-10 + 1e-12 * found
    if tail(low) - tail(high) < ATOM:
        return found
    # An atom: close in on its float, so that all percentiles that fall on it are one number.
    while low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if tail(middle) <= allowed else (middle, high)
    return high


def positive(value: float, name: str, unit: str = "per ms") -> float:
    """`value`, or WrongUsage where it is not a finite number above zero."""
    if not math.isfinite(value) or value <= 0:
        raise WrongUsage(f"{name} is {value:g}, not above zero", where=name, remedy=f"Give a {name} {unit} above zero.")
    return float(value)


def stable(rate: float, limit: float, what: str, hint: str = "") -> None:
    """Raise SlaOutOfReach, naming the limit, unless rate < limit (both per ms)."""
    if rate < limit:
        return
    raise SlaOutOfReach(
        f"{what} is unstable at {_per_second(rate)}: its queue grows without bound from {_per_second(limit)} on",
        where="rate",
        remedy=f"Keep the rate below {_per_second(limit)}, or add replicas.{' ' + hint if hint else ''}",
    )


def _per_second(rate: float) -> str:
    return f"{rate * 1e3:,.6g}/s"
