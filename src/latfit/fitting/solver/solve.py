"""The solver: search for starts, race them, polish the best on all rows.

The scale of a robust loss is estimated from the residuals of the fit, starting from a generous scale. Starts come from
variable projection, descents are Levenberg-Marquardt. On large data the starts race on a sample. Derivation:
docs/theory/fitting.md, "Solver".
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from latfit.fitting.data import Rows
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.levenberg_marquardt import (
    GAIN,
    MAX_STEPS,
    Descents,
    Minimum,
    Objective,
    minimise,
    minimise_all,
)
from latfit.fitting.solver.loss import TUNING
from latfit.fitting.solver.objective import CellProblem, by_cell, remembered
from latfit.fitting.solver.variable_projection import naive_points, search, search_beside, searched_points
from latfit.stats import FloatArray

SEARCH_ROWS = 256
RACE_ROWS = 400
RACERS = {0: 1, 1: 8, 2: 4}
MANY_RACERS = 6
"""Number of starts by the number of searched outer parameters; MANY_RACERS for more."""

FEW_OUTER = 2
NAIVE_STARTS = 2
"""Starts that ignore the structure, in case the sample of the search misleads."""

FINALISTS = 3
WORTH = 0.5
"""A point of the search up to this share costlier than the fit may lead to a better one."""

MOST_TRIED = 8

WELL_SEARCHED = (0, 2)
"""Numbers of outer parameters that need no second search along the axes: none, and two on a grid."""

RESCUES = 3
CLOSE = 0.02
"""Ends whose costs on a sample differ by less than this share count as equal."""

NOTHING = 1e-6
"""A start that predicts less than this share of the fastest step is unusable."""

TUKEY_STARTS = 8
FIRST_RELATIVE_SCALE = 0.1
SCALE_FLOOR = 1e-7
RACE_STEPS, MANY_STEPS = 10, 30
"""Steps of a race after a search on a grid, which finds the valleys, and after a scattered search."""

MORE_SCALES = 2
REFIT_STEPS, REFIT_GAINS = 25, (1e-3, 1e-5)
"""Steps of a fold's fit, and relative gains at which its two passes stop: far below the error of a fold."""
WIDER = (8.0, 4.0, 2.0)


@dataclass(frozen=True)
class Solution:
    """Optimum z (free,), its cost, the scale of the loss, and whether the solver converged."""

    z: FloatArray
    cost: float
    f_scale: float
    converged: bool


ROUGHLY, FINELY = 1e-6, 1e-9
"""Relative gains at which a search stops."""


def solved_once(data: Rows, options: FitOptions) -> tuple[FitProblem, Solution]:
    """Return the problem of fitting rows, without a correction, and its solution; cached with the data."""
    options = options.of_formula

    def find() -> tuple[FitProblem, Solution]:
        problem = make_problem(data, options)
        return problem, solve(problem, found=data.found.get(("nearly", repr(options))))

    return data.once(("solved", repr(options)), find)


def nearly_solved(data: Rows, options: FitOptions, theta: FloatArray | None = None) -> tuple[FitProblem, Solution]:
    """Return problem and solution without the second search for a better valley; `solved_once` continues from it.

    theta: parameters (p,) of a fit of some of the rows, in place of a search.
    """

    def find() -> tuple[FitProblem, list[Minimum], Solution]:
        problem = make_problem(data, options)
        if problem.options.loss == "tukey" or not problem.free:
            return problem, [], solve(problem)
        if theta is not None:
            return problem, [], solve(problem, warm=problem.coordinates(theta))
        problem = remembered(problem)
        rows = by_cell(problem)
        ends = _finals(rows, _race(problem, _samples(problem, rows)))
        objective = Objective(rows, _scale(rows, ends[0].z))
        return problem, ends, _at_the_edge(objective, minimise(objective, ends[0].z))

    if ("solved", repr(options)) in data.found:
        return solved_once(data, options)
    problem, _, solution = data.once(("nearly", repr(options)), find)
    return problem, solution


def solve(
    problem: FitProblem, warm: FloatArray | None = None, found: tuple[Any, list[Minimum], Any] | None = None
) -> Solution:
    """Minimise the robust cost.

    Parameters
    ----------
    warm
        Start in z (free,) in place of a search, for refits on parts of the data.
    found
        Result of `nearly_solved` for this problem.
    """
    problem = remembered(problem)
    if problem.options.loss == "tukey":
        return _tukey(problem, warm)
    rows = by_cell(problem)
    if len(problem.free) == 0:
        f_scale = _scale(rows, np.empty(0))
        return Solution(np.empty(0), Objective(rows, f_scale).cost(np.empty(0)), f_scale, True)
    if warm is not None and _speaks(rows, warm):
        return _refitted(rows, warm)
    samples = _samples(problem, rows)
    ends = (found[1] if found else []) or _finals(rows, _race(problem, samples))
    for _ in range(RESCUES):
        objective = Objective(rows, _scale(rows, ends[0].z))
        ends = _polished(objective, [end.z for end in ends])
        best = ends[0]
        better = _rescued(objective, samples, best)
        if better.cost >= best.cost * (1 - FINELY):
            break
        ends = [better, *ends]
    return _at_the_edge(objective, min(best, better, key=lambda end: end.cost))


