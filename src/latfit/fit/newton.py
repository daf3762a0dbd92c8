"""Minimising in a box: Levenberg and Marquardt's method with an active set.

A step d minimises g'd + 1/2 d'(H + lambda diag H)d. Coordinates on a bound that the gradient pushes outwards stay;
those whose step crosses a bound are put on it and the others solved again, so that a step ends inside the box. lambda
falls while the model predicts the gain well and grows when a step fails (Nielsen 1999). The search ends when the best
gain that the model can still promise is below a part in 10^12 of the cost, or no step gains.
"""

from dataclasses import dataclass

import numpy as np

from latfit.fit.objective import Objective, Quadratic
from latfit.stats import FloatArray

LONGEST = 3.0
"""No logarithmic coordinate moves further in one step."""

GAIN = 1e-12
MAX_STEPS = 150
MAX_DAMPING = 1e12


@dataclass(frozen=True)
class Minimum:
    """Where the search ended, its cost, and whether it ended because there was nothing more to gain."""

    z: FloatArray
    cost: float
    converged: bool


def minimise(objective: Objective, start: FloatArray, steps: int = MAX_STEPS, gain: float = GAIN) -> Minimum:
    """The minimum of the cost that a start leads to."""
    problem = objective.problem
    reach = np.array([LONGEST if p.positive else np.inf for p in problem.free_parameters])
    z = np.clip(start, problem.lower, problem.upper)
    with np.errstate(all="ignore"):
        here = objective.at(z)
        damping, growth = 1e-3, 2.0
        for _ in range(steps):
            low = np.maximum(problem.lower - z, -reach)
            high = np.minimum(problem.upper - z, reach)
            d = _step(here, low, high, damping)
            promised = -(here.gradient @ d + 0.5 * d @ here.curvature @ d)
            if promised <= gain * abs(here.cost) + 1e-300:
                return Minimum(z, here.cost, True)
            moved = np.clip(z + d, problem.lower, problem.upper)
            cost = objective.cost(moved)
            if cost < here.cost:
                ratio = float((here.cost - cost) / promised)
                z, here = moved, objective.at(moved)
                fall = float(np.clip(1 - (2 * min(ratio, 1.0) - 1) ** 3, 1 / 3, 2.0))
                damping = max(damping * fall, 1e-12)
                growth = 2.0
            else:
                damping, growth = damping * growth, growth * 2
                if damping > MAX_DAMPING:
                    return Minimum(z, here.cost, True)
    return Minimum(z, here.cost, False)


def _step(at: Quadratic, low: FloatArray, high: FloatArray, damping: float) -> FloatArray:
    """The damped step within [low, high]."""
    diagonal = np.diag(at.curvature)
    diagonal = np.maximum(diagonal, 1e-12 * max(float(diagonal.max()), 1e-300))
    H = at.curvature + np.diag(damping * diagonal)
    d = np.zeros(len(low))
    free = ~(((low >= 0) & (at.gradient > 0)) | ((high <= 0) & (at.gradient < 0)))
    for _ in range(len(low)):
        if not free.any():
            break
        pushed = at.gradient[free] + H[np.ix_(free, ~free)] @ d[~free]
        d[free] = _solve(H[np.ix_(free, free)], -pushed)
        crossed = free & ((d < low) | (d > high))
        d = np.clip(d, low, high)
        if not crossed.any():
            break
        free &= ~crossed
    return d


def _solve(H: FloatArray, right: FloatArray) -> FloatArray:
    size = np.sqrt(np.diag(H))
    try:
        return np.asarray(np.linalg.solve(H / np.outer(size, size), right / size) / size)
    except np.linalg.LinAlgError:
        return np.asarray(right / size**2)
