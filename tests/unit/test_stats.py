"""Shared statistics against the binomial distribution, SciPy and simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import special, stats as distributions

from latfit.stats import error_metrics, mad_sigma, median_interval, student_quantile, student_tail, weighted_quantile


@pytest.mark.parametrize("n", [6, 9, 10, 25, 101, 1000])
def test_median_interval_has_the_binomial_coverage(n: int) -> None:
    """[x_(l), x_(n+1-l)] covers with 1 - 2 P(Bin < l); the next narrower pair would not."""
    interval = median_interval(np.arange(1.0, n + 1), 0.95)
    rank = int(interval.low)
    assert interval.high == n + 1 - rank
    assert 1 - 2 * distributions.binom.cdf(rank - 1, n, 0.5) >= 0.95
    assert 1 - 2 * distributions.binom.cdf(rank, n, 0.5) < 0.95


def test_five_samples_cannot_give_a_95_percent_interval() -> None:
    assert median_interval(np.arange(5.0)).relative_half_width == np.inf


def test_metrics_of_a_hand_computed_case() -> None:
    metrics = error_metrics(np.array([1.0, 2.0, 4.0]), np.array([1.1, 1.8, 4.0]))
    assert metrics["mape_pct"] == pytest.approx(20 / 3)
    assert metrics["rmse_ms"] == pytest.approx(np.sqrt(0.05 / 3))
    assert metrics["mae_ms"] == pytest.approx(0.1)
    assert metrics["median_ape_pct"] == pytest.approx(10)
    assert metrics["r2"] == pytest.approx(1 - 0.05 / (14 / 3))


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100), st.integers(1, 5)), min_size=1, max_size=30))
def test_a_weight_is_a_number_of_repeats(rows: list[tuple[float, float, int]]) -> None:
    observed, predicted, repeats = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    expand = np.repeat(np.arange(len(rows)), repeats.astype(int))
    weighted = error_metrics(observed, predicted, repeats)
    spelled_out = error_metrics(observed[expand], predicted[expand], np.ones(len(expand)))
    assert weighted == pytest.approx(spelled_out, nan_ok=True)
    assert weighted_quantile(observed, 0.5, repeats) == weighted_quantile(observed[expand], 0.5, np.ones(len(expand)))


def test_mad_of_normal_residuals_is_their_standard_deviation() -> None:
    residuals = np.random.default_rng(1).normal(0, 2, 20_000)
    # standard error of the scaled MAD: 1.1667 sigma / sqrt n
    assert mad_sigma(residuals) == pytest.approx(2, abs=4 * 1.1667 * 2 / np.sqrt(20_000))


@pytest.mark.parametrize("freedom", [1.0, 2.0, 3.7, 19.0, 333.0, 99_999.0, 1e7])
def test_students_t_is_that_of_scipy(freedom: float) -> None:
    for t in (0.0, 0.1, 1.0, 3.0, 8.0):
        assert student_tail(freedom, t) == pytest.approx(special.stdtr(freedom, -t), rel=1e-7)
    for q in (0.025, 0.5, 0.9, 0.975, 1 - 1e-6):
        assert student_quantile(freedom, q) == pytest.approx(special.stdtrit(freedom, q), rel=1e-7, abs=1e-9)
    assert student_quantile(math.inf, 0.975) == pytest.approx(distributions.norm.ppf(0.975))
