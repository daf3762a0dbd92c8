"""The AMX behind a T_cut: the whole chain of batches and AMX states by matrix exponentials, near saturation too."""

import math

import numpy as np
import pytest
from scipy import linalg

from latfit.errors import SlaOutOfReach
from latfit.queueing.overflow import (
    CutoffQueue,
    Sojourn,
    cutoff_queue,
    cycle_of,
    decay,
    exact_distribution,
    overflow_bound,
    phases_of,
)
from latfit.queueing.service import linear_times, measured_times
from latfit.stats import FloatArray
from tests.unit.queueing.test_falling_times import poisson_pmf
from tests.unit.queueing.textbook import amx_percentile


def generators(rate: float, mu: float, N: int) -> tuple[FloatArray, FloatArray]:
    """M/M/1 and pure death on 0..N."""
    down = mu * (np.diag(np.ones(N), -1) - np.diag(np.append(0.0, np.ones(N))))
    up = rate * (np.diag(np.ones(N), 1) - np.diag(np.append(np.ones(N), 0.0)))
    return up + down, down


def with_integral(Q: FloatArray, t: float) -> tuple[FloatArray, FloatArray]:
    """e^(Q t) and its integral over 0..t."""
    n = len(Q)
    both = linalg.expm(t * np.block([[Q, np.eye(n)], [np.zeros((n, 2 * n))]]))
    return both[:n, :n], both[:n, n:]


def found_by_overflow(queue: CutoffQueue, T: FloatArray, N: int) -> FloatArray:
    """The number at the AMX that an overflow request finds, by the chain of (batch, number at its start)."""
    rate, mu, cutoff = queue.rate, queue.cpu_rate, queue.cutoff_ms
    Q, D = generators(rate, mu, N)
    idle = rate * np.linalg.inv(rate * np.eye(N + 1) - D)
    B = len(T)
    P, seen = np.zeros((B, N + 1, B, N + 1)), []
    for b, t in enumerate(T.tolist()):
        window = min(cutoff, t)
        moves, integral = with_integral(Q, t - window)
        death = linalg.expm(D * window)
        law = poisson_pmf(B, rate * window)
        law /= law.sum()
        for after in range(B):
            P[b, :, after] = law[after + 1] * death @ moves
        P[b, :, 0] += law[0] * death @ moves @ idle
        seen.append(death @ integral)
    chain = P.reshape(B * (N + 1), B * (N + 1))
    A = np.vstack([(chain.T - np.eye(len(chain)))[:-1], np.ones(len(chain))])
    v = np.linalg.solve(A, np.append(np.zeros(len(chain) - 1), 1.0)).reshape(B, N + 1)
    total = sum(v[b] @ seen[b] for b in range(B))
    return np.asarray(total / total.sum())


def random_system(rng: np.random.Generator, kind: str, load: float) -> tuple[CutoffQueue, FloatArray]:
    b = np.arange(1.0, 12)
    if kind == "rises":
        T = rng.uniform(1, 5) + rng.uniform(0.05, 1) * b
    elif kind == "falls":
        T = rng.uniform(1, 3) + rng.uniform(2, 20) / b
    else:
        T = rng.uniform(1, 8, len(b))
    rate = float(rng.uniform(0.1, 1.0))
    cutoff = min(float(rng.uniform(0.2, 1.5) * np.median(T)), 0.9 / rate)
    queue = cutoff_queue(rate, cutoff, measured_times(T), 1.0)
    queue = cutoff_queue(rate, cutoff, measured_times(T), queue.overflow_rate / load)
    return queue, T


class TestAllStates:
    @pytest.mark.parametrize("kind", ["rises", "falls", "any"])
    def test_what_overflow_finds(self, kind: str) -> None:
        rng = np.random.default_rng(4)
        for load in (0.02, 0.3, 0.5, 0.7):
            queue, T = random_system(rng, kind, load)
            seen = exact_distribution(queue).sojourn.seen
            expected = found_by_overflow(queue, T, 70)
            n = min(len(seen), 71)
            assert seen[:n] == pytest.approx(expected[:n], abs=1e-8)

    @pytest.mark.parametrize("cutoff", [3.0, 5.2])
    def test_near_saturation(self, cutoff: float) -> None:
        """Few states and a geometric tail against many states; T_cut below and above T(1) = 4.5 ms."""
        T = 4 + 0.5 * np.arange(1.0, 9)
        queue = cutoff_queue(0.08, cutoff, measured_times(T), 1.0)
        queue = cutoff_queue(0.08, cutoff, measured_times(T), queue.overflow_rate / 0.9)
        sojourn = exact_distribution(queue).sojourn
        assert sojourn.beyond > 1e-5
        expected = found_by_overflow(queue, T, 210)
        assert sojourn.seen == pytest.approx(expected[: len(sojourn.seen)], abs=2e-9)
        mean = float(expected @ np.arange(1.0, 212)) / queue.cpu_rate
        assert sojourn.mean_ms == pytest.approx(mean, rel=1e-6)

    def test_moves_of_a_cycle(self) -> None:
        """Batches up to 2 end before T_cut: their departures, then M/M/1, lambda above and below mu."""
        for rate, mu in ((1.0, 0.5), (0.3, 0.4)):
            phases = phases_of(cutoff_queue(rate, 9, linear_times(8, 0.5), mu))
            cycle = cycle_of(phases, 25)
            assert cycle.G.sum() + cycle.at_least[:, -1].sum() - cycle.G[:, -1].sum() == pytest.approx(1, abs=1e-12)
            expected = np.zeros((26, 26))
            Q, _ = generators(rate, mu, 140)
            for G, on in zip(cycle.G, phases.on.tolist(), strict=True):
                move = linalg.expm(Q * on)[:, :26]
                for i in range(26):
                    expected[i] += G[:i] @ move[i:0:-1] + (1 - G[:i].sum() / G.sum()) * G.sum() * move[0]
            # G ends at 25 departures; what is beyond them is of the order of their last.
            assert cycle.moves == pytest.approx(expected, abs=30 * float(cycle.G[:, -1].sum()) + 1e-12)


