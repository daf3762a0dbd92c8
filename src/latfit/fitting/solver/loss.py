"""Robust losses in SciPy's convention: cost = 1/2 f_scale^2 sum_i weight_i rho(z_i), z = (r/f_scale)^2.

Functions of RHO return rho, rho' and rho''. TUNING gives 95 % efficiency on normal residuals.
"""

from collections.abc import Callable, Mapping

import numpy as np

from latfit.stats import FloatArray

Rho = Callable[[FloatArray], FloatArray]

TUNING: Mapping[str, float] = {"linear": 1.0, "huber": 1.345, "soft_l1": 1.28710, "tukey": 4.685}


def _linear(z: FloatArray) -> FloatArray:
    return np.stack([z, np.ones_like(z), np.zeros_like(z)])


def _huber(z: FloatArray) -> FloatArray:
    root = np.sqrt(np.maximum(z, 1.0))
    first = 1 / root
    inside = z <= 1
    return np.stack([np.where(inside, z, 2 * root - 1), first, np.where(inside, 0.0, -0.5 * first**3)])


def _soft_l1(z: FloatArray) -> FloatArray:
    root = np.sqrt(1 + z)
    return np.stack([2 * (root - 1), 1 / root, -0.5 / root**3])


def _tukey(z: FloatArray) -> FloatArray:
    u = np.maximum(1 - z, 0.0)
    return np.stack([(1 - u**3) / 3, u**2, -2 * u])


RHO: Mapping[str, Rho] = {"linear": _linear, "huber": _huber, "soft_l1": _soft_l1, "tukey": _tukey}


LEAST_SLOPE = 0.02


def by_residual(loss: str, r: FloatArray, f_scale: float | FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return each residual's cost, score psi = r rho', and slope of psi, which stays above 2 % of rho' in the tail."""
    if loss == "huber":
        size = np.abs(r)
        inside = np.minimum(size, f_scale)
        slope = np.where(size <= f_scale, 1.0, LEAST_SLOPE * f_scale / np.maximum(size, f_scale))
        return inside * (size - 0.5 * inside), np.copysign(inside, r), slope
    z = (r / f_scale) ** 2
    rho, first, second = RHO[loss](z)
    return 0.5 * f_scale**2 * rho, first * r, np.maximum(first + 2 * z * second, LEAST_SLOPE * first)


def score_factor(loss: str, residuals: FloatArray, f_scale: float) -> FloatArray:
    return np.asarray(RHO[loss]((residuals / f_scale) ** 2)[1])


def score_slope(loss: str, residuals: FloatArray, f_scale: float) -> FloatArray:
    """Return the derivative of the score r rho'(z) by r: rho' + 2 z rho''."""
    z = (residuals / f_scale) ** 2
    _, first, second = RHO[loss](z)
    return np.asarray(first + 2 * z * second)
