"""The truth that promises about waiting are compared with: a compiled simulator that shares nothing with the package,
and random systems whose step times can be measured as a trace before anything is promised about them.

A server takes all requests that wait, up to `cap`, the oldest first. A batch of b lasts T(b) F, F drawn anew for each
batch, and pauses add to it: a Poisson process per batch or per ms of T(b) F.

R replications with streams of their own start empty and drop what the queue needs to forget; more replications follow
until the pooled quantile is known well enough. Its standard error is half the distance of the pooled quantiles at q - s
and q + s, s the standard error of the share below it (Woodruff 1952). Times in ms, rates per ms.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from scipy.special import ndtr

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# ---------------------------------------------------------------------------------------------------------------------
# What is simulated
# ---------------------------------------------------------------------------------------------------------------------

CONSTANT, EXPONENTIAL, LOGNORMAL, PAUSES, UNIFORM = range(5)
POISSON, RENEWAL, BURSTS, REPEATED = range(4)


@dataclass(frozen=True)
class Law:
    """Distribution of the factor F of a step's time; made by the functions below. p: its parameters."""

    kind: int
    p: tuple[float, ...] = ()

    @cached_property
    def moments(self) -> tuple[float, float]:
        """E[F], E[F^2]."""
        p = self.p
        if self.kind == CONSTANT:
            return p[0], p[0] ** 2
        if self.kind == EXPONENTIAL:
            return p[0], 2 * p[0] ** 2
        if self.kind == UNIFORM:
            return (p[0] + p[1]) / 2, (p[0] ** 2 + p[0] * p[1] + p[1] ** 2) / 3
        scale, s = (p[0], p[1]) if self.kind == LOGNORMAL else (1.0, p[0])
        calm = scale * math.exp(s**2 / 2), scale**2 * math.exp(2 * s**2)
        if self.kind == LOGNORMAL:
            return calm
        _, share, low, high = p
        return (
            (1 - share) * calm[0] + share * (low + high) / 2,
            (1 - share) * calm[1] + share * (low**2 + low * high + high**2) / 3,
        )

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        """`count` independent factors."""
        found = np.empty(count)
        _fill(self.kind, np.array(self.p), rng, found)
        return found


@njit(cache=True, nogil=True)
def _draw(kind, p, rng):  # type: ignore[no-untyped-def]
    """One number of a law."""
    if kind == CONSTANT:
        return p[0]
    if kind == EXPONENTIAL:
        return p[0] * rng.standard_exponential()
    if kind == LOGNORMAL:
        return p[0] * math.exp(p[1] * rng.standard_normal())
    if kind == PAUSES:
        if rng.random() < p[1]:
            return p[2] + (p[3] - p[2]) * rng.random()
        return math.exp(p[0] * rng.standard_normal())
    return p[0] + (p[1] - p[0]) * rng.random()


@njit(cache=True, nogil=True)
def _fill(kind, p, rng, found):  # type: ignore[no-untyped-def]
    for i in range(len(found)):
        found[i] = _draw(kind, p, rng)


def constant(value: float = 1.0) -> Law:
    """F is always `value`."""
    return Law(CONSTANT, (value,))


def exponential(mean: float = 1.0) -> Law:
    return Law(EXPONENTIAL, (mean,))


def lognormal(sigma: float, mean: float | None = None) -> Law:
    """F = e^N(0, sigma), whose median is 1; with `mean`, scaled to that mean instead."""
    return Law(LOGNORMAL, (1.0 if mean is None else mean * math.exp(-(sigma**2) / 2), sigma))


def pauses(s: float, share: float, low: float, high: float) -> Law:
    """F = e^N(0, s), but with probability `share` uniform on low..high instead."""
    return Law(PAUSES, (s, share, low, high))


def uniform(low: float, high: float) -> Law:
    """Uniform on low..high."""
    return Law(UNIFORM, (low, high))


