"""Continue a descent that stopped early: across kinks, and along flat valleys.

`along_kinks` minimises in the smooth stretches between the kinks of a corner parameter. `along_valley` follows a
profile in the parameter that moves furthest, with golden sections. Derivation: docs/theory/fitting.md, "Solver".
"""

import numpy as np

from latfit.fitting.solver.levenberg_marquardt import Minimum, minimise
from latfit.fitting.solver.objective import Objective
from latfit.fitting.solver.variable_projection import kink_values, non_negative
from latfit.stats import FloatArray

STEPS = 20
HELD_STEPS = 40
VALLEY_GAIN = 1e-8
ROUNDS = 4
DOUBLINGS = 24
SECTIONS = 12
GOLDEN = 0.5 * (5**0.5 - 1)


def along_valley(objective: Objective, end: Minimum) -> Minimum:
    """Return the lowest point found along the valley in which a search stopped without converging."""
    for _ in range(ROUNDS):
        if end.converged:
            break
        on = minimise(objective, end.z, STEPS)
        way = on.z - end.z
        leads = int(np.argmax(np.abs(way)))
        further = _lowest(objective, on, leads, float(way[leads])) if way[leads] else on
        reached = minimise(objective, further.z)
        gained, end = end.cost - reached.cost, reached
        if gained <= VALLEY_GAIN * abs(end.cost):
            break
    return end


def _lowest(objective: Objective, end: Minimum, leads: int, stride: float) -> Minimum:
    """Return the lowest point of one coordinate's profile, by doubling strides and golden sections."""
    low, high = objective.problem.lower[leads], objective.problem.upper[leads]
    points = [end]
    for _ in range(DOUBLINGS):
        value = float(np.clip(points[-1].z[leads] + stride, low, high))
        points.append(_held(objective, points[-1], leads, value))
        stride *= 2
        if points[-1].cost >= points[-2].cost or value in (low, high):
            break
    at = int(np.argmin([point.cost for point in points]))
    best = points[at]
    a, b = points[max(at - 1, 0)].z[leads], points[min(at + 1, len(points) - 1)].z[leads]
    for _ in range(SECTIONS):
        inner, outer = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
        tried = [_held(objective, best, leads, float(value)) for value in (inner, outer)]
        best = min([best, *tried], key=lambda point: point.cost)
        a, b = (a, outer) if tried[0].cost < tried[1].cost else (inner, b)
    return best


def _held(objective: Objective, start: Minimum, leads: int, value: float) -> Minimum:
    """Return the minimum with one coordinate fixed."""
    lower, upper = objective.problem.lower.copy(), objective.problem.upper.copy()
    lower[leads] = upper[leads] = value
    z = start.z.copy()
    z[leads] = value
    return minimise(objective, projected(objective, z), HELD_STEPS, box=(lower, upper))


def projected(objective: Objective, z: FloatArray) -> FloatArray:
    """Return coordinates (free,) with the same outer parameters and the best coefficients for them."""
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


MOVES = 24
KINK_GAIN = 1e-9


def along_kinks(objective: Objective, end: Minimum) -> Minimum:
    """Return the end of a search, moved across kinks while the cost falls."""
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
        if best.cost >= end.cost * (1 - KINK_GAIN):
            return best if best.cost < end.cost else end
        end = best
    return end


def _within(objective: Objective, end: Minimum, position: int, ends: FloatArray) -> Minimum:
    """Return the minimum with one coordinate between two ends."""
    lower, upper = objective.problem.lower.copy(), objective.problem.upper.copy()
    lower[position], upper[position] = ends
    return minimise(objective, end.z, box=(lower, upper))
