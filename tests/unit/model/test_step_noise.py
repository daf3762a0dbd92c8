"""The law of single steps: its sums against the sample's, its tail point by point, what a sample leaves open."""

from dataclasses import replace

import numpy as np
import pytest
from numba import njit

from latfit.fitting.checking.step_noise import Steps, noise_of_steps
from latfit.model.noise_draws import drawn_step_ms, noise_table
from latfit.model.step_noise import Pauses, StepNoise, noise_from_json, noise_of

ONE = np.ones(1)
LENGTHS = np.array([10.0, 30.0])
NARROW = noise_of(np.array([0.9, 1.1]), np.ones(2))
FIXED = Pauses(LENGTHS, np.zeros(2), np.array([0.75, 0.25]), 0.02, 0.0, 40.0)
PER_MS = replace(FIXED, per_step=0.0, per_ms=0.01)
UNCLEAR = replace(FIXED, ratio=LENGTHS / 5.0, per_ms=0.01)


@pytest.mark.parametrize("n", [1, 7, 250, 5_000, 300_000])
@pytest.mark.parametrize("shape", [0.1, 1.5])
def test_sums_are_those_of_the_sample(n: int, shape: float) -> None:
    sample = np.random.default_rng(n).lognormal(0, shape, n)
    law = noise_of(sample, np.ones(n))
    assert law.pooled.mean == pytest.approx(sample.mean(), rel=1e-12)
    # What points of next to equal steps lose of the second moment.
    assert law.cv(ONE, ONE)[0] == pytest.approx(sample.std() / sample.mean(), rel=2e-3)
    assert law.pooled.weights.sum() == pytest.approx(1)
    assert len(law.pooled.values) <= 1200


def test_json_gives_the_same_law() -> None:
    law = noise_of(np.random.default_rng(0).lognormal(0, 1, 3_000), np.ones(3_000), 0.5)
    again = noise_from_json(law.to_json())
    assert again is not None
    assert again.pooled.values == pytest.approx(law.pooled.values, rel=1e-7)
    assert again.pooled.weights == pytest.approx(law.pooled.weights, rel=1e-7)
    assert again.pooled.mean == pytest.approx(law.pooled.mean, rel=1e-7)
    assert again.groups[0].independent == pytest.approx(1_500)
    assert noise_from_json(None) is None


@pytest.mark.parametrize("T", [2.0, 8.0, 200.0])
@pytest.mark.parametrize("pauses", [None, FIXED, PER_MS, UNCLEAR])
def test_draws_have_the_moments_of_a_compound_poisson_time(pauses: Pauses | None, T: float) -> None:
    """F is 0.9 or 1.1; K ~ Poisson(h) pauses: E X = T + h E L, Var X = (T/10)^2 + h E L^2."""
    noise = replace(NARROW, pauses=pauses)
    h, lengths = 0.0, LENGTHS
    if pauses is not None:
        h = max(pauses.per_step, pauses.per_ms * T)
        lengths = np.maximum(LENGTHS, pauses.ratio * T)
    mean = T + h * (0.75 * lengths[0] + 0.25 * lengths[1])
    variance = (T / 10) ** 2 + h * (0.75 * lengths[0] ** 2 + 0.25 * lengths[1] ** 2)
    assert noise.mean_ms(np.array([T]), ONE)[0] == pytest.approx(mean)
    assert noise.cv(np.array([T]), ONE)[0] == pytest.approx(np.sqrt(variance) / mean)
    # Of the mean square: all that pauses add, and the slowest hundredth of the steps, which take 1.1 T.
    slow = 0.01 * (1.1 * T) ** 2 + mean**2 + variance - 1.01 * T**2
    assert noise.slow_share(T) == pytest.approx(slow / (mean**2 + variance))
    drawn, n = draws(noise, T), 400_000
    assert drawn.mean() == pytest.approx(mean, abs=4.5 * np.sqrt(variance / n))
    squares = (drawn - mean) ** 2
    assert squares.mean() == pytest.approx(variance, rel=1e-9, abs=4.5 * squares.std() / np.sqrt(n))
    # The longest measured pause is the longest drawn: so many of them at the most, each of the last length.
    assert (drawn.max() - 1.1 * T) / lengths[1] <= 1e-9 + (0 if h == 0 else 1 if h < 1e-3 else 20)


