"""The robust cost of a problem with its gradient and curvature, computed cell by cell.

All rows of a cell are the same step, so they share the prediction u (ln T, or T for absolute residuals) and its slopes.
With residuals r_i = u - y_i the cell's part of the cost and its two derivatives in u are sums over its rows,

    cost = 1/2 s^2 sum w_i rho(r_i^2/s^2),    G = sum w_i r_i rho',    K = sum w_i (rho' + 2 z rho''),

and with J = du/dz of the cells the gradient is J'G, the curvature J'KJ (the term with the second derivative of u is
left out, as in Gauss and Newton's method). Where a row lies in the loss's tail its part of K is kept above a small
share of rho', so that a step stays a descent.

A prior on a parameter, mean m and standard deviation d, is one more squared residual sigma (theta - m)/d, where sigma
is the spread of the residuals that the loss's scale stands for: as much as one row that is d off tells.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.fit.loss import RHO, TUNING
from latfit.fit.problem import FitProblem
from latfit.model.features import StepTable
from latfit.stats import FloatArray, mad_sigma

LEAST_CURVATURE = 0.02

COMPILED_FROM = 20_000
"""Rows from which the sums over cells are worth loading compiled code for."""


@dataclass(frozen=True)
class Quadratic:
    """Cost, gradient (free,) and curvature (free, free) at a point."""

    cost: float
    gradient: FloatArray
    curvature: FloatArray


@dataclass(frozen=True)
class CellProblem:
    """A problem with one row a cell in `cells`, and the measured rows behind them (sorted by cell).

    y: ln T or T (n,); weights (n,); starts: the first row of each cell (m,).
    """

    cells: FitProblem
    y: FloatArray
    weights: FloatArray
    starts: NDArray[np.int64]

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Rows in each cell (m,)."""
        return np.diff(self.starts, append=len(self.y))

    def predicted(self, z: FloatArray) -> FloatArray:
        """u of each cell (m,)."""
        T = self.cells.model.latency_ms(self.cells.theta(z), self.cells.steps)
        return T if self.cells.options.residuals == "absolute" else np.log(np.maximum(T, 1e-300))

    def by_row(self, values: FloatArray) -> FloatArray:
        return values if len(values) == len(self.y) else np.repeat(values, self.sizes)

    def by_row_matrix(self, values: FloatArray) -> FloatArray:
        return values if len(values) == len(self.y) else np.repeat(values, self.sizes, axis=0)

    def spread(self, z: FloatArray) -> float:
        """Robust standard deviation of the residuals."""
        size = np.abs(self.by_row(self.predicted(z)) - self.y)
        if len(size) < COMPILED_FROM:
            return mad_sigma(size, self.weights)
        from latfit.fit.kernels import weighted_median
        from latfit.stats import MAD_TO_SIGMA

        return MAD_TO_SIGMA * float(weighted_median(size, self.weights))


def by_cell(problem: FitProblem) -> CellProblem:
    """The problem with neighbouring rows of the same step gathered."""
    new = np.ones(len(problem.observed), dtype=bool)
    new[1:] = np.any([np.diff(column) != 0 for column in problem.steps.values()], axis=0)
    starts = np.flatnonzero(new)
    y = problem.observed if problem.options.residuals == "absolute" else np.log(problem.observed)
    if len(starts) == len(new):
        return CellProblem(problem, y, problem.weights, starts)
    weights = np.add.reduceat(problem.weights, starts)
    cells = replace(problem.rows_at(starts), weights=weights)
    return CellProblem(cells, y, problem.weights, starts)


@dataclass(frozen=True)
class Objective:
    """The cost to be minimised, at one scale of the loss."""

    rows: CellProblem
    f_scale: float

    @property
    def problem(self) -> FitProblem:
        return self.rows.cells

    def cost(self, z: FloatArray) -> float:
        return self._sums(z)[0] + self._prior(z)[0]

    def at(self, z: FloatArray) -> Quadratic:
        """Cost, gradient and curvature."""
        cost, pull, stiffness = self._sums(z)
        J = self.problem.jacobian(z)
        prior, prior_gradient, prior_curvature = self._prior(z)
        curvature = J.T @ (J * stiffness[:, None]) + np.diag(prior_curvature)
        return Quadratic(cost + prior, J.T @ pull + prior_gradient, curvature)

    def _sums(self, z: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """Cost, and G and K by cell (m,)."""
        rows, u, loss, s = self.rows, self.rows.predicted(z), self.problem.options.loss, self.f_scale
        if len(rows.y) >= COMPILED_FROM:
            from latfit.fit.kernels import LOSSES, cell_sums

            return cell_sums(rows.starts, rows.y, rows.weights, u, s, LOSSES[loss])  # type: ignore[no-any-return]
        r = rows.by_row(u) - rows.y
        square = (r / s) ** 2
        rho, first, second = RHO[loss](square)
        cost = 0.5 * s * s * float(rows.weights @ rho)
        pull = rows.weights * first * r
        stiffness = rows.weights * np.maximum(first + 2 * square * second, LEAST_CURVATURE * first)
        if len(rows.starts) == len(rows.y):
            return cost, pull, stiffness
        return cost, np.add.reduceat(pull, rows.starts), np.add.reduceat(stiffness, rows.starts)

    def _prior(self, z: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """Cost of the priors, its gradient (free,) and the diagonal of its curvature (free,)."""
        problem = self.problem
        gradient, curvature = np.zeros(len(z)), np.zeros(len(z))
        if not problem.options.priors:
            return 0.0, gradient, curvature
        sigma = self.f_scale / TUNING[problem.options.loss]
        theta = problem.theta(z)
        chain, cost = problem.chain(theta), 0.0
        for at, (index, parameter) in enumerate(zip(problem.free, problem.free_parameters, strict=True)):
            if parameter.name in problem.options.priors:
                mean, deviation = problem.options.priors[parameter.name]
                residual = sigma * (theta[index] - mean) / deviation
                slope = sigma * chain[at] / deviation
                cost += 0.5 * residual**2
                gradient[at], curvature[at] = residual * slope, slope**2
        return cost, gradient, curvature


def remembered(problem: FitProblem) -> FitProblem:
    """The problem with a table of steps that remembers what is derived from it."""
    return problem if isinstance(problem.steps, StepTable) else replace(problem, steps=StepTable(problem.steps))
