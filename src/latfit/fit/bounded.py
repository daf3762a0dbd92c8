"""One step of a quadratic problem in a box: argmin over low <= d <= high of 1/2 d'Hd - g'd.

Flat directions of H carry no information, so a step does not move along them: with H = V diag(l) V' on directions of
equal scale, those with l below 1e-12 of the largest are left out. A minimum inside the box is the plain Newton step;
else the problem is solved as bounded least squares |root d - target|^2 with root'root = H (active sets, BVLS).
"""

import numpy as np

from latfit.stats import FloatArray


def bounded_step(hessian: FloatArray, gradient: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """d (p,) for a Hessian (p, p) and a gradient (p,); low <= 0 <= high are the ends of the box from here (p,)."""
    scale = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    scale[scale == 0] = 1.0
    values, vectors = np.linalg.eigh(hessian / np.outer(scale, scale))
    keep = values > 1e-12 * max(float(values[-1]), 1e-300)
    root = (vectors[:, keep] * np.sqrt(values[keep])).T
    target = (vectors[:, keep].T @ (gradient / scale)) / np.sqrt(values[keep])
    free = (vectors[:, keep] @ (target / np.sqrt(values[keep]))) / scale
    if np.all((free >= low) & (free <= high)):
        return np.asarray(free)
    from scipy.optimize import lsq_linear

    inside = np.maximum(high - low, 1e-12)
    with np.errstate(all="ignore"):
        found = lsq_linear(root, target, (low * scale, (low + inside) * scale), method="bvls")
    return np.asarray(np.clip(found.x / scale, low, high))
