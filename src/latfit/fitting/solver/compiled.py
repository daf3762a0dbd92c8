"""Compiled loops for large problems: sums of the losses of `loss` by cell, and a quantile.

The loops run in one thread without the interpreter lock, are cached on disk, and are imported only for many rows.
"""

from collections.abc import Mapping

import numpy as np

from latfit.compiled import cached

LOSSES: Mapping[str, int] = {"linear": 0, "huber": 1, "soft_l1": 2, "tukey": 3}

BINS = 4096
FEW = 4096


@cached(nogil=True)
def cell_sums(starts, y, weights, u, s, loss):  # type: ignore[no-untyped-def]
    """Return (cost, G (m,), K (m,)) of `objective` for rows sorted by cell."""
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


@cached(nogil=True)
def weighted_quantile(values, weights, q):  # type: ignore[no-untyped-def]
    """Return `stats.weighted_quantile` without a full sort: bins are refined until few values are left to sort."""
    n = len(values)
    low, high, total = values[0], values[0], 0.0
    for i in range(n):
        low = min(low, values[i])
        high = max(high, values[i])
        total += weights[i]
    wanted, below = q * total * (1.0 - 1e-12), 0.0
    while True:
        mass, held = np.zeros(BINS), np.zeros(BINS, dtype=np.int64)
        width = (high - low) / BINS
        if not width > 0.0:
            return low
        for i in range(n):
            if low <= values[i] <= high:
                at = min(int((values[i] - low) / width), BINS - 1)
                mass[at] += weights[i]
                held[at] += 1
        at = 0
        while at < BINS - 1 and below + mass[at] < wanted:
            below += mass[at]
            at += 1
        if held[at] <= FEW:
            break
        low, high = extremes(values, low, high, width, at)
    inside, heavy, k = np.empty(held[at]), np.empty(held[at]), 0
    for i in range(n):
        if low <= values[i] <= high and min(int((values[i] - low) / width), BINS - 1) == at:
            inside[k], heavy[k] = values[i], weights[i]
            k += 1
    order = np.argsort(inside)
    for i in order:
        below += heavy[i]
        if below >= wanted:
            return inside[i]
    return inside[order[-1]]


@cached(nogil=True)
def extremes(values, low, high, width, bin_):  # type: ignore[no-untyped-def]
    """Return (lowest, highest) value in one of the bins of [low, high]."""
    least, most = high, low
    for value in values:
        if low <= value <= high and min(int((value - low) / width), BINS - 1) == bin_:
            least = min(least, value)
            most = max(most, value)
    return least, most
