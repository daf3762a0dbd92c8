"""Times that fall with the batch, have steps, or both: published means, a chain and a simulation written here."""

import math

import numpy as np
import pytest

from latfit.errors import SlaOutOfReach
from latfit.queueing.batch import BatchDistribution, batch_mean, batch_queue, solve_limited, solve_unlimited
from latfit.queueing.service import ServiceTimes, measured_times
from latfit.stats import FloatArray
from tests.unit.queueing.simulation import System


def decode_ms(b: FloatArray) -> FloatArray:
    """Decode steps of a saturation model, one token a request: 376.8 ms for one, 15.96 for 8, 10.05 for 16."""
    return np.asarray(
        4 + (30 + b) / (60 * (1 - np.exp(-0.15 * b)) * (1 - np.exp(-0.01 * b))) + 0.02 * b + 0.002 * b, dtype=np.float64
    )


def poisson_pmf(n: int, mean: float) -> FloatArray:
    """0..n, by logarithms."""
    k = np.arange(n + 1.0)
    return np.asarray(np.exp(k * math.log(mean) - mean - np.append(0.0, np.cumsum(np.log(k[1:])))))


def chain_mean(rate: float, T: FloatArray, threshold: int, top: int) -> float:
    """Mean response by the chain of the requests left behind, 0..top, censored state by state in long numbers: each
    state's probability keeps its digits even where the queue hardly ever leaves one of two states."""
    B = len(T)
    laws = [poisson_pmf(top, rate * float(t)) for t in T]
    q = np.arange(top + 1)
    waiting = np.maximum(q, threshold)
    batch = np.minimum(waiting, B)
    P = np.zeros((top + 1, top + 1), dtype=np.longdouble)
    for i in q:
        left = waiting[i] - batch[i]
        P[i, left:] = laws[batch[i] - 1][: top + 1 - left]
    for k in range(top, 0, -1):
        P[:k, k] /= P[k, :k].sum()
        P[:k, :k] += np.outer(P[:k, k], P[k, :k])
    pi = np.ones(1, dtype=np.longdouble)
    for k in range(1, top + 1):
        pi = np.append(pi, pi @ P[:k, k])
        pi /= pi.sum()
    time = T[batch - 1]
    missing = waiting - q
    held = waiting * time + rate * time**2 / 2 + missing * (q + waiting - 1) / 2 / rate
    return float(pi @ held / (pi @ (rate * time + missing)))


class TestPublished:
    @pytest.mark.parametrize(
        ("rate", "largest", "mean_ms"),
        [(0.318, 16, 102.33), (0.251, 8, 102.10), (0.477, 16, 64.57), (0.752, 32, 33.82)],
    )
    def test_decode_steps(self, rate: float, largest: int, mean_ms: float) -> None:
        T = decode_ms(np.arange(1.0, largest + 1))
        assert batch_queue(rate, measured_times(T)).mean_ms == pytest.approx(mean_ms, abs=0.006)

    def test_decode_steps_without_a_largest_batch(self) -> None:
        """A service of one brings 113 arrivals at .3/ms, and all are taken at once."""
        T = decode_ms(np.arange(1.0, 401))
        free = batch_queue(0.3, ServiceTimes(decode_ms))
        assert free.mean_ms == pytest.approx(chain_mean(0.3, T, 1, 400), rel=1e-9)


def random_times(rng: np.random.Generator, kind: str, largest: int) -> FloatArray:
    b = np.arange(1.0, largest + 1)
    if kind == "falls":
        return np.asarray(rng.uniform(0.5, 3) + rng.uniform(10, 80) / b ** rng.uniform(0.7, 2), dtype=np.float64)
    if kind == "falls and rises":
        return np.asarray(rng.uniform(0.5, 2) + rng.uniform(10, 40) / b + rng.uniform(0.05, 0.4) * b, dtype=np.float64)
    return rng.uniform(1.0, 12.0, largest)


CASES = [
    (kind, seed, share, waits)
    for seed, (kind, share, waits) in enumerate(
        [
            ("falls", 0.1, False),
            ("falls", 0.4, False),
            ("falls", 0.9, False),
            ("falls", 0.3, True),
            ("falls and rises", 0.1, False),
            ("falls and rises", 0.5, False),
            ("falls and rises", 0.85, True),
            ("any", 0.3, False),
            ("any", 0.8, True),
        ]
    )
]


