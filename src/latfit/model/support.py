"""Where steps were measured: convex regions of ln B and ln S, of steps that decode, that prefill, and that do both.

The smallest and largest B and S say little of a log: one step of a single request among batches of ten makes both ends
of B, and nothing is known of single requests. With x = (ln B, ln S) and unit vectors u_j all around, the region is

    u_j . x <= h_j,    h_j the k-th largest u_j . x of the measured steps, k = 1 + 1.5 % of them, 10 at most:

the convex hull of the steps without the few that lie farthest in each direction. Of fewer than 67 steps and of grids,
whose outermost values were measured at several places, all count. A kind of steps that was not measured has no region.
Where nobody tells which requests of a step are in prefill, its kind is `prefill` whether others decode or not; a step
that does not say it of a fit whose steps do lies inside where it does as one or the other.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray

DECODE, PREFILL, MIXED, ANY_PREFILL = "decode", "prefill", "mixed", "prefill or mixed"
DIRECTIONS = 16
SHARE, MOST = 0.015, 9.0
"""Share of the steps, and their number, that may lie beyond the region in one direction."""
DECIMALS = 6
ROUNDING = 1e-5
"""Distance up to which a step lies inside."""

Support = Mapping[str, Sequence[float]]
"""h (16,) by kind of steps."""


def kinds_of(B: FloatArray, prefill: NDArray[np.bool_], prefill_requests: FloatArray | None) -> NDArray[np.str_]:
    """The kind of each step (n,). prefill: which contain some."""
    if prefill_requests is None:
        return np.where(prefill, ANY_PREFILL, DECODE)
    return np.where(~prefill, DECODE, np.where(prefill_requests < B, MIXED, PREFILL))


def support_of(B: FloatArray, S: FloatArray, kinds: NDArray[np.str_], weights: FloatArray) -> dict[str, list[float]]:
    """The regions of measured steps (n,). weights: how many steps each stands for."""
    found = {}
    for kind in (DECODE, PREFILL, MIXED, ANY_PREFILL):
        if (rows := kinds == kind).any():
            w = weights[rows]
            beyond = np.floor(min(SHARE * float(w.sum()), MOST))
            most = min(len(w), int(MOST) + 1)  # of rows that stand for a step or more, no more can matter
            ends = []
            for along in _along(B[rows], S[rows]):
                top = np.argpartition(along, len(along) - most)[len(along) - most :]
                top = top[np.argsort(-along[top])]
                ends.append(float(along[top[np.argmax(np.cumsum(np.maximum(w[top], 1.0)) > beyond)]]))
            found[kind] = [round(end, DECIMALS) for end in ends]
    return found


def outside_by(support: Support, B: FloatArray, S: FloatArray, kinds: NDArray[np.str_]) -> FloatArray:
    """How far (n,) steps lie outside the region of their kind, in ln B and ln S: max_j (u_j . x - h_j), at least 0;
    infinite for a kind that has none, 0 where nobody knows."""
    if not support:
        return np.zeros(len(B))
    far = np.full(len(B), np.inf)
    along = _along(B, S)
    for kind, ends in support.items():
        either = (ANY_PREFILL,) if kind != ANY_PREFILL else (PREFILL, MIXED)
        rows = (kinds == kind) | (np.isin(kinds, either) if kind != DECODE else False)
        beyond = np.max(along - np.asarray(ends, dtype=np.float64)[:, None], axis=0)
        far[rows] = np.minimum(far, np.maximum(beyond, 0.0))[rows]
    return far


def check_support(support: Support) -> None:
    """Raises ValueError for what is no region."""
    for kind, ends in support.items():
        if np.shape(ends) != (DIRECTIONS,) or not np.all(np.isfinite(ends)):
            raise ValueError(f"support of {kind} is not {DIRECTIONS} numbers")


def _along(B: FloatArray, S: FloatArray) -> FloatArray:
    """u_j . x (16, n) of steps."""
    angle = 2 * np.pi * np.arange(DIRECTIONS) / DIRECTIONS
    x, y = (np.log(np.maximum(each, 1e-9)) for each in (B, S))
    return np.asarray(np.cos(angle)[:, None] * x + np.sin(angle)[:, None] * y)