def _refitted(rows: CellProblem, warm: FloatArray) -> Solution:
    """Fit from a start, within its valley."""
    z = warm
    for _ in range(MORE_SCALES):
        objective = Objective(rows, _scale(rows, z))
        end = minimise(objective, z)
        z = end.z
    return _at_the_edge(objective, end)


@dataclass(frozen=True)
class _Samples:
    """Rows to search on, and rows to race on; the latter are all rows of a small problem."""

    searched: FitProblem
    beside: FitProblem
    raced: CellProblem
    whole: bool


def _samples(problem: FitProblem, rows: CellProblem) -> _Samples:
    few = sample_rows(problem, RACE_ROWS)
    whole = few is problem
    raced = rows if whole else by_cell(few, rows.compiled)
    return _Samples(remembered(sample_rows(few, SEARCH_ROWS)), remembered(few), raced, whole)


def _race(problem: FitProblem, samples: _Samples) -> list[Minimum]:
    """Return the ends of several starts, best first: each polished at the generous scale, then at the best end's."""
    sample, first = samples.raced, _generous(problem)
    starts = searched_points(samples.searched, first, _racers(problem))
    starts += naive_points(problem, NAIVE_STARTS)
    steps = RACE_STEPS if _searched(problem) <= FEW_OUTER else MANY_STEPS
    ends = _apart(_raced(Objective(sample, first), starts, ROUGHLY, steps))
    scaled = Objective(sample, _scale(sample, ends[0].z))
    return _apart(_raced(scaled, [end.z for end in ends], FINELY, steps))


def _raced(objective: Objective, starts: list[FloatArray], gain: float, steps: int) -> list[Minimum]:
    """Return the ends of starts, best first."""
    descents = Descents.alike(objective.rows, objective.f_scale, len(starts))
    return sorted(minimise_all(descents, np.array(starts), steps, gain), key=lambda end: end.cost)


def _finals(rows: CellProblem, ends: list[Minimum]) -> list[Minimum]:
    """Polish on all rows the ends that are equal to the best one on the sample."""
    close = [end.z for end in ends if end.cost <= (1 + CLOSE) * ends[0].cost]
    return _polished(Objective(rows, _scale(rows, ends[0].z)), close[:FINALISTS])


def _polished(objective: Objective, starts: list[FloatArray]) -> list[Minimum]:
    """Return the distinct ends of starts, best first."""
    return _apart(_raced(objective, starts, GAIN, MAX_STEPS)) if starts else []


def _rescued(objective: Objective, samples: _Samples, best: Minimum) -> Minimum:
    """Search again at the scale of the fit; return a better end, or the best one."""
    problem, f_scale = samples.searched, objective.f_scale
    known = max(Objective(by_cell(problem, objective.rows.compiled), f_scale).cost(best.z), 1e-300)
    sample = Objective(samples.raced, f_scale)
    found = [(each.cost / known, each.theta) for each in search(problem, f_scale, MANY_RACERS)]
    if _searched(problem) not in WELL_SEARCHED:
        known = max(sample.cost(best.z), 1e-300)
        beside = search_beside(samples.beside, f_scale, problem.theta(best.z))
        found += [(each.cost / known, each.theta) for each in beside]
    worth = sorted((each for each in found if each[0] <= 1 + WORTH), key=lambda each: each[0])
    if not worth:
        return best
    starts = [problem.coordinates(theta) for _, theta in worth[:MOST_TRIED]]
    ends = _raced(sample, starts, FINELY, MANY_STEPS)
    if samples.whole:
        lower = [end for end in _apart(ends) if end.cost < best.cost * (1 - FINELY)]
    else:
        near = minimise(sample, best.z, MANY_STEPS, FINELY)
        lower = [end for end in _apart([near, *ends])[1:] if end.cost <= near.cost * (1 + CLOSE)]
    return min([best, *_polished(objective, [end.z for end in lower[:FINALISTS]])], key=lambda end: end.cost)


def _generous(problem: FitProblem) -> float:
    """Return the first scale of the loss, before residuals are known."""
    relative = problem.options.residuals == "relative"
    return FIRST_RELATIVE_SCALE * (1.0 if relative else float(np.median(problem.observed)))


def _speaks(rows: CellProblem, start: FloatArray) -> bool:
    """Return whether a start predicts a positive latency for every step; ln T has no slope at zero."""
    T = rows.cells.model.latency_ms(rows.cells.theta(start), rows.cells.steps)
    return bool(T.min() > NOTHING * float(rows.cells.observed.min()))


