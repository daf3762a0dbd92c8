"""The solver: SciPy's trust-region reflective from several starts, with the robust scale found on the way.

The scale of a robust loss is the spread of the residuals of the very fit it belongs to. So: a fit with a generous
scale, the spread of its residuals by the median absolute deviation, a fit with that scale, and once more. With the
scale held, the cost falls in each solve; a scale floor keeps noise-free data from dividing by zero.

On large data the starts race on a sample of the rows, and only the winner is polished on all of them.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from scipy.optimize import least_squares

from latfit.fit.loss import RHO, TUNING, total_cost, weighted
from latfit.fit.problem import FitProblem
from latfit.fit.start import starting_points
from latfit.stats import FloatArray, mad_sigma

RACE_ROWS = 1500
FIRST_RELATIVE_SCALE = 0.1
SCALE_FLOOR = 1e-7
MAX_EVALUATIONS = 400


@dataclass(frozen=True)
class Solution:
    """z of the optimum (free,), its cost, the loss's scale, and whether the solver said that it converged."""

    z: FloatArray
    cost: float
    f_scale: float
    converged: bool


def solve(problem: FitProblem, warm: FloatArray | None = None) -> Solution:
    """Minimise the robust cost. warm: a start in z in place of the search for one (refits on parts of the data)."""
    if len(problem.free) == 0:
        z = np.empty(0)
        f_scale = _scale(problem, z)
        return Solution(z, _cost(problem, z, f_scale), f_scale, True)
    race = _race_sample(problem) if len(problem.observed) > RACE_ROWS else problem
    starts = [warm] if warm is not None else starting_points(race)
    first = _first_scale(race, starts[0])
    best = min((_minimise(race, start, first) for start in starts), key=lambda solution: solution.cost)
    for _ in range(2):
        best = _minimise(problem, best.z, _scale(problem, best.z))
    return _at_the_edge(problem, best)


def _minimise(problem: FitProblem, start: FloatArray, f_scale: float) -> Solution:
    inside = np.clip(start, problem.lower, problem.upper)
    with np.errstate(all="ignore"):  # columns that the data cannot tell apart divide by zero inside SciPy's subproblem
        result = least_squares(
            problem.residuals,
            inside,
            jac=problem.jacobian,
            bounds=(problem.lower, problem.upper),
            method="trf",
            x_scale="jac",
            loss=weighted(RHO[problem.options.loss], problem.weights),
            f_scale=f_scale,
            ftol=1e-11,
            xtol=1e-11,
            gtol=1e-11,
            max_nfev=MAX_EVALUATIONS,
        )
    return Solution(result.x, float(result.cost), f_scale, bool(result.status > 0))


def _first_scale(problem: FitProblem, start: FloatArray) -> float:
    if problem.options.residuals == "relative":
        return FIRST_RELATIVE_SCALE
    return max(_scale(problem, start), FIRST_RELATIVE_SCALE * float(np.median(problem.observed)))


def _scale(problem: FitProblem, z: FloatArray) -> float:
    sigma = mad_sigma(problem.residuals(z), problem.weights)
    floor = SCALE_FLOOR * (1.0 if problem.options.residuals == "relative" else float(np.median(problem.observed)))
    return max(TUNING[problem.options.loss] * sigma, floor)


def _cost(problem: FitProblem, z: FloatArray, f_scale: float) -> float:
    return total_cost(problem.options.loss, problem.residuals(z), f_scale, problem.weights)


def _at_the_edge(problem: FitProblem, solution: Solution) -> Solution:
    """Put coordinates that the interior method left a hair inside their bound onto it, where that costs nothing."""
    cost = partial(_cost, problem, f_scale=solution.f_scale)
    z, kept = solution.z.copy(), cost(solution.z)
    for i, (low, high) in enumerate(zip(problem.lower, problem.upper, strict=True)):
        for edge in (low, high):
            if np.isfinite(edge) and z[i] != edge and abs(z[i] - edge) < 1e-3 * max(1.0, abs(edge)):
                trial = z.copy()
                trial[i] = edge
                if (reached := cost(trial)) <= kept * (1 + 1e-9):
                    z, kept = trial, reached
    return Solution(z, kept, solution.f_scale, solution.converged)


def _race_sample(problem: FitProblem) -> FitProblem:
    """About RACE_ROWS rows drawn by weight, the extremes of B and S always among them.

    A row's weight is divided by its chance to be drawn, so that the sample's cost estimates the cost of all rows.
    """
    rng = np.random.default_rng(problem.options.seed)
    share = problem.weights / problem.weights.sum()
    drawn = rng.choice(len(share), size=RACE_ROWS, replace=False, p=share)
    corners = [extreme(problem.steps[name]) for name in ("B", "S") for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.concatenate([drawn, np.array(corners)]).astype(np.int64))
    sample = problem.rows_at(rows)
    return replace(sample, weights=sample.weights / np.minimum(1.0, RACE_ROWS * share[rows]))
