"""The solver: search for starts, race them on a sample, polish the best on all rows.

Starts come from variable projection: given its outer parameters the model is linear in coefficients >= 0. The scale of
a robust loss is that of the fit's residuals. Derivation: docs/theory/fitting.md, "Solver".
"""

from dataclasses import dataclass, replace

import numpy as np

from latfit.fitting.data import Rows
from latfit.fitting.problem import TUNING, FitOptions, FitProblem, make_problem
from latfit.fitting.solver.levenberg_marquardt import (
    GAIN,
    MAX_STEPS,
    Descents,
    Minimum,
    minimise_all,
)
from latfit.fitting.solver.objective import CellProblem, by_cell, by_residual, score_factor
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


SEARCH_ROWS, RACE_ROWS = 256, 400
RACERS = 12  # number of starts where outer parameters are searched
FINALISTS = 3
CLOSE = 0.02  # ends whose costs on a sample differ by less than this share count as equal
NOTHING = 1e-6  # A start that predicts less than this share of the fastest step is unusable
FIRST_RELATIVE_SCALE = 0.1
SCALE_FLOOR = 1e-7
RACE_STEPS = 30
MORE_SCALES = 2
REFIT_STEPS, REFIT_GAINS = 25, (1e-3, 1e-5)
"""Steps of a fold's fit, and relative gains at which its two passes stop: far below the error of a fold."""


@dataclass(frozen=True)
class Solution:
    """Optimum z (free,), its cost, the scale of the loss, and whether the solver converged."""

    z: FloatArray
    cost: float
    f_scale: float
    converged: bool


ROUGHLY = 1e-6  # relative gain at which a race stops


def solved_once(data: Rows, options: FitOptions) -> tuple[FitProblem, Solution]:
    """Return the problem of fitting rows, without a correction, and its solution; cached with the data."""
    options = options.of_formula

    def find() -> tuple[FitProblem, Solution]:
        problem = make_problem(data, options)
        return problem, solve(problem)

    return data.once(("solved", repr(options)), find)


def solve(problem: FitProblem, warm: FloatArray | None = None) -> Solution:
    """Minimise the robust cost. warm: start in z (free,) in place of a search."""
    if problem.options.loss == "tukey" and warm is None:  # not convex
        warm = solve(replace(problem, options=replace(problem.options, loss="huber"))).z
    rows = by_cell(problem)
    if len(problem.free) == 0:
        f_scale = _scale(rows, np.empty(0))
        return Solution(np.empty(0), Descents.alike(rows, f_scale).cost(np.empty(0)), f_scale, True)
    if warm is not None and _predicts(rows, warm):
        return _refitted(rows, warm)
    few = sample_rows(problem, RACE_ROWS)
    sample = rows if few is problem else by_cell(few)
    first, searched = (
        FIRST_RELATIVE_SCALE * problem.unit,
        sum(name not in problem.fixed for name in problem.model.outer),
    )
    racers = max(RACERS, problem.options.starts) if searched else 1
    starts = find_starts(sample_rows(few, SEARCH_ROWS), first, racers)
    # on the sample at a generous scale, then at the best end's; the best of these on all rows
    ends = _race(sample, first, starts, ROUGHLY, RACE_STEPS)
    ends = _race(sample, _scale(sample, ends[0].z), [end.z for end in ends], ROUGHLY, RACE_STEPS)
    close = [end.z for end in ends if end.cost <= (1 + CLOSE) * ends[0].cost][:FINALISTS]
    ends = _race(rows, _scale(rows, ends[0].z), close, ROUGHLY, MAX_STEPS)
    f_scale = _scale(rows, ends[0].z)
    return _at_the_edge(rows, f_scale, _race(rows, f_scale, [end.z for end in ends], GAIN, MAX_STEPS)[0])


