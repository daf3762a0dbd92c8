"""The rows of a problem gathered by cell, which share one prediction and its slopes, and priors as further rows."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.loss import TUNING
from latfit.stats import MAD_TO_SIGMA, FloatArray, weighted_quantile


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
