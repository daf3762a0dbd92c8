"""A GPU that serves batches greedily, with waiting cut off at T_cut: who still waits then goes to the CPU queue.

System: Poisson(lambda) arrivals; GPU first come first served with deterministic T(b); a request that still waits at age
T_cut moves to the CPU, which serves one at a time, FCFS, Exp(mu). p_o is the share that overflows. It stays in the
CPU's queue, so all below needs a CPU that is not overloaded, lambda p_o < mu. The policy `cutoff` keeps requests on the
GPU that would end sooner there, and is no slower in any tested system (docs/theory.md, "Two paths").

GPU side. Whatever survives to a completion arrived in its last min(T_cut, T(b)) ms, so the batches are the chain
b' = max(1, Poisson(lambda min(T_cut, T(b)))), i.i.d. where T_cut <= T(b) for every b, and
p_o = sum pi_b lambda (T(b) - T_cut)^+ / sum pi_b (lambda T(b) + p_0). T_cut -> 0 gives Erlang's loss. This needs a
largest batch that does not bind.

CPU side, three answers of different standing:
- textbook: overflow taken as Poisson(lambda p_o), R ~ T_cut + Exp(mu - lambda p_o). Not a bound in either direction:
  overflow comes in bursts (Poisson(lambda) inside windows of a GPU service), and requests served by the GPU may be the
  slower ones. For large t it always underestimates the CPU-served tail.
- proved, lambda < mu, any largest batch: attach the CPU service to every arrival; the CPU workload is non-decreasing in
  the set of arrivals it gets, so its sojourn is below the one it would have in M/M/1(lambda, mu):
  P(overflow, sojourn > y) <= min(p_o, e^(-(mu - lambda) y)).
- proved, lambda p_o < mu, i.i.d. batches: backwards in time e^(theta (work - elapsed)) times a function of the phase is
  a martingale for the theta with E[e^(kappa ON) omega] = 1, kappa = theta (lambda/(mu - theta) - 1), ON = T(b) - T_cut,
  omega = e^(-theta T_cut), times lambda/(lambda + theta) if the GPU was left empty. Optional stopping gives
  P(sojourn > y | overflow) <= K e^(-theta y) + (1 - K) e^(-mu y), K = (1 - E omega)/(kappa E[ON] h),
  h = e^(-theta T_cut) lambda/(lambda + theta). The exact distribution decays at this theta.
The exact distribution is in `cutoff_law`.

Exact distribution of the response with waiting cut off at T_cut (the system of `cutoff`): the CPU queue by the chain of
`cutoff_cycle`.

A request that finds k at the CPU stays there for Erlang(k + 1, mu). Where u_k ~ r^k beyond N, so is what it finds, and
its stay Erlang(N + 1, mu) + Exp(mu (1 - r)).

The number at the CPU behind a GPU with waiting cut off at T_cut (the system of `cutoff`), by matrices.

Within a GPU service of length T(b) nothing overflows for min(T_cut, T(b)) ms, then overflow is Poisson(lambda) for
ON = T(b) - T_cut ms. So the CPU is fed in services longer than T_cut only, and whatever waits at the end of such a
service arrived in its last T_cut ms: the next batch has one distribution after all of them. The number at the CPU at
those ends is therefore a Markov chain u, whatever the batches in between. From one end to the next: idling for
Exp(lambda) where nobody waits, and services up to T_cut, in which the CPU only empties (n departures, as far as there
are requests: G_b(n) is the distribution of n until ON begins, joint with the batch b that is then served), then M/M/1
for ON.

M/M/1 from i after t, with S = Poisson(lambda t) - Poisson(mu t), s its distribution (a Fourier sum) and rho =
lambda/mu, by reflection: P(i -> j) = s(j - i) + rho^j g(i + j), g(m) = P(S < -m) - rho P(S < -m - 1). Sums over n and b
of G_b(n) P_b(max(i - n, 0) -> j) have rank one a batch, but for their limits; those follow row by row: A(i + 1, j + 1)
= A(i, j) + sum_b G_b(i) s_b(j) for the first term, and along the other diagonal for the second.

Above the most departures of a cycle u is that of a random walk: u_k ~ r^k, 1/r = z the root of E z^(change in a cycle)
= 1, with other modes that die away in about fourteen standard deviations of that change. So u is solved on 0..N with
all states from N on as one, near saturation too; N grows until what the modes leave is below 1e-9. What an overflow
request finds is the average over ON, by the same formula with int_0^ON s_t dt. Where mu > lambda, M/M/1 has forgotten
its start after some time; longer ON times end in its stationary distribution.

Which T_cut meets an SLA: a fixed point, since the overflow rate depends on T_cut itself.

F(T_cut) = P(R > SLA) - (1 - q) is not monotone: a small T_cut overloads the CPU, a large one delays the GPU's own
requests. So F is taken on a grid over (0, SLA], is infinite where the CPU would be overloaded, and each change of sign
is bisected. The answer is a list of ranges, and says by which method: the exact distribution, the proved bound (what it
admits is certain), or the textbook formula, which admits what the system then misses.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import scipy

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.batch import MOST_STATES, Chain
from latfit.queueing.censoring import stationary, visits
from latfit.queueing.distribution import (
    Idle,
    OverflowDistribution,
    Residual,
    convolved,
    percentile_of,
    poisson,
    poisson_reach,
    positive,
    stable,
)
from latfit.queueing.roots import root
from latfit.queueing.service import ServiceTimes
from latfit.stats import FloatArray

NEXT_TO_NOTHING = 1e-10
"""Load of the CPU below which the bound's root lies closer to mu than numbers tell."""
BINDING = 1e-7
"""Chance of more survivors than the largest batch from which on it binds."""


