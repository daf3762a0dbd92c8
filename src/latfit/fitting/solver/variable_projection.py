"""Starts of the solver by variable projection.

Given its outer parameters (rates, corners), the model is linear in coefficients >= 0. The search evaluates many outer
parameters, on a grid or a low-discrepancy sequence, and solves a stack of non-negative least squares problems for the
coefficients. Derivation: docs/theory/fitting.md, "Solver".
"""

import itertools
from dataclasses import dataclass

import numpy as np

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.loss import by_residual, score_factor
from latfit.model import Separable, features_of
from latfit.stats import FloatArray

GRID = {1: 48, 2: 10}
"""Grid nodes per axis, by the number of axes."""

MOST_KINKS = {48: 96, 10: 48}
"""Largest number of nodes between kinks, by the number of evenly spaced nodes."""

CORNERS = 2
SCATTERED_POINTS = 384
DIFFERENT = 0.8
"""Points closer than this in every log-coordinate count as one start."""

ROUNDS = 3
PIVOTS = 60
_RIDGE = 1e-10
_LARGEST = 1 << 22
"""Memory limit: entries of the stacked columns."""


@dataclass(frozen=True)
class Candidate:
    """A point of the search: outer parameters, all parameters, and the robust cost."""

    outer: FloatArray
    theta: FloatArray
    cost: float


def search(problem: FitProblem, f_scale: float, wanted: int) -> list[Candidate]:
    """Return starts for the solver: the best distinct points, best first, then the two corners of the search.

    Parameters
    ----------
    f_scale
        Scale of the loss.
    wanted
        Largest number of points besides the corners.
    """
    points, shape = _points(problem)
    found = _candidates(problem, points, f_scale)
    inside, corners = found[: len(found) - CORNERS], found[len(found) - CORNERS :]
    if len(inside) == 1:
        return inside
    lowest = _valleys(np.array([candidate.cost for candidate in inside]), shape) if shape else range(len(inside))
    ranked = sorted((inside[i] for i in lowest), key=lambda candidate: candidate.cost)
    return [*_distinct(ranked, wanted, 0.0 if shape else DIFFERENT), *corners]


def _valleys(costs: FloatArray, shape: tuple[int, ...]) -> list[int]:
    """Return the local minima of a grid of one or two axes."""
    grid = np.pad(costs.reshape(shape), 1, constant_values=np.inf)
    lowest = np.ones(shape, dtype=bool)
    for shift in itertools.product((-1, 0, 1), repeat=len(shape)):
        beside = grid[tuple(slice(1 + s, 1 + s + n) for s, n in zip(shift, shape, strict=True))]
        lowest &= costs.reshape(shape) <= beside
    return [int(i) for i in np.flatnonzero(lowest)]


