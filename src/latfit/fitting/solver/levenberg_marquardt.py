"""Minimising in a box: Levenberg and Marquardt's method with an active set.

A step d minimises g'd + 1/2 d'(H + lambda diag H)d. Coordinates on a bound that the gradient pushes outwards stay;
those whose step crosses a bound are put on it and the others solved again, so that a step ends inside the box. lambda
falls while the model predicts the gain well and grows when a step fails (Nielsen 1999), or promises nothing although a
single coordinate does, because the active set was a bad guess. The search ends when the best gain that the model can
still promise is below a part in 10^12 of the cost, or rounding, or no step gains.

Where one step has to be the answer itself (`bounded_step`, for a bootstrap), damping would bias it and a guessed active
set would not do: it is argmin over low <= d <= high of q(d) = 1/2 d'Hd - g'd. Flat directions of H carry no
information, so a step does not move along them: with H = V diag(l) V' on directions of equal scale, those with l below
1e-12 of the largest are left out. A minimum inside the box is the plain Newton step; else q is, up to a constant, half
of |root d - target|^2 with root'root = H, and a primal active set closes in on its least value: from d = 0 on, the
coordinates that are free go to their least-squares solution (the shortest one), or as far towards it as the box lets
them, where the one that stops them is held; once they are there, the held one whose gradient points inwards most is let
go. q is a parabola along each stretch and its lowest point is never passed, so that no step ends above q(0) = 0,
whatever H's rank (Lawson & Hanson 1974, section 23.3, with two ends).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.solver.objective import Objective, Quadratic
from latfit.stats import FloatArray

FLAT = 1e-12
SINGULAR = 1e-9
"""Singular values of some of root's columns below this share of the largest are rounding."""

INWARDS = 1e-10
"""A held coordinate's gradient counts from this share of the largest that the coordinate could have."""

ROUNDS = 10
"""Times the number of coordinates: stretches after which the step ends where it is."""


def bounded_step(hessian: FloatArray, gradient: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """d (p,) for a Hessian (p, p) and a gradient (p,); low <= 0 <= high are the ends of the box from here (p,)."""
    scale = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    scale[scale == 0] = 1.0
    values, vectors = np.linalg.eigh(hessian / np.outer(scale, scale))
    keep = values > FLAT * max(float(values[-1]), 1e-300)
    root = (vectors[:, keep] * np.sqrt(values[keep])).T
    target = (vectors[:, keep].T @ (gradient / scale)) / np.sqrt(values[keep])
    free = (vectors[:, keep] @ (target / np.sqrt(values[keep]))) / scale
    if np.all((free >= low) & (free <= high)):
        return np.asarray(free)
    with np.errstate(invalid="ignore"):
        found = _closest(root, target, low * scale, high * scale)
    return np.asarray(np.clip(found / scale, low, high))


def _closest(root: FloatArray, target: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """The x (p,) in a box around zero for which root x (k, p) is closest to the target (k,)."""
    p = root.shape[1]
    x, rest = np.zeros(p), target.copy()
    size = INWARDS * float(np.linalg.norm(target))
    pull = root.T @ rest
    free = _can_move(x, pull, low, high, size)
    stuck = np.zeros(p, dtype=bool)
    for _ in range(ROUNDS * p):
        own = np.flatnonzero(free)
        way = np.zeros(p)
        if len(own):
            way[own] = np.linalg.lstsq(root[:, own], rest, rcond=SINGULAR)[0]
        share, stops = _until_stopped(x, way, low, high)
        x = np.minimum(np.maximum(x + share * way, low), high)
        if stops >= 0:
            x[stops] = low[stops] if way[stops] < 0 else high[stops]
            free[stops] = False
        rest = target - root @ x
        if share > 0:
            stuck[:] = False
        if stops >= 0:
            stuck[stops] = share == 0
            continue
        pull = root.T @ rest
        ready = ~free & ~stuck & _can_move(x, pull, low, high, size)
        if not ready.any():
            break
        free[int(np.argmax(np.where(ready, np.abs(pull), -1.0)))] = True
    return x


def _can_move(x: FloatArray, pull: FloatArray, low: FloatArray, high: FloatArray, size: float) -> NDArray[np.bool_]:
    """Which coordinates (p,) have room on the side that they are pulled to."""
    return np.asarray(((pull > size) & (x < high)) | ((pull < -size) & (x > low)))


def _until_stopped(x: FloatArray, way: FloatArray, low: FloatArray, high: FloatArray) -> tuple[float, int]:
    """(share of the way that stays in the box, coordinate that ends it or -1)."""
    room = np.where(way > 0, high - x, np.where(way < 0, low - x, np.inf))
    shares = np.divide(room, way, out=np.full(len(x), np.inf), where=way != 0)
    stops = int(np.argmin(shares))
    return (1.0, -1) if not shares[stops] < 1 else (max(float(shares[stops]), 0.0), stops)


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
            if promised <= (least := gain * abs(here.cost) + objective.rows.nothing):
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
    from latfit.fitting.solver.compiled import box_step

    return box_step(at.gradient, _damped(at, damping), low, high)  # type: ignore[no-any-return]


def _damped(at: Quadratic, damping: float) -> FloatArray:
    """H + lambda diag H."""
    diagonal = np.diag(at.curvature)
    return at.curvature + np.diag(damping * np.maximum(diagonal, 1e-12 * max(float(diagonal.max()), 1e-300)))


def _solve(H: FloatArray, right: FloatArray) -> FloatArray:
    """H x = right for a positive definite H; by its diagonal alone where rounding left it none."""
    try:
        return np.asarray(np.linalg.solve(H, right))
    except np.linalg.LinAlgError:
        return np.asarray(right / np.diag(H))