@dataclass(frozen=True)
class Stalls:
    """Pauses that add to steps: `rate` per step, or per ms of the step without them, of these lengths in ms."""

    rate: float
    per_ms: bool
    lengths_ms: Law

    def expected(self, ms: FloatArray | float) -> FloatArray | float:
        """Pauses in steps of so many ms."""
        return self.rate * (ms if self.per_ms else np.ones_like(ms))

    def draw(self, ms: FloatArray, rng: np.random.Generator) -> FloatArray:
        """What they add to steps (n,) that take `ms` (n,) without."""
        count = rng.poisson(self.expected(ms))
        lengths = self.lengths_ms.draw(int(count.sum()), rng)
        return np.asarray(np.bincount(np.repeat(np.arange(len(ms)), count), lengths, len(ms)), dtype=np.float64)


@dataclass(frozen=True)
class Steps:
    """Step times: times_ms[b - 1] = T(b). F of a batch of b follows laws[law_of[b - 1]]; one law for all without
    law_of. stalls: on top."""

    times_ms: tuple[float, ...]
    laws: tuple[Law, ...] = (Law(CONSTANT, (1.0,)),)
    law_of: tuple[int, ...] = ()
    stalls: Stalls | None = None

    def law(self, b: int) -> Law:
        return self.laws[self.law_of[b - 1] if self.law_of else 0]

    def moments(self, b: int) -> tuple[float, float]:
        """E[X], E[X^2] of the time X of a batch of b in ms."""
        T = self.times_ms[b - 1]
        first, second = T * self.law(b).moments[0], T**2 * self.law(b).moments[1]
        if self.stalls is None:
            return first, second
        length, square = self.stalls.lengths_ms.moments
        if self.stalls.per_ms:
            r = self.stalls.rate
            return first * (1 + r * length), second * (1 + r * length) ** 2 + r * first * square
        added = self.stalls.rate * length
        return first + added, second + 2 * first * added + added**2 + self.stalls.rate * square

    def mean_ms(self, b: int) -> float:
        """E[X]."""
        return self.moments(b)[0]


def steps(times_ms: Sequence[float] | FloatArray, law: Law | None = None) -> Steps:
    """T(1), T(2), ... with the same law of F for all (F = 1 without)."""
    return Steps(tuple(float(t) for t in times_ms), (law or constant(),))


def linear(tau_ms: float, alpha_ms: float, largest: int) -> FloatArray:
    """tau + alpha b for b = 1..largest."""
    return tau_ms + alpha_ms * np.arange(1.0, largest + 1)


@dataclass(frozen=True)
class Arrivals:
    """Arrivals at `rate` per ms in the mean; made by the functions below. p: parameters; gaps_ms: of a recording."""

    kind: int
    rate: float
    p: tuple[float, ...] = ()
    gaps_ms: tuple[float, ...] = ()

    def at_rate(self, rate: float) -> "Arrivals":
        """The same arrivals in time that runs faster or slower, bursts and all."""
        factor, p = rate / self.rate, self.p
        if self.kind == BURSTS:
            p = (p[0] * factor, p[1] * factor, p[2] / factor, p[3] / factor)
        return replace(self, rate=rate, p=p, gaps_ms=tuple(gap / factor for gap in self.gaps_ms))

    def gaps(self, n: int, rng: np.random.Generator) -> FloatArray:
        """Gaps (n,); bursts and recordings start at a random moment of their course."""
        if self.kind == REPEATED:
            return np.resize(np.roll(np.asarray(self.gaps_ms), -int(rng.integers(len(self.gaps_ms)))), n)
        if self.kind == BURSTS:
            found = np.empty(n)
            _burst_gaps(rng, np.asarray(self.p), found)
            return found
        if self.kind == RENEWAL:
            return rng.standard_gamma(self.p[0], n) / (self.p[0] * self.rate)
        return rng.standard_exponential(n) / self.rate

    @cached_property
    def dispersion(self) -> float:
        """Variance over mean of the number that come in a long time."""
        if self.kind == RENEWAL:
            return 1 / self.p[0]
        if self.kind == BURSTS:
            fast, slow, m1, m2 = self.p
            return 1 + 2 * (fast - slow) ** 2 * (m1 * m2) ** 2 / ((m1 + m2) ** 3 * self.rate)
        return _recorded_dispersion(np.asarray(self.gaps_ms)) if self.gaps_ms else 1.0


