"""From one resample of the data to its parameters: a descent from the estimate, or one step carried onto the model."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fit.bounded import bounded_step
from latfit.fit.draws import carried
from latfit.fit.loss import TUNING, score_factor, score_slope, total_cost
from latfit.fit.priors import prior_rows
from latfit.fit.problem import FitProblem
from latfit.fit.solve import Solution
from latfit.stats import FloatArray

FEW_ROWS = 3_000
"""Rows up to which curvature may matter, so that a resample is followed by a whole descent."""

MOST_STEPS = 12
FIRST_DAMPING = 1e-3
CLOSE = 1e-7
LEAST_DAMPING = 1e-9
"""Keeps the quadratic definite: its least point in a box is not well defined along a flat direction."""

ROUNDING = 1e-12
"""A cost closer to zero than this, in its scale, is zero."""
_SMALLEST_SLOPE = 0.05


@dataclass(frozen=True)
class Resample:
    """A problem with other weights (m,), or with other residuals: errors (m,) about what the estimate predicts for rows
    (m,), whose residuals were `centre` (n,)."""

    problem: FitProblem
    f_scale: float
    weights: FloatArray
    rows: NDArray[np.intp] | None = None
    errors: FloatArray | None = None
    centre: FloatArray | None = None

    def cost(self, z: FloatArray) -> float:
        return total_cost(self.problem.options.loss, self._residuals(z), self.f_scale, self.weights)

    def sums(self, z: FloatArray) -> FloatArray:
        """Sums of weight [-psi j, psi' j j'] (p + p(p+1)/2,)."""
        r, J, loss = self._residuals(z), self.problem.jacobian(z), self.problem.options.loss
        psi = self.weights * r * score_factor(loss, r, self.f_scale)
        slope = self.weights * safe_slope(loss, r, self.f_scale)
        if self.rows is not None:
            psi, slope = (np.bincount(self.rows, each, len(J)).astype(np.float64) for each in (psi, slope))
        hessian = J.T @ (J * slope[:, None])
        return np.concatenate([-J.T @ psi, hessian[np.triu_indices(J.shape[1])]])

    def _residuals(self, z: FloatArray) -> FloatArray:
        r = self.problem.residuals(z)
        if self.rows is None or self.errors is None or self.centre is None:
            return r
        return np.asarray((r - self.centre)[self.rows] + self.errors)


@dataclass(frozen=True)
class Refit:
    """The parameters of resamples of a solved problem. `known`: standard deviations that the means of its k priors are
    off in a resample (k,)."""

    problem: FitProblem
    solution: Solution

    def prior_errors(self, count: int, rng: np.random.Generator) -> FloatArray:
        """How far the means of the priors are off in each resample (count, k): they are drawn like measurements."""
        free = {p.name for p in self.problem.free_parameters}
        return rng.standard_normal((count, len(free & set(self.problem.options.priors))))

    def one_step(self, sums: FloatArray, known: FloatArray) -> FloatArray:
        """z (m, p) after a Newton step by sums (m, p + p(p+1)/2) at the estimate, carried onto the model."""
        moved = np.stack([self._step(self.solution.z, *pair) for pair in zip(sums, known, strict=True)])
        return carried(self.problem, self.solution, moved - self.solution.z)

    def descent(self, resample: Resample, known: FloatArray) -> FloatArray:
        """z (p,) after Newton steps from the estimate, damped where the cost would rise."""

        def cost(z: FloatArray) -> float:
            residuals, _ = self._priors(z, known)
            return resample.cost(z) + 0.5 * float(residuals @ residuals)

        z, damping = self.solution.z, 0.0
        here, total = cost(z), resample.sums(z)
        for _ in range(MOST_STEPS):
            trial = self._step(z, total, known, damping)
            there = cost(trial)
            if there > here:
                damping = max(10 * damping, FIRST_DAMPING)
                continue
            z, gained, here, damping = trial, here - there, there, damping / 10
            if gained <= CLOSE * here:
                break
            total = resample.sums(z)
        return z

    def _step(self, z: FloatArray, total: FloatArray, known: FloatArray, damping: float = 0.0) -> FloatArray:
        """Where the quadratic of a resample's sums (p + p(p+1)/2,) is least, in the box."""
        p = len(z)
        hessian = np.empty((p, p))
        upper = np.triu_indices(p)
        hessian[upper] = total[p:]
        hessian.T[upper] = total[p:]
        residuals, J = self._priors(z, known)
        hessian, gradient = hessian + J.T @ J, total[:p] - J.T @ residuals
        hessian[np.diag_indices(p)] *= 1 + max(damping, LEAST_DAMPING)
        low, high = self.problem.lower, self.problem.upper
        moved = z + bounded_step(hessian, gradient, low - z, high - z)
        return np.where(moved - low < ROUNDING, low, moved)

    def _priors(self, z: FloatArray, known: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Residuals and Jacobian of the priors."""
        residuals, J = prior_rows(self.problem, z, self.solution.f_scale)
        return residuals + self.solution.f_scale / TUNING[self.problem.options.loss] * known, J


def score_columns(problem: FitProblem, z: FloatArray, f_scale: float) -> FloatArray:
    """[-psi j, psi' j j'] of each row (n, p + p(p+1)/2)."""
    r, J = problem.residuals(z), problem.jacobian(z)
    loss = problem.options.loss
    psi = r * score_factor(loss, r, f_scale)
    left, right = np.triu_indices(J.shape[1])
    return np.concatenate([-J * psi[:, None], J[:, left] * J[:, right] * safe_slope(loss, r, f_scale)[:, None]], axis=1)


def safe_slope(loss: str, r: FloatArray, f_scale: float) -> FloatArray:
    """psi', kept above a small part of rho' so that the Hessian stays positive for any resample."""
    return np.maximum(score_slope(loss, r, f_scale), _SMALLEST_SLOPE * score_factor(loss, r, f_scale))