class TestSimulation:
    @pytest.mark.parametrize(("kind", "seed", "share", "waits"), CASES)
    def test_mean_and_tail(self, kind: str, seed: int, share: float, waits: bool) -> None:
        """The mean, and how many take longer than the law's own 50th and 99th percentile and a point between."""
        rng = np.random.default_rng([seed, 3])
        largest = int(rng.integers(2, 24))
        T = random_times(rng, kind, largest)
        threshold = int(rng.integers(1, largest + 1)) if waits else 1
        rate = share * largest / float(T[-1])
        law = batch_queue(rate, measured_times(T), threshold)
        # Between two floats an atom's share is on either side: look a hair beyond it.
        at = [1.0001 * law.percentile(q) for q in (0.5, 0.9, 0.99)]
        system = System(rate, lambda b: T[b.astype(int) - 1], largest, threshold)
        assert system.simulate(lambda response, _: float(response.mean())).agrees(law.mean_ms)
        for t in at:
            assert system.simulate(lambda response, _, t=t: float((response > t).mean())).agrees(law.tail(t))  # type: ignore[misc]


class TestSecondMethod:
    def test_chains_in_long_numbers(self) -> None:
        rng = np.random.default_rng(5)
        for kind in ("falls", "falls and rises", "any") * 4:
            largest = int(rng.integers(2, 16))
            T, threshold = random_times(rng, kind, largest), int(rng.integers(1, largest + 1))
            rate = float(rng.uniform(0.05, 0.8)) * largest / float(T[-1])
            top = largest + int(1.3 * rate * T.max() + 12 * math.sqrt(rate * T.max())) + 90
            expected = chain_mean(rate, T, threshold, top)
            assert solve_limited(rate, measured_times(T), threshold).mean_ms == pytest.approx(expected, rel=1e-8)

    @pytest.mark.parametrize("rate", [0.4, 0.7])
    def test_two_states_that_hardly_ever_change(self, rate: float) -> None:
        """Up to 20 take 8 ms, more 70: batches of about 5 or about 49, seldom both. Limit and none are two programs."""
        T = np.where(np.arange(1, 161) > 20, 70.0, 8.0)
        expected = chain_mean(rate, T, 1, 200)
        free = solve_unlimited(rate, measured_times(T))
        assert free is not None
        assert free.mean_ms == pytest.approx(expected, rel=1e-8)
        assert solve_limited(rate, measured_times(T)).mean_ms == pytest.approx(expected, rel=1e-8)

    def test_the_tail_integrates_to_the_mean(self) -> None:
        T = decode_ms(np.arange(1.0, 17))
        for rate, threshold in ((0.318, 1), (0.2, 6)):
            law = batch_queue(rate, measured_times(T), threshold)
            assert area(law) == pytest.approx(law.mean_ms, rel=2e-3)


def area(law: BatchDistribution) -> float:
    """The integral of the tail by the midpoint rule."""
    t = np.linspace(0, law.percentile(1 - 1e-8), 501)
    return float(sum(law.tail(x) for x in (t[1:] + t[:-1]) / 2) * t[1])


class TestManyStates:
    def test_long_steps_that_never_happen_do_not_count(self) -> None:
        """At 15/ms nobody is ever served alone, however long that would take."""
        b = np.arange(1.0, 257)
        rising = np.where(b < 8, decode_ms(b), decode_ms(np.maximum(b, 8)))
        longer = np.where(b < 8, 1000 * decode_ms(b), rising)
        assert batch_mean(13.0, measured_times(longer)) == pytest.approx(
            batch_mean(13.0, measured_times(rising)), rel=1e-9
        )

    def test_too_many_are_refused(self) -> None:
        T = np.array([50_000.0, 2.0, 2.0, 2.0])
        with pytest.raises(SlaOutOfReach, match="states"):
            batch_queue(1.0, measured_times(T))
        with pytest.raises(SlaOutOfReach, match="batches may settle"):
            batch_queue(0.7, ServiceTimes(lambda b: 4 + 2.0 ** np.ceil(np.log2(b))))
