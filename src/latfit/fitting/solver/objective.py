"""The cost of a fit: rows gathered by cell, which share one prediction, robust losses, and priors as further rows.

Losses follow SciPy: cost = 1/2 f_scale^2 sum_i weight_i rho(z_i), z = (r/f_scale)^2; functions of RHO return rho, rho'
and rho''.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.problem import TUNING, FitProblem
from latfit.stats import MAD_TO_SIGMA, FloatArray, weighted_quantile

Rho = Callable[[FloatArray], FloatArray]


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


def prior_rows(problem: FitProblem, z: FloatArray, f_scale: float) -> tuple[FloatArray, FloatArray]:
    """Return (residuals (k,), Jacobian (k, free)) of the k priors on free parameters, in the residuals' unit."""
    names = [p.name for p in problem.free_parameters]
    known = [(names.index(name), *prior) for name, prior in problem.options.priors.items() if name in names]
    J = np.zeros((len(known), len(z)))
    residuals = np.zeros(len(known))
    if not known:
        return residuals, J
    sigma = f_scale / TUNING[problem.options.loss]
    theta = problem.theta(z)
    chain = problem.chain(theta)
    for row, (at, mean, deviation) in enumerate(known):
        residuals[row] = sigma * (theta[problem.free[at]] - mean) / deviation
        J[row, at] = sigma * chain[at] / deviation
    return residuals, J


def with_priors(
    problem: FitProblem, z: FloatArray, f_scale: float, J: FloatArray, slope: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """Return (Jacobian, weights) of the rows followed by the priors; slope: mean psi' of the rows."""
    more = prior_rows(problem, z, f_scale)[1]
    if len(more) == 0:
        return J, problem.weights
    weights = np.concatenate([problem.weights, np.full(len(more), 1.0 / slope)])
    return np.concatenate([J, more]), weights


EXACT = 1e-10  # relative residuals of an exact fit


@dataclass(frozen=True)
class CellProblem:
    """A problem with one row per cell, and the measured rows (n,) behind the cells, sorted by cell."""

    cells: FitProblem  # the problem with one row per cell (m)
    y: FloatArray  # ln T or T
    weights: FloatArray
    starts: NDArray[np.int64]  # first row of each cell (m,)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        return np.diff(self.starts, append=len(self.y))

    def to_residual_scale(self, T: FloatArray) -> FloatArray:
        """Return ln T, or T for absolute residuals."""
        return np.log(np.maximum(T, 1e-300)) if self.cells.relative else T

    def predicted(self, z: FloatArray) -> FloatArray:
        return self.to_residual_scale(self.cells.model.latency_ms(self.cells.theta(z), self.cells.steps))

    def by_row(self, values: FloatArray) -> FloatArray:
        """Return values of the cells (..., m) as those of the rows (..., n)."""
        return values if values.shape[-1] == len(self.y) else np.repeat(values, self.sizes, axis=-1)

    @cached_property
    def nothing(self) -> float:
        return 0.5 * float(self.weights.sum()) * (EXACT * self.cells.unit) ** 2

    def spread(self, z: FloatArray) -> float:
        """Return the robust standard deviation of the residuals."""
        return MAD_TO_SIGMA * weighted_quantile(np.abs(self.by_row(self.predicted(z)) - self.y), 0.5, self.weights)


def by_cell(problem: FitProblem) -> CellProblem:
    starts, y = problem.firsts, np.log(problem.observed) if problem.relative else problem.observed
    if len(starts) == len(y):
        return CellProblem(problem, y, problem.weights, starts)
    weights = np.add.reduceat(problem.weights, starts)
    cells = replace(problem.rows_at(starts), weights=weights)
    return CellProblem(cells, y, problem.weights, starts)
