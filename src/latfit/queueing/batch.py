"""The queue of a server that takes batches: Poisson arrivals, FIFO, deterministic T(b), a batch of b takes T(b).

Rules: greedy (an idle server takes what waits, up to Bmax), control limit (it first waits until `threshold` requests
are there) and fixed batch (exactly B, threshold = Bmax = B). All are one chain; without a limit on the batch, or where
the limit is never met, it is that of `batch_unlimited`, else that of `batch_limited`. The tail of the response is
light: given the service, arrivals in it are Poisson, so nothing becomes heavy-tailed by batching.

Inoue (2021) bounds the mean of the greedy queue without limit, T(b) = tau + alpha b, in closed form: with x = lambda
alpha, min(phi0, phi1), phi0 = (alpha + tau)/(2 (1 - x)) (1 + 2 lambda tau + (1 - lambda tau)/(1 + x)),
phi1 = 3 tau/(2 (1 - x)) + alpha (x + 2)/(2 (1 - x^2)).

The batch queue without a limit on the batch, by its embedded chain.

A server that becomes idle takes all that wait; if fewer than `threshold` wait it first waits for the missing arrivals
(threshold 1 is the greedy rule). Arrivals in a service of b are N ~ Poisson(lambda T(b)), so the batches form a Markov
chain b' = max(threshold, N) with stationary distribution pi. All N of them are served together, in T(b'), after a
residual of the service that is uniform on (0, T(b)): the tail of the response is a sum over (b, N), and by renewal and
reward

    mean = sum_b pi_b [b T + lambda T^2/2 + sum_(n<threshold) p_n (n + ... + threshold-1)/lambda] / (lambda E[cycle]).

The chain is solved on a window of states, first around the root of b = lambda T(b) with a spread of about
sqrt(b/(1 - c^2)), c = lambda T'(b). It grows until it holds all that matters: a service leads out of it with a chance
below 1e-12, so that a long step of a small batch brings in the states that its arrivals reach; and outside it the queue
drifts back, lambda T(b) >= b + 1 below and lambda T(b) < b above, so that no second balance is left out (a T that falls
or has steps may have several). At high load the window is wide but pi is smooth on the scale of one Poisson step,
sqrt(b), so every h-th state is kept with h at most a quarter of that (the trapezoid rule on smooth bells converges
faster than any power of h), if T is smooth on that scale too.

The batch queue with a largest batch B: how many wait, and the mean.

State q: the requests left behind at a completion. The next batch starts with w = max(q, threshold) waiting, takes
b = min(w, B), leaves r = w - b, and at its end q' = r + Poisson(lambda T(b)). Beyond B the chain is a random walk with
steps Poisson(a) - B, a = lambda T(B). Beyond the most arrivals that any service brings, nothing comes in but by that
walk: there pi is a sum of terms z^-q over the roots of e^(a (z - 1)) = z^B with |z| > 1. The real root is the smallest.
The chain is solved on 0..M, with pi_q = pi_M z^-(q-M) for all q > M, M so far above B and above those most arrivals
that the next pair of roots has died away: exact at any load below the limit, with no cut-off tail. T may fall: a
service of one that lasts as long as thousands arrive is followed by all the full batches that serve them.

What a service of b < B leaves behind are its own arrivals alone, so the chain is watched at the starts of those
services, nb <= B of them. Between two, the walk visits the states from B on, X (states, nb) times on average:
(I - P_hh^T) X = P_lh^T with a banded P_hh, for a walk goes down by B and up by few at a time. What the walk and the
services send below B closes a chain of nb states; its distribution c gives pi = X c there.

Mean: with w waiting, the integral of the number in system over a service is w T + lambda T^2/2; over the wait for the
threshold it is (q + ... + threshold-1)/lambda; divided by lambda times the mean cycle it is the mean response.

Distribution of the response in the batch queue with a largest batch B, first come first served.

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

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import scipy
from numpy.polynomial import legendre

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.censoring import stationary
from latfit.queueing.distribution import (
    Idle,
    Residual,
    ResponseDistribution,
    convolved,
    poisson,
    poisson_reach,
    positive,
    stable,
)
from latfit.queueing.roots import root
from latfit.queueing.service import FAR, ServiceTimes
from latfit.stats import FloatArray

MOST_LIMITED_STATES = 6000
LOST = 1e-12
"""Share of the cycles that may go beyond the states kept."""

LOG_NEGLIGIBLE = 50.0
FASTEST = 256.0
"""ln z from which nothing is left of the queue; a few doublings more would overflow e^u."""


@dataclass(frozen=True)
class LimitedChain:
    """pi (M + 1,) of the requests left behind, 0..M, continued by pi_M z^-(q-M); T (B + 1,) with T[0] unused."""

    rate: float
    threshold: int
    T: FloatArray
    pi: FloatArray
    z: float

    @property
    def max_batch(self) -> int:
        return len(self.T) - 1

    @property
    def beyond(self) -> float:
        """Sum over k >= 1 of z^-k."""
        return 1 / (self.z - 1)

    def _sum(self, inner: FloatArray, level: float, slope: float = 0.0) -> float:
        """E[f(q)], f given on 0..M as `inner` and as level + slope (q - M) beyond."""
        geometric = self.beyond * level + self.z * self.beyond**2 * slope
        return float(self.pi @ inner) + float(self.pi[-1]) * geometric

    def _starts(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Left behind, waiting at the next start, and its service time, for q = 0..M."""
        q = np.arange(len(self.pi), dtype=np.float64)
        waiting = np.maximum(q, self.threshold)
        return q, waiting, self.T[np.minimum(waiting, self.max_batch).astype(np.int64)]

    @property
    def requests_per_cycle(self) -> float:
        q, waiting, T = self._starts()
        return self._sum(self.rate * T + waiting - q, self.rate * float(self.T[-1]))

    @property
    def busy_share(self) -> float:
        _, _, T = self._starts()
        return self.rate * self._sum(T, float(self.T[-1])) / self.requests_per_cycle

    @property
    def mean_batch(self) -> float:
        _, waiting, _ = self._starts()
        return self._sum(np.minimum(waiting, self.max_batch), float(self.max_batch))

    @property
    def mean_ms(self) -> float:
        q, waiting, T = self._starts()
        filling = (waiting - q) * (q + waiting - 1) / 2 / self.rate
        cost = waiting * T + self.rate * T**2 / 2 + filling
        last = float(self.T[-1])
        return self._sum(cost, float(cost[-1]), last) / self.requests_per_cycle