@dataclass(frozen=True)
class OverflowBound:
    """P(CPU sojourn > y | overflow) <= K e^(-decay y) + (1 - K) e^(-mu y)."""

    decay: float
    K: float
    cpu_rate: float

    def tail(self, y: float) -> float:
        y = max(y, 0.0)
        return min(1.0, self.K * math.exp(-self.decay * y) + (1 - self.K) * math.exp(-self.cpu_rate * y))


@dataclass(frozen=True)
class CutoffQueue:
    """The GPU side solved, with what the CPU side needs. Rates per ms; `windows` (b,) are min(T_cut, T(b))."""

    rate: float
    cutoff_ms: float
    cpu_rate: float
    chain: Chain
    windows: FloatArray
    served_later: Residual
    served_idle: Idle

    @property
    def overflow_share(self) -> float:
        on = self.chain.T - self.windows
        return self.rate * float(self.chain.pi @ on) / self.chain.requests_per_cycle

    @property
    def overflow_rate(self) -> float:
        return self.rate * self.overflow_share

    @property
    def independent_batches(self) -> bool:
        return bool(np.all(self.windows == self.cutoff_ms))

    def gpu_tail(self, x: float) -> float:
        """P(served by the GPU and R > x)."""
        return self.served_later.tail(x) + self.served_idle.tail(x)

    def with_cpu(self, sojourn_tail: Callable[[float], float]) -> Callable[[float], float]:
        """P(R > x) over all requests, from y -> P(CPU sojourn > y | overflow)."""
        share = self.overflow_share

        def tail(x: float) -> float:
            y = x - self.cutoff_ms
            return min(1.0, self.gpu_tail(x) + share * (sojourn_tail(y) if y > 0 else 1.0))

        return tail

    def textbook_percentile(self, q: float) -> float:
        """T_cut + ln(1/(1 - q))/(mu - lambda p_o), the formula in circulation. It is not a bound (see the module)."""
        spare = self.cpu_rate - self.overflow_rate
        return self.cutoff_ms - math.log1p(-q) / spare if spare > 0 else math.inf

    def textbook_tail(self, x: float) -> float:
        """The textbook Poisson overflow for the CPU, with the GPU's tail added; an approximation."""
        spare = self.cpu_rate - self.overflow_rate
        return self.with_cpu(lambda y: math.exp(-spare * y))(x) if spare > 0 else 1.0

    def proved_tail(self) -> Callable[[float], float]:
        """x -> upper bound on P(R > x): the smaller of the two proved bounds. Where neither applies, such as with an
        overloaded CPU, it stays at p_o."""
        bound, share = overflow_bound(self), self.overflow_share
        spare = self.cpu_rate - self.rate

        def sojourn(y: float) -> float:
            best = bound.tail(y) if bound is not None else 1.0
            if spare > 0 and share > 0:
                best = min(best, math.exp(-spare * y) / share)
            return best

        return self.with_cpu(sojourn)

    def proved_percentile(self, q: float) -> float:
        return percentile_of(self.proved_tail(), q)


