"""The solver: search for starts, race them on a sample, polish the best on all rows.

The scale of a robust loss is that of the fit's residuals. Derivation: docs/theory/fitting.md, "Solver".
"""

from dataclasses import dataclass, replace

import numpy as np

from latfit.fitting.data import Rows
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.levenberg_marquardt import (
    GAIN,
    MAX_STEPS,
    Descents,
    Minimum,
    minimise_all,
)
from latfit.fitting.solver.loss import TUNING
from latfit.fitting.solver.objective import CellProblem, by_cell
from latfit.fitting.solver.variable_projection import find_starts
from latfit.stats import FloatArray

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


ROUGHLY, FINELY = 1e-6, 1e-9  # relative gains at which a search stops


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
    ends = _race(sample, _scale(sample, ends[0].z), [end.z for end in ends], FINELY, RACE_STEPS)
    close = [end.z for end in ends if end.cost <= (1 + CLOSE) * ends[0].cost][:FINALISTS]
    ends = _race(rows, _scale(rows, ends[0].z), close, GAIN, MAX_STEPS)
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