def solve_limited(rate: float, times: ServiceTimes, threshold: int = 1) -> LimitedChain:
    """The chain; `times.max_batch` is set, arguments are taken as checked and the load as stable. Raises SlaOutOfReach
    where it needs too many states."""
    assert times.max_batch is not None
    B = times.max_batch
    T = np.concatenate([[0.0], times.table(1, B)])
    z = queue_ratio(rate * float(T[-1]), B)
    came = rate * T[threshold : max(threshold + 1, B)]
    closing = _reach(rate * float(T[-1]), B, z)
    M = max(B, min(poisson_reach(float(came.max())), MOST_LIMITED_STATES - closing)) + closing
    if M > MOST_LIMITED_STATES:
        raise _too_many(B, M)
    walk = _Walk(rate * float(T[-1]), B, z, M)
    X = scipy.linalg.solve_banded(
        (walk.up, B), walk.bands(), poisson(np.arange(B, M + 1.0), came).T, check_finite=False
    )
    land = poisson(np.arange(float(B)), came).T + walk.down() @ X[: walk.low]
    # Below the threshold all wait for the same batch. What goes beyond M is next to nothing, or refused below.
    closed = np.vstack([land[: threshold + 1].sum(axis=0), land[threshold + 1 :]])
    closed[-1] += scipy.special.gammainc(M + 1, came)
    c = stationary(closed.T)
    pi = np.maximum(np.concatenate([land @ c, X @ c]), 0)
    total = float(pi.sum() + pi[-1] / (z - 1))
    if float(c @ scipy.special.gammainc(M + 1 - closing, came)) > LOST * total:
        raise _too_many(B, max(B, poisson_reach(float(came.max()))) + closing)
    return LimitedChain(rate, threshold, T, np.asarray(pi / total), z)