def cutoff_queue(rate: float, cutoff_ms: float, times: ServiceTimes, cpu_rate: float) -> CutoffQueue:
    """Solve the GPU side. rate and cpu_rate per ms; cpu_rate is 1 / mean CPU service time, taken as exponential.

    Raises SlaOutOfReach where the largest batch binds (more than 1e-7 of the services leave more survivors).
    """
    rate, cutoff = positive(rate, "rate"), positive(cutoff_ms, "T_cut", "in ms")
    mu = positive(cpu_rate, "CPU rate")
    top = poisson_reach(rate * cutoff)
    if times.max_batch is not None and top > times.max_batch:
        top = times.max_batch
        if float(scipy.special.gammainc(top + 1, rate * cutoff)) > BINDING:
            raise _binding(rate, cutoff, top)
    if top > MOST_STATES:
        raise SlaOutOfReach(
            f"{top} requests may wait within T_cut: too many for the exact distribution",
            where="T_cut",
            remedy="Lower T_cut or the rate.",
        )
    batches, arrivals = np.arange(1.0, top + 1), np.arange(0.0, top + 1)
    T = times.table(1, top)
    windows = np.minimum(cutoff, T)
    p = poisson(arrivals, rate * windows)
    p /= p.sum(axis=1, keepdims=True)
    lumped = p[:, 1:].copy()
    lumped[:, 0] += p[:, 0]
    pi = lumped[0] if np.all(windows == cutoff) else stationary(lumped)
    chain = Chain(rate, 1, batches, T, pi, arrivals, p)
    return CutoffQueue(rate, cutoff, mu, chain, windows, chain.residuals(windows, times), chain.idle(times))


def overflow_bound(queue: CutoffQueue) -> OverflowBound | None:
    """The exponential bound on the CPU sojourn of overflow; None where batches are not i.i.d. or lambda p_o >= mu, or
    so little arrives that the root is beyond what numbers tell."""
    if not queue.independent_batches or queue.overflow_rate >= queue.cpu_rate:
        return None
    rate, mu, cutoff = queue.rate, queue.cpu_rate, queue.cutoff_ms
    if rate < NEXT_TO_NOTHING * mu:
        return None
    p = queue.chain.p[0]
    on = np.concatenate([queue.chain.T[:1], queue.chain.T]) - cutoff
    empty = np.arange(len(p)) == 0
    log_p = np.log(np.maximum(p, 1e-300))

    def kappa(theta: float) -> float:
        return theta * (rate / (mu - theta) - 1)

    def log_omega(theta: float) -> FloatArray:
        return np.asarray(-theta * cutoff + np.where(empty, -math.log1p(theta / rate), 0.0))

    def log_mean(theta: float) -> float:
        return float(scipy.special.logsumexp(log_p + kappa(theta) * on + log_omega(theta)))

    floor = max(0.0, mu - rate)
    step = (mu - floor) / 2
    while log_mean(floor + step) >= 0:
        step /= 2
        if step < 1e-9 * mu:
            return None
    if log_mean(mu * (1 - 1e-12)) <= 0:
        return None
    theta = root(log_mean, floor + step, mu * (1 - 1e-12), xtol=1e-14)
    mean_omega = float(p @ np.exp(log_omega(theta)))
    h = math.exp(-theta * cutoff - math.log1p(theta / rate))
    scale = kappa(theta) * float(p @ on) * h
    return OverflowBound(theta, (1 - mean_omega) / scale, mu) if scale != 0 else None


def _binding(rate: float, cutoff: float, top: int) -> SlaOutOfReach:
    return SlaOutOfReach(
        f"{rate * cutoff:.4g} requests arrive within T_cut on average: batches of {top} bind: no exact answer",
        where="max_batch",
        remedy="Raise the largest batch, lower T_cut, or simulate.",
    )


FEWEST = 24
LOG_NEGLIGIBLE = 34.0
EDGE = 1e-13
"""Share of the distribution above the states kept that needs no form."""

STRAIGHT = 1e-9
"""By what share the last states may depart from the geometric tail."""

RARE = 1e-15
"""Batches that are served less often a cycle are left out."""

LARGEST_EXPONENT = 600.0
LEAST = 1e-15 - 1
SLOWEST = 1e-9
"""ln z from which on the CPU is taken as saturated."""


