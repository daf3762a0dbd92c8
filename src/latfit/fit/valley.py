"""Long flat valleys: where two parameters make up for each other the way down bends, and damped steps crawl along it.

From where a search came to a stop it goes on for a few steps; the way that these went is taken again, twice as far each
time, as long as the cost falls. Coefficients are put at their best on the way (variable projection), so that only the
bends of the outer parameters matter: with G and K of the cells at f the cost is to second order
sum K/2 (f'/f - 1 + G/K)^2, so that c' = argmin_{c >= 0} sum K/f^2 (X c - f (1 - G/K))^2.
"""

import numpy as np

from latfit.fit.newton import Minimum, minimise
from latfit.fit.objective import Objective
from latfit.fit.separable import non_negative
from latfit.stats import FloatArray

STEPS = 20
GAIN = 1e-8
ROUNDS = 12
DOUBLINGS = 10


def along_valley(objective: Objective, end: Minimum) -> Minimum:
    """The end of a search that came to no rest, moved down the valley that it stopped in."""
    if end.converged:
        return end
    for _ in range(ROUNDS):
        on = minimise(objective, end.z, STEPS)
        way = on.z - end.z
        further = on
        for doubling in range(1, DOUBLINGS):
            trial = minimise(objective, projected(objective, on.z + 2.0**doubling * way), 3)
            if trial.cost >= further.cost:
                break
            further = trial
        gained = end.cost - further.cost
        end = further
        if gained <= GAIN * abs(end.cost):
            break
    return minimise(objective, end.z)


def projected(objective: Objective, z: FloatArray) -> FloatArray:
    """Coordinates (free,) with the same outer parameters and coefficients that suit them."""
    problem = objective.problem
    inside = np.clip(z, problem.lower, problem.upper)
    names = [p.name for p in problem.model.parameters]
    for _ in range(2):
        theta = problem.theta(inside)
        sums = objective.sums(inside)
        outer = np.array([theta[names.index(name)] for name in problem.model.outer])
        X = problem.model.basis(outer, problem.steps)
        K = np.maximum(sums.stiffness, 1e-300)
        if objective.rows.relative:
            weights, target = K / sums.T**2, sums.T * np.maximum(1 - sums.pull / K, 0.0)
        else:
            weights, target = K, sums.T - sums.pull / K
        c = non_negative(X[None], target[None], weights[None])[0]
        moved = problem.coordinates(problem.model.assemble(outer, c))
        if not objective.cost(moved) < objective.cost(inside):
            break
        inside = moved
    return inside
