"""Statistical tests of residuals, from their published formulas, so that a fit needs no library of statistics.

* Shapiro-Wilk: W = (sum a_i x_(i))^2 / sum (x - mean)^2 with Royston's approximation of the weights a and of the law of
  ln(1 - W) (Royston 1995, AS R94), for 8 to 5,000 values.
* Anderson-Darling of a normal sample whose mean and standard deviation are estimated: A^2 with the p-value of
  D'Agostino & Stephens (1986, table 4.9).
* Breusch-Pagan in Koenker's form: n R^2 of e^2 on a design is chi^2 with as many degrees as it has columns beside one.
* Ljung-Box: Q = n (n+2) sum_{k<=h} r_k^2/(n-k) is chi^2 with h degrees. Durbin-Watson: sum of squared differences over
  the sum of squares.
* Slope in time with Newey-West standard errors: (X'X)^-1 S (X'X)^-1, S = sum_l (1 - |l|/(L+1)) X'e e_(-l)' X_(-l).
"""

import numpy as np
from numpy.polynomial.polynomial import polyval
from scipy.special import chdtrc, log_ndtr, ndtr, ndtri

from latfit.stats import FloatArray

_FIRST = (0.0, 0.221157, -0.147981, -2.07119, 4.434685, -2.706056)
_SECOND = (0.0, 0.042981, -0.293762, -1.752461, 5.682633, -3.582633)
_FEW = 11


def shapiro_wilk(values: FloatArray) -> tuple[float, float]:
    """(W, p-value) of values (n,), 8 <= n <= 5,000, that vary."""
    x = np.sort(values - np.median(values))
    n = len(x)
    m = ndtri((np.arange(1, n // 2 + 1) - 0.375) / (n + 0.25))
    whole = 2 * float(m @ m)
    a = -m / np.sqrt(whole)
    a[0] += polyval(1 / np.sqrt(n), _FIRST)
    a[1] += polyval(1 / np.sqrt(n), _SECOND)
    left = (whole - 2 * float(m[:2] @ m[:2])) / (1 - 2 * float(a[:2] @ a[:2]))
    a[2:] = -m[2:] / np.sqrt(left)
    spread = float(np.sum((x - x.mean()) ** 2))
    W = min(float(a @ (x[::-1] - x)[: n // 2]) ** 2 / spread, 1.0)
    y, logn = float(np.log(max(1 - W, 1e-19))), float(np.log(n))
    if n <= _FEW:
        gamma = polyval(n, (-2.273, 0.459))
        if y >= gamma:
            return W, 1e-99
        y = -float(np.log(gamma - y))
        middle, scale = polyval(n, (0.544, -0.39978, 0.025054, -6.714e-4)), (1.3822, -0.77857, 0.062767, -0.0020322)
        deviation = np.exp(polyval(n, scale))
    else:
        middle = polyval(logn, (-1.5861, -0.31082, -0.083751, 0.0038915))
        deviation = np.exp(polyval(logn, (-0.4803, -0.082676, 0.0030302)))
    return W, float(ndtr(-(y - middle) / deviation))


def anderson_darling(values: FloatArray) -> tuple[float, float]:
    """(A^2, p-value) of values (n,) that vary, against a normal law with their own mean and standard deviation."""
    z = np.sort((values - values.mean()) / values.std(ddof=1))
    n = len(z)
    odd = 2 * np.arange(1, n + 1) - 1
    square = -n - float(odd @ (log_ndtr(z) + log_ndtr(-z[::-1]))) / n
    a = square * (1 + 0.75 / n + 2.25 / n**2)
    if a < 0.2:
        p = 1 - np.exp(polyval(a, (-13.436, 101.14, -223.73)))
    elif a < 0.34:
        p = 1 - np.exp(polyval(a, (-8.318, 42.796, -59.938)))
    elif a < 0.6:
        p = np.exp(polyval(a, (0.9177, -4.279, -1.38)))
    else:
        p = np.exp(polyval(a, (1.2937, -5.709, 0.0186))) if a <= 13 else 0.0
    return square, float(p)


def moments(values: FloatArray) -> tuple[float, float]:
    """(skewness, excess kurtosis) of values (n,) that vary."""
    z = (values - values.mean()) / values.std()
    square = z * z
    return float(square @ z) / len(z), float(square @ square) / len(z) - 3


def breusch_pagan(residuals: FloatArray, design: FloatArray) -> tuple[float, float]:
    """(n R^2, p-value) of squared residuals (n,) on a design (n, k) whose first column is one."""
    y = residuals**2
    fitted = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    centred = y - y.mean()
    statistic = len(y) * (1 - float(np.sum((y - fitted) ** 2)) / float(centred @ centred))
    return statistic, float(chdtrc(design.shape[1] - 1, max(statistic, 0.0)))


def ljung_box(series: FloatArray, lags: int) -> tuple[float, float]:
    """(Q, p-value) of a series (n,) over its first lags."""
    x = series - series.mean()
    n = len(x)
    r = np.array([float(x[k:] @ x[:-k]) for k in range(1, lags + 1)]) / float(x @ x)
    statistic = n * (n + 2) * float(np.sum(r**2 / (n - np.arange(1, lags + 1))))
    return statistic, float(chdtrc(lags, statistic))


def durbin_watson(series: FloatArray) -> float:
    """Of a series (n,)."""
    return float(np.sum(np.diff(series) ** 2) / np.sum(series**2))


def slope_in_time(series: FloatArray, lags: int) -> tuple[float, float]:
    """(rise from first to last, two-sided p-value) of a line through a series (n,), Newey-West over some lags."""
    time = np.linspace(0.0, 1.0, len(series))
    X = np.stack([np.ones_like(time), time], axis=1)
    inverse = np.linalg.inv(X.T @ X)
    line = inverse @ (X.T @ series)
    scores = X * (series - X @ line)[:, None]
    inner = scores.T @ scores
    for k in range(1, lags + 1):
        shared = scores[k:].T @ scores[:-k]
        inner += (1 - k / (lags + 1)) * (shared + shared.T)
    variance = float((inverse @ inner @ inverse)[1, 1])
    with np.errstate(all="ignore"):
        return float(line[1]), float(2 * ndtr(-abs(line[1]) / np.sqrt(variance)))