@dataclass(frozen=True)
class Phases:
    """What follows the end of a service longer than T_cut (row 0), or of a shorter one (rows 1..S): the chances of each
    shorter one (S + 1, S), of one with each ON time (S + 1, L), and of nobody waiting (S + 1,), after which one request
    is served. `one_short` (S,), `one_long` (L,): which of them that is, as ones and zeros."""

    rate: float
    cpu_rate: float
    cutoff: float
    short: FloatArray
    on: FloatArray
    onto_short: FloatArray
    onto_long: FloatArray
    from_none: FloatArray
    one_short: FloatArray
    one_long: FloatArray
    share: FloatArray


@dataclass(frozen=True)
class Cycle:
    """One cycle on states 0..N: departures before ON `G` (L, N + 1), their tail `at_least`, the transitions `moves`
    (N + 1, N + 1) of u, and the ON times as far as M/M/1 has not forgotten its start (L,)."""

    phases: Phases
    G: FloatArray
    at_least: FloatArray
    moves: FloatArray
    felt: FloatArray

    @property
    def size(self) -> int:
        return int(self.G.shape[1]) - 1


def phases_of(queue: CutoffQueue) -> Phases:
    chain, cutoff = queue.chain, queue.cutoff_ms
    overflows = np.greater(chain.T, cutoff)
    visited = chain.pi > RARE * float(chain.pi @ overflows)
    short, long = np.flatnonzero(visited & ~overflows), np.flatnonzero(visited & overflows)
    after = chain.p[np.append(np.argmax(overflows), short)]
    on, group = np.unique(chain.T[long] - cutoff, return_inverse=True)
    member = np.zeros((len(long), len(on)))
    member[np.arange(len(long)), group] = 1
    share = chain.pi[long] @ member
    sizes = chain.batches.astype(np.int64)
    return Phases(
        queue.rate,
        queue.cpu_rate,
        cutoff,
        chain.T[short],
        on,
        after[:, sizes[short]],
        after[:, sizes[long]] @ member,
        after[:, 0],
        (sizes[short] == 1).astype(np.float64),
        (sizes[long] == 1) @ member,
        share / share.sum(),
    )


def decay(phases: Phases, load: float) -> tuple[float, float]:
    """ln z, and the standard deviation of the change at the CPU in a cycle, as a parabola has it between 0 and ln z."""
    rate, mu = phases.rate, phases.cpu_rate

    def slope(u: float) -> float:
        """ln E z^(change in a cycle)/u at z = e^u, nearly straight and rising. E z^... - 1 is summed over the phases of
        a cycle, visits times what each adds: 1 would take its digits."""
        down = math.expm1(-u)
        idle, lost = rate / (rate - mu * down), -mu * down / (rate - mu * down)
        unserved = -np.expm1(mu * down * phases.short)
        after = np.ones(1)
        if len(unserved):
            onward = phases.onto_short + idle * np.outer(phases.from_none, phases.one_short)
            begun = np.linalg.solve(np.eye(len(unserved)) - onward[1:].T * (1 - unserved), onward[0])
            after = np.append(1.0, (1 - unserved) * begun)
            added = -float(unserved @ begun)
        else:
            added = 0.0
        none = float(after @ phases.from_none)
        growth = mu * down * phases.cutoff + phases.on * (rate * math.expm1(u) + mu * down)
        ended = after @ phases.onto_long + idle * none * phases.one_long
        added += float(ended @ np.expm1(np.minimum(growth, LARGEST_EXPONENT))) - lost * none
        return math.log1p(max(added, LEAST)) / u

    high = min(max(-math.log(load), SLOWEST), LOG_NEGLIGIBLE)  # ln z of M/M/1
    while slope(high) <= 0:
        high *= 2
        if high > 2 * LOG_NEGLIGIBLE:
            return LOG_NEGLIGIBLE, 1.0
    low = high / 2
    while slope(low) >= 0:
        high, low = low, low / 2
        if low < SLOWEST:
            raise _too_near(mu)
    u = root(slope, low, high, xtol=1e-15, rtol=1e-12)
    return u, math.sqrt(max(-4 * slope(u / 2) / u, 0.0))


def _visits(phases: Phases, served: FloatArray, unserved: FloatArray, idle: float, lost: float) -> FloatArray:
    """(I - Q)^-1 (S, S), Q[i, j] = served[i] (P(i -> j) + idle P(i -> nobody waits, then j)), served + unserved = 1 =
    idle + lost. Where overflow is rare, I - Q is nearly singular."""
    Q = served[:, None] * (phases.onto_short[1:] + idle * np.outer(phases.from_none[1:], phases.one_short))
    none_goes = lost if phases.one_short.any() else 1.0
    return visits(Q, unserved + served * (phases.onto_long[1:].sum(axis=1) + none_goes * phases.from_none[1:]))


