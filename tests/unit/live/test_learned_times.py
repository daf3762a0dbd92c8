"""Times learnt from batches in planted worlds: a change is seen soon and only if there is one, whatever the noise."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from latfit.live import learned_times
from latfit.live.learned_times import LearnedTimes, SignCusum
from latfit.stats import FloatArray

PLANNED: FloatArray = 6 + 0.25 * np.arange(1.0, 33.0)
Noise = Callable[[np.random.Generator, int], FloatArray]

NOISES: dict[str, Noise] = {
    "lognormal, 5 %": lambda rng, n: rng.normal(0, 0.05, n),
    "lognormal, 30 %": lambda rng, n: rng.normal(0, 0.3, n),
    "Student's t with 1.5 degrees": lambda rng, n: np.clip(0.1 * rng.standard_t(1.5, n), -20, 20),
    "one in 20 of Pareto's, without a mean": lambda rng, n: (
        rng.normal(0, 0.05, n) + np.where(rng.random(n) < 0.05, np.minimum(rng.pareto(1.0, n), 20), 0)
    ),
    "exponential": lambda rng, n: np.log(rng.exponential(1, n) / math.log(2)),
}  # all with a median of zero


def adoptions(
    factor: Callable[[int], float],
    batches: int,
    noise: Noise = NOISES["lognormal, 5 %"],
    seed: int = 0,
) -> tuple[list[tuple[int, float]], LearnedTimes]:
    """What was adopted after which batch, where batch i takes factor(i) times as long as planned."""
    rng = np.random.default_rng(seed)
    learnt, found = LearnedTimes(PLANNED), []
    drawn, scatter = rng.integers(1, 33, batches).tolist(), noise(rng, batches).tolist()
    for i, (size, took) in enumerate(zip(drawn, times_of(drawn, scatter, factor), strict=True)):
        if learnt.add_batch(size, took) and (proposal := learnt.propose()) is not None:
            learnt.adopt(proposal)
            found.append((i, proposal))
    return found, learnt


def times_of(sizes: list[int], scatter: list[float], factor: Callable[[int], float]) -> Iterator[float]:
    for i, (size, each) in enumerate(zip(sizes, scatter, strict=True)):
        yield float(PLANNED[size - 1]) * factor(i) * math.exp(each)


@pytest.mark.parametrize("noise", NOISES)
def test_a_path_that_does_not_change_is_left_alone(noise: str) -> None:
    """Four times 20,000 batches; one in a hundred first looks, once a path, may be wrong by chance."""
    found = [adoptions(lambda _: 1.0, 20_000, NOISES[noise], seed)[0] for seed in range(4)]
    assert sum(map(len, found)) <= 1


@pytest.mark.parametrize("to", [2.0, 0.5, 1.4])
@pytest.mark.parametrize("noise", [name for name in NOISES if name != "exponential"])
def test_a_change_is_seen_within_200_batches(noise: str, to: float) -> None:
    for seed in range(5):
        found, _ = adoptions(lambda i: to if i >= 600 else 1.0, 1200, NOISES[noise], seed)
        assert 600 < found[0][0] <= 800
        assert len(found) <= 3
        assert math.exp(found[-1][1]) == pytest.approx(to, rel=0.1)


def test_false_alarms_of_the_cusum_are_as_far_apart_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the batches beyond the margin, the most allowed: 50 batches on average until an alarm, or more."""
    monkeypatch.setattr(learned_times, "THRESHOLD", math.log(50))
    rng, took = np.random.default_rng(0), []
    for _ in range(200):
        cusum = SignCusum()
        took.append(next(n for n in range(1, 10_000) if cusum.add(bool(rng.random() < 0.5))))
    assert np.mean(took) >= 50
    assert np.mean(took) < 2000  # it does alarm


def test_a_change_that_all_batches_show_is_seen_after_44() -> None:
    """ln(2e6) / ln 1.4 = 43.1; the change is dated where it began."""
    cusum = SignCusum()
    for _ in range(1000):
        cusum.add(False)
    assert [cusum.add(True) for _ in range(44)] == [False] * 43 + [True]
    assert cusum.batches_since_change == 44
