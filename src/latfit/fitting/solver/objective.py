"""The robust cost with gradient and Gauss-Newton curvature, summed by cell.

All rows of a cell share one prediction and its slopes, so sums over rows come first. A prior is one more squared
residual, and one more row in the covariance. Derivation: docs/theory/fitting.md, "Cost".
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.problem import FitProblem, quantile
from latfit.fitting.solver.loss import TUNING, by_residual
from latfit.model import Saturation, StepTable
from latfit.stats import MAD_TO_SIGMA, FloatArray


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
    """Return (Jacobian (n + k, free), weights (n + k,)) of the rows followed by the k priors.

    slope: mean psi' of the rows, divided out of the weights of the priors.
    """
    more = prior_rows(problem, z, f_scale)[1]
    if len(more) == 0:
        return J, problem.weights
    weights = np.concatenate([problem.weights, np.full(len(more), 1.0 / slope)])
    return np.concatenate([J, more]), weights


EXACT = 1e-10
"""Relative residuals of an exact fit."""

COMPILED_FROM = 20_000
"""From this many rows on, sums over cells pay for loading compiled code."""


@dataclass(frozen=True)
class Quadratic:
    """Cost, gradient (free,) and curvature (free, free) at a point."""

    cost: float
    gradient: FloatArray
    curvature: FloatArray


@dataclass(frozen=True)
class Sums:
    """At a point: T in ms, pull G and stiffness K of each cell (m,), and the cost without priors."""

    T: FloatArray
    cost: float
    pull: FloatArray
    stiffness: FloatArray


@dataclass(frozen=True)
class CellProblem:
    """A problem with one row per cell, and the measured rows behind the cells.

    Attributes
    ----------
    cells
        The problem with one row per cell (m).
    y, weights
        ln T or T, and weight of each row (n,), sorted by cell.
    starts
        First row of each cell (m,).
    compiled
        Whether compiled code pays, here or for the problem that this one is a sample of.
    """

    cells: FitProblem
    y: FloatArray
    weights: FloatArray
    starts: NDArray[np.int64]
    compiled: bool = False

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Number of rows of each cell (m,)."""
        return np.diff(self.starts, append=len(self.y))

    @cached_property
    def axes(self) -> tuple[FloatArray, FloatArray, NDArray[np.int64], FloatArray]:
        """B and S of the cells (m,), and S again as indices into distinct values, for `swift`."""
        B, S = (np.ascontiguousarray(self.cells.steps[name]) for name in ("B", "S"))
        top = float(S.max())
        if top <= len(S) and np.array_equal(S, np.floor(S)):
            return B, S, S.astype(np.int64), np.arange(top + 1)
        return B, S, np.arange(len(S)), S

    @property
    def swift(self) -> bool:
        """Whether the compiled saturation model applies."""
        return self.compiled and isinstance(self.cells.model, Saturation)

    @property
    def relative(self) -> bool:
        return self.cells.options.residuals == "relative"

    def latency_ms(self, z: FloatArray) -> FloatArray:
        """Return T of each cell in ms (m,)."""
        theta = self.cells.theta(z)
        if self.swift:
            from latfit.fitting.solver.compiled import latencies

            return latencies(theta, self.axes)  # type: ignore[no-any-return]
        return self.cells.model.latency_ms(theta, self.cells.steps)

    def told(self, T: FloatArray) -> FloatArray:
        """Return u (m,): ln T, or T for absolute residuals."""
        return np.log(np.maximum(T, 1e-300)) if self.relative else T

    def predicted(self, z: FloatArray) -> FloatArray:
        """Return u of each cell (m,)."""
        return self.told(self.latency_ms(z))

    def by_row(self, values: FloatArray) -> FloatArray:
        return values if len(values) == len(self.y) else np.repeat(values, self.sizes)

    def by_row_matrix(self, values: FloatArray) -> FloatArray:
        return values if len(values) == len(self.y) else np.repeat(values, self.sizes, axis=0)

    @cached_property
    def nothing(self) -> float:
        """Cost below which residuals are rounding errors (1e-10 of T)."""
        unit = 1.0 if self.relative else float(np.median(self.cells.observed))
        return 0.5 * float(self.weights.sum()) * (EXACT * unit) ** 2

    def spread(self, z: FloatArray) -> float:
        """Return the robust standard deviation of the residuals."""
        return MAD_TO_SIGMA * quantile(np.abs(self.by_row(self.predicted(z)) - self.y), 0.5, self.weights)