@dataclass(frozen=True)
class _Walk:
    """Full batches one after the other: states B..M, `a` arrivals in each on average."""

    a: float
    B: int
    z: float
    M: int

    @property
    def up(self) -> int:
        """Most steps up, and lower diagonals of the system."""
        return min(max(0, poisson_reach(self.a) - self.B), self.M - self.B)

    @property
    def low(self) -> int:
        """States from which a batch may leave fewer than B."""
        return min(self.B, self.M + 1 - self.B)

    def bands(self) -> FloatArray:
        """I - P_hh^T (up + B + 1, M + 1 - B) as its diagonals. Rows beyond M are multiples of row M: what they
        send back is folded into it."""
        p = poisson(np.arange(self.up + self.B + 1.0), np.array([self.a]))[0]
        bands = np.repeat(-p[:, None], self.M + 1 - self.B, axis=1)
        bands[self.B] += 1
        bands[1 : self.B + 1, -1] -= np.convolve(p, self.z ** -np.arange(1.0, self.B + 1))[: self.B]
        return bands

    def down(self) -> FloatArray:
        """P_hl^T (B, low), from B + j to what is left below B."""
        law = poisson(np.arange(float(self.B)), np.array([self.a]))[0]
        return np.asarray(scipy.linalg.toeplitz(law, np.zeros(self.low)))


def _too_many(B: int, states: int) -> SlaOutOfReach:
    return SlaOutOfReach(
        f"batches up to {B} need {states:,} states, above {MOST_LIMITED_STATES:,}: the load is near its limit, or "
        "thousands arrive in a long step",
        where="max_batch",
        remedy="Lower the largest batch or the rate.",
    )


def queue_ratio(a: float, B: int) -> float:
    """z > 1 with e^(a (z - 1)) = z^B, for 0 < a < B: the queue thins out as z^-q."""

    def excess(u: float) -> float:
        return a * math.expm1(u) / u - B

    high = 1.0
    while excess(high) < 0:
        if high > FASTEST:
            return math.exp(high)
        high *= 2
    low = min(high, (B - a) / B)
    while excess(low) >= 0:
        low /= 2
    return math.exp(root(excess, low, high, xtol=1e-15))


def _reach(a: float, B: int, z: float) -> int:
    """States beyond B until the next pair of roots is below e^-50 of the first, or nothing is left at all."""
    whole = math.ceil(LOG_NEGLIGIBLE / math.log(z)) + 10
    if whole <= B:
        return whole
    # The next roots are z = e^w with a (e^w - 1) = B w +- 2 pi i; near the limit w^2 is about 4 pi i/a.
    w = ((B - a) + cmath.sqrt((B - a) ** 2 + 4j * math.pi * a)) / a
    try:
        for _ in range(30):
            w -= (a * (cmath.exp(w) - 1) - B * w - 2j * math.pi) / (a * cmath.exp(w) - B)
        off = abs(a * (cmath.exp(w) - 1) - B * w - 2j * math.pi)
    except OverflowError:
        return whole
    gap = w.real - math.log(z)
    return min(whole, math.ceil(LOG_NEGLIGIBLE / gap) + 10) if off < 1e-6 * B and gap > 0 else whole