def _candidates(problem: FitProblem, points: FloatArray, f_scale: float) -> list[Candidate]:
    active = _active_columns(problem)
    size = len(problem.observed) * len(active) + 1
    at_once = max(1, _LARGEST // size)
    found: list[Candidate] = []
    for first in range(0, len(points), at_once):
        found += _solved(problem, points[first : first + at_once], active, f_scale)
    return found


def _distinct(found: list[Candidate], wanted: int, apart: float) -> list[Candidate]:
    """Return the best candidates that differ by a factor e^apart in an outer parameter, and in cost."""
    taken: list[Candidate] = []
    for candidate in found:
        if len(taken) == wanted:
            break
        if all(_differ(candidate, other, apart) for other in taken):
            taken.append(candidate)
    return taken


def _differ(a: Candidate, b: Candidate, apart: float) -> bool:
    if len(a.outer) == 0 or abs(a.cost - b.cost) <= 1e-9 * abs(b.cost):
        return False
    small = 1e-12
    return bool(np.max(np.abs(np.log((a.outer + small) / (b.outer + small)))) > apart)


def _points(problem: FitProblem) -> tuple[FloatArray, tuple[int, ...]]:
    """Return the points of the search (points, outer), both corners last, and the shape of their grid, if any."""
    names = problem.model.outer
    searched = [name for name in names if name not in problem.fixed]
    axes = {name: _ends(problem, name) for name in searched}
    wide = [name for name in searched if axes[name][0] < axes[name][1]]
    count = GRID.get(len(wide))
    nodes = [_nodes(problem, name, axes[name], count) for name in wide] if count else []
    shape = tuple(len(axis) for axis in nodes)
    inside = _cube(nodes) if shape else _scattered(len(wide), problem.options.seed)
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
    return table, shape


def _nodes(problem: FitProblem, name: str, ends: tuple[float, float], count: int) -> FloatArray:
    """Return the nodes of an axis in [0, 1]: evenly spaced, plus one between kinks for local minima."""
    even = np.linspace(0, 1, count)
    kept = _between_kinks(problem, name, ends, MOST_KINKS[count])
    return np.unique(np.concatenate([even, np.log(kept / ends[0]) / np.log(ends[1] / ends[0])]))


def _between_kinks(problem: FitProblem, name: str, ends: tuple[float, float], most: int) -> FloatArray:
    """Return values between neighbouring kinks, where the slope of the latency jumps, at most `most` of them."""
    kinks = np.empty(0)
    for shape in problem.model.shapes if isinstance(problem.model, Separable) else ():
        if shape.parameter.name == name and shape.kinks_at:
            kinks = np.unique(features_of(problem.steps)[shape.kinks_at])
            kinks = kinks[kinks > 0]
            break
    between = np.sqrt(kinks[1:] * kinks[:-1])
    between = between[(between > ends[0]) & (between < ends[1])]
    return np.asarray(between[np.linspace(0, len(between) - 1, min(len(between), most)).astype(np.int64)])


def _cube(nodes: list[FloatArray]) -> FloatArray:
    return np.stack([axis.ravel() for axis in np.meshgrid(*nodes, indexing="ij")], axis=1)


def _scattered(dimensions: int, seed: int) -> FloatArray:
    """Return a low-discrepancy sequence in the unit cube (points, dimensions)."""
    if dimensions == 0:
        return np.zeros((1, 0))
    golden = 2.0
    for _ in range(40):
        golden = (1 + golden) ** (1 / (dimensions + 1))
    strides = golden ** -np.arange(1.0, dimensions + 1)
    first = np.random.default_rng(seed).random(dimensions)
    return np.asarray((first + np.arange(SCATTERED_POINTS)[:, None] * strides) % 1.0)


def _positive(problem: FitProblem, name: str) -> bool:
    return next(p.positive for p in problem.model.parameters if p.name == name)


def _ends(problem: FitProblem, name: str) -> tuple[float, float]:
    """Return the search range of an outer parameter: the user's bounds, or where it affects the curvature."""
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
    """Return the number of columns of the basis."""
    outer = np.array([problem.fixed.get(name, 1.0) for name in problem.model.outer])
    one = {name: column[:1] for name, column in problem.steps.items()}
    return int(problem.model.basis(outer, one).shape[1])


def _active_columns(problem: FitProblem) -> list[int]:
    """Return the columns of the basis with a free coefficient; columns of terms are last."""
    model, total = problem.model, _width(problem)
    if not isinstance(model, Separable):
        return list(range(total))
    front = total - len(model.terms)
    held = {name for name, value in problem.fixed.items() if value == 0}
    own = [front + i for i, term in enumerate(model.terms) if term.parameter.name not in held]
    return [*range(front), *own]


def _solved(problem: FitProblem, points: FloatArray, active: list[int], f_scale: float) -> list[Candidate]:
    X = np.empty((len(points), len(problem.observed), len(active)))
    for i, point in enumerate(points):
        X[i] = problem.model.basis(point, problem.steps)[:, active]
    T, weights = problem.observed, problem.weights
    costs, best = np.full(len(points), np.inf), np.zeros((len(points), len(active)))
    f, r = np.broadcast_to(T, X.shape[:2]), np.zeros(X.shape[:2])
    for _ in range(ROUNDS):
        coefficients = non_negative(X, *_reweighted(problem, f, r, f_scale))
        f = np.maximum((X @ coefficients[:, :, None])[:, :, 0], 1e-12 * T)
        r = _residuals(problem, f)
        reached = by_residual(problem.options.loss, r, f_scale)[0] @ weights
        better = reached < costs
        costs[better], best[better] = reached[better], coefficients[better]
    full = np.zeros((len(points), _width(problem)))
    full[:, active] = best
    return [
        Candidate(point, problem.model.assemble(point, c), float(cost))
        for point, c, cost in zip(points, full, costs, strict=True)
    ]


def _residuals(problem: FitProblem, f: FloatArray) -> FloatArray:
    """Return the residuals (..., n) of predictions f."""
    return np.log(f / problem.observed) if problem.options.residuals == "relative" else f - problem.observed


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
    gram = gram / (size[:, :, None] * size[:, None, :]) + _RIDGE * np.eye(X.shape[2])
    right = ((y * root)[:, None, :] @ rooted)[:, 0, :] / size
    return np.asarray(_pivoted(gram, right) / size)


def _pivoted(gram: FloatArray, right: FloatArray) -> FloatArray:
    """Return argmin over c >= 0 of c'Gc/2 - b'c for a stack of positive definite G (k, m, m), b (k, m).

    Block principal pivoting (Kim & Park 2011): all infeasible coefficients change sides together; after three rounds
    without progress only the last one does, which guarantees termination.
    """
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


def searched_points(problem: FitProblem, f_scale: float, wanted: int) -> list[FloatArray]:
    """Return starts in z from the search over the outer parameters, best first."""
    return [problem.coordinates(candidate.theta) for candidate in search(problem, f_scale, wanted)]
