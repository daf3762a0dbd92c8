"""Which batch sizes scatter alike: seldom a split where all do, and the true ones where they do not."""

from collections.abc import Callable

import numpy as np
import pytest

from latfit.fitting.checking.step_noise import batch_groups
from latfit.stats import FloatArray

Law = Callable[[np.random.Generator, int], FloatArray]

SEEDS = 200


def lognormal(sigma: float) -> Law:
    return lambda rng, n: rng.lognormal(0, sigma, n)


def pauses(share: float) -> Law:
    return lambda rng, n: np.where(rng.random(n) < share, rng.uniform(20, 60, n), rng.lognormal(0, 0.03, n))


def rounded(rng: np.random.Generator, n: int) -> FloatArray:
    """Many ties."""
    return np.round(rng.lognormal(0, 0.02, n), 2)


def batches(rng: np.random.Generator, n: int, largest: int = 128) -> FloatArray:
    """Sizes as an engine's log has them."""
    chances = 1 / np.arange(1.0, largest + 1)
    return rng.choice(np.arange(1.0, largest + 1), n, p=chances / chances.sum())


@pytest.mark.parametrize("law", [lognormal(0.5), pauses(0.005), rounded])
def test_sizes_that_scatter_alike_are_seldom_split(law: Law) -> None:
    """At most 5 %: of 200 at most 19, but for once in a thousand."""
    split = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng([seed, 1])
        n = int(np.exp(rng.uniform(np.log(300), np.log(3000))))
        split += int(batch_groups(batches(rng, n), law(rng, n), np.ones(n)).max() > 0)
    assert split <= 19


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (lognormal(0.02), lognormal(0.2)),
        (lognormal(0.4), lognormal(0.1)),
        (lognormal(0.03), pauses(0.03)),
        (pauses(0.05), lognormal(0.03)),
    ],
)
def test_sizes_that_scatter_otherwise_are_told_apart(small: Law, large: Law) -> None:
    for seed in range(20):
        rng = np.random.default_rng([seed, 3])
        B = batches(rng, 2000)
        F = np.where(B > 12, large(rng, 2000), small(rng, 2000))
        group = batch_groups(B, F, np.ones(2000))
        # Few steps are with those that scatter otherwise: no group reaches from far below the boundary to far above it.
        assert all(B[group == g].max() <= 30 or B[group == g].min() >= 6 for g in range(group.max() + 1))
