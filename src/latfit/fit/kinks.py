"""The last descent where the latency has kinks in a parameter: T's slope in a hinge's corner jumps at every S measured.

Between two neighbouring kinks the cost is smooth, so that a minimum there, ends included, is found by `newton` in a
box. The descent goes from such a stretch to those beside it while the cost falls.
"""

import numpy as np

from latfit.fit.newton import Minimum, minimise
from latfit.fit.objective import Objective
from latfit.fit.separable import kink_values
from latfit.stats import FloatArray

MOVES = 24
GAIN = 1e-9


def along_kinks(objective: Objective, end: Minimum) -> Minimum:
    """The end of a search, moved across kinks as long as the cost falls."""
    problem = objective.problem
    for position, parameter in enumerate(problem.free_parameters):
        values = kink_values(problem, parameter.name)
        if len(values):
            scale = problem.scales[problem.free[position]]
            end = _descended(objective, end, position, np.log(values / scale))
    return end


def _descended(objective: Objective, end: Minimum, position: int, kinks: FloatArray) -> Minimum:
    low, high = objective.problem.lower[position], objective.problem.upper[position]
    edges = np.concatenate([[low], kinks[(kinks > low) & (kinks < high)], [high]])
    seen: set[int] = set()
    for _ in range(MOVES):
        here = int(np.searchsorted(edges, end.z[position])) - 1
        beside = {i for i in (here - 1, here, here + 1) if 0 <= i < len(edges) - 1} - seen
        if not beside:
            break
        seen |= beside
        best = min((_within(objective, end, position, edges[i : i + 2]) for i in beside), key=lambda tried: tried.cost)
        if best.cost >= end.cost * (1 - GAIN):
            return best if best.cost < end.cost else end
        end = best
    return end


def _within(objective: Objective, end: Minimum, position: int, ends: FloatArray) -> Minimum:
    """The minimum with one coordinate between two ends."""
    lower, upper = objective.problem.lower.copy(), objective.problem.upper.copy()
    lower[position], upper[position] = ends
    return minimise(objective, end.z, box=(lower, upper))
