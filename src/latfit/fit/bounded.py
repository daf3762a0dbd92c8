"""One step of a quadratic problem in a box: argmin over low <= d <= high of q(d) = 1/2 d'Hd - g'd.

Flat directions of H carry no information, so a step does not move along them: with H = V diag(l) V' on directions of
equal scale, those with l below 1e-12 of the largest are left out. A minimum inside the box is the plain Newton step;
else q is, up to a constant, half of |root d - target|^2 with root'root = H, and a primal active set closes in on its
least value: from d = 0 on, the coordinates that are free go to their least-squares solution (the shortest one), or as
far towards it as the box lets them, where the one that stops them is held; once they are there, the held one whose
gradient points inwards most is let go. q is a parabola along each stretch and its lowest point is never passed, so that
no step ends above q(0) = 0, whatever H's rank (Lawson & Hanson 1974, section 23.3, with two ends).
"""

import numpy as np
from numpy.typing import NDArray

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
