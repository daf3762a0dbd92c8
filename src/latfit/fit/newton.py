"""Minimising in a box: Levenberg and Marquardt's method with an active set.

A step d minimises g'd + 1/2 d'(H + lambda diag H)d. Coordinates on a bound that the gradient pushes outwards stay;
those whose step crosses a bound are put on it and the others solved again, so that a step ends inside the box. lambda
falls while the model predicts the gain well and grows when a step fails (Nielsen 1999), or promises nothing although a
single coordinate does, because the active set was a bad guess. The search ends when the best gain that the model can
still promise is below a part in 10^12 of the cost, or no step gains.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg.lapack import dposv

from latfit.fit.objective import Objective, Quadratic
from latfit.stats import FloatArray

LONGEST = 3.0
"""No logarithmic coordinate moves further in one step."""

GAIN = 1e-12
MAX_STEPS = 150
MAX_DAMPING = 1e12
FIRM = 1e6
"""Damping with which a step is that of single coordinates."""


@dataclass(frozen=True)
class Minimum:
    """Where the search ended, its cost, and whether it ended because there was nothing more to gain."""

    z: FloatArray
    cost: float
    converged: bool


def minimise(
    objective: Objective,
    start: FloatArray,
    steps: int = MAX_STEPS,
    gain: float = GAIN,
    box: tuple[FloatArray, FloatArray] | None = None,
) -> Minimum:
    """The minimum of the cost that a start leads to. box: (lower, upper) each (free,), in place of the problem's."""
    problem = objective.problem
    lower, upper = box or (problem.lower, problem.upper)
    step = _compiled_step if objective.rows.compiled else damped_step
    reach = np.array([LONGEST if p.positive else np.inf for p in problem.free_parameters])
    z = np.clip(start, lower, upper)
    with np.errstate(all="ignore"):
        here = objective.at(z)
        damping, growth = 1e-3, 2.0
        for _ in range(steps):
            low = np.maximum(lower - z, -reach)
            high = np.minimum(upper - z, reach)
            d = step(here, low, high, damping)
            promised = -(here.gradient @ d + 0.5 * d @ here.curvature @ d)
            if promised <= (least := gain * abs(here.cost) + 1e-300):
                if damping >= FIRM or _single(here, low, high) <= least:
                    return Minimum(z, here.cost, True)
                damping, growth = damping * growth, growth * 2
                continue
            moved = np.clip(z + d, lower, upper)
            sums = objective.sums(moved)
            cost = objective.whole(moved, sums)
            if cost < here.cost:
                ratio = float((here.cost - cost) / promised)
                z, here = moved, objective.around(moved, sums)
                fall = float(np.clip(1 - (2 * min(ratio, 1.0) - 1) ** 3, 1 / 3, 2.0))
                damping = max(damping * fall, 1e-12)
                growth = 2.0
            else:
                damping, growth = damping * growth, growth * 2
                if damping > MAX_DAMPING:
                    return Minimum(z, here.cost, True)
    return Minimum(z, here.cost, False)


def _single(at: Quadratic, low: FloatArray, high: FloatArray) -> float:
    """The gain that a step in one coordinate promises, at best."""
    diagonal = np.maximum(np.diag(at.curvature), 1e-300)
    d = np.minimum(np.maximum(-at.gradient / diagonal, low), high)
    return float(np.max(-d * (at.gradient + 0.5 * diagonal * d), initial=0.0))


def damped_step(at: Quadratic, low: FloatArray, high: FloatArray, damping: float) -> FloatArray:
    """The step within [low, high] (p,) that an active set gives for damping above zero."""
    H = _damped(at, damping)
    d = np.zeros(len(low))
    free = ~(((low >= 0) & (at.gradient > 0)) | ((high <= 0) & (at.gradient < 0)))
    for _ in range(len(low)):
        if free.all():
            d = _solve(H, -at.gradient)
        elif free.any():
            own = np.flatnonzero(free)
            rows = H[own]
            d[own] = _solve(rows[:, own], -(at.gradient[own] + rows @ np.where(free, 0.0, d)))
        inside = np.minimum(np.maximum(d, low), high)
        crossed = free & (inside != d)
        d = inside
        if not crossed.any():
            break
        free &= ~crossed
    return d


def _compiled_step(at: Quadratic, low: FloatArray, high: FloatArray, damping: float) -> FloatArray:
    from latfit.fit.swift import box_step

    return box_step(at.gradient, _damped(at, damping), low, high)  # type: ignore[no-any-return]


def _damped(at: Quadratic, damping: float) -> FloatArray:
    """H + lambda diag H."""
    diagonal = np.diag(at.curvature)
    return at.curvature + np.diag(damping * np.maximum(diagonal, 1e-12 * max(float(diagonal.max()), 1e-300)))


def _solve(H: FloatArray, right: FloatArray) -> FloatArray:
    """H x = right for a positive definite H; by its diagonal alone where rounding left it none."""
    _, x, failed = dposv(H, right)
    return np.asarray(right / np.diag(H)) if failed else x
