"""The solver: a search for starts, a race between them, a polish of the winner on all rows.

The scale of a robust loss is the spread of the residuals of the very fit it belongs to. So: a fit with a generous
scale, the spread of its residuals by the median absolute deviation, a fit with that scale, and once more. With the
scale held, the cost falls in each solve; a scale floor keeps noise-free data from dividing by zero.

`separable` searches by variable projection and polishes with `newton`; `trf` runs SciPy's trust-region reflective from
starts that know nothing of the structure, as anyone would. On large data the starts race on a sample of the rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares

from latfit.fit.loss import RHO, TUNING, weighted
from latfit.fit.newton import MAX_STEPS, Minimum, minimise
from latfit.fit.objective import CellProblem, Objective, by_cell, remembered
from latfit.fit.problem import FitProblem
from latfit.fit.start import naive_points, searched_points
from latfit.stats import FloatArray

SEARCH_ROWS = 256
RACE_ROWS = 1500
RACERS = {0: 1, 1: 8, 2: 4}
MANY_RACERS = 12
"""Starts by the number of outer parameters that are searched; of more, many."""

MANY_PARAMETERS = 7
"""Beyond this many free parameters the search's sample may mislead, and starts that know nothing race along."""

FINALISTS = 3
CLOSE = 0.02
"""A sample cannot tell ends whose costs differ by less than this share."""

NOTHING = 1e-6
"""A prediction below this share of the fastest step is none."""

TRF_STARTS = 8
FIRST_RELATIVE_SCALE = 0.1
SCALE_FLOOR = 1e-7
MAX_EVALUATIONS = 400
RACE_EVALUATIONS = 80
RACE_STEPS = 30
MORE_SCALES = 2
WIDER = (8.0, 4.0, 2.0)


@dataclass(frozen=True)
class Solution:
    """z of the optimum (free,), its cost, the loss's scale, and whether the solver said that it converged."""

    z: FloatArray
    cost: float
    f_scale: float
    converged: bool


Polish = Callable[[Objective, FloatArray, float], Minimum]
"""A minimiser: objective, start, and the share of the cost below which a further gain does not count."""

ROUGHLY, EXACTLY = 1e-6, 1e-12


def solve(problem: FitProblem, warm: FloatArray | None = None) -> Solution:
    """Minimise the robust cost. warm: a start in z in place of the search for one (refits on parts of the data)."""
    problem = remembered(problem)
    if problem.options.loss == "tukey":
        return _tukey(problem, warm)
    rows = by_cell(problem)
    if len(problem.free) == 0:
        f_scale = _scale(rows, np.empty(0))
        return Solution(np.empty(0), Objective(rows, f_scale).cost(np.empty(0)), f_scale, True)
    polish = _trf if problem.options.solver == "trf" else _newton
    starts = [warm] if warm is not None and _speaks(rows, warm) else _race(problem, rows, polish)
    f_scale = _scale(rows, starts[0])
    best = min((polish(Objective(rows, f_scale), start, EXACTLY) for start in starts), key=lambda end: end.cost)
    for _ in range(MORE_SCALES - 1):
        f_scale = _scale(rows, best.z)
        best = polish(Objective(rows, f_scale), best.z, EXACTLY)
    return _at_the_edge(Objective(rows, f_scale), best)


def _race(problem: FitProblem, rows: CellProblem, polish: Polish) -> list[FloatArray]:
    """The best of several starts, each polished on a sample at the generous scale and again at the best one's own;
    where the sample cannot tell a few of them apart, those."""
    sample = by_cell(_sample(problem, RACE_ROWS)) if len(problem.observed) > RACE_ROWS else rows
    options = problem.options
    first = FIRST_RELATIVE_SCALE * (1.0 if options.residuals == "relative" else float(np.median(problem.observed)))
    if options.solver == "trf":
        starts = naive_points(problem, TRF_STARTS)
    else:
        starts = searched_points(remembered(_sample(problem, SEARCH_ROWS)), first, _racers(problem))
        if len(problem.free) > MANY_PARAMETERS:
            starts += naive_points(problem, TRF_STARTS)
    ends = sorted((polish(Objective(sample, first), start, ROUGHLY) for start in starts), key=lambda end: end.cost)
    scaled = Objective(sample, _scale(sample, ends[0].z))
    ends = sorted((polish(scaled, end.z, 1e-3 * ROUGHLY) for end in _apart(ends)), key=lambda end: end.cost)
    if sample is rows and len(problem.free) <= MANY_PARAMETERS:
        return [ends[0].z]
    close = [end for end in _apart(ends) if end.cost <= (1 + CLOSE) * ends[0].cost]
    return [end.z for end in close[:FINALISTS]]


