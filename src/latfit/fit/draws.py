"""Parameter vectors that the data allow, kept with a fit so that whatever is computed from it gets an interval.

A draw d from the covariance of the coordinates z, or from one step of a bootstrap, is a move to first order: it says
that predictions move from u to u + J d (u = ln T, or T for absolute residuals). Where a direction is nearly flat d is
long, the formula bends away under it, and T(z + d) is nonsense although J d is small. So each draw whose prediction
misses u + J d by more than a tenth of the typical move is carried back: to the vector in the box of the parameters
whose predictions are closest to u + J d, by damped Gauss-Newton steps from the estimate (as in randomize-then-optimize,
Bardsley et al. 2014). Predictions are compared on up to 120 of the steps, the extremes of every column among them.

Flat directions are not explored by that: their parameters are not identified and the draws do not pretend otherwise.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from latfit.fit.newton import damped_step
from latfit.fit.objective import Quadratic
from latfit.fit.problem import FitProblem
from latfit.fit.solve import Solution
from latfit.fit.uncertainty import Uncertainty
from latfit.model.draws import KEPT
from latfit.stats import FloatArray

COMPARED = 120
MISSES = 0.1
_STEPS = 12
_DAMPING, _LEAST_DAMPING = 1e-6, 1e-9
_LONGEST = 1.0
_DIGITS = 7


def from_covariance(problem: FitProblem, solution: Solution, doubt: Uncertainty, n: int = KEPT) -> FloatArray:
    """Draws (n, p) of all parameters from the covariance of the free coordinates."""
    if doubt.root is None or not problem.free:
        return np.empty((0, len(problem.model.parameters)))
    rng = np.random.default_rng(problem.options.seed)
    moves = rng.standard_normal((n, len(doubt.root))) @ doubt.root
    return np.stack([problem.theta(z) for z in carried(problem, solution, moves)])


def kept(problem: FitProblem, theta: FloatArray, source: str) -> Mapping[str, Any]:
    """The `draws` of the JSON contract from parameter vectors (n, p): the free parameters of up to 200 of them."""
    values = theta[:KEPT, problem.free]
    rounded = [[float(f"{x:.{_DIGITS}g}") for x in row] for row in values.tolist()]
    return {"source": source, "parameters": [p.name for p in problem.free_parameters], "values": rounded}


def carried(problem: FitProblem, solution: Solution, moves: FloatArray) -> FloatArray:
    """Coordinates (n, p) whose predictions move as the first order of the moves (n, p) says."""
    part = _compared(problem)
    here = _predicted(part, solution.z)
    wanted = moves @ part.jacobian(solution.z).T
    share = part.weights / part.weights.sum()
    typical = float(np.sqrt(np.median(wanted**2 @ share)))
    found = np.clip(solution.z + moves, problem.lower, problem.upper)
    for i, (z, move) in enumerate(zip(found, wanted, strict=True)):
        with np.errstate(all="ignore"):  # a long move may overflow, and is then no match
            miss = float(np.sqrt(share @ (_predicted(part, z) - here - move) ** 2))
        if not miss <= MISSES * typical:
            found[i] = _closest(part, solution.z, here + move, share, (MISSES * typical) ** 2)
    return found


def _closest(part: FitProblem, z: FloatArray, target: FloatArray, share: FloatArray, enough: float) -> FloatArray:
    """The coordinates near z whose predictions are closest to a target (m,), or closer than enough (mean square)."""
    r = _predicted(part, z) - target
    cost, damping = float(share @ r**2), _DAMPING
    for _ in range(_STEPS):
        J = part.jacobian(z)
        at = Quadratic(cost, J.T @ (share * r), J.T @ (J * share[:, None]))
        low, high = np.maximum(part.lower - z, -_LONGEST), np.minimum(part.upper - z, _LONGEST)
        trial = z + damped_step(at, low, high, damping)
        left = _predicted(part, trial) - target
        reached = float(share @ left**2)
        if not reached < cost:
            damping = max(damping, 1e-4) * 30
            continue
        done = reached < enough or reached > 0.999 * cost
        z, r, cost, damping = trial, left, reached, max(damping / 5, _LEAST_DAMPING)
        if done:
            break
    return z


def _compared(problem: FitProblem) -> FitProblem:
    """Some of the rows: evenly by weight in the order of the rows, and the extremes of every column."""
    if len(problem.observed) <= COMPARED:
        return problem
    reached = np.cumsum(problem.weights)
    evenly = np.searchsorted(reached, (np.arange(COMPARED) + 0.5) / COMPARED * reached[-1])
    corners = [extreme(column) for column in problem.steps.values() for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.concatenate([evenly, np.array(corners)])).astype(np.int64)
    return problem.rows_at(rows)


def _predicted(part: FitProblem, z: FloatArray) -> FloatArray:
    T = part.model.latency_ms(part.theta(z), part.steps)
    return T if part.options.residuals == "absolute" else np.log(np.maximum(T, 1e-300))
