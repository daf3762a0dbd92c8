"""Levenberg-Marquardt in a box, with an active set.

`minimise` takes damped steps until the largest gain that the quadratic allows is negligible. `bounded_step` solves a
quadratic in a box exactly, without damping, for the one-step bootstrap; it leaves flat directions out. Derivation:
docs/theory/fitting.md, "Solver".
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.solver.objective import Objective, Quadratic
from latfit.stats import FloatArray

FLAT = 1e-12
SINGULAR = 1e-9
"""Singular values below this share of the largest count as rounding errors."""

INWARDS = 1e-10
"""Smallest gradient that releases a held coordinate, as a share of the largest it could have."""

ROUNDS = 10
"""Limit of active set changes, times the number of coordinates."""


def bounded_step(hessian: FloatArray, gradient: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """Return argmin over low <= d <= high of d'Hd/2 - g'd (p,), without a move along flat directions.

    Parameters
    ----------
    hessian, gradient
        H (p, p), positive semidefinite, and g (p,).
    low, high
        Ends of the box relative to the current point (p,), low <= 0 <= high.
    """
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
    """Return x (p,) in a box around zero that brings root (k, p) times x closest to the target (k,)."""
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
    """Return which coordinates (p,) can move in the direction of the gradient."""
    return np.asarray(((pull > size) & (x < high)) | ((pull < -size) & (x > low)))


def _until_stopped(x: FloatArray, way: FloatArray, low: FloatArray, high: FloatArray) -> tuple[float, int]:
    """Return (share of the move that stays in the box, coordinate that limits it or -1)."""
    room = np.where(way > 0, high - x, np.where(way < 0, low - x, np.inf))
    shares = np.divide(room, way, out=np.full(len(x), np.inf), where=way != 0)
    stops = int(np.argmin(shares))
    return (1.0, -1) if not shares[stops] < 1 else (max(float(shares[stops]), 0.0), stops)


LONGEST = 3.0
"""Longest move of a logarithmic coordinate in one step."""

GAIN = 1e-12
MAX_STEPS = 150
MAX_DAMPING = 1e12
FIRM = 1e6
"""With this damping a step moves coordinates independently of each other."""


@dataclass(frozen=True)
class Minimum:
    """End of a search: coordinates z (free,), cost, and whether it converged."""

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
    """Minimise the cost from a start (free,).

    Parameters
    ----------
    steps
        Limit of steps.
    gain
        The search converges when the best possible gain falls below this share of the cost.
    box
        (lower, upper), each (free,), in place of the problem's.
    """
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
    """Return the largest gain that the quadratic allows for a step in one coordinate."""
    diagonal = np.maximum(np.diag(at.curvature), 1e-300)
    d = np.minimum(np.maximum(-at.gradient / diagonal, low), high)
    return float(np.max(-d * (at.gradient + 0.5 * diagonal * d), initial=0.0))


def damped_step(at: Quadratic, low: FloatArray, high: FloatArray, damping: float) -> FloatArray:
    """Return the damped step (p,) within [low, high], by an active set; damping > 0."""
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
    """Return H + lambda diag H."""
    diagonal = np.diag(at.curvature)
    return at.curvature + np.diag(damping * np.maximum(diagonal, 1e-12 * max(float(diagonal.max()), 1e-300)))


def _solve(H: FloatArray, right: FloatArray) -> FloatArray:
    """Solve H x = right for a positive definite H; by its diagonal if rounding made H singular."""
    try:
        return np.asarray(np.linalg.solve(H, right))
    except np.linalg.LinAlgError:
        return np.asarray(right / np.diag(H))
