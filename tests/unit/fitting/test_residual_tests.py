"""Tests of residuals beside SciPy and statsmodels."""

import numpy as np
import pytest
from scipy import stats

from latfit.fitting.checking.step_noise import log_p_of_counts
from latfit.fitting.diagnostics.residual_tests import (
    anderson_darling,
    breusch_pagan,
    durbin_watson,
    ljung_box,
    moments,
    shapiro_wilk,
    slope_in_time,
)


@pytest.mark.parametrize("n", [8, 11, 12, 50, 501, 5000])
@pytest.mark.parametrize("law", ["normal", "exponential"])
def test_normality_is_that_of_scipy_and_statsmodels(n: int, law: str) -> None:
    from statsmodels.stats.diagnostic import normal_ad

    x = getattr(np.random.default_rng(n), law)(size=n)
    assert shapiro_wilk(x) == pytest.approx(tuple(stats.shapiro(x)), rel=1e-4, abs=1e-6)
    if law == "normal" or n < 5000:  # so far out the peer's logarithms of tails are those of zero
        assert anderson_darling(x) == pytest.approx(normal_ad(x), rel=1e-4, abs=1e-9)
    assert moments(x) == pytest.approx((stats.skew(x), stats.kurtosis(x)), abs=1e-9)


def test_tests_in_time_and_of_spread_are_those_of_statsmodels() -> None:
    from statsmodels.regression.linear_model import OLS
    from statsmodels.stats.diagnostic import acorr_ljungbox, het_breuschpagan
    from statsmodels.stats.stattools import durbin_watson as peer

    rng = np.random.default_rng(1)
    x = np.convolve(rng.normal(size=302), [0.5, 0.3, 0.2], "valid")
    table = acorr_ljungbox(x, lags=[10])
    assert ljung_box(x, 10) == pytest.approx((table["lb_stat"].iloc[0], table["lb_pvalue"].iloc[0]))
    assert durbin_watson(x) == pytest.approx(peer(x))
    design = np.stack([np.ones(300), rng.random(300), rng.random(300)], axis=1)
    assert breusch_pagan(x, design) == pytest.approx(het_breuschpagan(x, design)[:2])
    line = OLS(x, np.stack([np.ones(300), np.linspace(0, 1, 300)], axis=1)).fit(
        cov_type="HAC", cov_kwds={"maxlags": 10}
    )
    assert slope_in_time(x, 10) == pytest.approx((line.params[1], line.pvalues[1]))


@pytest.mark.parametrize("events", [8, 80, 9000])
def test_counts_of_slow_steps_follow_the_binomial_distribution(events: int) -> None:
    chance = np.array([0.1, 0.5, 0.99])
    law = stats.binom(events, chance)
    for seen in (law.ppf(0.001), law.ppf(0.4), law.ppf(0.97)):
        wanted = np.log(np.minimum(2 * np.minimum(law.sf(seen - 1), law.cdf(seen)), 1.0))
        assert log_p_of_counts(seen, events, chance) == pytest.approx(wanted, abs=1e-6)
