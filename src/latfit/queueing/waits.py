"""Kinds of requests, by what is left for them to wait, and the tail each adds to P(R > x).

Requests that arrive during a service of length s arrive at i.i.d. uniform moments, so what is left of the service is
uniform on (0, s) whatever happens after it. A kind is then: uniform residual, plus (where the batch waits to fill) an
Erlang time until the missing arrivals have come, plus a constant T of the batch it ends up in. With
G_k(c) = int_0^c P(Erlang(k) <= u) du = c P(k, rate c) - (k/rate) P(k + 1, rate c), P the incomplete gamma function, the
tail of uniform + Erlang is 1 - (G_k(y) - G_k(y - s))/s.

All arrays of a kind have one entry a request group; `weight` is the group's share of all requests.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import special

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
        waits = special.gammaincc(some, self.rate * np.maximum(y, 0))
        return float(self.weight @ np.where(y < 0, 1.0, np.where(self.missing > 0, waits, 0.0)))


def poisson(counts: FloatArray, means: FloatArray) -> FloatArray:
    """Poisson probabilities (len(means), len(counts)); zero for a negative count."""
    n, mean = counts[None, :], means[:, None]
    inside = np.maximum(n, 0)
    mass = np.exp(special.xlogy(inside, mean) - mean - special.gammaln(inside + 1))
    return np.asarray(np.where(n < 0, 0.0, mass))


def poisson_reach(mean: float) -> int:
    """A count that a Poisson variable exceeds with a chance below 1e-16."""
    return int(mean + 9 * math.sqrt(mean) + 25)


def _erlang_integral(k: FloatArray, c: FloatArray, rate: float) -> FloatArray:
    c = np.maximum(c, 0)
    return np.asarray(c * special.gammainc(k, rate * c) - k / rate * special.gammainc(k + 1, rate * c))
