"""The measured region: convex hulls of the measured steps in (ln B, ln S), one per kind of step, in 16 directions.

With known cached tokens there is a second one in (ln B, ln(1 + cached tokens per request)).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latfit.model.features import CONTEXT, features_of
from latfit.stats import FloatArray

DECODE, PREFILL, MIXED, ANY_PREFILL = "decode", "prefill", "mixed", "prefill or mixed"
DIRECTIONS = 16
SHARE, MOST = 0.015, 9.0  # largest share and number of steps beyond the region in one direction
DECIMALS = 6
ROUNDING = 1e-5  # A step up to this far outside, in logarithms, counts as inside
PARTS = 16  # resolution of ln(1 + c): steps per unit

Support = Mapping[str, Sequence[float]]
"""Bounds h by kind of step: (16,), or (32,) with those of the region of cached tokens last."""


def kinds_of(B: FloatArray, prefill: NDArray[np.bool_], prefill_requests: FloatArray | None) -> NDArray[np.str_]:
    """Return the kind of each step (n,). prefill: whether it contains prefill (n,)."""
    if prefill_requests is None:
        return np.where(prefill, ANY_PREFILL, DECODE)
    return np.where(~prefill, DECODE, np.where(prefill_requests < B, MIXED, PREFILL))


def read_by(steps: Mapping[str, FloatArray]) -> FloatArray | None:
    """Return ln(1 + cached tokens per request) of steps (n,), rounded; None if the trace has no context."""
    if CONTEXT not in steps:
        return None
    seen = features_of(steps)
    of_prefill = seen["KP"] / np.maximum(seen["n"], 1.0)
    tokens = np.where(seen["D"] > 0, seen["KD"] / np.maximum(seen["D"], 1.0), of_prefill)
    return np.asarray(np.round(PARTS * np.log1p(np.maximum(tokens, 0.0))) / PARTS)


def support_of(
    B: FloatArray, S: FloatArray, kinds: NDArray[np.str_], weights: FloatArray, read: FloatArray | None = None
) -> dict[str, list[float]]:
    """Return the bounds of the measured region of each kind of step. read: result of `read_by` (n,), if known."""
    found = {}
    for kind in (DECODE, PREFILL, MIXED, ANY_PREFILL):
        if (rows := kinds == kind).any():
            w = weights[rows]
            beyond = np.floor(min(SHARE * float(w.sum()), MOST))
            most = min(len(w), int(MOST) + 1)  # if each row represents a step or more, no other row matters
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
    """Return the distance of steps (n,) from the region of their kind in logarithms: 0 inside, inf without region."""
    if not support:
        return np.zeros(len(B))
    far = np.full(len(B), np.inf)
    for kind, ends in support.items():
        either = (ANY_PREFILL,) if kind != ANY_PREFILL else (PREFILL, MIXED)
        rows = (kinds == kind) | (np.isin(kinds, either) if kind != DECODE else False)
        beyond = np.zeros(len(B))
        for along, end in zip(_along(B, S, read), ends, strict=False):
            beyond = np.maximum(beyond, along - end)
        far[rows] = np.minimum(far, beyond)[rows]
    return far


def check_support(support: Support) -> None:
    for kind, ends in support.items():
        if np.shape(ends) not in ((DIRECTIONS,), (2 * DIRECTIONS,)) or not np.all(np.isfinite(ends)):
            raise ValueError(f"support of {kind} is not {DIRECTIONS} numbers, nor {2 * DIRECTIONS}")


def _along(B: FloatArray, S: FloatArray, read: FloatArray | None) -> Iterator[FloatArray]:
    """Yield u_j . x of steps (n,) for 16 directions j, then those of cached tokens."""
    x, y = (np.log(np.maximum(each, 1e-9)) for each in (B, S))
    for other in (y, read):
        for angle in 2 * np.pi * np.arange(DIRECTIONS) / DIRECTIONS if other is not None else ():
            yield np.cos(angle) * x + np.sin(angle) * other
