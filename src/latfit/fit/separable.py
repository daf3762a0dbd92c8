"""The search over the outer parameters, with everything else solved for: variable projection.

Given its outer parameters k (rates, corners) the model is linear in coefficients c >= 0, f = X(k) c, so a point of the
search costs one non-negative least squares problem (Golub & Pereyra 1973; Lawson & Hanson 1974). For residuals
r = ln(f/T) and a robust loss it is iterated: with f the last prediction, the residuals of f' are to first order
r + (f' - f)/f, so that

    c' = argmin_{c >= 0} sum_i w_i rho'(r_i) / f_i^2 (X_i c - f_i (1 - r_i))^2,

started at f = T, r = 0. Each is solved through the small triangle R of its normal equations X'WX = R'R, of columns of
unit length with a tiny ridge. All points of the search are solved together, on a sample of the rows.

The points are a geometric grid over one or two outer parameters and a Sobol sequence over more. The best that really
differ become starts of the polish; with them go the two corners, where all rates are low or nothing bends any more,
and the customary start from quantiles of the data.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import nnls

from latfit.fit.loss import RHO, score_factor
from latfit.fit.problem import FitProblem
from latfit.model.separable import Separable
from latfit.stats import FloatArray

GRID = {1: 48, 2: 10}
"""Nodes of an axis by the number of axes."""

SOBOL_POINTS = 256
DIFFERENT = 0.8
"""Two points closer than this in every log-coordinate lead to the same optimum."""

ROUNDS = 3
_RIDGE = 1e-10
_LARGEST = 1 << 22
"""Entries of the stacked columns that are held at once."""


@dataclass(frozen=True)
class Candidate:
    """A point of the search: outer parameters, all parameters, and the robust cost there."""

    outer: FloatArray
    theta: FloatArray
    cost: float


def search(problem: FitProblem, f_scale: float, wanted: int) -> list[Candidate]:
    """The best points that really differ, best first, and after them the two corners of the search."""
    points, corners = _points(problem), 2
    found = _candidates(problem, points, f_scale)
    ranked = sorted(found[:-corners], key=lambda candidate: candidate.cost)
    return [*_distinct(ranked, wanted), *(found[-corners:] if len(points) > 1 + corners else [])]


def _candidates(problem: FitProblem, points: FloatArray, f_scale: float) -> list[Candidate]:
    active = _active_columns(problem)
    size = len(problem.observed) * len(active) + 1
    at_once = max(1, _LARGEST // size)
    found: list[Candidate] = []
    for first in range(0, len(points), at_once):
        found += _solved(problem, points[first : first + at_once], active, f_scale)
    return found


def _distinct(found: list[Candidate], wanted: int) -> list[Candidate]:
    """The best candidates that differ from each other."""
    taken: list[Candidate] = []
    for candidate in found:
        if len(taken) == wanted:
            break
        if all(_differ(candidate.outer, other.outer) for other in taken):
            taken.append(candidate)
    return taken


def _differ(a: FloatArray, b: FloatArray) -> bool:
    if len(a) == 0:
        return False
    small = 1e-12
    return bool(np.max(np.abs(np.log((a + small) / (b + small)))) > DIFFERENT)


def _points(problem: FitProblem) -> FloatArray:
    """Outer parameters of every point of the search (points, outer); its low and its high corner last."""
    names = problem.model.outer
    searched = [name for name in names if name not in problem.fixed]
    axes = {name: _ends(problem, name) for name in searched}
    wide = [name for name in searched if axes[name][0] < axes[name][1]]
    inside = _unit_cube(len(wide), problem.options.seed)
    unit = np.concatenate([inside, np.zeros((1, len(wide))), np.ones((1, len(wide)))])
    table = np.empty((len(unit), len(names)))
    for column, name in enumerate(names):
        if name not in axes:
            table[:, column] = problem.fixed[name]
            continue
        low, high = axes[name]
        u = unit[:, wide.index(name)] if name in wide else np.full(len(unit), 0.5)
        table[:, column] = np.exp(np.log(low) + u * np.log(high / low))
        if not _positive(problem, name):
            table[u < 0.5, column] = 0.0
            table[-1, column] = 0.0
    return table


def _unit_cube(dimensions: int, seed: int) -> FloatArray:
    if dimensions == 0:
        return np.zeros((1, 0))
    if dimensions in GRID:
        axis = np.linspace(0, 1, GRID[dimensions])
        return np.stack([a.ravel() for a in np.meshgrid(*[axis] * dimensions, indexing="ij")], axis=1)
    from scipy.stats import qmc

    return np.asarray(qmc.Sobol(dimensions, scramble=True, rng=seed).random(SOBOL_POINTS))


def _positive(problem: FitProblem, name: str) -> bool:
    return next(p.positive for p in problem.model.parameters if p.name == name)


def _ends(problem: FitProblem, name: str) -> tuple[float, float]:
    """Range of an outer parameter in the search: the user's, or where it still bends something."""
    column = dict(problem.model.rates).get(name)
    if name in problem.options.bounds:
        low, high = problem.options.bounds[name]
        return max(low, 1e-6 * high), high
    if column:
        x = problem.steps[column]
        if x.min() == x.max():
            middle = 1.0 / float(x.max())
            return middle, middle
        return 0.05 / float(x.max()), 10.0 / float(x.min())
    low, high = problem.model.span(name, problem.steps) or (1e-3, 1e3)
    return max(low, 1e-6 * high), high