def _speaks(rows: CellProblem, start: FloatArray) -> bool:
    """Whether a start predicts something for every step: logarithms of nothing have no slope to leave it by."""
    T = rows.cells.model.latency_ms(rows.cells.theta(start), rows.cells.steps)
    return bool(T.min() > NOTHING * float(rows.cells.observed.min()))


def _racers(problem: FitProblem) -> int:
    searched = sum(name not in problem.fixed for name in problem.model.outer)
    return max(RACERS.get(searched, MANY_RACERS), problem.options.starts if searched else 1)


def _apart(ends: list[Minimum]) -> list[Minimum]:
    """Ends of different cost: starts that met in one optimum run on as one."""
    kept: list[Minimum] = []
    for end in ends:
        if all(abs(end.cost - other.cost) > ROUGHLY * abs(other.cost) for other in kept):
            kept.append(end)
    return kept


def _tukey(problem: FitProblem, warm: FloatArray | None) -> Solution:
    """Not convex: from the Huber fit, from fits with a wider scale that narrows, and from the points that the search
    likes, with the Huber fit's spread held."""
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
        starts += searched_points(remembered(_sample(problem, SEARCH_ROWS)), f_scale, MANY_RACERS)
        starts += naive_points(problem, TRF_STARTS)
    return _at_the_edge(objective, min((minimise(objective, z) for z in starts), key=lambda end: end.cost))


def _newton(objective: Objective, start: FloatArray, gain: float) -> Minimum:
    return minimise(objective, start, MAX_STEPS if gain < ROUGHLY else RACE_STEPS, gain)


def _trf(objective: Objective, start: FloatArray, gain: float) -> Minimum:
    """SciPy's trust-region reflective on all rows; it knows no priors, which `problem` refuses with it."""
    problem = objective.problem
    rows = objective.rows
    inside = np.clip(start, problem.lower, problem.upper)
    with np.errstate(all="ignore"):  # columns that the data cannot tell apart divide by zero inside SciPy's subproblem
        result = least_squares(
            lambda z: rows.by_row(rows.predicted(z)) - rows.y,
            inside,
            jac=lambda z: rows.by_row_matrix(problem.jacobian(z)),
            bounds=(problem.lower, problem.upper),
            method="trf",
            x_scale="jac",
            loss=weighted(RHO[problem.options.loss], rows.weights),
            f_scale=objective.f_scale,
            ftol=10 * gain,
            xtol=1e-11,
            gtol=1e-11,
            max_nfev=MAX_EVALUATIONS if gain <= EXACTLY else RACE_EVALUATIONS,
        )
    return Minimum(result.x, objective.cost(result.x), bool(result.status > 0))


def _scale(rows: CellProblem, z: FloatArray) -> float:
    options = rows.cells.options
    floor = SCALE_FLOOR * (1.0 if options.residuals == "relative" else float(np.median(rows.cells.observed)))
    return max(TUNING[options.loss] * rows.spread(z), floor)


def _at_the_edge(objective: Objective, end: Minimum) -> Solution:
    """Put coordinates that a solver left a hair inside their bound onto it, where that costs nothing."""
    problem = objective.problem
    z, kept = end.z.copy(), objective.cost(end.z)
    for i, (low, high) in enumerate(zip(problem.lower, problem.upper, strict=True)):
        for edge in (low, high):
            if np.isfinite(edge) and z[i] != edge and abs(z[i] - edge) < 1e-3 * max(1.0, abs(edge)):
                trial = z.copy()
                trial[i] = edge
                if (reached := objective.cost(trial)) <= kept * (1 + 1e-9):
                    z, kept = trial, reached
    return Solution(z, kept, objective.f_scale, end.converged)


def _sample(problem: FitProblem, size: int) -> FitProblem:
    """About `size` rows, drawn half by weight and half evenly, the extremes of every column always among them.

    A row's weight is divided by its chance to be drawn, so that the sample's cost estimates the cost of all rows.
    """
    if len(problem.observed) <= size:
        return problem
    rng = np.random.default_rng(problem.options.seed)
    share = 0.5 * problem.weights / problem.weights.sum() + 0.5 / len(problem.weights)
    drawn = rng.choice(len(share), size=size, replace=False, p=share)
    corners = [extreme(column) for column in problem.steps.values() for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.concatenate([drawn, np.array(corners)]).astype(np.int64))
    sample = problem.rows_at(rows)
    return replace(sample, weights=sample.weights / np.minimum(1.0, size * share[rows]))
