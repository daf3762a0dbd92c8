"""From empty to the stationary state: followed step by step here, by powers of a matrix, and by a simulation."""

import math

import numpy as np
import pytest
from numba import njit

from latfit.errors import SlaOutOfReach, WrongUsage
from latfit.queueing.service import ServiceTimes, linear_times, measured_times
from latfit.queueing.settling import settling_ms
from latfit.stats import FloatArray
from tests.unit.queueing.test_falling_times import decode_ms, poisson_pmf, random_times

TWO_STATES = np.where(np.arange(1, 161) > 20, 70.0, 8.0)


def transitions(rate: float, T: FloatArray, threshold: int, top: int) -> tuple[FloatArray, FloatArray]:
    """P (top + 1, top + 1) of the requests left behind, and how long a step lasts on average."""
    laws = [poisson_pmf(top, rate * float(t)) for t in T]
    P, lasts = np.zeros((top + 1, top + 1)), np.zeros(top + 1)
    for q in range(top + 1):
        waiting = max(q, threshold)
        batch = min(waiting, len(T))
        P[q, waiting - batch :] = laws[batch - 1][: top + 1 - waiting + batch]
        P[q, -1] += max(0.0, 1 - float(P[q].sum()))
        lasts[q] = T[batch - 1] + (waiting - q) / rate
    return P, lasts


def followed(rate: float, T: FloatArray, threshold: int, top: int) -> float:
    """By squares of P: the last step at which two laws in a row are 0.1 away, and the mean time until then."""
    P, lasts = transitions(rate, T, threshold, top)
    powers, sums = [P], [lasts]
    while np.abs(powers[-1][0] - powers[-1][-1]).sum() > 1e-9:
        sums.append(sums[-1] + powers[-1] @ sums[-1])
        powers.append(powers[-1] @ powers[-1])
        powers[-1] /= powers[-1].sum(axis=1, keepdims=True)
    pi, v, spent = powers[-1][0], np.eye(top + 1)[0], 0.0

    def far(v: FloatArray) -> bool:
        return bool(np.abs((v + v @ P) / 2 - pi).sum() / 2 > 0.1)

    if not far(v):
        return 0.0
    for power, total in zip(reversed(powers), reversed(sums), strict=True):
        if far(v @ power):
            spent, v = spent + float(v @ total), v @ power
    return spent + float(v @ lasts)


class TestSecondMethod:
    @pytest.mark.parametrize("kind", ["falls", "falls and rises", "any"])
    def test_random_times(self, kind: str) -> None:
        rng = np.random.default_rng(9)
        for _ in range(8):
            largest = int(rng.integers(2, 20))
            T, threshold = random_times(rng, kind, largest), int(rng.integers(1, largest + 1))
            rate = float(rng.uniform(0.05, 0.85)) * largest / float(T[-1])
            top = largest + int(2 * rate * T.max() + 12 * math.sqrt(rate * T.max())) + 150
            # The slow mode gives a step to a share of one, and its time to 1e-3.
            expected, step = followed(rate, T, threshold, top), float(T.max()) + threshold / rate
            assert settling_ms(rate, measured_times(T), threshold) == pytest.approx(expected, rel=5e-3, abs=step)

    @pytest.mark.parametrize("rate", [0.5, 0.62, 0.7])
    def test_two_states(self, rate: float) -> None:
        """Up to 20 take 8 ms, more 70: a queue that serves five at a time goes over to fifty once in a long while."""
        expected = followed(rate, TWO_STATES, 1, 220)
        assert settling_ms(rate, measured_times(TWO_STATES)) == pytest.approx(expected, rel=5e-3, abs=10)

    def test_decode_steps(self) -> None:
        """At 1.2/ms the first service of one brings 450 requests; batches of 16 in 10 ms take seconds to serve them."""
        T = decode_ms(np.arange(1.0, 17))
        expected = followed(1.2, T, 1, 800)
        assert expected > 1000
        assert settling_ms(1.2, measured_times(T)) == pytest.approx(expected, rel=1e-6)

    def test_without_a_largest_batch(self) -> None:
        T = decode_ms(np.arange(1.0, 401))
        assert settling_ms(0.3, ServiceTimes(decode_ms)) == pytest.approx(followed(0.3, T, 1, 400), rel=1e-6)


@njit
def share_in_large_batches(rng, rate, T, until, runs):  # type: ignore[no-untyped-def]
    """Of `runs` greedy queues that were empty at 0, those whose service at `until` is one of the long ones."""
    large = 0
    for _ in range(runs):
        now, waiting = 0.0, 0
        while now < until:
            if waiting == 0:
                now += rng.exponential(1 / rate)
                waiting = 1
            batch = min(waiting, len(T))
            now += T[batch - 1]
            waiting += rng.poisson(rate * T[batch - 1]) - batch
        large += T[batch - 1] == T[-1]
    return large / runs


class TestSimulation:
    def test_two_states(self) -> None:
        """At the settling time completions lack 0.1 of 0.35 large batches. In time the share of long services comes a
        little later, as the steps that are still to come are the longer ones."""
        T, rate = np.where(np.arange(1, 41) > 8, 30.0, 5.0), 0.6
        moment = settling_ms(rate, measured_times(T))
        assert moment is not None
        rng = np.random.default_rng(7)
        found = [share_in_large_batches(rng, rate, T, moment * times, 5000) for times in (0.1, 1, 8)]
        assert found[0] < 0.2 * found[2]
        assert 0.55 * found[2] < found[1] < 0.75 * found[2]


class TestRefusals:
    def test_too_long_to_follow(self) -> None:
        assert settling_ms(4.4444, linear_times(4, 0.1, 32)) is None

    def test_never(self) -> None:
        """Batches of 5 grow to above 30 with a chance of 1e-14 a step; those of 250 shrink with one of 1e-80."""
        T = np.where(np.arange(1, 501) > 30, 250.0, 5.0)
        assert settling_ms(1.0, measured_times(T)) == math.inf

    def test_arguments(self) -> None:
        with pytest.raises(SlaOutOfReach, match="unstable"):
            settling_ms(5, linear_times(4, 0.1, 32))
        with pytest.raises(WrongUsage):
            settling_ms(0, linear_times(4, 0.1, 32))
        with pytest.raises(WrongUsage, match="threshold"):
            settling_ms(1, linear_times(4, 0.1, 32), 33)
