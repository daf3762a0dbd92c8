"""Which batch sizes scatter alike: seldom a split where all do, and the true ones where they do not."""

from collections.abc import Callable

import numpy as np
import pytest

from latfit.fitting.checking.step_noise import batch_groups
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray
from latfit.trace.table import Trace

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


def test_fits_of_noise_that_is_alike_are_seldom_split() -> None:
    """The ratios to a fitted curve, about its levels: of 8 at most 3, but for once in a thousand."""
    split = 0
    for seed in range(8):
        rng = np.random.default_rng([seed, 2])
        B = np.resize(np.array([1.0, 2, 4, 8, 16, 32, 64]), 700)
        trace = Trace({"B": B, "S": B, "T_ms": (5 + 0.1 * B) * rng.lognormal(0, 0.1, 700)})
        law = fit_trace(trace, FitOptions("linear")).limits.of("decode").ratios
        assert law is not None
        split += int(len(law.groups) > 1)
    assert split <= 3


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


def test_a_middle_group_is_found() -> None:
    rng = np.random.default_rng(5)
    B = np.resize(np.arange(1.0, 33.0), 6400)
    F = np.where((B > 8) & (B <= 18), rng.lognormal(0, 0.3, 6400), rng.lognormal(0, 0.1, 6400))
    group = batch_groups(B, F, np.ones(6400))
    assert sorted({(B[group == g].min(), B[group == g].max()) for g in range(group.max() + 1)}) == [
        (1, 8),
        (9, 18),
        (19, 32),
    ]


def test_steps_that_resemble_each_other_count_as_fewer() -> None:
    """The same steps: as 2,000 they are told apart, as 60 independent ones they are too few for two groups."""
    rng = np.random.default_rng(6)
    B = batches(rng, 2000)
    F = np.where(B > 12, rng.lognormal(0, 0.2, 2000), rng.lognormal(0, 0.1, 2000))
    assert batch_groups(B, F, np.ones(2000)).max() >= 1
    assert batch_groups(B, F, np.full(2000, 0.03)).max() == 0


def test_a_fit_keeps_the_law_of_each_group() -> None:
    """Noise of 2 % up to 8 requests, of 30 % above: means and second moments of log-normal noise about its median."""
    rng = np.random.default_rng(7)
    B = np.resize(np.array([1.0, 2, 4, 8, 12, 16, 24, 32]), 8000)
    sigma = np.where(B <= 8, 0.02, 0.3)
    trace = Trace({"B": B, "S": B, "T_ms": (5 + 0.2 * B) * np.exp(sigma * rng.standard_normal(8000))})
    law = fit_trace(trace, FitOptions("linear")).limits.of("decode").ratios
    assert law is not None
    assert law.edges.tolist() == pytest.approx([np.sqrt(8 * 12)])
    for batch, s in ((1.0, 0.02), (32.0, 0.3)):
        # 4,000 steps: a relative standard error of s/63 of the mean, of s (1 + s) / 90 and so of the spread.
        assert law.cv(np.ones(1), np.array([batch]))[0] == pytest.approx(np.sqrt(np.expm1(s**2)), rel=0.06)
        group = law.groups[int(law.group_of(np.array([batch]))[0])]
        assert group.mean == pytest.approx(np.exp(s**2 / 2), abs=4 * s / 60 + 0.002)


def test_pauses_of_all_sizes_are_seldom_cut_apart_where_a_curve_misses_some() -> None:
    """Sizes of 30 to 60 spread by 15 % where others do by 3 %, all with pauses of twenty times and more once in a
    hundred. By spread alone every one is cut, into groups of which some know of no pause. That one of the cuts between
    them is two standard deviations off has a chance of about a third (the largest of a Brownian bridge over its
    deviation, on three octaves): of 60 at most 32, but for once in a thousand."""
    split = 0
    for seed in range(60):
        rng = np.random.default_rng([seed, 8])
        B = batches(rng, 2000)
        missed = np.where((B >= 30) & (B < 60), 0.15 * rng.choice([-1.0, 1.0], 2000), 0.0)
        split += int(batch_groups(B, pauses(0.01)(rng, 2000) * np.exp(missed), np.ones(2000)).max() > 0)
    assert split <= 32
