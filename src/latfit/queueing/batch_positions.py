"""Law of the response in the batch queue with a largest batch B, first come first served.

A request that arrives with w of the current service left takes place p = r + N, r left behind at the start of the
service, N ~ Poisson(lambda (s - w)). Before its own, j = p // B full batches go; in its own it is at place k = p mod B,
and by the start of that batch Poisson(lambda (w + j T(B))) more have come, so the batch has m = min(B, k + 1 + those).
If m is below the threshold the batch waits an Erlang time for the missing. The response is w + j T(B) + T(m), and
that Erlang time.

For b < B nothing is left behind, and for j = 0 the sum over k is closed: m - 1 ~ Poisson(lambda s) whatever w is,
except at m = B, where the density of w is lambda (P(Poisson(lambda (s - w)) < B) - P(Poisson(lambda s) < B - 1)), with
int_0^c P(Poisson(u) < B) du = c Q(B, c) + B P(B + 1, c). What remains (j >= 1, or something left behind) has densities
in w that are analytic on (0, s): they are kept as Legendre series and integrated term by term.

Far back in the queue r ~ C z^-r, so that a place p has the density lambda C z^-p e^(lambda (s - w) (z - 1)), and all
batches are full. With s = T(B), e^(lambda T(B) (z - 1)) = z^B, the places from round J on sum up in closed form,
however near the limit the load is.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.polynomial import legendre
from scipy import signal, special

from latfit.queueing.batch_limited import LOG_NEGLIGIBLE, LimitedChain
from latfit.queueing.waits import Idle, Residual, poisson, poisson_reach
from latfit.stats import FloatArray

DROPPED = 1e-14

UNHEARD = 1e-12
"""Share of the requests below which those of one batch size that meet a full batch are left out: its tail is at most
that much too low."""

DEGREES = 8
"""Series lengths are multiples of this, so that few quadrature rules are needed."""


@dataclass(frozen=True)
class LastSeat:
    """Arrivals in services of b < B whose own batch is full, j = 0: closed integral. Arrays (b,)."""

    scale: FloatArray
    span: FloatArray
    rate: float
    max_batch: int
    service: float

    def tail(self, x: float) -> float:
        B, s = self.max_batch, self.span
        w = np.clip(x - self.service, 0, s)
        early = _count_integral(B, self.rate * (s - w))
        fewer = special.gammaincc(B - 1, self.rate * s) if B > 1 else np.zeros_like(s)
        return float(self.scale @ np.maximum(early - fewer * self.rate * (s - w), 0))


@dataclass(frozen=True)
class Places:
    """Groups with a density in the residual w, as Legendre series on (0, span): series (degree + 1, groups), and
    integral, the series of its integral from 0."""

    span: float
    series: FloatArray
    integral: FloatArray
    missing: FloatArray
    offset: FloatArray
    rate: float

    def tail(self, x: float) -> float:
        y = x - self.offset
        at_once = self.missing == 0
        # A group's whole weight is span times its zeroth coefficient; only those within reach need the series.
        total = self.span * float(self.series[0, (y < self.span) | ~at_once].sum())
        inside = at_once & (y > 0) & (y < self.span)
        u = 2 * y[inside] / self.span - 1
        total -= self.span / 2 * float(legendre.legval(u, self.integral[:, inside], tensor=False).sum())
        late = ~at_once & (y > 0)
        if late.any():
            nodes, weights, _ = _quadrature(len(self.series))
            w = np.minimum(y[late], self.span)[None, :] * (nodes[:, None] + 1) / 2
            density = legendre.legval(2 * w / self.span - 1, self.series[:, late], tensor=False)
            done = special.gammainc(self.missing[late], self.rate * (y[late] - w))
            total -= float(((density * done) * weights[:, None]).sum(axis=0) @ np.minimum(y[late], self.span)) / 2
        return total


@dataclass(frozen=True)
class Far:
    """Places from round `first` on, in services of T(B): closed sum over all of them. scale is C first B rounds back:
    C z^(-first B)."""

    scale: float
    log_z: float
    first: int
    rate: float
    max_batch: int
    service: float

    def tail(self, x: float) -> float:
        B, u, T = self.max_batch, self.log_z, self.service
        spare = math.expm1(u)
        rounds = math.floor(x / T) - 1
        if rounds < self.first:
            return self._all_from(self.first)
        left = (rounds + 2) * T - x
        same = math.exp(-(rounds - self.first) * B * u) * math.expm1(self.rate * left * spare)
        # Places of one round: z^-p sums to (1 - z^-B)/(1 - 1/z).
        same *= self.scale * math.expm1(-B * u) / math.expm1(-u) / spare
        return self._all_from(rounds + 1) + same

    def _all_from(self, j: int) -> float:
        B, u = self.max_batch, self.log_z
        here = self.scale * math.exp(-(j - self.first) * B * u)
        return here * math.expm1(B * u) / math.expm1(u) / -math.expm1(-u)


def response_tail(chain: LimitedChain) -> Callable[[float], float]:
    """t in ms -> P(R > t)."""
    B, L, per_cycle = chain.max_batch, chain.threshold, chain.requests_per_cycle
    share = np.zeros(B + 1)  # of cycles that serve b with nothing left behind, b < B
    share[L : B + 1] = chain.pi[L : B + 1]
    share[L] += chain.pi[:L].sum()
    parts: list[Idle | Residual | LastSeat | Places | Far] = [_idle(chain)]
    if B > L:
        parts += [_own_batch(chain, share), _last_seat(chain, share)]
        for b in range(L, B):
            if share[b] * float(special.gammainc(B, chain.rate * chain.T[b])) > UNHEARD:
                parts.append(_places(chain, float(chain.T[b]), np.array([share[b]]), first=1))
    far = _far(chain)
    most = None if far is None else far.first * B
    parts.append(_places(chain, float(chain.T[B]), _left_behind(chain, share[B], most), first=0, most=most))
    parts += [] if far is None else [far]

    def tail(x: float) -> float:
        return min(1.0, max(0.0, sum(part.tail(x) for part in parts) / per_cycle))

    return tail


def _idle(chain: LimitedChain) -> Idle:
    place = np.arange(chain.threshold)
    weight = np.cumsum(chain.pi[: chain.threshold])
    service = np.full(chain.threshold, chain.T[chain.threshold])
    return Idle(weight, (chain.threshold - 1 - place).astype(np.float64), service, chain.rate)


def _own_batch(chain: LimitedChain, share: FloatArray) -> Residual:
    """j = 0, m < B, for services of b < B: as in the queue without a limit."""
    B, L, rate = chain.max_batch, chain.threshold, chain.rate
    spans, m = chain.T[L:B], np.arange(1.0, B)
    weight = (share[L:B] * rate * spans)[:, None] * poisson(m - 1, rate * spans)
    row, column = np.nonzero(weight > DROPPED / B)
    batch = np.maximum(m, L)
    missing = batch - m
    service = chain.T[batch.astype(np.int64)]
    return Residual(weight[row, column], spans[row], missing[column], service[column], rate)


def _last_seat(chain: LimitedChain, share: FloatArray) -> LastSeat:
    B, L = chain.max_batch, chain.threshold
    return LastSeat(share[L:B], chain.T[L:B], chain.rate, B, float(chain.T[B]))


def _left_behind(chain: LimitedChain, none: float, most: int | None) -> FloatArray:
    """Weights of r = 0, 1, ... left behind at the start of a full batch, the geometric part written out: up to `most`,
    or until nothing is left."""
    known = np.concatenate([[none], chain.pi[chain.max_batch + 1 :]])
    more = _until_nothing(chain) if most is None else max(0, most - len(known))
    return np.concatenate([known, chain.pi[-1] * chain.z ** -np.arange(1.0, more + 1)])


def _until_nothing(chain: LimitedChain) -> int:
    return math.ceil(max(0.0, LOG_NEGLIGIBLE + math.log(max(chain.pi[-1], 1e-300))) / math.log(chain.z))


def _far(chain: LimitedChain) -> Far | None:
    """Places so far back that only geometric states and full batches matter; None where it is less to write all out."""
    B, rate, full = chain.max_batch, chain.rate, float(chain.T[-1])
    geometric = len(chain.pi) - 1 - B
    first = -(-(geometric + poisson_reach(rate * full)) // B)
    while float(special.gammaincc(B, rate * first * full)) > DROPPED:
        first += 1
        if first * B > geometric + _until_nothing(chain):
            return None
    if first * B > geometric + _until_nothing(chain):
        return None
    scale = float(chain.pi[-1]) * chain.z ** (geometric - first * B)
    return Far(scale, math.log(chain.z), first, rate, B, full)


def _places(chain: LimitedChain, span: float, left: FloatArray, first: int, most: int | None = None) -> Places:
    """Groups (j, m), j >= first, of the arrivals in a service of length `span` that left r = 0, 1, ... behind, at the
    places below `most`."""
    B, rate, full = chain.max_batch, chain.rate, float(chain.T[-1])
    degree = -(-(24 + int(5 * math.sqrt(rate * span))) // DEGREES) * DEGREES
    nodes, weights, transform = _quadrature(degree)
    w = span * (nodes + 1) / 2
    came = poisson(np.arange(float(poisson_reach(rate * span))), rate * (span - w))
    place = np.maximum(signal.fftconvolve(came, left[None, :], axes=1), 0)[:, :most] * rate
    rounds = -(-place.shape[1] // B)
    place = np.pad(place, ((0, 0), (0, rounds * B - place.shape[1]))).reshape(degree, rounds, B)
    series, missing, offset = [], [], []
    for j in range(first, rounds):
        density, batch = _batches(place[:, j], rate * (w + j * full), B)
        start = np.maximum(batch, chain.threshold)
        kept = weights @ density * span / 2 > DROPPED
        series.append(transform @ density[:, kept])
        missing.append((start - batch)[kept])
        offset.append(j * full + chain.T[start.astype(np.int64)][kept])
    joined = np.hstack(series)
    integral = np.asarray(legendre.legint(joined, lbnd=-1, axis=0), dtype=np.float64)
    return Places(span, joined, integral, np.concatenate(missing), np.concatenate(offset), rate)


@lru_cache(maxsize=64)
def _quadrature(degree: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Gauss nodes and weights on (-1, 1), and what turns values at the nodes into Legendre coefficients."""
    nodes, weights = legendre.leggauss(degree)
    transform = legendre.legvander(nodes, degree - 1).T * weights * (np.arange(degree)[:, None] + 0.5)
    return nodes, weights, np.asarray(transform)


def _batches(seats: FloatArray, means: FloatArray, B: int) -> tuple[FloatArray, FloatArray]:
    """Density (nodes, groups) of being in a batch of m, from that of the places k (nodes, B) and the mean arrivals
    until the batch starts (nodes,); with the m of each group."""
    whole = seats.sum(axis=1)
    if float(special.gammaincc(B, means.min())) < DROPPED:
        return whole[:, None], np.array([float(B)])
    later = poisson(np.arange(B - 1.0), means)
    below = np.maximum(signal.fftconvolve(seats, later, axes=1)[:, : B - 1], 0) if B > 1 else np.zeros((len(means), 0))
    return np.column_stack([below, np.maximum(whole - below.sum(axis=1), 0)]), np.arange(1.0, B + 1)


def _count_integral(B: int, c: FloatArray) -> FloatArray:
    """int_0^c P(Poisson(u) < B) du."""
    return np.asarray(c * special.gammaincc(B, c) + B * special.gammainc(B + 1, c))