def poisson(rate: float) -> Arrivals:
    return Arrivals(POISSON, rate)


def gamma_arrivals(rate: float, shape: float) -> Arrivals:
    """Independent gamma gaps, squared coefficient of variation 1/shape: below shape 1 burstier than Poisson."""
    return Arrivals(RENEWAL, rate, (shape,))


def bursts(rate: float, faster: float, mean_1_ms: float, mean_2_ms: float) -> Arrivals:
    """Poisson arrivals, for an exponential time of mean mean_1_ms `faster` times as fast as for one of mean_2_ms, and
    so on (a Markov-modulated Poisson process of two states)."""
    slow = rate * (mean_1_ms + mean_2_ms) / (faster * mean_1_ms + mean_2_ms)
    return Arrivals(BURSTS, rate, (faster * slow, slow, mean_1_ms, mean_2_ms))


def recorded(times_ms: Sequence[float] | FloatArray, rate: float) -> Arrivals:
    """Arrivals at given moments, faster or slower, over and over, a mean gap between."""
    gaps = np.diff(np.asarray(times_ms, dtype=np.float64))
    mean = float(gaps.mean())
    return Arrivals(REPEATED, 1 / mean, (), (mean, *gaps.tolist())).at_rate(rate)


@njit(cache=True, nogil=True)
def _burst_gaps(rng, p, gaps):  # type: ignore[no-untyped-def]
    """Fill `gaps`. An arrival takes Exp(1) of accumulated rate."""
    state = int(rng.random() < p[3] / (p[2] + p[3]))
    left = rng.standard_exponential() * p[2 + state]
    for i in range(len(gaps)):
        passed, work = 0.0, rng.standard_exponential()
        while work > p[state] * left:
            work -= p[state] * left
            passed += left
            state = 1 - state
            left = rng.standard_exponential() * p[2 + state]
        gaps[i] = passed + work / p[state]
        left -= work / p[state]