DROPPED_POSITIONS = 1e-14

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
        fewer = scipy.special.gammaincc(B - 1, self.rate * s) if B > 1 else np.zeros_like(s)
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
            done = scipy.special.gammainc(self.missing[late], self.rate * (y[late] - w))
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
            if share[b] * float(scipy.special.gammainc(B, chain.rate * chain.T[b])) > UNHEARD:
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
    row, column = np.nonzero(weight > DROPPED_POSITIONS / B)
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
    while float(scipy.special.gammaincc(B, rate * first * full)) > DROPPED_POSITIONS:
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
    place = np.maximum(convolved(came, left[None, :]), 0)[:, :most] * rate
    rounds = -(-place.shape[1] // B)
    place = np.pad(place, ((0, 0), (0, rounds * B - place.shape[1]))).reshape(degree, rounds, B)
    series, missing, offset = [], [], []
    for j in range(first, rounds):
        density, batch = _batches(place[:, j], rate * (w + j * full), B)
        start = np.maximum(batch, chain.threshold)
        kept = weights @ density * span / 2 > DROPPED_POSITIONS
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
    if float(scipy.special.gammaincc(B, means.min())) < DROPPED_POSITIONS:
        return whole[:, None], np.array([float(B)])
    later = poisson(np.arange(B - 1.0), means)
    below = np.maximum(convolved(seats, later)[:, : B - 1], 0) if B > 1 else np.zeros((len(means), 0))
    return np.column_stack([below, np.maximum(whole - below.sum(axis=1), 0)]), np.arange(1.0, B + 1)


def _count_integral(B: int, c: FloatArray) -> FloatArray:
    """int_0^c P(Poisson(u) < B) du."""
    return np.asarray(c * scipy.special.gammaincc(B, c) + B * scipy.special.gammainc(B + 1, c))


FEW_STATES = 1200
MOST_STATES = 4000
MOST_WINDOWS = 16
PROBED = 3000
"""Batches above the window at which its drift is looked at."""

EDGE = 1e-12
TINY = 1e-14
LEAST = 1e-200
SMOOTH = 1e-6
DROPPED = 1e-17
"""Request groups with a smaller share are left out of the tail."""


@dataclass(frozen=True)
class Chain:
    """Stationary distribution `pi` of the batch sizes `batches`, their times `T`, and p_N (len(batches),
    len(arrivals))."""

    rate: float
    threshold: int
    batches: FloatArray
    T: FloatArray
    pi: FloatArray
    arrivals: FloatArray
    p: FloatArray

    @property
    def mean_batch(self) -> float:
        return float(self.pi @ self.batches)

    def _missing(self) -> FloatArray:
        """Arrivals that the next batch lacks, for each count of arrivals."""
        return np.maximum(self.threshold - self.arrivals, 0)

    @property
    def requests_per_cycle(self) -> float:
        return float(self.pi @ (self.rate * self.T + self.p @ self._missing()))

    @property
    def busy_share(self) -> float:
        return float(self.pi @ self.T) * self.rate / self.requests_per_cycle

    @property
    def mean_ms(self) -> float:
        short = self._missing()
        # n + (n+1) + ... + (threshold-1) requests wait 1/lambda each while the batch fills.
        filling = short * (self.arrivals + self.threshold - 1) / 2 / self.rate
        cost = self.batches * self.T + self.rate * self.T**2 / 2 + self.p @ filling
        return float(self.pi @ cost) / self.requests_per_cycle

    def residuals(self, spans: FloatArray, times: ServiceTimes) -> Residual:
        """Requests served after a residual that is uniform on (0, span), one span a batch; p_N must match them."""
        weight = self.pi[:, None] * self.p * self.arrivals[None, :] / self.requests_per_cycle
        row, column = np.nonzero(weight > DROPPED)
        missing = self._missing()
        service = self._service_of(times)
        return Residual(weight[row, column], spans[row], missing[column], service[column], self.rate)

    def idle(self, times: ServiceTimes) -> Idle:
        """Requests that arrive at an idle server and fill the batch: one group for each place in the queue."""
        counts = self.pi @ self.p
        place = np.arange(self.threshold)
        short = [float(counts[self.arrivals <= i].sum()) for i in place]
        service = np.full(self.threshold, times(self.threshold))
        missing = (self.threshold - 1 - place).astype(np.float64)
        return Idle(np.array(short) / self.requests_per_cycle, missing, service, self.rate)

    def _service_of(self, times: ServiceTimes) -> FloatArray:
        batch = np.maximum(self.arrivals, self.threshold)
        return np.asarray(times.at(batch), dtype=np.float64)


def solve_unlimited(rate: float, times: ServiceTimes, threshold: int = 1) -> Chain | None:
    """The chain, or None where its states reach beyond `times.max_batch`, or are too many below it. Arguments are taken
    as checked, the load as stable. Raises SlaOutOfReach where there is no largest batch and too many states are needed:
    the load is too near its limit, or T has steps so high that the queue may settle at more than one batch.
    """
    top = FAR if times.max_batch is None else times.max_batch
    centre = _balance(rate, times, threshold, top)
    chain = None
    if centre is not None and (times.max_batch is None or centre + 6 * math.sqrt(centre) + 6 <= top):
        chain = _settled(rate, times, threshold, centre)
    if chain is None and times.max_batch is None:
        raise _too_near(rate, times)
    return chain


def _settled(rate: float, times: ServiceTimes, threshold: int, centre: int) -> Chain | None:
    """The chain on a window that holds all states that matter; None where there is none, or too many are needed."""
    top = FAR if times.max_batch is None else times.max_batch
    steepness = min(max(rate * (times(min(centre + 1, top)) - times(max(centre, 1))), 0.0), 1 - 1e-9)
    spread = math.sqrt(centre / (1 - steepness**2))
    # Nearly a gamma distribution of this mean and spread (square-root diffusion), a Poisson step wider on either side.
    shape = (centre / spread) ** 2
    margin = 9 * math.sqrt(centre) + 25
    low = max(threshold, int(centre * scipy.special.gammaincinv(shape, TINY) / shape - margin))
    high = min(top, int(centre * scipy.special.gammainccinv(shape, TINY) / shape + margin))
    for _ in range(MOST_WINDOWS):
        low, high = _to_turning_points(rate, times, threshold, low, high)
        chain = _window(rate, times, threshold, low, high)
        if chain is None:
            return None
        below = float(chain.pi @ scipy.special.gammaincc(low, rate * chain.T)) if low > threshold else 0.0
        above = float(chain.pi @ scipy.special.gammainc(high + 1, rate * chain.T))
        if max(below, above) < EDGE:
            return chain
        if above >= EDGE and high == top:
            return None
        width = high - low + 25
        low = max(threshold, low - width // 2) if below >= EDGE else low
        high = min(top, high + width // 2) if above >= EDGE else high
    return None


def _to_turning_points(rate: float, times: ServiceTimes, threshold: int, low: int, high: int) -> tuple[int, int]:
    """The window, down to the bottom unless all below drifts up, and up to the last batch that does not drift down."""
    top = FAR if times.max_batch is None else times.max_batch
    if low > threshold and np.any(rate * times.table(threshold, low - 1) < np.arange(threshold, low) + 1):
        low = threshold
    if high < top:
        above = np.unique(np.geomspace(high + 1, top, PROBED).astype(np.int64)).astype(np.float64)
        stays = np.flatnonzero(rate * np.asarray(times.at(above), dtype=np.float64) >= above)
        high = high if not len(stays) else min(top, int(above[stays[-1]] + 9 * math.sqrt(above[stays[-1]])) + 25)
    return low, high


def _window(rate: float, times: ServiceTimes, threshold: int, low: int, high: int) -> Chain | None:
    step = 1
    if high - low > FEW_STATES and low > threshold:
        step = max(1, int(math.sqrt(low) / 4))
        while step > 1 and not _smooth(rate, times, low, high, step):
            step //= 2
    if (high - low) / step > MOST_STATES:
        return None
    batches = np.arange(float(low), high + 1, step)
    T = times.table(low, high, step)
    first = 0.0 if low == threshold else float(low)
    arrivals = np.arange(first, high + 1, step)
    p = poisson(arrivals, rate * T)
    p /= np.maximum(p.sum(axis=1, keepdims=True), LEAST)
    lumped = p[:, len(arrivals) - len(batches) :].copy()
    lumped[:, 0] += p[:, : len(arrivals) - len(batches)].sum(axis=1)
    # What leads out above ends at the edge. (Not 1 - sum: its rounding would join states that nothing joins.)
    lumped[:, -1] += scipy.special.gammainc(high + 1, rate * T)
    return Chain(rate, threshold, batches, T, stationary(lumped), arrivals, p)


def _smooth(rate: float, times: ServiceTimes, low: int, high: int, step: int) -> bool:
    """Whether T between every `step`-th batch is what a cubic through those says, as arrivals, to 1e-6."""
    cells = (high - low) // step
    T = rate * times.table(low, low + cells * step).astype(np.float64)
    at, between = T[::step], T[:-1].reshape(cells, step)[1:-1]
    x = np.arange(step) / step
    weights = [-x * (x - 1) * (x - 2) / 6, (x * x - 1) * (x - 2) / 2, -x * (x + 1) * (x - 2) / 2, x * (x * x - 1) / 6]
    cubic = sum(np.outer(at[i : cells - 2 + i], weight) for i, weight in enumerate(weights))
    return bool(np.all(np.abs(between - cubic) < SMOOTH * low))


def _balance(rate: float, times: ServiceTimes, threshold: int, top: int) -> int | None:
    """Largest b with b = rate T(b), at least `threshold`; None where b < rate T(b) up to `top`."""
    if rate * times(top) >= top:
        return None
    high = top
    while high > threshold and rate * times(high) < high:
        low = max(high // 2, threshold)
        if rate * times(low) >= low:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if rate * times(middle) >= middle else (low, middle)
            return high
        high = low
    return threshold


def _too_near(rate: float, times: ServiceTimes) -> SlaOutOfReach:
    limit = times.rate_limit()
    return SlaOutOfReach(
        f"{rate * 1e3:,.6g}/s is too near the limit of {limit * 1e3:,.6g}/s for the exact distribution,"
        " or T(b) has steps at which batches may settle",
        where="rate",
        remedy="Lower the rate by a thousandth, or limit the batch.",
    )


SOURCE = "embedded Markov chain, exact"


@dataclass(frozen=True)
class BatchDistribution(ResponseDistribution):
    """Also: the mean batch, the share of time the server works (near 1 already at moderate load: not a measure of
    headroom, `utilisation` is), and the threshold of the rule."""

    mean_batch: float = math.nan
    busy_share: float = math.nan
    threshold: int = 1


def batch_queue(rate: float, times: ServiceTimes, threshold: int = 1) -> BatchDistribution:
    """Exact distribution of the response in ms. threshold 1 is greedy; rate per ms below `times.rate_limit()`."""
    rate, limit = checked_load(rate, times, threshold), times.rate_limit()
    chain = solve_unlimited(rate, times, threshold)
    law = BatchDistribution(
        mean_ms=math.nan,
        tail=lambda t: 1.0,
        utilisation=rate / limit,
        rate_limit=limit,
        conditions=_conditions(times, threshold),
        source=SOURCE,
        threshold=threshold,
    )
    if chain is None:
        limited = solve_limited(rate, times, threshold)
        return replace(
            law,
            mean_ms=limited.mean_ms,
            tail=response_tail(limited),
            mean_batch=limited.mean_batch,
            busy_share=limited.busy_share,
        )
    residual, idle = chain.residuals(chain.T, times), chain.idle(times)
    return replace(
        law,
        mean_ms=chain.mean_ms,
        tail=lambda t: residual.tail(t) + idle.tail(t),
        mean_batch=chain.mean_batch,
        busy_share=chain.busy_share,
    )


def batch_mean(rate: float, times: ServiceTimes, threshold: int = 1) -> float:
    """Mean response in ms of `batch_queue`, without the cost of its tail."""
    rate = checked_load(rate, times, threshold)
    chain = solve_unlimited(rate, times, threshold)
    return chain.mean_ms if chain is not None else solve_limited(rate, times, threshold).mean_ms


def checked_load(rate: float, times: ServiceTimes, threshold: int) -> float:
    """`rate`, if the queue is stable at it and batches can reach the threshold. Raises SlaOutOfReach, WrongUsage."""
    rate = positive(rate, "rate")
    if threshold < 1 or (times.max_batch is not None and threshold > times.max_batch):
        raise WrongUsage(
            f"threshold {threshold} is not between 1 and the largest batch",
            where="threshold",
            remedy="Give a threshold that a batch can reach.",
        )
    stable(rate, times.rate_limit(), "the batch queue", _cap_hint(rate, times))
    return rate


def _cap_hint(rate: float, times: ServiceTimes) -> str:
    if times.max_batch is None or rate < times.rate_limit():
        return ""
    best = times.best_batch()
    if best == times.max_batch:
        return ""
    return f"Batches of at most {best} would carry {best / times(best) * 1e3:,.6g}/s."


def _conditions(times: ServiceTimes, threshold: int) -> str:
    rule = "greedy" if threshold == 1 else f"waits for {threshold}"
    size = "any batch" if times.max_batch is None else f"batches up to {times.max_batch}"
    return f"Poisson arrivals, FIFO, one server, {size}, {rule}, deterministic T(b)"
