"""Levenberg-Marquardt in a box, for many descents on the same rows: several starts, folds, or boxes.

They advance together on stacked arrays, because the overhead of array calls dominates on a few hundred cells.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.problem import TUNING, FitProblem
from latfit.fitting.solver.objective import CellProblem, by_residual, prior_rows
from latfit.stats import MAD_TO_SIGMA, FloatArray, weighted_quantile

LARGEST = 1 << 22  # memory limit: slopes held at once; further descents wait their turn
LONGEST = 3.0  # longest move of a logarithmic coordinate in one step
GAIN = 1e-10  # relative to the cost; of 10,000 rows that is a thousandth of a standard error, sqrt(GAIN * rows)
MAX_STEPS = 150
MAX_DAMPING = 1e12
FIRM = 1e6  # with this damping a step moves coordinates independently of each other


@dataclass(frozen=True)
class Minimum:
    """End of a search: coordinates z (free,), cost, and whether it converged."""

    z: FloatArray
    cost: float
    converged: bool


@dataclass(frozen=True)
class Descents:
    """k costs on the rows of a problem."""

    rows: CellProblem
    weights: FloatArray  # of the rows (k, n), or (1, n) for all
    f_scale: FloatArray  # of the loss (k,)
    lower: FloatArray  # end of the boxes (k, p)
    upper: FloatArray
    y: FloatArray  # measured ln T or T (k, n), or (1, n) for all

    @staticmethod
    def alike(rows: CellProblem, f_scale: float, count: int = 1) -> "Descents":
        """Return `count` copies of the problem's own cost."""
        lower, upper = (np.tile(end, (count, 1)) for end in (rows.cells.lower, rows.cells.upper))
        return Descents(rows, rows.weights[None], np.full(count, f_scale), lower, upper, rows.y[None])

    @property
    def problem(self) -> FitProblem:
        return self.rows.cells

    def cost(self, z: FloatArray) -> float:
        return float(self.at(np.arange(1)).costs(z[None])[0][0])

    def at(self, which: NDArray[np.intp]) -> "Descents":
        """Return some of the descents, by rising numbers."""
        if len(which) == len(self.f_scale):
            return self
        weights, y = (each if len(each) == 1 else each[which] for each in (self.weights, self.y))
        return Descents(self.rows, weights, self.f_scale[which], self.lower[which], self.upper[which], y)

    def at_own_scale(self, z: FloatArray, least: float) -> "Descents":
        """Return the descents with the scale of the residuals at z (k, free), at least `least`."""
        size = np.abs(self.rows.by_row(self.rows.to_residual_scale(self.latency_ms(z))) - self.y)
        tuned = TUNING[self.problem.options.loss] * MAD_TO_SIGMA
        weights = np.broadcast_to(self.weights, size.shape)
        found = [tuned * weighted_quantile(r, 0.5, w) for r, w in zip(size, weights, strict=True)]
        return replace(self, f_scale=np.maximum(found, least))

    def latency_ms(self, z: FloatArray) -> FloatArray:
        found = self.problem.model.latency_ms(thetas(self.problem, z), self.problem.steps)
        return np.broadcast_to(found, (len(z), len(self.rows.starts)))

    def costs(self, z: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return costs (k,), and T in ms, pull and stiffness of each cell (k, m)."""
        rows, loss = self.rows, self.problem.options.loss
        T = self.latency_ms(z)
        u = rows.to_residual_scale(T)
        cost, pull, stiffness = by_residual(loss, rows.by_row(u) - self.y, self.f_scale[:, None])
        total, pull, stiffness = np.sum(self.weights * cost, axis=1), self.weights * pull, self.weights * stiffness
        if len(rows.starts) < len(rows.y):
            pull, stiffness = (np.add.reduceat(each, rows.starts, axis=1) for each in (pull, stiffness))
        for i, (known, _) in enumerate(self._priors(z)):
            total[i] += 0.5 * float(known @ known)
        return total, T, pull, stiffness

    def quadratics(
        self, z: FloatArray, T: FloatArray, pull: FloatArray, stiffness: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Return gradients (k, free) and curvatures (k, free, free), given the results of `costs`."""
        problem, theta = self.problem, thetas(self.problem, z)
        by_parameter = np.moveaxis(problem.model.gradient(theta, problem.steps), -1, 0)[problem.free]
        slopes, chain = np.swapaxes(by_parameter, 0, 1), problem.chain(theta[:, :, 0].T)
        per_ms = 1 / np.maximum(T, 1e-300) if problem.relative else np.ones_like(T)
        gradient = (slopes @ (pull * per_ms)[:, :, None])[:, :, 0] * chain
        curvature = (slopes * (stiffness * per_ms**2)[:, None, :]) @ np.swapaxes(slopes, 1, 2)
        curvature *= chain[:, :, None] * chain[:, None, :]
        for i, (known, own) in enumerate(self._priors(z)):
            gradient[i] += own.T @ known
            curvature[i] += own.T @ own
        return gradient, curvature

    def _priors(self, z: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
        if not self.problem.options.priors:
            return []
        return [prior_rows(self.problem, each, float(s)) for each, s in zip(z, self.f_scale, strict=True)]


def thetas(problem: FitProblem, z: FloatArray) -> FloatArray:
    """Return all parameters (p, k, 1) of k vectors of free coordinates (k, free), shaped for models."""
    return problem.theta(z).T[:, :, None]


def minimise_all(descents: Descents, starts: FloatArray, steps: int = MAX_STEPS, gain: float = GAIN) -> list[Minimum]:
    """Minimise from starts (k, free); a descent converges when the best gain is below this share of its cost."""
    cells, free = len(descents.rows.starts), max(starts.shape[1], 1)
    at_once = max(1, LARGEST // (max(cells, 1) * free))
    found: list[Minimum] = []
    for first in range(0, len(starts), at_once):
        some = np.arange(first, min(first + at_once, len(starts)))
        with np.errstate(all="ignore"):
            found += _together(descents.at(some), starts[some], steps, gain)
    return found


def _together(descents: Descents, starts: FloatArray, steps: int, gain: float) -> list[Minimum]:
    k = len(starts)
    reach = np.array([LONGEST if p.positive else np.inf for p in descents.problem.free_parameters])
    z = np.clip(starts, descents.lower, descents.upper)
    cost, T, pull, stiffness = descents.costs(z)
    gradient, H = descents.quadratics(z, T, pull, stiffness)
    damping, growth, ended = np.full(k, 1e-3), np.full(k, 2.0), np.zeros(k, dtype=bool)
    for _ in range(steps):
        on = np.flatnonzero(~ended)
        if len(on) == 0:
            break
        part = descents.at(on)
        low, high = np.maximum(part.lower - z[on], -reach), np.minimum(part.upper - z[on], reach)
        d = damped_steps(gradient[on], H[on], low, high, damping[on])
        promised = -(np.einsum("ij,ij->i", gradient[on], d) + 0.5 * np.einsum("ij,ijk,ik->i", d, H[on], d))
        least = gain * np.abs(cost[on]) + descents.rows.nothing
        small = ~(promised > least)
        firm = damping[on] >= FIRM
        if small.any():
            firm |= _single(gradient[on], H[on], low, high) <= least
        ended[on[small & firm]] = True
        worse = on[small & ~firm]
        go = np.flatnonzero(~small)
        if len(go):
            part, moved = part.at(go), np.clip(z[on[go]] + d[go], part.lower[go], part.upper[go])
            reached, T, pull, stiffness = part.costs(moved)
            better = reached < cost[on[go]]
            worse = np.concatenate([worse, on[go[~better]]])
        damping[worse] *= growth[worse]
        growth[worse] *= 2
        ended[worse] |= damping[worse] > MAX_DAMPING
        if not len(go) or not better.any():
            continue
        kept = on[go[better]]
        ratio = np.minimum((cost[kept] - reached[better]) / promised[go[better]], 1.0)
        fall = np.clip(1 - (2 * ratio - 1) ** 3, 1 / 3, 2.0)
        damping[kept], growth[kept] = np.maximum(damping[kept] * fall, 1e-12), 2.0
        z[kept], cost[kept] = moved[better], reached[better]
        gradient[kept], H[kept] = descents.at(kept).quadratics(z[kept], T[better], pull[better], stiffness[better])
    return [Minimum(z[i], float(cost[i]), bool(ended[i])) for i in range(k)]


def _single(gradient: FloatArray, H: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Return the largest gains (k,) that the quadratics allow for a step in one coordinate."""
    diagonal = np.maximum(np.diagonal(H, axis1=1, axis2=2), 1e-300)
    d = np.minimum(np.maximum(-gradient / diagonal, low), high)
    return np.asarray(np.max(-d * (gradient + 0.5 * diagonal * d), axis=1, initial=0.0))


def damped_steps(
    gradient: FloatArray, curvature: FloatArray, low: FloatArray, high: FloatArray, damping: FloatArray
) -> FloatArray:
    """Return the damped steps (k, free) within [low, high], by an active set; damping (k,) > 0."""
    k, p = gradient.shape
    eye = np.eye(p)
    diagonal = np.diagonal(curvature, axis1=1, axis2=2)
    floor = 1e-12 * np.maximum(diagonal.max(axis=1), 1e-300)
    H = curvature + eye * (damping[:, None] * np.maximum(diagonal, floor[:, None]))[:, :, None]
    free = ~(((low >= 0) & (gradient > 0)) | ((high <= 0) & (gradient < 0)))
    d, open_ = np.zeros((k, p)), np.arange(k)
    for _ in range(p):
        on, own = free[open_], H[open_]
        held = np.where(on, 0.0, d[open_])
        right = np.where(on, -(gradient[open_] + (own @ held[:, :, None])[:, :, 0]), held)
        both = on[:, :, None] & on[:, None, :]
        solved = _solve(np.where(both, own, eye * np.where(on, 0.0, 1.0)[:, :, None]), right)
        inside = np.minimum(np.maximum(solved, low[open_]), high[open_])
        crossed = on & (inside != solved)
        d[open_] = np.where(on, inside, held)
        free[open_] = on & ~crossed
        open_ = open_[crossed.any(axis=1)]
        if len(open_) == 0:
            break
    return d


def _solve(H: FloatArray, right: FloatArray) -> FloatArray:
    """Solve H x = right for a stack; by the diagonal if rounding made H singular."""
    try:
        found = np.linalg.solve(H, right[:, :, None])[:, :, 0]
    except np.linalg.LinAlgError:
        found = np.full_like(right, np.nan)
    plain = right / np.diagonal(H, axis1=1, axis2=2)
    return np.where(np.isfinite(found).all(axis=1, keepdims=True), found, plain)
