"""Starts of the solver by variable projection: given its outer parameters the model is linear in coefficients >= 0.

Non-negative least squares at many points of a low-discrepancy sequence: docs/theory/fitting.md, "Solver".
"""

import numpy as np

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.loss import by_residual, score_factor
from latfit.model import Separable
from latfit.stats import FloatArray

POINTS = {1: 96}  # of the search, by the number of outer parameters that are searched
MANY_POINTS = 384
DIFFERENT = 0.8  # points closer than this in every log-coordinate count as one start
DIFFERENT_ALONE = 0.1  # the same of a single outer parameter, in which kinks make narrow valleys
ROUNDS = 3
PIVOTS = 60
RIDGE = 1e-10
MAX_ENTRIES = 1 << 22  # of the stacked columns: bounds the memory


def find_starts(problem: FitProblem, f_scale: float, wanted: int) -> list[FloatArray]:
    """Return up to `wanted` distinct starts in z, best first, then the two corners. f_scale: scale of the loss."""
    points, searched = _points(problem)
    at_once = max(1, MAX_ENTRIES // (len(problem.observed) * len(problem.model.parameters) + 1))
    found = [_solve_linear(problem, points[i : i + at_once], f_scale) for i in range(0, len(points), at_once)]
    costs, coefficients = (np.concatenate(part) for part in zip(*found, strict=True))
    chosen: list[int] = []
    logs = np.log(points + 1e-12)
    apart = DIFFERENT_ALONE if searched == 1 else DIFFERENT
    for i in np.argsort(costs[:-2]).tolist() if searched else [0]:
        if len(chosen) < wanted and all(np.max(np.abs(logs[i] - logs[j])) > apart for j in chosen):
            chosen.append(i)
    corners = [len(points) - 2, len(points) - 1] if searched else []
    return [problem.coordinates(problem.model.assemble(points[i], coefficients[i])) for i in [*chosen, *corners]]


def _points(problem: FitProblem) -> tuple[FloatArray, int]:
    """Return the points of the search (points, outer), both corners last, and how many parameters are searched."""
    names = problem.model.outer
    axes = {name: _ends(problem, name) for name in names if name not in problem.fixed}
    wide = [name for name, (low, high) in axes.items() if low < high]
    count = POINTS.get(len(wide), MANY_POINTS) if wide else 1
    inside = _scattered(len(wide), count, problem.options.seed)
    unit = np.concatenate([inside, np.zeros((1, len(wide))), np.ones((1, len(wide)))])
    table = np.empty((len(unit), len(names)))
    positive = {p.name: p.positive for p in problem.model.parameters}
    for column, name in enumerate(names):
        if name not in axes:
            table[:, column] = problem.fixed[name]
            continue
        low, high = axes[name]
        u = unit[:, wide.index(name)] if name in wide else np.full(len(unit), 0.5)
        table[:, column] = np.exp(np.log(low) + u * np.log(high / low))
        if not positive[name]:
            table[u < 0.5, column] = 0.0
            table[-1, column] = 0.0
    return table, len(wide)


def _scattered(dimensions: int, count: int, seed: int) -> FloatArray:
    """Return a low-discrepancy sequence in the unit cube (count, dimensions)."""
    golden = 2.0
    for _ in range(40):
        golden = (1 + golden) ** (1 / (dimensions + 1))
    strides = golden ** -np.arange(1.0, dimensions + 1)
    first = np.random.default_rng(seed).random(dimensions)
    return np.asarray((first + np.arange(count)[:, None] * strides) % 1.0)


def _ends(problem: FitProblem, name: str) -> tuple[float, float]:
    """Return the search range of an outer parameter: the user's bounds, or where it affects the curvature."""
    column = dict(problem.model.rates).get(name)
    if name in problem.options.bounds:
        low, high = problem.options.bounds[name]
    elif column:
        x = problem.steps[column]
        if x.min() == x.max():
            middle = 1.0 / float(x.max())
            return middle, middle
        return 0.05 / float(x.max()), 10.0 / float(x.min())
    else:
        low, high = problem.model.span(name, problem.steps) or (1e-3, 1e3)
    return max(low, 1e-6 * high), high


def _solve_linear(problem: FitProblem, points: FloatArray, f_scale: float) -> tuple[FloatArray, FloatArray]:
    """Return the robust cost (k,) at outer parameters (k, outer), and the coefficients (k, columns)."""
    X = problem.model.basis(points.T[:, :, None], problem.steps)
    if isinstance(problem.model, Separable):
        terms = problem.model.terms
        X[:, :, -len(terms) :] *= [problem.fixed.get(term.parameter.name) != 0 for term in terms]
    T, weights = problem.observed, problem.weights
    costs, best = np.full(len(points), np.inf), np.zeros((len(points), X.shape[2]))
    f, r = np.broadcast_to(T, X.shape[:2]), np.zeros(X.shape[:2])
    for _ in range(ROUNDS):
        coefficients = non_negative(X, *_reweighted(problem, f, r, f_scale))
        f = np.maximum((X @ coefficients[:, :, None])[:, :, 0], 1e-12 * T)
        r = np.log(f / T) if problem.options.residuals == "relative" else f - T
        reached = by_residual(problem.options.loss, r, f_scale)[0] @ weights
        better = reached < costs
        costs[better], best[better] = reached[better], coefficients[better]
    return costs, best


def _reweighted(problem: FitProblem, f: FloatArray, r: FloatArray, f_scale: float) -> tuple[FloatArray, FloatArray]:
    """Return targets and weights (k, n) of the least squares problem that approximates the cost near predictions f."""
    factor = problem.weights * np.maximum(score_factor(problem.options.loss, r, f_scale), 1e-12)
    if problem.options.residuals == "relative":
        return f * np.maximum(1 - r, 0.0), factor / f**2
    return np.broadcast_to(problem.observed, f.shape), factor


def non_negative(X: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """Return argmin over c >= 0 of sum weights (X c - y)^2 for a stack: X (k, n, m), y and weights (k, n)."""
    root = np.sqrt(weights)
    rooted = X * root[:, :, None]
    gram = rooted.transpose(0, 2, 1) @ rooted
    size = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    size = np.where(size > 0, size, 1.0)
    gram = gram / (size[:, :, None] * size[:, None, :]) + RIDGE * np.eye(X.shape[2])
    right = ((y * root)[:, None, :] @ rooted)[:, 0, :] / size
    return np.asarray(_pivoted(gram, right) / size)


def _pivoted(gram: FloatArray, right: FloatArray) -> FloatArray:
    """Return argmin over c >= 0 of c'Gc/2 - b'c for a stack, by block principal pivoting (Kim & Park 2011)."""
    k, m = right.shape
    size = 1e-9 * np.maximum(np.abs(right).max(axis=1, initial=0.0), 1e-300)[:, None]
    active = np.ones((k, m), dtype=bool)
    patience, least = np.full(k, 3), np.full(k, m + 1)
    c = np.zeros((k, m))
    eye = np.eye(m)
    open_ = np.arange(k)
    for _ in range(PIVOTS):
        on = active[open_]
        both = on[:, :, None] & on[:, None, :]
        G = gram[open_]
        solved = np.linalg.solve(np.where(both, G, eye), np.where(on, right[open_], 0.0)[:, :, None])[:, :, 0]
        gradient = (G @ solved[:, :, None])[:, :, 0] - right[open_]
        wrong = np.where(on, solved < 0, gradient < -size[open_])
        count = wrong.sum(axis=1)
        c[open_] = np.maximum(solved, 0.0)
        fewer = count < least[open_]
        patience[open_] = np.where(fewer, 3, patience[open_] - 1)
        least[open_] = np.minimum(count, least[open_])
        last = m - 1 - np.argmax(wrong[:, ::-1], axis=1)
        one = (np.arange(m) == last[:, None]) & wrong
        active[open_] = on ^ np.where((patience[open_] >= 0)[:, None], wrong, one)
        open_ = open_[count > 0]
        if len(open_) == 0:
            break
    return c