def _racers(problem: FitProblem) -> int:
    searched = _searched(problem)
    return max(RACERS.get(searched, MANY_RACERS), problem.options.starts if searched else 1)


def _searched(problem: FitProblem) -> int:
    """Return the number of outer parameters that are searched."""
    return sum(name not in problem.fixed for name in problem.model.outer)


def _apart(ends: list[Minimum]) -> list[Minimum]:
    """Return the ends of different cost: starts that reached one optimum count once."""
    kept: list[Minimum] = []
    for end in ends:
        if all(abs(end.cost - other.cost) > ROUGHLY * abs(other.cost) for other in kept):
            kept.append(end)
    return kept


def _tukey(problem: FitProblem, warm: FloatArray | None) -> Solution:
    """Fit Tukey's loss, which is not convex, with the Huber fit's spread held.

    Starts: the Huber fit, a series of narrowing scales, the best points of the search, and naive ones.
    """
    huber = solve(replace(problem, options=replace(problem.options, loss="huber")), warm)
    f_scale = huber.f_scale * TUNING["tukey"] / TUNING["huber"]
    objective = Objective(by_cell(problem), f_scale)
    if len(problem.free) == 0:
        return Solution(huber.z, objective.cost(huber.z), f_scale, True)
    starts = [huber.z]
    if warm is None:
        wider = huber.z
        for factor in WIDER:
            wider = minimise(Objective(objective.rows, factor * f_scale), wider).z
        starts.append(wider)
        starts += searched_points(remembered(sample_rows(problem, SEARCH_ROWS)), f_scale, MANY_RACERS)
        starts += naive_points(problem, TUKEY_STARTS)
    return _at_the_edge(objective, min((minimise(objective, z) for z in starts), key=lambda end: end.cost))


def _scale(rows: CellProblem, z: FloatArray) -> float:
    return max(TUNING[rows.cells.options.loss] * rows.spread(z), _least_scale(rows))


def _least_scale(rows: CellProblem) -> float:
    relative = rows.cells.options.residuals == "relative"
    return SCALE_FLOOR * (1.0 if relative else float(np.median(rows.cells.observed)))


def refitted_all(problem: FitProblem, z: FloatArray, weights: FloatArray, upper: FloatArray) -> FloatArray:
    """Refit with other weights (k, n), each from z (free,); return coordinates (k, free).

    upper: upper ends of the boxes (k, free); a coordinate that a fit lacks has its lower end there.
    """
    rows = by_cell(remembered(problem))
    k = len(weights)
    lower = np.tile(problem.lower, (k, 1))
    descents = Descents(rows, weights, np.zeros(k), lower, np.maximum(upper, lower))
    found = np.clip(np.tile(z, (k, 1)), lower, descents.upper)
    for gain in REFIT_GAINS:
        descents = descents.at_own_scale(found, _least_scale(rows))
        found = np.array([end.z for end in minimise_all(descents, found, REFIT_STEPS, gain)])
    return found


def _at_the_edge(objective: Objective, end: Minimum) -> Solution:
    """Move coordinates that are almost at a bound onto it, if the cost does not rise, and idle ones to the middle.

    The corner of a term with cost zero is idle: any value fits, and folds start from it.
    """
    problem = objective.problem
    z, kept = end.z.copy(), objective.cost(end.z)
    middle = (problem.lower + problem.upper) / 2
    idle = ~np.any(problem.slopes(problem.theta(z), problem.steps), axis=0) & np.isfinite(middle)
    idle &= np.array([p.positive for p in problem.free_parameters], dtype=bool)
    z[idle] = middle[idle]
    for i, (low, high) in enumerate(zip(problem.lower, problem.upper, strict=True)):
        for edge in (low, high):
            if np.isfinite(edge) and z[i] != edge and abs(z[i] - edge) < 1e-3 * max(1.0, abs(edge)):
                trial = z.copy()
                trial[i] = edge
                if (reached := objective.cost(trial)) <= kept * (1 + 1e-9):
                    z, kept = trial, reached
    return Solution(z, kept, objective.f_scale, end.converged)


def sample_rows(problem: FitProblem, size: int) -> FitProblem:
    """Return a sample of about `size` rows, with the extremes of every column.

    Systematic sampling along the order of B, S and T, half by weight and half evenly. Weights are divided by the
    probability of inclusion, so the sample's cost estimates the cost of all rows.
    """
    if len(problem.observed) <= size:
        return problem
    rng = np.random.default_rng(problem.options.seed)
    share = 0.5 * problem.weights / problem.weights.sum() + 0.5 / len(problem.weights)
    drawn = np.searchsorted(np.cumsum(share), (np.arange(size) + rng.random()) / size)
    corners = [extreme(column) for column in problem.steps.values() for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.minimum(np.concatenate([drawn, np.array(corners)]), len(share) - 1).astype(np.int64))
    sample = problem.rows_at(rows)
    return replace(sample, weights=sample.weights / np.minimum(1.0, size * share[rows]))