def _recorded_dispersion(gaps: FloatArray) -> float:
    """Variance of sums of k gaps over k times the squared mean gap, the largest over k = 1, 2, 4, ... with 20 sums."""
    found, k = 1.0, 1
    while len(gaps) // k >= 20:
        sums = gaps[: len(gaps) // k * k].reshape(-1, k).sum(axis=1)
        found = max(found, float(sums.var() / (k * gaps.mean() ** 2)))
        k *= 2
    return found


@dataclass(frozen=True)
class System:
    """A server of batches of at most `cap`."""

    main: Steps
    arrivals: Arrivals
    cap: int = 1

    @property
    def limit(self) -> float:
        """Rate per ms below which the server is stable: with many waiting it always takes `cap`."""
        return self.cap / self.main.mean_ms(self.cap)

    @property
    def utilisation(self) -> float:
        """Rate over `limit`."""
        return self.arrivals.rate / self.limit


# ---------------------------------------------------------------------------------------------------------------------
# The simulation
# ---------------------------------------------------------------------------------------------------------------------


class _Plant(NamedTuple):
    """T[b] and law_of[b] of the server; kinds (k,) and parameters (k, 4) of the laws, the last that of pauses' lengths;
    pauses per batch or per ms, 0 for none."""

    T: FloatArray
    law_of: IntArray
    kinds: IntArray
    p: FloatArray
    per_batch: float
    per_ms: float


def _plant(main: Steps) -> _Plant:
    stalls = main.stalls or Stalls(0.0, False, constant(0.0))
    laws = [*main.laws, stalls.lengths_ms]
    return _Plant(
        np.array([0.0, *main.times_ms]),
        np.array([0, *(main.law_of or (0,) * len(main.times_ms))], dtype=np.int64),
        np.array([law.kind for law in laws]),
        np.array([[*law.p, *[0.0] * (4 - len(law.p))] for law in laws]),
        0.0 if stalls.per_ms else stalls.rate,
        stalls.rate if stalls.per_ms else 0.0,
    )


@njit(cache=True, nogil=True)
def _serve(plant, cap, arrive, warm, rng, response):  # type: ignore[no-untyped-def]
    """Write the response of each arrival (n,) in ms; return how many batches began with arrival `warm` or later."""
    T, law_of, kinds, p, per_batch, per_ms = plant
    n, i, batches, free, ahead = len(arrive), 0, 0, 0.0, rng.standard_exponential()
    while i < n:
        start, end = max(free, arrive[i]), i + 1
        while end < n and end - i < cap and arrive[end] <= start:
            end += 1
        law = law_of[end - i]
        lasts = T[end - i] * _draw(kinds[law], p[law], rng)
        # The next pause lies `ahead`, in expected pauses.
        ahead -= per_batch + per_ms * lasts
        while ahead < 0.0:
            lasts += _draw(kinds[-1], p[-1], rng)
            ahead += rng.standard_exponential()
        free = start + lasts
        for k in range(i, end):
            response[k] = free - arrive[k]
        batches += i >= warm
        i = end
    return batches


def serve(system: System, arrive: FloatArray, warm: int, rng: np.random.Generator) -> tuple[FloatArray, int]:
    """Responses (n - warm,) in ms of requests that come at `arrive` (n,), and the batches they were served in."""
    response = np.empty(len(arrive))
    batches = _serve(_plant(system.main), system.cap, arrive, warm, rng, response)
    return response[warm:], batches


class Value(NamedTuple):
    """An estimate with its standard error."""

    value: float
    error: float

    @property
    def relative(self) -> float:
        """Standard error over value."""
        return self.error / self.value if self.value > 0 else math.inf


@dataclass(frozen=True)
class Effort:
    """How long to simulate: until the standard error of quantile `q` is at most `tolerance` times it (inf: one round),
    or `budget` requests are served in all.

    replications: of a round. requests: of a replication; 0 goes by the load. warm: what is dropped of each; None goes
    by the load.
    """

    tolerance: float = 0.01
    q: float = 0.99
    replications: int = 16
    requests: int = 0
    warm: int | None = None
    budget: int = 20_000_000


@dataclass(frozen=True)
class Truth:
    """Responses (R, n) of R replications, in ms, and the batches (R,) that served them."""

    responses: FloatArray
    batches: IntArray

    @property
    def mean(self) -> Value:
        """Mean response in ms."""
        return _mean_of(self.responses.mean(axis=1))

    @property
    def mean_batch(self) -> float:
        """Requests in a batch."""
        return self.responses.size / int(self.batches.sum())

    def quantile(self, q: float) -> Value:
        """Response in ms that a share q of the requests meets."""
        x = float(np.quantile(self.responses, q))
        error = self.share_within(x).error
        low, high = np.quantile(self.responses, [max(q - error, 0.0), min(q + error, 1.0)])
        return Value(x, float(high - low) / 2)

    def share_within(self, limit_ms: float) -> Value:
        """Share of requests with a response up to the limit."""
        return _mean_of((self.responses <= limit_ms).mean(axis=1))


def _mean_of(runs: FloatArray) -> Value:
    return Value(float(runs.mean()), float(runs.std(ddof=1)) / math.sqrt(len(runs)))


def remembers(system: System) -> float:
    """Requests over which the slowest part of the queue's memory decays by e. Raises ValueError for overload.

    In heavy traffic the workload is a reflected Brownian motion with drift -(1 - rho) and variance I/b + c^2 a batch,
    b = cap, I the arrivals' index of dispersion, c^2 of F: it forgets within 2 (I/b + c^2)/(1 - rho)^2 batches.
    """
    arrivals, rho = system.arrivals, system.utilisation
    if rho >= 1:
        raise ValueError(f"a server has {rho:.4g} times as much to do as it can")
    first, second = system.main.moments(system.cap)
    spread, changes = arrivals.dispersion + system.cap * (second / first**2 - 1), 0.0
    if arrivals.kind == BURSTS:
        changes = arrivals.rate / (1 / arrivals.p[2] + 1 / arrivals.p[3])
    return max(2 * spread / (1 - rho) ** 2, changes)


def truth(system: System, effort: Effort | None = None, seed: int = 0) -> Truth:
    """Simulate until the quantile is known. Raises ValueError where the system is not stable."""
    effort = effort or Effort()
    warm = effort.warm if effort.warm is not None else math.ceil(max(20_000.0, 5 * remembers(system)))
    warm = min(warm, effort.budget // (2 * effort.replications))
    count, responses, batches = warm + (effort.requests or max(50_000, warm)), list[FloatArray](), list[int]()
    while True:
        for _ in range(effort.replications):
            rng = np.random.default_rng((seed, len(responses)))
            response, served = serve(system, np.cumsum(system.arrivals.gaps(count, rng)), warm, rng)
            responses.append(response)
            batches.append(served)
        found = Truth(np.array(responses), np.array(batches))
        if found.quantile(effort.q).relative <= effort.tolerance or len(responses) * count >= effort.budget:
            return found


# ---------------------------------------------------------------------------------------------------------------------
# Random systems
# ---------------------------------------------------------------------------------------------------------------------

ENOUGH = 5.0
"""Events of the tail that a trace should hold on average: of fewer, nobody could know."""

LEAST_ROWS, MOST_ROWS = 500, 10_000

RATIOS = ("narrow", "exponential", "lognormal", "pauses", "by_size")
STALLS = (
    "fixed per step",
    "uniform per step",
    "exponential per step",
    "fixed per second",
    "uniform per second",
    "exponential per second",
    "mixed",
)
"""Noise of ratios only, and pauses by length and rate on top of noise of 1 to 3 %. mixed: on top of pauses that are
ratios, or of noise of 10 to 40 %."""


@dataclass(frozen=True)
class Planted:
    """A random system, and how its steps are measured.

    shape: of T ("linear", "stepped", "falling"). noise: of F ("narrow", "exponential", "lognormal", "pauses",
    "by_size"), or of pauses that add to steps ("fixed per step", ..., "mixed": see STALLS). load: of the arrivals
    ("poisson", "gamma", "bursts", "recorded"). utilisation: rate over the limit of stability with the true mean of F.
    design: "grid" visits sizes as a designed profile does, "log" wanders through them as an engine's log does. rows: of
    the trace.
    """

    system: System
    shape: str
    noise: str
    load: str
    utilisation: float
    design: str
    rows: int


def _tail_share(main: Steps, design: str) -> float:
    """Share of a trace's steps that show the tail."""
    chances = _size_chances(design, len(main.times_ms))
    laws = [main.law(b) for b in range(1, len(chances) + 1)]
    paused = np.array([law.p[1] if law.kind == PAUSES else 0.0 for law in laws])
    if main.stalls is not None:
        paused = -np.expm1(-np.asarray(main.stalls.expected(np.asarray(main.times_ms))))
    # A grid may miss the sizes that pause.
    return float(chances @ paused) if paused.any() else 0.01


def measure(planted: Planted, rows: int, seed: int) -> dict[str, FloatArray]:
    """A trace of `rows` decode steps: columns B, S = B and T_ms = T(B) F, with F drawn anew for each."""
    rng, main = np.random.default_rng([seed, 1]), planted.system.main
    largest = len(main.times_ms)
    if planted.design == "grid":
        sizes = _grid(largest)
        B = rng.permutation(np.resize(sizes, rows))
    else:
        # A stationary walk: normal, correlation .9 from step to step, mapped to the sizes' distribution.
        walk = rng.standard_normal(rows)
        for i in range(1, rows):
            walk[i] = 0.9 * walk[i - 1] + math.sqrt(1 - 0.9**2) * walk[i]
        ends = np.cumsum(_size_chances("log", largest))
        B = 1 + np.minimum(np.searchsorted(ends, ndtr(walk), side="right"), largest - 1)
    factors = np.array([law.draw(rows, rng) for law in main.laws])
    law = np.asarray(main.law_of or (0,) * largest)[B - 1]
    T = np.asarray(main.times_ms)[B - 1] * factors[law, np.arange(rows)]
    if main.stalls is not None:
        T = T + main.stalls.draw(T, rng)
    return {"B": B.astype(np.float64), "S": B.astype(np.float64), "T_ms": T}


def random_systems(n: int, seed: int) -> Iterator[Planted]:
    """`n` random systems of one main server, the same for the same seed."""
    for i in range(n):
        yield _random_system(np.random.default_rng([seed, i]))


def _random_system(rng: np.random.Generator) -> Planted:
    largest = int(rng.choice([8, 16, 32, 64, 128, 256]))
    shape = str(rng.choice(["linear", "stepped", "falling"]))
    noise = str(rng.choice([*RATIOS, *STALLS]))
    load = str(rng.choice(["poisson", "gamma", "bursts", "recorded"]))
    design = "grid" if rng.random() < 0.5 else "log"
    T = tuple(_random_times(shape, largest, rng).tolist())
    least = math.inf
    while least > MOST_ROWS:
        main = _random_steps(noise, T, design, rng)
        share = _tail_share(main, design)
        least = max(LEAST_ROWS, ENOUGH / share) if share > 0 else math.inf
    rows = math.ceil(_log_uniform(rng, least, MOST_ROWS))
    cap = 1 if rng.random() < 0.25 else largest if rng.random() < 0.5 else int(rng.integers(2, largest + 1))
    utilisation = float(rng.uniform(0.1, 0.97))
    system = System(main, poisson(1.0), cap)
    arrivals = _random_arrivals(load, utilisation * system.limit, main.mean_ms(cap), rng)
    return Planted(replace(system, arrivals=arrivals), shape, noise, load, utilisation, design, rows)


def _random_times(shape: str, largest: int, rng: np.random.Generator) -> FloatArray:
    """T(1..largest) in ms. falling: tau + c/(1 - e^{-kb}) + alpha b, falling while the machine fills, then rising."""
    b = np.arange(1.0, largest + 1)
    tau, alpha = _log_uniform(rng, 1, 20), _log_uniform(rng, 0.003, 0.3)
    if shape == "stepped":
        width = rng.choice([2, 4, 8])
        doubled, even = np.maximum(width, 2.0 ** np.ceil(np.log2(b))), width * np.ceil(b / width)
        b = doubled if rng.random() < 0.5 else even
    if shape == "falling":
        return np.asarray(tau * (1 + rng.uniform(0.3, 3) / -np.expm1(-_log_uniform(rng, 0.03, 1) * b) + alpha * b / 10))
    return np.asarray(tau * (1 + alpha * b))


def _random_steps(noise: str, T: tuple[float, ...], design: str, rng: np.random.Generator) -> Steps:
    """T with noise; pauses fall on 0.2 to 2 % of the trace's steps and take 3 to 60 times the median step of a size."""
    largest = len(T)
    if noise not in STALLS:
        return Steps(T, *_random_noise(noise, largest, rng))
    laws, law_of = _random_noise("pauses" if noise == "mixed" and rng.random() < 0.5 else "narrow", largest, rng)
    if noise == "mixed" and laws[0].kind != PAUSES:
        laws = (lognormal(rng.uniform(0.1, 0.4)),)
    kind, _, per = noise.partition(" per ")
    per_ms = (per or str(rng.choice(["step", "second"]))) == "second"
    ms = float(np.median(T)) * _log_uniform(rng, 3, 60)
    lengths = {
        "fixed": constant(ms),
        "uniform": uniform(ms * rng.uniform(0.2, 0.9), ms * 1.5),
        "exponential": exponential(ms),
    }[str(rng.choice(["fixed", "uniform", "exponential"])) if noise == "mixed" else kind]
    mean = float(_size_chances(design, largest) @ np.asarray(T)) if per_ms else 1.0
    return Steps(T, laws, law_of, Stalls(_log_uniform(rng, 0.002, 0.02) / mean, per_ms, lengths))


def _random_noise(noise: str, largest: int, rng: np.random.Generator) -> tuple[tuple[Law, ...], tuple[int, ...]]:
    """laws and law_of. by_size: a law each for small, middle and large batches, one of them with pauses or none."""
    low = rng.uniform(20, 50)
    paused = pauses(rng.uniform(0.01, 0.05), _log_uniform(rng, 0.002, 0.01), low, rng.uniform(low + 5, 60))
    if noise == "by_size":
        ends = np.sort(rng.choice(np.arange(1, largest), 2, replace=False))
        laws = [lognormal(_log_uniform(rng, 0.02, 0.6)) for _ in range(3)]
        if rng.random() < 0.5:
            laws[int(rng.integers(3))] = paused
        return tuple(laws), tuple(np.searchsorted(ends, np.arange(1, largest + 1)).tolist())
    law = {
        "narrow": lognormal(rng.uniform(0.01, 0.03)),
        "exponential": exponential(),
        "lognormal": lognormal(rng.uniform(0.2, 1)),
        "pauses": paused,
    }[noise]
    return (law,), ()


def _random_arrivals(load: str, rate: float, batch_ms: float, rng: np.random.Generator) -> Arrivals:
    """bursts: 1.5 to 5 times as fast as between, 5 to 40 % of the time, 1 to 20 batches long. recorded: 2,000 to 20,000
    gamma gaps at a rate that waves by up to 40 %."""
    if load == "gamma":
        return gamma_arrivals(rate, _log_uniform(rng, 0.3, 3))
    if load == "bursts":
        lasts, share = batch_ms * _log_uniform(rng, 1, 20), rng.uniform(0.05, 0.4)
        return bursts(rate, rng.uniform(1.5, 5), lasts, lasts * (1 - share) / share)
    if load == "recorded":
        count, waves = int(_log_uniform(rng, 2_000, 20_000)), rng.integers(1, 6)
        speed = 1 + rng.uniform(0, 0.4) * np.sin(2 * np.pi * waves * np.arange(count) / count)
        return recorded(np.cumsum(rng.standard_gamma(_log_uniform(rng, 0.5, 3), count) / speed), rate=rate)
    return poisson(rate)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(math.log(low), math.log(high))))