def by_cell(problem: FitProblem, compiled: bool = False) -> CellProblem:
    """Return the problem with the rows of each cell gathered."""
    compiled = compiled or len(problem.observed) >= COMPILED_FROM
    starts = np.flatnonzero(np.diff(problem.cells, prepend=-1))
    y = np.log(problem.observed) if problem.options.residuals == "relative" else problem.observed
    if len(starts) == len(y):
        return CellProblem(problem, y, problem.weights, starts, compiled)
    weights = np.add.reduceat(problem.weights, starts)
    cells = replace(problem.rows_at(starts), weights=weights)
    return CellProblem(cells, y, problem.weights, starts, compiled)


@dataclass(frozen=True)
class Objective:
    """The cost to minimise, at one scale of the loss."""

    rows: CellProblem
    f_scale: float

    @property
    def problem(self) -> FitProblem:
        return self.rows.cells

    def cost(self, z: FloatArray) -> float:
        return self.whole(z, self.sums(z))

    def at(self, z: FloatArray) -> Quadratic:
        """Return cost, gradient and curvature."""
        return self.around(z, self.sums(z))

    def whole(self, z: FloatArray, sums: Sums) -> float:
        """Return the cost with priors, given the sums."""
        known, _ = prior_rows(self.problem, z, self.f_scale)
        return sums.cost + 0.5 * float(known @ known)

    def around(self, z: FloatArray, sums: Sums) -> Quadratic:
        """Return cost, gradient and curvature, given the sums."""
        problem, rows = self.problem, self.rows
        theta = problem.theta(z)
        divisor = np.maximum(sums.T, 1e-300) if rows.relative else np.ones_like(sums.T)
        if rows.swift:
            from latfit.fitting.solver.compiled import normal_equations

            chain = problem.chain(theta)
            free = np.array(problem.free)
            g, H = normal_equations(theta, rows.axes, free, divisor, sums.pull, sums.stiffness)
            gradient, curvature = g * chain, H * np.outer(chain, chain)
        else:
            J = problem.slopes(theta, problem.steps) / divisor[:, None]
            gradient, curvature = J.T @ sums.pull, J.T @ (J * sums.stiffness[:, None])
        known, slopes = prior_rows(problem, z, self.f_scale)
        cost = sums.cost + 0.5 * float(known @ known)
        return Quadratic(cost, gradient + slopes.T @ known, curvature + slopes.T @ slopes)

    def sums(self, z: FloatArray) -> Sums:
        """Return the cost without priors, and G and K of each cell."""
        rows, loss, s = self.rows, self.problem.options.loss, self.f_scale
        T = rows.latency_ms(z)
        u = rows.told(T)
        if rows.compiled:
            from latfit.fitting.solver.compiled import LOSSES, cell_sums

            return Sums(T, *cell_sums(rows.starts, rows.y, rows.weights, u, s, LOSSES[loss]))
        r = rows.by_row(u) - rows.y
        cost, pull, stiffness = by_residual(loss, r, s)
        total, pull, stiffness = float(rows.weights @ cost), rows.weights * pull, rows.weights * stiffness
        if len(rows.starts) < len(rows.y):
            pull, stiffness = np.add.reduceat(pull, rows.starts), np.add.reduceat(stiffness, rows.starts)
        return Sums(T, total, pull, stiffness)


def remembered(problem: FitProblem) -> FitProblem:
    """Return the problem with a StepTable, which caches derived columns."""
    return problem if isinstance(problem.steps, StepTable) else replace(problem, steps=StepTable(problem.steps))
