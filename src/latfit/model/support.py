"""Where steps were measured: convex regions of ln B and ln S, of steps that decode, that prefill, and that do both, and
where their cached tokens are known of ln B and these.

The smallest and largest B and S say little of a log: one step of a single request among batches of ten makes both ends
of B, and nothing is known of single requests. With x = (ln B, ln S) and unit vectors u_j all around, the region is

    u_j . x <= h_j,    h_j the k-th largest u_j . x of the measured steps, k = 1 + 1.5 % of them, 10 at most:

the convex hull of the steps without the few that lie farthest in each direction. Of fewer than 67 steps and of grids,
whose outermost values were measured at several places, all count. A kind of steps that was not measured has no region.
Where nobody tells which requests of a step are in prefill, its kind is `prefill` whether others decode or not; a step
that does not say it of a fit whose steps do lies inside where it does as one or the other.

Small batches of a load that ends are old ones: B requests with much context tell nothing of B requests with little. So
where steps say what they read, there is such a region of x = (ln B, ln(1 + c)), too, c the cached tokens a request that
decodes (of one that prefills, where none does), to a sixteenth in the logarithm. A step lies outside where it lies
outside either; one that does not say what it reads is asked for B and S alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latfit.model.features import CONTEXT, features_of
from latfit.stats import FloatArray

DECODE, PREFILL, MIXED, ANY_PREFILL = "decode", "prefill", "mixed", "prefill or mixed"
DIRECTIONS = 16
SHARE, MOST = 0.015, 9.0
"""Share of the steps, and their number, that may lie beyond the region in one direction."""
DECIMALS = 6
ROUNDING = 1e-5
"""Distance up to which a step lies inside."""

PARTS = 16
"""Of a unit of ln(1 + c) that are told apart."""

Support = Mapping[str, Sequence[float]]
"""h by kind of steps: (16,), or (32,) with those of cached tokens behind."""


def kinds_of(B: FloatArray, prefill: NDArray[np.bool_], prefill_requests: FloatArray | None) -> NDArray[np.str_]:
    """The kind of each step (n,). prefill: which contain some."""
    if prefill_requests is None:
        return np.where(prefill, ANY_PREFILL, DECODE)
    return np.where(~prefill, DECODE, np.where(prefill_requests < B, MIXED, PREFILL))


def read_by(steps: Mapping[str, FloatArray]) -> FloatArray | None:
    """ln(1 + cached tokens a request) of steps (n,), rounded; None where they do not say what they read."""
    if CONTEXT not in steps:
        return None
    seen = features_of(steps)
    of_prefill = seen["KP"] / np.maximum(seen["n"], 1.0)
    tokens = np.where(seen["D"] > 0, seen["KD"] / np.maximum(seen["D"], 1.0), of_prefill)
    return np.asarray(np.round(PARTS * np.log1p(np.maximum(tokens, 0.0))) / PARTS)


def support_of(
    B: FloatArray, S: FloatArray, kinds: NDArray[np.str_], weights: FloatArray, read: FloatArray | None = None
) -> dict[str, list[float]]:
    """The regions of measured steps (n,). weights: how many steps each stands for.  read: see `read_by`."""
    found = {}
    for kind in (DECODE, PREFILL, MIXED, ANY_PREFILL):
        if (rows := kinds == kind).any():
            w = weights[rows]
            beyond = np.floor(min(SHARE * float(w.sum()), MOST))
            most = min(len(w), int(MOST) + 1)  # of rows that stand for a step or more, no more can matter
            ends = []
            for along in _along(B[rows], S[rows], None if read is None else read[rows]):
                top = np.argpartition(along, len(along) - most)[len(along) - most :]
                top = top[np.argsort(-along[top])]
                ends.append(float(along[top[np.argmax(np.cumsum(np.maximum(w[top], 1.0)) > beyond)]]))
            found[kind] = [round(end, DECIMALS) for end in ends]
    return found


def outside_by(
    support: Support, B: FloatArray, S: FloatArray, kinds: NDArray[np.str_], read: FloatArray | None = None
) -> FloatArray:
    """How far (n,) steps lie outside the region of their kind, in logarithms: max_j (u_j . x - h_j), at least 0;
    infinite for a kind that has none, 0 where nobody knows. read: see `read_by`."""
    if not support:
        return np.zeros(len(B))
    far = np.full(len(B), np.inf)
    along = _along(B, S, read)
    for kind, ends in support.items():
        either = (ANY_PREFILL,) if kind != ANY_PREFILL else (PREFILL, MIXED)
        rows = (kinds == kind) | (np.isin(kinds, either) if kind != DECODE else False)
        known = min(len(ends), len(along))
        beyond = np.max(along[:known] - np.asarray(ends[:known], dtype=np.float64)[:, None], axis=0)
        far[rows] = np.minimum(far, np.maximum(beyond, 0.0))[rows]
    return far


def check_support(support: Support) -> None:
    """Raises ValueError for what is no region."""
    for kind, ends in support.items():
        if np.shape(ends) not in ((DIRECTIONS,), (2 * DIRECTIONS,)) or not np.all(np.isfinite(ends)):
            raise ValueError(f"support of {kind} is not {DIRECTIONS} numbers, nor {2 * DIRECTIONS}")


def _along(B: FloatArray, S: FloatArray, read: FloatArray | None) -> FloatArray:
    """u_j . x of steps (n,): (16, n), or (32, n) with those of cached tokens behind."""
    angle = 2 * np.pi * np.arange(DIRECTIONS) / DIRECTIONS
    x, y = (np.log(np.maximum(each, 1e-9)) for each in (B, S))
    planes = [np.cos(angle)[:, None] * x + np.sin(angle)[:, None] * other for other in (y, read) if other is not None]
    return np.concatenate(planes)
