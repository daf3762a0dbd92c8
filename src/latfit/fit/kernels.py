"""Compiled loops over the rows of large problems: robust sums by cell and a weighted median.

Without the interpreter's lock, one thread, cached on disk; imported only where there are rows enough to pay for it.
"""

from collections.abc import Mapping

import numpy as np
from numba import njit

LOSSES: Mapping[str, int] = {"linear": 0, "huber": 1, "soft_l1": 2, "tukey": 3}

BINS = 4096


@njit(nogil=True, cache=True)
def cell_sums(starts, y, weights, u, s, loss):  # type: ignore[no-untyped-def]
    """(cost, G (m,), K (m,)) of `objective` for rows sorted by cell."""
    m, n = len(starts), len(y)
    pull, stiffness = np.empty(m), np.empty(m)
    total = 0.0
    inverse = 1.0 / s
    for cell in range(m):
        end = starts[cell + 1] if cell + 1 < m else n
        g = k = c = 0.0
        for i in range(starts[cell], end):
            r = u[cell] - y[i]
            x = abs(r) * inverse
            w = weights[i]
            if loss == 0 or (loss == 1 and x <= 1.0):
                c += w * x * x
                g += w * r
                k += w
            elif loss == 1:
                c += w * (2.0 * x - 1.0)
                g += w * (s if r > 0 else -s)
                k += 0.02 * w / x
            elif loss == 2:
                root = np.sqrt(1.0 + x * x)
                c += w * 2.0 * (root - 1.0)
                g += w * r / root
                k += w * max(1.0 / (root * root * root), 0.02 / root)
            else:
                v = max(1.0 - x * x, 0.0)
                c += w * (1.0 - v * v * v) / 3.0
                g += w * r * v * v
                k += w * max(v * v - 4.0 * x * x * v, 0.02 * v * v)
        pull[cell] = g
        stiffness[cell] = k
        total += c
    return 0.5 * s * s * total, pull, stiffness


@njit(nogil=True, cache=True)
def weighted_median(values, weights):  # type: ignore[no-untyped-def]
    """The smallest value >= 0 with at least half of the weight at or below it, to one part in BINS^3 of the largest."""
    n = len(values)
    low, high, half = 0.0, 0.0, 0.0
    for i in range(n):
        high = max(high, values[i])
        half += 0.5 * weights[i]
    below = 0.0
    mass = np.empty(BINS)
    for _ in range(4):
        width = (high - low) / BINS
        if width <= 0.0:
            break
        mass[:] = 0.0
        for i in range(n):
            if low <= values[i] <= high:
                mass[min(int((values[i] - low) / width), BINS - 1)] += weights[i]
        at = 0
        while at < BINS - 1 and below + mass[at] < half:
            below += mass[at]
            at += 1
        low, high = low + at * width, low + (at + 1) * width
    return high