def _grid(largest: int) -> IntArray:
    """Sizes 1..largest, each about 1.4 times the one before."""
    steps_up = math.ceil(math.log(largest) / math.log(1.4)) + 1
    return np.unique(np.round(np.geomspace(1, largest, steps_up)).astype(np.int64))


def _size_chances(design: str, largest: int) -> FloatArray:
    """How often a step of the trace has size 1, 2, ..., largest: a grid's sizes equally, a log's as 1/b, from the walk
    of an engine's load over orders of magnitude."""
    weights = 1 / np.arange(1.0, largest + 1)
    if design == "grid":
        weights = np.isin(np.arange(1, largest + 1), _grid(largest)).astype(np.float64)
    return np.asarray(weights / weights.sum())


# ---------------------------------------------------------------------------------------------------------------------
# Serving engines
# ---------------------------------------------------------------------------------------------------------------------

MOST_RUNNING, STEP_TOKENS = 32, 1024


@njit(cache=True, nogil=True)
def _first_tokens(arrival, prompt, output, costs, plant, rng, first):  # type: ignore[no-untyped-def]
    """When the first token of each request (n,) comes from an engine that prefills in chunks beside decoding. costs: ms
    a step, a request, a token."""
    _, _, kinds, p, per_batch, per_ms = plant
    n, running, come, now, ahead = len(arrival), 0, 0, 0.0, rng.standard_exponential()
    who, left, more = np.zeros(64, np.int64), np.zeros(64, np.int64), np.zeros(64, np.int64)
    chunk = np.zeros(64, np.int64)
    while come < n or running > 0:
        budget, tokens = STEP_TOKENS, 0
        for i in range(running):
            chunk[i] = min(left[i] if left[i] > 0 else 1, budget)
            budget -= chunk[i]
        while running < MOST_RUNNING and budget > 0 and come < n and arrival[come] <= now:
            who[running], left[running], more[running] = come, prompt[come], output[come]
            chunk[running] = min(prompt[come], budget)
            budget -= chunk[running]
            running += 1
            come += 1
        if running == 0:
            now = arrival[come]
            continue
        batch = 0
        for i in range(running):
            tokens += chunk[i]
            batch += chunk[i] > 0
        lasts = (costs[0] + costs[1] * batch + costs[2] * tokens) * _draw(kinds[0], p[0], rng)
        ahead -= per_batch + per_ms * lasts
        while ahead < 0.0:
            lasts += _draw(kinds[-1], p[-1], rng)
            ahead += rng.standard_exponential()
        now += lasts
        kept = 0
        for i in range(running):
            ends = False
            if chunk[i] > 0:
                left[i] = max(left[i] - chunk[i], 0)
                if left[i] == 0:
                    if more[i] == output[who[i]]:
                        first[who[i]] = now
                    more[i] -= 1
                    ends = more[i] == 0
            if not ends:
                who[kept], left[kept], more[kept] = who[i], left[i], more[i]
                kept += 1
        running = kept