def cycle_of(phases: Phases, N: int) -> Cycle:
    G = departures(phases, N)
    at_least = phases.share[:, None] - np.cumsum(G, axis=1) + G
    rho = phases.rate / phases.cpu_rate
    felt = np.minimum(phases.on, _memory(phases, N))
    law, mirror = free_moves(phases, felt, N, integrated=False)
    # Row by row: a service that starts its ON with i - n there adds a term with n = i to the next row's.
    direct, mirrored = G.T @ law, G.T @ mirror
    ends = np.minimum(1.0, rho) ** np.arange(N + 1.0)
    moves = at_least.T @ (law[:, N:] + ends * mirror[:, : N + 1])
    first, second = np.zeros(2 * N + 1), np.zeros(2 * N + 1)
    for i in range(N + 1):
        moves[i] += first[N:] + ends * second[: N + 1]
        first[1:] = (first + direct[i])[:-1]
        second[:-1] = min(1.0, 1 / rho) * (second + mirrored[i])[1:]
    return Cycle(phases, G, at_least, np.maximum(moves, 0), felt)


def departures(phases: Phases, N: int) -> FloatArray:
    """G (L, N + 1): the distribution of the departures that a full CPU would have had when ON begins, joint with the ON
    time."""
    mu, n = phases.cpu_rate, np.arange(N + 1.0)
    none = mu / (phases.rate + mu)
    most = poisson_reach(mu * float(phases.short.max(initial=0.0)))
    in_short = poisson(n[: most + 1], mu * phases.short)
    # after[k] (N + 1,): departures until the end of the service before, row 0 for the one that begins the cycle
    after = np.zeros((len(phases.short) + 1, N + 1))
    after[0, 0] = 1
    idle = np.zeros(N + 1)
    if len(phases.short):
        starts = np.zeros((len(phases.short), N + 1))
        onto = phases.onto_short + (1 - none) * np.outer(phases.from_none, phases.one_short)
        unserved = -np.expm1(-mu * phases.short)
        at_once = _visits(phases, in_short[:, 0], unserved, 1 - none, none)
        for k in range(N + 1):
            past = min(k, most)
            earlier = np.einsum("sk,sk->s", in_short[:, 1 : past + 1], starts[:, k - past : k][:, ::-1])
            known = onto[1:].T @ earlier + (onto[0] if k == 0 else phases.one_short * none * idle[k - 1])
            starts[:, k] = known @ at_once
            after[1:, k] = in_short[:, 0] * starts[:, k] + earlier
            idle[k] = (1 - none) * (phases.from_none @ after[:, k]) + (none * idle[k - 1] if k else 0.0)
    else:
        idle = (1 - none) * phases.from_none[0] * none**n
    begun = phases.onto_long.T @ after + np.outer(phases.one_long, idle)
    last = poisson(n, np.array([mu * phases.cutoff]))
    return np.asarray(np.maximum(convolved(begun, last)[:, : N + 1], 0))


def _memory(phases: Phases, N: int) -> float:
    """ms after which M/M/1 has forgotten whether it began with 0 or 2 N: s_t(-k) < e^(-(sqrt mu - sqrt lambda)^2 t)
    rho^(-k/2)."""
    rate, mu = phases.rate, phases.cpu_rate
    if mu <= rate:
        return math.inf
    return (LOG_NEGLIGIBLE + (N + 2) * math.log(mu / rate)) / (math.sqrt(mu) - math.sqrt(rate)) ** 2