def _width(problem: FitProblem) -> int:
    """Number of columns of the basis."""
    outer = np.array([problem.fixed.get(name, 1.0) for name in problem.model.outer])
    one = {name: column[:1] for name, column in problem.steps.items()}
    return int(problem.model.basis(outer, one).shape[1])


def _active_columns(problem: FitProblem) -> list[int]:
    """Columns of the basis whose coefficient is searched; columns of terms stand last."""
    model, total = problem.model, _width(problem)
    if not isinstance(model, Separable):
        return list(range(total))
    front = total - len(model.terms)
    held = {name for name, value in problem.fixed.items() if value == 0}
    own = [front + i for i, term in enumerate(model.terms) if term.parameter.name not in held]
    return [*range(front), *own]


def _solved(problem: FitProblem, points: FloatArray, active: list[int], f_scale: float) -> list[Candidate]:
    X = np.stack([problem.model.basis(point, problem.steps)[:, active] for point in points])
    T, weights, loss = problem.observed, problem.weights, problem.options.loss
    relative = problem.options.residuals == "relative"
    target, rows = np.broadcast_to(T, X.shape[:2]), np.broadcast_to(weights / (T**2 if relative else 1.0), X.shape[:2])
    costs, best = np.full(len(points), np.inf), np.zeros((len(points), len(active)))
    for _ in range(ROUNDS):
        coefficients = _nonnegative(X, target, rows)
        f = np.maximum((X @ coefficients[:, :, None])[:, :, 0], 1e-12 * T)
        r = np.log(f / T) if relative else f - T
        reached = RHO[loss]((r / f_scale) ** 2)[0] @ weights
        better = reached < costs
        costs[better], best[better] = reached[better], coefficients[better]
        factor = weights * np.maximum(score_factor(loss, r, f_scale), 1e-12)
        rows, target = (factor / f**2, f * np.maximum(1 - r, 0.0)) if relative else (factor, target)
    full = np.zeros((len(points), _width(problem)))
    full[:, active] = best
    return [
        Candidate(point, problem.model.assemble(point, c), float(cost))
        for point, c, cost in zip(points, full, costs, strict=True)
    ]


def _nonnegative(X: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """argmin_{c >= 0} sum weights (X c - y)^2 for each of a stack of problems: X (k, n, m), y, weights (k, n)."""
    size = np.sqrt((weights[:, None, :] @ X**2)[:, 0, :])
    size[size == 0] = 1.0
    unit = X / size[:, None, :]
    heavy = unit * weights[:, :, None]
    gram = unit.transpose(0, 2, 1) @ heavy + _RIDGE * np.eye(X.shape[2])
    right = (heavy * y[:, :, None]).sum(axis=1)
    triangles = np.linalg.cholesky(gram)
    found = np.empty(right.shape)
    for i, (triangle, b) in enumerate(zip(triangles, right, strict=True)):
        found[i] = nnls(triangle.T, solve_triangular(triangle, b, lower=True, check_finite=False))[0]
    return np.asarray(found / size)