@dataclass(frozen=True)
class Engine:
    """Serving engines with steps of costs[0] + costs[1] B + costs[2] S ms, F, and pauses."""

    costs: tuple[float, float, float]
    law: Law
    stalls: Stalls | None
    prompt: IntArray
    output: IntArray

    def measure(self, rows: int, seed: int) -> dict[str, FloatArray]:
        """A log: half of the steps decode, half prefill one request beside."""
        rng = np.random.default_rng([seed, 1])
        B, prefill = rng.integers(1, MOST_RUNNING + 1, rows), rng.integers(0, 2, rows)
        tokens = prefill * rng.integers(16, STEP_TOKENS - MOST_RUNNING, rows)
        S = B - prefill + tokens
        T = (self.costs[0] + self.costs[1] * B + self.costs[2] * S) * self.law.draw(rows, rng)
        T = T if self.stalls is None else T + self.stalls.draw(T, rng)
        columns = {"t_s": np.cumsum(T) / 1e3, "B": B, "S": S, "prefill_requests": prefill, "prefill_tokens": tokens}
        columns["T_ms"] = T
        return {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}

    def first_ms(self, arrival: FloatArray, rng: np.random.Generator) -> FloatArray:
        """When the first tokens of requests with random lengths come from one engine."""
        drawn, first = rng.integers(0, len(self.prompt), len(arrival)), np.zeros(len(arrival))
        plant = _plant(Steps((), (self.law,), stalls=self.stalls))
        _first_tokens(arrival, self.prompt[drawn], self.output[drawn], np.array(self.costs), plant, rng, first)
        return first

    def most_per_ms(self) -> float:
        """Requests that one engine serves that always has enough to do."""
        first = self.first_ms(np.zeros(200_000), np.random.default_rng(5))
        return 160_000 / float(first[180_000] - first[20_000])

    def ttft(self, rate: float, engines: int, seed: int, q: float = 0.99, runs: int = 8, count: int = 40_000) -> Value:
        """Quantile of the time to first token where engines take turns, a tenth of each run left out."""
        found = []
        for run in range(runs):
            rng = np.random.default_rng([seed, 2, run])
            arrival, each = np.cumsum(rng.exponential(1 / rate, count * engines)), []
            for k in range(engines):
                own = arrival[k::engines]
                each.append((self.first_ms(own, rng) - own)[count // 10 :])
            found.append(np.concatenate(each))
        pooled = float(np.quantile(np.concatenate(found), q))
        # Woodruff: the share's error, over the density.
        share = float(np.std([np.mean(run <= pooled) for run in found], ddof=1)) / math.sqrt(runs)
        low, high = np.quantile(np.concatenate(found), [max(q - share, 0.0), min(q + share, 1.0)])
        return Value(pooled, float(high - low) / 2)


def random_engine(noise: str, rng: np.random.Generator) -> Engine:
    """noise: "narrow", "pauses" or one of STALLS, on 0.2 to 2 % of the steps."""
    costs = (_log_uniform(rng, 2, 12), rng.uniform(0.02, 0.2), rng.uniform(0.003, 0.03))
    T = tuple(np.quantile([costs[0] + costs[1] * b + costs[2] * (b + 256) for b in range(1, 33)], [0.1, 0.5, 0.9]))
    main = _random_steps(noise, T, "grid", rng)
    prompt = np.clip(rng.lognormal(math.log(300) - 0.3, 0.8, 20_000), 1, 8_000).astype(np.int64)
    output = np.clip(rng.lognormal(math.log(40) - 0.2, 0.6, 20_000), 1, 1_500).astype(np.int64)
    return Engine(costs, main.laws[0], main.stalls, prompt, output)