def _refitted(rows: CellProblem, warm: FloatArray) -> Solution:
    z = warm
    for _ in range(MORE_SCALES):
        f_scale = _scale(rows, z)
        (end,) = minimise_all(Descents.alike(rows, f_scale), z[None])
        z = end.z
    return _at_the_edge(rows, f_scale, end)


def _race(rows: CellProblem, f_scale: float, starts: list[FloatArray], gain: float, steps: int) -> list[Minimum]:
    """Return the ends of starts, best first; those that reached one optimum count once."""
    descents = Descents.alike(rows, f_scale, len(starts))
    distinct: list[Minimum] = []
    for end in sorted(minimise_all(descents, np.array(starts), steps, gain), key=lambda end: end.cost):
        if all(abs(end.cost - other.cost) > ROUGHLY * abs(other.cost) for other in distinct):
            distinct.append(end)
    return distinct


def _predicts(rows: CellProblem, start: FloatArray) -> bool:
    """Return whether a start predicts a positive latency for every step; ln T has no slope at zero."""
    T = rows.cells.model.latency_ms(rows.cells.theta(start), rows.cells.steps)
    return bool(T.min() > NOTHING * float(rows.cells.observed.min()))


def _scale(rows: CellProblem, z: FloatArray) -> float:
    return max(TUNING[rows.cells.options.loss] * rows.spread(z), SCALE_FLOOR * rows.cells.unit)


def refitted_all(problem: FitProblem, z: FloatArray, weights: FloatArray, upper: FloatArray) -> FloatArray:
    """Refit with other weights (k, n) and upper ends (k, free), each from z; return coordinates (k, free)."""
    rows = by_cell(problem)
    k = len(weights)
    lower = np.tile(problem.lower, (k, 1))
    descents = Descents(rows, weights, np.zeros(k), lower, np.maximum(upper, lower), rows.y[None])
    found = np.clip(np.tile(z, (k, 1)), lower, descents.upper)
    for gain in REFIT_GAINS:
        descents = descents.at_own_scale(found, SCALE_FLOOR * problem.unit)
        found = np.array([end.z for end in minimise_all(descents, found, REFIT_STEPS, gain)])
    return found


def _at_the_edge(rows: CellProblem, f_scale: float, end: Minimum) -> Solution:
    """Move coordinates close to a bound onto it if the cost does not rise, and corners of zero terms to the middle."""
    problem, descent = rows.cells, Descents.alike(rows, f_scale)
    z, kept = end.z.copy(), descent.cost(end.z)
    middle = (problem.lower + problem.upper) / 2
    idle = ~np.any(problem.slopes(problem.theta(z), problem.steps), axis=0) & np.isfinite(middle)
    idle &= np.array([p.positive for p in problem.free_parameters], dtype=bool)
    z[idle] = middle[idle]
    for i, (low, high) in enumerate(zip(problem.lower, problem.upper, strict=True)):
        for edge in (low, high):
            if np.isfinite(edge) and z[i] != edge and abs(z[i] - edge) < 1e-3 * max(1.0, abs(edge)):
                trial = z.copy()
                trial[i] = edge
                if (reached := descent.cost(trial)) <= kept * (1 + 1e-9):
                    z, kept = trial, reached
    return Solution(z, kept, f_scale, end.converged)


def sample_rows(problem: FitProblem, size: int) -> FitProblem:
    """Return a systematic sample of about `size` rows with the extremes of every column, weighted as all."""
    if len(problem.observed) <= size:
        return problem
    rng = np.random.default_rng(problem.options.seed)
    share = 0.5 * problem.weights / problem.weights.sum() + 0.5 / len(problem.weights)
    drawn = np.searchsorted(np.cumsum(share), (np.arange(size) + rng.random()) / size)
    corners = [extreme(column) for column in problem.steps.values() for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.minimum(np.concatenate([drawn, np.array(corners)]), len(share) - 1).astype(np.int64))
    sample = problem.rows_at(rows)
    return replace(sample, weights=sample.weights / np.minimum(1.0, size * share[rows]))
