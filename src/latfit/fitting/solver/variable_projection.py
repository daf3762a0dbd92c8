"""Where a solver starts: from a search over the outer parameters with everything else solved for (variable projection),
from custom, or at random in the box.

Given its outer parameters k (rates, corners) the model is linear in coefficients c >= 0, f = X(k) c, so a point of the
search costs one non-negative least squares problem (Golub & Pereyra 1973; Lawson & Hanson 1974). For residuals
r = ln(f/T) and a robust loss it is iterated: with f the last prediction, the residuals of f' are to first order
r + (f' - f)/f, so that

    c' = argmin_{c >= 0} sum_i w_i rho'(r_i) / f_i^2 (X_i c - f_i (1 - r_i))^2,

started at f = T, r = 0. Each is solved through its normal equations, of columns of unit length with a tiny ridge. All
points of the search are solved together, on a sample of the rows.

The points are a geometric grid over one or two outer parameters, whose valleys become starts of the polish, and over
more the additive sequence x_k = (x_0 + k a) mod 1 with a_j = g^-j and g^(d+1) = g + 1, the golden ratio's counterpart
in d dimensions, whose points keep far apart (Roberts 2018); of these the best that really differ do. With them go the
two corners, where all rates are low or nothing bends any more.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from latfit.fitting.problem import FitProblem, quantile
from latfit.fitting.solver.loss import by_residual, score_factor
from latfit.model import Separable, features_of
from latfit.stats import FloatArray

GRID = {1: 48, 2: 10}
"""Nodes of an axis by the number of axes."""

MOST_KINKS = {48: 96, 10: 48}
"""Nodes between kinks by the number of even ones."""

BESIDE, MOST_KINKS_BESIDE = 24, 160
"""Even nodes of an axis through a point, and those between kinks."""

CORNERS = 2
SCATTERED_POINTS = 256
DIFFERENT = 0.8
"""Two points closer than this in every log-coordinate lead to the same optimum."""

ROUNDS = 3
PIVOTS = 60
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
    points, shape = _points(problem)
    found = _candidates(problem, points, f_scale)
    inside, corners = found[: len(found) - CORNERS], found[len(found) - CORNERS :]
    if len(inside) == 1:
        return inside
    lowest = _valleys(np.array([candidate.cost for candidate in inside]), shape) if shape else range(len(inside))
    ranked = sorted((inside[i] for i in lowest), key=lambda candidate: candidate.cost)
    return [*_distinct(ranked, wanted, 0.0 if shape else DIFFERENT), *corners]


def search_beside(problem: FitProblem, f_scale: float, theta: FloatArray) -> list[Candidate]:
    """The other valleys of each axis of the search through a point, best first; theta: all parameters there (p,).
    Residuals are weighted as they are at that point, which is exact for small changes."""
    found, model = [], problem.model
    names = [p.name for p in model.parameters]
    here = np.maximum(model.latency_ms(theta, problem.steps), 1e-12 * problem.observed)
    at = np.array([theta[names.index(name)] for name in model.outer])
    for column, name in enumerate(model.outer):
        if name in problem.fixed:
            continue
        low, high = _ends(problem, name)
        axis = np.exp(np.linspace(np.log(low), np.log(high), BESIDE)) if low < high else np.array([low])
        if not _positive(problem, name):
            axis[0] = 0.0
        axis = np.unique(
            np.concatenate([axis, _between_kinks(problem, name, (low, high), MOST_KINKS_BESIDE), at[[column]]])
        )
        points = np.tile(at, (len(axis), 1))
        points[:, column] = axis
        tried = _candidates(problem, points, f_scale, here)
        lowest = _valleys(np.array([candidate.cost for candidate in tried]), (len(axis),))
        found += [tried[i] for i in lowest if axis[i] != at[column]]
    return _distinct(sorted(found, key=lambda candidate: candidate.cost), len(found), 0.0)


def _valleys(costs: FloatArray, shape: tuple[int, ...]) -> list[int]:
    """Nodes of a grid of one or two axes that cost no more than any node beside them."""
    grid = np.pad(costs.reshape(shape), 1, constant_values=np.inf)
    lowest = np.ones(shape, dtype=bool)
    for shift in itertools.product((-1, 0, 1), repeat=len(shape)):
        beside = grid[tuple(slice(1 + s, 1 + s + n) for s, n in zip(shift, shape, strict=True))]
        lowest &= costs.reshape(shape) <= beside
    return [int(i) for i in np.flatnonzero(lowest)]


def _candidates(
    problem: FitProblem, points: FloatArray, f_scale: float, here: FloatArray | None = None
) -> list[Candidate]:
    active = _active_columns(problem)
    size = len(problem.observed) * len(active) + 1
    at_once = max(1, _LARGEST // size)
    found: list[Candidate] = []
    for first in range(0, len(points), at_once):
        found += _solved(problem, points[first : first + at_once], active, f_scale, here)
    return found


def _distinct(found: list[Candidate], wanted: int, apart: float) -> list[Candidate]:
    """The best candidates that differ from each other by a factor e^apart in an outer parameter, and in cost: along an
    outer parameter that nothing depends on they do not."""
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
    """Outer parameters of every point of the search (points, outer), its low and its high corner last; and the shape
    of the grid that they form, empty where they form none."""
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
    """Where an axis of the grid has its nodes, between 0 and 1: evenly; and where the latency has kinks, between them
    as well, because every stretch may have an optimum of its own."""
    even = np.linspace(0, 1, count)
    kept = _between_kinks(problem, name, ends, MOST_KINKS[count])
    return np.unique(np.concatenate([even, np.log(kept / ends[0]) / np.log(ends[1] / ends[0])]))


def _between_kinks(problem: FitProblem, name: str, ends: tuple[float, float], most: int) -> FloatArray:
    """Values between neighbouring kinks, at most so many of them."""
    kinks = kink_values(problem, name)
    between = np.sqrt(kinks[1:] * kinks[:-1])
    between = between[(between > ends[0]) & (between < ends[1])]
    return np.asarray(between[np.linspace(0, len(between) - 1, min(len(between), most)).astype(np.int64)])


def kink_values(problem: FitProblem, name: str) -> FloatArray:
    """Where the latency has a kink in an outer parameter: the values above zero of a feature, in order."""
    for shape in problem.model.shapes if isinstance(problem.model, Separable) else ():
        if shape.parameter.name == name and shape.kinks_at:
            values = np.unique(features_of(problem.steps)[shape.kinks_at])
            return np.asarray(values[values > 0])
    return np.empty(0)


def _cube(nodes: list[FloatArray]) -> FloatArray:
    return np.stack([axis.ravel() for axis in np.meshgrid(*nodes, indexing="ij")], axis=1)


def _scattered(dimensions: int, seed: int) -> FloatArray:
    """Points in the unit cube that keep far apart (points, dimensions)."""
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


def _solved(
    problem: FitProblem, points: FloatArray, active: list[int], f_scale: float, here: FloatArray | None
) -> list[Candidate]:
    X = np.empty((len(points), len(problem.observed), len(active)))
    for i, point in enumerate(points):
        X[i] = problem.model.basis(point, problem.steps)[:, active]
    T, weights = problem.observed, problem.weights
    costs, best = np.full(len(points), np.inf), np.zeros((len(points), len(active)))
    f, r = (T, np.zeros_like(T)) if here is None else (here, _residuals(problem, here))
    f, r = np.broadcast_to(f, X.shape[:2]), np.broadcast_to(r, X.shape[:2])
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
    """r (..., n) of predictions f."""
    return np.log(f / problem.observed) if problem.options.residuals == "relative" else f - problem.observed


def _reweighted(problem: FitProblem, f: FloatArray, r: FloatArray, f_scale: float) -> tuple[FloatArray, FloatArray]:
    """Targets and weights, each (k, n), of the least squares problem that stands for the cost near predictions f."""
    factor = problem.weights * np.maximum(score_factor(problem.options.loss, r, f_scale), 1e-12)
    if problem.options.residuals == "relative":
        return f * np.maximum(1 - r, 0.0), factor / f**2
    return np.broadcast_to(problem.observed, f.shape), factor


def non_negative(X: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """argmin_{c >= 0} sum weights (X c - y)^2 for each of a stack of problems: X (k, n, m), y, weights (k, n)."""
    root = np.sqrt(weights)
    rooted = X * root[:, :, None]
    gram = rooted.transpose(0, 2, 1) @ rooted
    size = np.sqrt(np.diagonal(gram, axis1=1, axis2=2))
    size = np.where(size > 0, size, 1.0)
    gram = gram / (size[:, :, None] * size[:, None, :]) + _RIDGE * np.eye(X.shape[2])
    right = ((y * root)[:, None, :] @ rooted)[:, 0, :] / size
    return np.asarray(_pivoted(gram, right) / size)


def _pivoted(gram: FloatArray, right: FloatArray) -> FloatArray:
    """argmin_{c >= 0} c'Gc/2 - b'c for a stack of positive definite G (k, m, m), b (k, m), by block principal pivoting
    (Kim & Park 2011): all coefficients whose sign or gradient is wrong change sides together, and where that has not
    led to fewer wrong ones three times running, only the last of them, which ends after finitely many steps."""
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


RANDOM_SPREAD = 2.0


def searched_points(problem: FitProblem, f_scale: float, wanted: int) -> list[FloatArray]:
    """Starts in z from the search over the outer parameters, best first."""
    return [problem.coordinates(candidate.theta) for candidate in search(problem, f_scale, wanted)]


def naive_points(problem: FitProblem, wanted: int) -> list[FloatArray]:
    """Starts in z that know nothing of the structure: the textbook one, zero, and random ones of order one."""
    rng = np.random.default_rng(problem.options.seed)
    drawn = rng.normal(0.0, RANDOM_SPREAD, (max(wanted - 1, 0), len(problem.free)))
    drawn[:1] = 0.0
    first = problem.coordinates(textbook_start(problem))
    return [first, *(np.clip(np.abs(z) * _signs(problem, z), problem.lower, problem.upper) for z in drawn)]


def _signs(problem: FitProblem, z: FloatArray) -> FloatArray:
    """Costs start above zero, logarithms on either side."""
    return np.where([p.positive for p in problem.free_parameters], np.sign(z), 1.0)


def textbook_start(problem: FitProblem) -> FloatArray:
    """The start that the saturation model's literature uses, in theta: P_max from the 95th percentile of S/T, rates one
    tenth and one hundredth of the scaled axes, half a low quantile of T as fixed cost. Shapes start in the middle of
    their range, and other coefficients small."""
    T, weights = problem.observed, problem.weights
    guess = {
        "tau_0": 0.5 * quantile(T, 0.05, weights),
        "w_0": 1.0,
        "w_1": 1.0,
        "P_max": quantile(problem.steps["S"] / T, 0.95, weights),
    }
    factor = {"k_B": 0.1, "k_S": 0.01}
    theta = np.empty(len(problem.scales))
    for i, (parameter, scale) in enumerate(zip(problem.model.parameters, problem.scales, strict=True)):
        small = 1.0 if parameter.positive else 0.01
        value = guess.get(parameter.name, factor.get(parameter.name, small) * float(scale))
        theta[i] = problem.fixed.get(parameter.name, value)
    return theta
