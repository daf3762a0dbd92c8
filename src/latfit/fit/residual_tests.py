"""Tests of residuals: normal, of constant spread, independent in time, without trend.

Residuals are e = ln(observed/predicted), whatever the fit minimised. A test that cannot be run gives the reason instead
of a number. What to know of each:

* Shapiro-Wilk's p-value holds up to 5,000 values (Royston 1995), so larger data are tested on a seeded sample; with
  thousands of values any real trace is rejected, and skewness and kurtosis say how far it matters. Anderson-Darling
  looks at the tails more.
* Breusch-Pagan in Koenker's form: n R^2 of e^2 on (1, B, S) is chi^2 where the spread does not depend on B and S.
* Durbin-Watson is 2 (1 - r_1) up to its ends; its tables are not for nonlinear fits. Ljung-Box tests the first lags
  together: Q = n (n+2) sum_k r_k^2/(n-k) is chi^2.
* The trend's p-value allows for autocorrelation (Newey-West standard errors): without, neighbours that share their
  noise look like a trend.
"""

import warnings
from typing import Any

import numpy as np

from latfit.stats import FloatArray

SHAPIRO_LIMIT = 5000
LAGS = 10
MIN_ROWS = 20
FEW = 8
STILL = 1e-12


def normality(residuals: FloatArray, seed: int = 0) -> dict[str, Any]:
    """Shapiro-Wilk and Anderson-Darling of residuals (n,), with skewness and excess kurtosis."""
    if len(residuals) < FEW or np.ptp(residuals) < STILL:
        return {"reason": "too few rows, or residuals that do not vary"}
    from scipy import stats as distributions
    from statsmodels.stats.diagnostic import normal_ad

    sample = residuals
    if len(residuals) > SHAPIRO_LIMIT:
        sample = np.random.default_rng(seed).choice(residuals, SHAPIRO_LIMIT, replace=False)
    if np.ptp(sample) < STILL:
        return {"reason": "residuals that hardly vary"}
    statistic, p = distributions.shapiro(sample)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # logs of zero tail probabilities; the statistic is then infinite
        anderson, anderson_p = normal_ad(sample)
    found = {
        "test": "Shapiro-Wilk",
        "statistic": float(statistic),
        "p_value": float(p),
        "n": len(sample),
        "anderson_darling": _finite(anderson),
        "anderson_darling_p_value": _finite(anderson_p),
        "skewness": float(distributions.skew(residuals)),
        "excess_kurtosis": float(distributions.kurtosis(residuals)),
    }
    if len(residuals) > SHAPIRO_LIMIT:
        found["note"] = (
            f"a sample of {SHAPIRO_LIMIT:,} of {len(residuals):,} residuals; so many always reject: skewness and"
            " kurtosis say how far it matters"
        )
    return found


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def heteroscedasticity(B: FloatArray, S: FloatArray, residuals: FloatArray) -> dict[str, Any]:
    """Breusch-Pagan of residuals (n,) on B and S (n,)."""
    B, S = B / B.max(), S / S.max()
    columns = [np.ones_like(B), B, *([] if np.allclose(B, S) else [S])]
    design = np.stack([column for i, column in enumerate(columns) if i == 0 or np.ptp(column) > 0], axis=1)
    if len(residuals) < MIN_ROWS or design.shape[1] < 2 or np.ptp(residuals**2) < STILL:
        return {"reason": f"needs {MIN_ROWS} rows with residuals, and B or S that vary"}
    from statsmodels.stats.diagnostic import het_breuschpagan

    statistic, p, _, _ = het_breuschpagan(residuals, design)
    return {"test": "Breusch-Pagan", "statistic": float(statistic), "p_value": float(p)}


def autocorrelation(series: FloatArray) -> dict[str, Any]:
    """Ljung-Box over ten lags and Durbin-Watson of residuals in time order (n,)."""
    if len(series) < 3 * LAGS or np.ptp(series) < STILL:
        return {"reason": f"fewer than {3 * LAGS} rows with residuals"}
    from statsmodels.stats.diagnostic import acorr_ljungbox
    from statsmodels.stats.stattools import durbin_watson

    table = acorr_ljungbox(series, lags=[LAGS])
    return {
        "test": "Ljung-Box",
        "lags": LAGS,
        "statistic": float(table["lb_stat"].iloc[0]),
        "p_value": float(table["lb_pvalue"].iloc[0]),
        "durbin_watson": float(durbin_watson(series)),
    }


def trend(series: FloatArray) -> dict[str, Any]:
    """Drift of residuals in time order (n,) from first to last, with an error that allows for autocorrelation."""
    if len(series) < 3 * LAGS or np.ptp(series) < STILL:
        return {"reason": f"fewer than {3 * LAGS} rows with residuals"}
    from statsmodels.regression.linear_model import OLS

    position = np.linspace(0.0, 1.0, len(series))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # statsmodels warns of series it regards as short; the p-value says it better
        fitted = OLS(series, np.stack([np.ones_like(position), position], axis=1)).fit(
            cov_type="HAC", cov_kwds={"maxlags": LAGS}
        )
        p = float(fitted.pvalues[1])
    return {
        "test": "linear, HAC",
        "relative_drift": float(np.expm1(fitted.params[1])),
        "slope_per_row": float(fitted.params[1]) / (len(series) - 1),
        "p_value": p if np.isfinite(p) else None,
    }