class TestTail:
    def test_the_root_is_that_of_the_bound(self) -> None:
        """Two programs for one root: r = 1 - theta/mu."""
        for rate, mu, cutoff in ((0.2, 0.5, 2.0), (1.0, 0.5, 5.0), (2.0, 2.0, 3.0), (0.5, 0.2604, 5.0)):
            queue = cutoff_queue(rate, cutoff, linear_times(8, 0.05, 256), mu)
            bound = overflow_bound(queue)
            assert bound is not None
            log_z, _ = decay(phases_of(queue), queue.overflow_rate / mu)
            assert math.exp(-log_z) == pytest.approx(1 - bound.decay / mu, rel=1e-9)

    def test_what_is_beyond_the_states(self) -> None:
        """A sojourn cut at 40 and one written out to 4000."""
        written = 0.02 * 0.98 ** np.arange(4000.0)
        short, long = Sojourn(written[:41], 0.98, 0.7), Sojourn(written, 0.98, 0.7)
        assert short.mean_ms == pytest.approx(1 / (0.7 * 0.02), rel=1e-12)
        assert short.mean_ms == pytest.approx(long.mean_ms, rel=1e-12)
        for y in (0.0, 3.0, 40.0, 90.0, 700.0):
            assert short.tail(y) == pytest.approx(math.exp(-0.7 * 0.02 * y), rel=1e-10)
            assert short.tail(y) == pytest.approx(long.tail(y), rel=1e-10)

    @pytest.mark.parametrize("load", [0.99, 0.999, 0.9999])
    def test_at_the_limit_it_is_all_exponential(self, load: float) -> None:
        """Percentiles are ln 10/(mu (1 - r)) apart, and the mean is near 1/(mu (1 - r))."""
        times = linear_times(8, 0.5)
        for cutoff in (4.0, 10.0):
            queue = cutoff_queue(1.0, cutoff, times, 1.0)
            queue = cutoff_queue(1.0, cutoff, times, queue.overflow_rate / load)
            law = exact_distribution(queue)
            far = math.log(10) / (queue.cpu_rate * (1 - law.sojourn.ratio))
            assert amx_percentile(law, 0.999) - amx_percentile(law, 0.99) == pytest.approx(far, rel=1e-6)
            assert law.sojourn.mean_ms == pytest.approx(far / math.log(10), rel=3 * (1 - load) + 1e-4)


class TestAnySystem:
    def test_a_law_without_a_warning(self) -> None:
        """Any T, T_cut and load of the AMX: a law, or a refusal that says what to do. (Warnings fail a test.)"""
        rng = np.random.default_rng(11)
        b, refused = np.arange(1.0, 257), 0
        for _ in range(60):
            kind = int(rng.integers(3))
            T = rng.uniform(1, 20) + 10 ** rng.uniform(-2, 0) * (b if kind else 2 ** np.ceil(np.log2(b)))
            if kind == 2:
                T = rng.uniform(1, 5) + rng.uniform(5, 60) / b + 0.02 * b
            rate, cutoff = float(10 ** rng.uniform(-1.5, 0.7)), float(T[0] * 10 ** rng.uniform(-1, 0.5))
            if rate * cutoff > 150:
                continue
            queue = cutoff_queue(rate, cutoff, measured_times(T), 1.0)
            if queue.overflow_rate < 1e-300:
                continue
            load = float(rng.choice([0.01, 0.5, 0.95, 0.99, 0.999]))
            try:
                law = exact_distribution(cutoff_queue(rate, cutoff, measured_times(T), queue.overflow_rate / load))
            except SlaOutOfReach as error:
                refused += 1
                assert "states" in error.found
                continue
            sojourn = law.sojourn
            assert sojourn.seen.sum() + sojourn.beyond == pytest.approx(1, abs=1e-12)
            tails = [law.tail(x) for x in np.linspace(0, 2 * law.percentile(0.99), 12)]
            assert np.all(np.diff(tails) <= 1e-12)
            assert tails[0] == pytest.approx(1, abs=1e-9)
        assert refused <= 2
