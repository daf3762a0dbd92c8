"""Features of a step that the richer models use, derived from the columns of a trace, and the measured region.

B, S: requests, tokens. n, P: prefill requests, tokens. D: decoding requests. m: 1 with prefill. KP, KD: cached tokens
that either attends to. A: attention work. L: longest prefill. The region: convex hulls of the measured steps in
(ln B, ln S), one per kind of step, in 16 directions; with known cached tokens also in (ln B, ln(1 + cached tokens per
request)).
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray, weighted_quantile

Features = Mapping[str, FloatArray]
"""B, S, n, P, m, D, KP, KD, A, L of steps, each (n,); A in token pairs, the others in requests or tokens."""

SOURCES = (
    "B",
    "S",
    "prefill_requests",
    "prefill_tokens",
    "context_tokens",
    "prefill_context_tokens",
    "prefill_attention",
    "longest_prefill",
)
"""Columns of a trace that features are derived from."""

MIXED_FROM = 1.5  # tokens per request from which a step counts as one with prefill
MAX_DECODE_ONLY_SHARE, MIN_PREFILL_TOKENS = 0.03, 64.0  # of steps with prefill, in a trace that counts as decode only


class StepTable(Mapping[str, FloatArray]):
    """Columns of a trace, each (n,), with the features derived from them cached."""

    def __init__(self, columns: Mapping[str, FloatArray]) -> None:
        self._columns = dict(columns)
        self._derived: Features | None = None

    def __getitem__(self, name: str) -> FloatArray:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def derived(self) -> Features:
        if self._derived is None:
            self._derived = step_features(self._columns)
        return self._derived

    def at(self, rows: NDArray[np.int64]) -> "StepTable":
        return StepTable({name: column[rows] for name, column in self._columns.items()})


def features_of(steps: Mapping[str, FloatArray]) -> Features:
    return steps.derived if isinstance(steps, StepTable) else step_features(steps)


def step_features(columns: Mapping[str, FloatArray]) -> Features:
    B, S = columns["B"], columns["S"]
    n, P = _prefill(columns)
    m = (P > 0).astype(np.float64)
    context = columns.get("context_tokens", np.zeros_like(S))
    KP = np.minimum(columns.get("prefill_context_tokens", np.zeros_like(S)), context)
    return {
        "B": B,
        "S": S,
        "n": n,
        "P": P,
        "m": m,
        "D": np.maximum(B - n, 0.0),
        "KP": KP,
        "KD": np.maximum(context - KP, 0.0),
        "A": columns.get("prefill_attention", P * (KP + P / 2) / np.maximum(n, 1.0)),
        "L": columns.get("longest_prefill", (KP + P) / np.maximum(n, 1.0)),
    }


def _prefill(columns: Mapping[str, FloatArray]) -> tuple[FloatArray, FloatArray]:
    B, S = columns["B"], columns["S"]
    P, n = columns.get("prefill_tokens"), columns.get("prefill_requests")
    if P is None:
        n = (S > B).astype(np.float64) if n is None else n
        return n, np.where(n > 0, np.maximum(S - B + n, 0.0), 0.0)
    return ((P > 0).astype(np.float64) if n is None else n), P


def decode_only(steps: Mapping[str, FloatArray], weights: FloatArray | None = None) -> bool:
    """Return whether the steps hold no prefill worth fitting: under 3 % with over 1.5 tokens a request, all short."""
    B, S = steps["B"], steps["S"]
    if "prefill_tokens" in steps and not np.any(steps["prefill_tokens"]):
        return True
    holds = S > MIXED_FROM * B
    share = float(np.average(holds, weights=weights))
    return share < MAX_DECODE_ONLY_SHARE and not bool(np.any(S[holds] >= MIN_PREFILL_TOKENS))


CONTEXT, PREFILL_CONTEXT = "context_tokens", "prefill_context_tokens"


def typical_context(steps: Mapping[str, FloatArray], weights: FloatArray) -> dict[str, float]:
    """Return the weighted median of cached tokens per decoding and per prefill request, for known columns."""
    if CONTEXT not in steps or not np.all(np.isfinite(steps[CONTEXT])):
        return {}
    seen = step_features(steps)
    found = {}
    for name, tokens, requests in ((CONTEXT, "KD", "D"), (PREFILL_CONTEXT, "KP", "n")):
        some = seen[requests] > 0
        if name in steps and some.any():
            found[name] = weighted_quantile(seen[tokens][some] / seen[requests][some], 0.5, weights[some])
    return found


def with_typical_context(steps: Mapping[str, FloatArray], typical: Mapping[str, float]) -> Mapping[str, FloatArray]:
    """Return the steps (n,), with typical cached tokens if they lack a context."""
    if CONTEXT in steps or not typical:
        return steps
    seen = step_features(steps)
    prefill = typical.get(PREFILL_CONTEXT, 0.0) * seen["n"]
    if PREFILL_CONTEXT in steps:
        prefill = steps[PREFILL_CONTEXT]
    decode = typical.get(CONTEXT, 0.0) * seen["D"]
    return {**steps, CONTEXT: np.asarray(decode + prefill), PREFILL_CONTEXT: np.asarray(prefill)}


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
