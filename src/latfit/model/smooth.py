"""Smooth maxima and tiles: the two bent curves that the roofline family is made of.

pmax_p(x, y) = (x^p + y^p)^(1/p) for x, y >= 0: at least max(x, y), at most 2^(1/p) max(x, y), and in the limit of large
p the maximum. Its slope in x is (x / pmax)^(p-1). Both are computed after division by the maximum, so nothing
overflows.

A kernel works on whole tiles of Q tokens, so its time follows Q ceil(S/Q); where the last tile's riser is spread over
rho Q tokens, because parts of a tile start early: max(Q, Q (k + min((S/Q - k)/rho, 1))), k = floor(S/Q).
"""

import numpy as np

from latfit.stats import FloatArray


def pmax(x: FloatArray | float, y: FloatArray, p: float) -> FloatArray:
    """Smooth maximum (n,)."""
    top = np.maximum(x, y)
    safe = np.where(top > 0, top, 1.0)
    low = np.minimum(x, y) / safe
    return np.asarray(top * (1.0 + low**p) ** (1.0 / p))


def pmax_slope(x: FloatArray | float, whole: FloatArray, p: float) -> FloatArray:
    """d pmax / dx (n,), where `whole` is pmax."""
    return np.asarray((x / np.where(whole > 0, whole, 1.0)) ** (p - 1.0))


def tiles(S: FloatArray, Q: float, rho: float) -> FloatArray:
    """Tokens after rounding up to tiles of Q with a riser of rho Q; zero where Q is zero (no tiles)."""
    if Q <= 0:
        return np.zeros_like(S)
    if rho <= 0:
        return np.asarray(Q * np.ceil(S / Q))
    k = np.floor(S / Q)
    return np.asarray(np.maximum(Q, Q * (k + np.minimum((S / Q - k) / rho, 1.0))))
