"""The number at the AMX behind a GPU with waiting cut off at T_cut (the system of `cutoff`), by matrices.

Within a GPU service of length T(b) nothing overflows for min(T_cut, T(b)) ms, then overflow is Poisson(lambda) for
ON = T(b) - T_cut ms. So the AMX is fed in services longer than T_cut only, and whatever waits at the end of such a
service arrived in its last T_cut ms: the next batch has one law after all of them. The number at the AMX at those ends
is therefore a Markov chain u, whatever the batches in between. From one end to the next: idling for Exp(lambda) where
nobody waits, and services up to T_cut, in which the AMX only empties (n departures, as far as there are requests:
G_b(n) is the law of n until ON begins, joint with the batch b that is then served), then M/M/1 for ON.

M/M/1 from i after t, with S = Poisson(lambda t) - Poisson(mu t), s its law (a Fourier sum) and rho = lambda/mu, by
reflection: P(i -> j) = s(j - i) + rho^j g(i + j), g(m) = P(S < -m) - rho P(S < -m - 1). Sums over n and b of
G_b(n) P_b(max(i - n, 0) -> j) have rank one a batch, but for their limits; those follow row by row:
A(i + 1, j + 1) = A(i, j) + sum_b G_b(i) s_b(j) for the first term, and along the other diagonal for the second.

Above the most departures of a cycle u is that of a random walk: u_k ~ r^k, 1/r = z the root of E z^(change in a cycle)
= 1, with other modes that die away in about fourteen standard deviations of that change. So u is solved on 0..N with
all states from N on as one, near saturation too; N grows until what the modes leave is below 1e-9. What an overflow
request finds is the average over ON, by the same formula with int_0^ON s_t dt. Where mu > lambda, M/M/1 has forgotten
its start after some time; longer ON times end in its stationary law.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import linalg, optimize, signal

from latfit.errors import SlaOutOfReach
from latfit.queueing.censoring import stationary, visits
from latfit.queueing.cutoff import CutoffQueue
from latfit.queueing.waits import poisson, poisson_reach
from latfit.stats import FloatArray

FEWEST = 24
LOG_NEGLIGIBLE = 34.0
EDGE = 1e-13
"""Share of the law above the states kept that needs no form."""

STRAIGHT = 1e-9
"""By what share the last states may depart from the geometric tail."""

RARE = 1e-15
"""Batches that are served less often a cycle are left out."""

LARGEST_EXPONENT = 600.0
LEAST = 1e-15 - 1
SLOWEST = 1e-9
"""ln z from which on the AMX is taken as saturated."""


@dataclass(frozen=True)
class Phases:
    """What follows the end of a service longer than T_cut (row 0), or of a shorter one (rows 1..S): the chances of each
    shorter one (S + 1, S), of one with each ON time (S + 1, L), and of nobody waiting (S + 1,), after which one request
    is served. `one_short` (S,), `one_long` (L,): which of them that is, as ones and zeros."""

    rate: float
    amx_rate: float
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
        queue.amx_rate,
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
    """ln z, and the standard deviation of the change at the AMX in a cycle, as a parabola has it between 0 and ln z."""
    rate, mu = phases.rate, phases.amx_rate

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
    u = float(optimize.brentq(slope, low, high, xtol=1e-15, rtol=1e-12))
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
    rho = phases.rate / phases.amx_rate
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
    """G (L, N + 1): the law of the departures that a full AMX would have had when ON begins, joint with the ON time."""
    mu, n = phases.amx_rate, np.arange(N + 1.0)
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
    return np.asarray(np.maximum(signal.fftconvolve(begun, last, axes=1)[:, : N + 1], 0))


def _memory(phases: Phases, N: int) -> float:
    """ms after which M/M/1 has forgotten whether it began with 0 or 2 N: s_t(-k) < e^(-(sqrt mu - sqrt lambda)^2 t)
    rho^(-k/2)."""
    rate, mu = phases.rate, phases.amx_rate
    if mu <= rate:
        return math.inf
    return (LOG_NEGLIGIBLE + (N + 2) * math.log(mu / rate)) / (math.sqrt(mu) - math.sqrt(rate)) ** 2


def free_moves(phases: Phases, spans: FloatArray, N: int, *, integrated: bool) -> tuple[FloatArray, FloatArray]:
    """s_t(k), k = -N..N, and g(m), m = 0..2 N, of each span t (L, 2 N + 1); `integrated`: their integrals over 0..t.
    For rho > 1 g is given as rho^m g(m)."""
    rate, mu = phases.rate, phases.amx_rate
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
        rest = signal.lfilter([1.0], [1.0, -1 / rho], law[:, length // 2 - 1 :: -1], axis=1)[:, ::-1]
        mirror = (rest[:, 1 : 2 * N + 2] - rest[:, 2 : 2 * N + 3]) / rho
    return np.hstack([down[:, :N][:, ::-1], up[:, : N + 1]]), mirror


def ends(cycle: Cycle, ratio: float) -> FloatArray | None:
    """u (N + 1,) at the ends of long services, u[N] ratio^k beyond; None where N is too small for that."""
    N, moves = cycle.size, cycle.moves
    P = moves.copy()
    P[:, N] = np.maximum(1 - moves[:, :N].sum(axis=1), 0)
    # From N + k as from N, k higher; all of them are one state, of weight 1/(1 - ratio).
    higher = signal.lfilter([0.0, ratio], [1.0, -ratio], moves[N])
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
    """Law of the number at the AMX that an overflow request finds, 0..N, as u continued by ratio^k."""
    N, phases = cycle.size, cycle.phases
    rho = phases.rate / phases.amx_rate
    far = u[N] * ratio ** np.arange(1.0, N + 1)
    ahead = linalg.hankel(u, np.append(u[N], far))  # u(n + l)
    v = cycle.G @ ahead
    v[:, 0] = cycle.at_least @ u
    v = np.hstack([v, v[:, N:] * ratio ** np.arange(1.0, N + 1)])
    law, mirror = free_moves(phases, cycle.felt, N, integrated=True)
    direct = signal.fftconvolve(v, law, axes=1)[:, N : 2 * N + 1]
    # sum over l of v(l) rho^-l g(l + j) for rho > 1, without rho for less
    v = v[:, : N + 1] * np.minimum(1.0, 1 / rho) ** np.arange(N + 1.0)
    mirrored = signal.fftconvolve(mirror, v[:, ::-1], axes=1)[:, N : 2 * N + 1]
    seen = np.maximum((direct + np.minimum(1.0, rho) ** np.arange(N + 1.0) * mirrored).sum(axis=0), 0)
    if rho < 1:
        seen += float(phases.share @ (phases.on - cycle.felt)) * (1 - rho) * rho ** np.arange(N + 1.0)
    return np.asarray(seen / (seen.sum() + seen[N] * ratio / (1 - ratio)))


def _too_near(amx_rate: float) -> SlaOutOfReach:
    return SlaOutOfReach(
        f"overflow is too near the {amx_rate * 1e3:,.6g}/s that the AMX serves for the exact law",
        where="T_cut",
        remedy="Take another T_cut, or the proved bound.",
    )