def draws(noise: StepNoise, T: float, n: int = 400_000) -> np.ndarray:
    table = noise_table([None, noise], 4)
    return np.asarray(_drawn(table, T, np.random.default_rng(3).random(n), np.empty(n)))


@njit
def _drawn(table, T, u, out):  # type: ignore[no-untyped-def]
    for i in range(len(u)):
        out[i] = drawn_step_ms(table, table.group[1, 2], T, u[i])
    return out


def test_json_keeps_pauses_and_refuses_what_are_none() -> None:
    written = replace(NARROW, pauses=UNCLEAR).to_json()
    again = noise_from_json(written)
    assert again is not None
    assert again.pauses is not None
    assert again.to_json()["pauses"] == written["pauses"]
    cases: list[dict[str, object]] = [
        {"ms": [1.0]},
        {"weights": [0.5, 0.7]},
        {"per_step": -1.0},
        {"independent": 0.0},
        {"ms": [], "ratio": []},
    ]
    for broken in cases:
        with pytest.raises(ValueError, match="pauses"):
            noise_from_json({**written, "pauses": {**written["pauses"], **broken}})


def test_a_draw_has_one_of_the_kinds_that_the_data_leave_open() -> None:
    rng = np.random.default_rng(0)
    drawn = [UNCLEAR.drawn(rng) for _ in range(400)]
    fixed, of_steps = ([bool(np.all(each.ratio == 0)) for each in drawn], [each.per_ms == 0 for each in drawn])
    assert all(np.all(each.ms == 0) != known for each, known in zip(drawn, fixed, strict=True))
    assert all((each.per_step == 0) != known for each, known in zip(drawn, of_steps, strict=True))
    # Half of 400 each, within four standard errors.
    assert [sum(fixed), sum(of_steps)] == pytest.approx([200, 200], abs=40)
    known = FIXED.drawn(rng)
    assert known.ms[-2] == 30.0
    assert known.per_step > 0


def test_stalls_at_regular_distances_are_not_all_one() -> None:
    """A stall every 30 steps where 40 steps are worth an independent one: every second stall is another."""
    T = np.tile(np.geomspace(2, 30, 50), 60)
    observed = T * np.random.default_rng(5).lognormal(0.0, 0.03, len(T))
    observed[::30] += 200.0
    noise = noise_of_steps(np.ones(len(T)), np.ones(len(T)), Steps(T, observed, np.ones(len(T))), 1 / 40)
    assert noise.pauses is not None
    assert noise.pauses.independent == pytest.approx(len(T) / 60)


def test_batches_that_scatter_more_have_a_noise_of_their_own() -> None:
    """2 % of 1 to 4 requests, 30 % of 16 to 20: between them, sizes belong to the nearer ones in the logarithm."""
    rng = np.random.default_rng(6)
    B = np.concatenate([rng.integers(1, 5, 3000), rng.integers(16, 21, 3000)]).astype(float)
    F = np.exp(rng.normal(0, np.where(B < 10, 0.02, 0.3)))
    noise = noise_of_steps(B, B, Steps(5 + B, (5 + B) * F, np.ones(len(B))), 1.0)
    assert noise.edges == pytest.approx([8.0])
    for sizes, sigma in ((B < 10, 0.02), (B > 10, 0.3)):
        group = noise.groups[int(noise.group_of(B[sizes])[0])]
        assert group.steps == 3000
        assert group.variance / group.mean**2 == pytest.approx(np.expm1(sigma**2), rel=0.1)