def free_moves(phases: Phases, spans: FloatArray, N: int, *, integrated: bool) -> tuple[FloatArray, FloatArray]:
    """s_t(k), k = -N..N, and g(m), m = 0..2 N, of each span t (L, 2 N + 1); `integrated`: their integrals over 0..t.
    For rho > 1 g is given as rho^m g(m)."""
    rate, mu = phases.rate, phases.cpu_rate
    rho = rate / mu
    reach = max(2 * N + 3, poisson_reach(max(rate, mu) * float(spans.max())))
    length = 2 ** math.ceil(math.log2(2 * reach + 2))
    turn = np.exp(2j * math.pi / length * np.arange(length // 2 + 1))
    speed = (rate * (np.conj(turn) - 1) + mu * (turn - 1))[None, :]
    spectrum = np.exp(speed * spans[:, None])
    if integrated:
        spectrum[:, 1:] = (spectrum[:, 1:] - 1) / speed[:, 1:]
        spectrum[:, 0] = spans
    law = np.maximum(np.fft.irfft(spectrum, length, axis=1), 0)
    up, down = law[:, : 2 * N + 3], law[:, : length // 2 : -1]  # s(0), s(1), ... and s(-1), s(-2), ...
    if rho <= 1:
        below = np.cumsum(down[:, ::-1], axis=1)[:, ::-1]  # P(S <= -k), k = 1, ...
        mirror = down[:, : 2 * N + 1] + (1 - rho) * below[:, 1 : 2 * N + 2]
    else:
        rest = scipy.signal.lfilter([1.0], [1.0, -1 / rho], law[:, length // 2 - 1 :: -1], axis=1)[:, ::-1]
        mirror = (rest[:, 1 : 2 * N + 2] - rest[:, 2 : 2 * N + 3]) / rho
    return np.hstack([down[:, :N][:, ::-1], up[:, : N + 1]]), mirror


def ends(cycle: Cycle, ratio: float) -> FloatArray | None:
    """u (N + 1,) at the ends of long services, u[N] ratio^k beyond; None where N is too small for that."""

    N, moves = cycle.size, cycle.moves
    P = moves.copy()
    P[:, N] = np.maximum(1 - moves[:, :N].sum(axis=1), 0)
    # From N + k as from N, k higher; all of them are one state, of weight 1/(1 - ratio).
    higher = scipy.signal.lfilter([0.0, ratio], [1.0, -ratio], moves[N])
    P[N, :N] = (1 - ratio) * (moves[N] + higher)[:N]
    u = stationary(P)
    beyond = float(u[N]) * ratio
    u[N] -= beyond
    if beyond < EDGE:
        return u
    alike = float(np.abs(moves[N, 1:] - moves[N - 1, :-1]).max())
    straight = abs(float(u[N] / u[N - 1]) / ratio - 1) * beyond
    return u if alike < EDGE and straight < STRAIGHT else None


def seen_by_overflow(cycle: Cycle, u: FloatArray, ratio: float) -> FloatArray:
    """Distribution of the number at the CPU that an overflow request finds, 0..N, as u continued by ratio^k."""
    N, phases = cycle.size, cycle.phases
    rho = phases.rate / phases.cpu_rate
    far = u[N] * ratio ** np.arange(1.0, N + 1)
    ahead = scipy.linalg.hankel(u, np.append(u[N], far))  # u(n + l)
    v = cycle.G @ ahead
    v[:, 0] = cycle.at_least @ u
    v = np.hstack([v, v[:, N:] * ratio ** np.arange(1.0, N + 1)])
    law, mirror = free_moves(phases, cycle.felt, N, integrated=True)
    direct = convolved(v, law)[:, N : 2 * N + 1]
    # sum over l of v(l) rho^-l g(l + j) for rho > 1, without rho for less
    v = v[:, : N + 1] * np.minimum(1.0, 1 / rho) ** np.arange(N + 1.0)
    mirrored = convolved(mirror, v[:, ::-1])[:, N : 2 * N + 1]
    seen = np.maximum((direct + np.minimum(1.0, rho) ** np.arange(N + 1.0) * mirrored).sum(axis=0), 0)
    if rho < 1:
        seen += float(phases.share @ (phases.on - cycle.felt)) * (1 - rho) * rho ** np.arange(N + 1.0)
    return np.asarray(seen / (seen.sum() + seen[N] * ratio / (1 - ratio)))


def _too_near(cpu_rate: float) -> SlaOutOfReach:
    return SlaOutOfReach(
        f"overflow is too near the {cpu_rate * 1e3:,.6g}/s that the CPU serves for the exact distribution",
        where="T_cut",
        remedy="Take another T_cut, or the proved bound.",
    )


MOST_CYCLE_STATES = 2000
DEVIATIONS = 14.0
GROWTH = 2
NO_OVERFLOW = 1e-12
"""Share below which nobody overflows; the CPU is then empty for whoever would."""


@dataclass(frozen=True)
class Sojourn:
    """At the CPU, of a request that finds k there with chance seen[k], k = 0..N, and seen[N] ratio^(k - N) beyond."""

    seen: FloatArray
    ratio: float
    cpu_rate: float

    @property
    def beyond(self) -> float:
        return float(self.seen[-1]) * self.ratio / (1 - self.ratio)

    def tail(self, y: float) -> float:
        N, y = len(self.seen), max(y, 0.0)
        late = float(self.seen @ scipy.special.gammaincc(np.arange(1.0, N + 1), self.cpu_rate * y))
        if self.beyond > EDGE:
            done = float(scipy.special.gammainc(N, self.cpu_rate * self.ratio * y)) * self.ratio**-N
            slow = math.exp(-self.cpu_rate * (1 - self.ratio) * y)
            late += self.beyond * (float(scipy.special.gammaincc(N, self.cpu_rate * y)) + slow * done)
        return late

    @property
    def mean_ms(self) -> float:
        N = len(self.seen)
        inside = float(self.seen @ np.arange(1.0, N + 1))
        return (inside + self.beyond * (N + 1 / (1 - self.ratio))) / self.cpu_rate


@dataclass(frozen=True)
class CutoffLaw(OverflowDistribution):
    """Response over all requests; also that of those that overflow, from their move to the CPU."""

    cutoff_ms: float = math.nan
    sojourn: Sojourn = field(default_factory=lambda: Sojourn(np.ones(1), 0.0, math.nan))


def exact_distribution(queue: CutoffQueue) -> CutoffLaw:
    """The distribution of the response over all requests. Raises SlaOutOfReach where the CPU would be overloaded."""
    if queue.overflow_rate >= queue.cpu_rate:
        stable(queue.overflow_rate, queue.cpu_rate, "the CPU queue", "A larger T_cut sends less to the CPU.")
    sojourn = _sojourn(queue)
    share = queue.overflow_share
    gpu_mean = queue.served_later.mean_ms + queue.served_idle.mean_ms
    return CutoffLaw(
        mean_ms=gpu_mean + share * (queue.cutoff_ms + sojourn.mean_ms),
        tail=queue.with_cpu(sojourn.tail),
        utilisation=queue.overflow_rate / queue.cpu_rate,
        rate_limit=math.nan,
        conditions="Poisson arrivals, GPU greedy with a largest batch that does not bind, CPU exponential and not"
        " overloaded, overflow stays there, both FIFO",
        source="matrix method, exact" + ("" if queue.independent_batches else " (batches as a chain)"),
        overflow_share=share,
        cutoff_ms=queue.cutoff_ms,
        sojourn=sojourn,
    )


def _sojourn(queue: CutoffQueue) -> Sojourn:
    """What overflow meets at the CPU."""
    if queue.overflow_share < NO_OVERFLOW:
        return Sojourn(np.ones(1), 0.0, queue.cpu_rate)
    phases = phases_of(queue)
    log_z, deviation = decay(phases, queue.overflow_rate / queue.cpu_rate)
    ratio = math.exp(-log_z)
    size = min(math.ceil(LOG_NEGLIGIBLE / log_z), math.ceil(DEVIATIONS * deviation)) + FEWEST
    while size <= MOST_CYCLE_STATES:
        cycle = cycle_of(phases, size)
        u = ends(cycle, ratio)
        if u is not None:
            return Sojourn(seen_by_overflow(cycle, u, ratio), ratio, queue.cpu_rate)
        size = math.ceil(GROWTH * size)
    raise SlaOutOfReach(
        f"{size:,} states of the CPU are needed for the exact distribution, above {MOST_CYCLE_STATES:,}",
        where="T_cut",
        remedy="Take another T_cut, the proved bound, or a simulation.",
    )


Method = Literal["exact", "rigorous", "poisson", "poisson with GPU"]

OVERLOADED = 1.0
SMALLEST_SHARE = 1e-3
"""The grid starts at this share of the SLA."""


@dataclass(frozen=True)
class Ranges:
    """Where a condition holds: closed ranges in order, found on a grid and refined; `method` says by what."""

    ranges: tuple[tuple[float, float], ...]
    method: str

    @property
    def smallest(self) -> float | None:
        return self.ranges[0][0] if self.ranges else None

    @property
    def largest(self) -> float | None:
        return self.ranges[-1][1] if self.ranges else None

    def __contains__(self, value: float) -> bool:
        return any(low <= value <= high for low, high in self.ranges)


def feasible_cutoffs(
    rate: float, times: ServiceTimes, cpu_rate: float, sla_ms: float, q: float = 0.99, method: Method = "exact"
) -> Ranges:
    """T_cut in ms, from a thousandth of the SLA up to it, with the q-quantile of all responses within the SLA.

    rate, cpu_rate per ms. No range where there is none. Where a T_cut cannot be judged (the CPU within a hair of its
    limit, a largest batch that binds) it is left out.
    """
    positive(rate, "rate"), positive(cpu_rate, "CPU rate"), positive(sla_ms, "SLA", "in ms")
    if not 0 < q < 1:
        raise WrongUsage(f"percentile {q:g} is not between 0 and 1", where="percentile", remedy="Write 0.99.")

    def excess(cutoff: float) -> float:
        try:
            queue = cutoff_queue(rate, cutoff, times, cpu_rate)
            return _late_share(queue, sla_ms, q, method) - (1 - q)
        except SlaOutOfReach:
            return OVERLOADED

    first = times(1)
    # Beyond T(1) batches depend on each other and little changes: a coarser grid there.
    near = np.linspace(SMALLEST_SHARE * sla_ms, min(sla_ms, first), 41)
    far = np.linspace(first, sla_ms, 9)[1:] if sla_ms > first else np.zeros(0)
    return Ranges(not_above_zero(excess, np.concatenate([near, far])), method)


def not_above_zero(excess: Callable[[float], float], grid: FloatArray) -> tuple[tuple[float, float], ...]:
    """Ranges within the ends of `grid` (n,) where excess <= 0, as far as the grid separates them."""
    values = [excess(float(x)) for x in grid]
    ranges: list[tuple[float, float]] = []
    start: float | None = float(grid[0]) if values[0] <= 0 else None
    for i in range(1, len(grid)):
        if (values[i] <= 0) == (start is not None):
            continue
        edge = _edge(excess, float(grid[i - 1]), float(grid[i]))
        if start is None:
            start = edge
        else:
            ranges.append((start, edge))
            start = None
    if start is not None:
        ranges.append((start, float(grid[-1])))
    return tuple(ranges)


def inner_ranges(
    excess: Callable[[float], float], grid: Sequence[float], steps: int
) -> tuple[tuple[float, float], ...]:
    """The same of a condition that a simulation judges: every end is bisected so many times, and keeps it."""
    keeps = [excess(x) <= 0 for x in grid]
    ranges: list[tuple[float, float]] = []
    for i in (place for place, kept in enumerate(keeps) if kept):
        high = grid[i] if i + 1 == len(grid) or keeps[i + 1] else _kept_end(excess, grid[i], grid[i + 1], steps)
        if i and keeps[i - 1]:
            low = ranges.pop()[0]
        else:
            low = grid[i] if i == 0 else _kept_end(excess, grid[i], grid[i - 1], steps)
        ranges.append((low, high))
    return tuple(ranges)


def _kept_end(excess: Callable[[float], float], kept: float, missed: float, steps: int) -> float:
    """The last value towards `missed` that keeps the condition."""
    for _ in range(steps):
        middle = (kept + missed) / 2
        kept, missed = (middle, missed) if excess(middle) <= 0 else (kept, middle)
    return kept


def _edge(excess: Callable[[float], float], low: float, high: float) -> float:
    return root(excess, low, high, xtol=1e-7 * high, rtol=1e-10)


def _late_share(queue: CutoffQueue, sla_ms: float, q: float, method: Method) -> float:
    """P(R > SLA) by the method, right at 1 - q and on the right side of it elsewhere."""
    if queue.overflow_rate >= queue.cpu_rate:
        return OVERLOADED + 1
    if method == "exact":
        # Where bounds decide, the distribution is not needed: nobody leaves the CPU sooner than its own service ends.
        least = queue.with_cpu(lambda y: math.exp(-queue.cpu_rate * y))(sla_ms)
        if least > 1 - q:
            return least
        most = queue.proved_tail()(sla_ms)
        return most if most <= 1 - q else exact_distribution(queue).tail(sla_ms)
    if method == "rigorous":
        return queue.proved_tail()(sla_ms)
    if method == "poisson with GPU":
        return queue.textbook_tail(sla_ms)
    if method == "poisson":
        return math.exp(-(queue.cpu_rate - queue.overflow_rate) * max(sla_ms - queue.cutoff_ms, 0.0))
    raise WrongUsage(f"method {method!r} is not known", where="method", remedy="Take exact, proved or textbook.")
