"""What the richer models read of a step, derived from the columns of a trace.

n prefill requests, P prefill tokens, KP cached tokens read by prefill, D = B - n decode rows, KD = context - KP cached
tokens read by decode, m = 1 where the step contains prefill, else 0. A = P (KP + P/2) / max(n, 1) is the attention work
of the prefill chunks, sum over chunks of p (c + p/2), and L the tokens of the longest of them, max (c + p); averages
stand in for the single lengths where a step does not tell them: L = (KP + P) / max(n, 1). A trace may know A and L
(`prefill_attention`, `longest_prefill`).

Where a trace lacks a column: a step with more tokens than requests contains prefill, of one request, and its other
requests decode; prefill reads no cache; the cached context counts as zero, so that models which need it lose their
terms for it.

Where a caller names only the requests and tokens of a step, its cached context is taken to be typical. Zero would be
wrong by as much as the context costs, so the fit keeps what was typical of its trace: the median, over steps that
decode, of cached tokens per decoding request, and the same for prefill where the trace tells them apart. A step of B
requests and S tokens without a context of its own is given as much a request.
"""

from collections.abc import Iterator, Mapping

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

MIXED_FROM = 1.5
"""Tokens a request from which a step counts as one that contains prefill, whatever it says."""

FEW = 0.03
SHORT = 64.0


class StepTable(Mapping[str, FloatArray]):
    """Columns of a trace (each (n,)) that remember the features derived from them."""

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
        """The same columns at some of the rows."""
        return StepTable({name: column[rows] for name, column in self._columns.items()})


def features_of(steps: Mapping[str, FloatArray]) -> Features:
    """The features of steps, remembered where the table can."""
    return steps.derived if isinstance(steps, StepTable) else step_features(steps)


def step_features(columns: Mapping[str, FloatArray]) -> Features:
    """Features (n,) from the columns there are; see the module's derivation."""
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
    """Prefill requests and prefill tokens (n,)."""
    B, S = columns["B"], columns["S"]
    P, n = columns.get("prefill_tokens"), columns.get("prefill_requests")
    if P is None:
        n = (S > B).astype(np.float64) if n is None else n
        return n, np.where(n > 0, np.maximum(S - B + n, 0.0), 0.0)
    return ((P > 0).astype(np.float64) if n is None else n), P


def decode_only(steps: Mapping[str, FloatArray], weights: FloatArray | None = None) -> bool:
    """Whether the steps say nothing of prefill: under 3 % hold more than 1.5 tokens a request, none of them 64; or all
    say that they prefill nothing, and what they compute besides are drafts."""
    B, S = steps["B"], steps["S"]
    if "prefill_tokens" in steps and not np.any(steps["prefill_tokens"]):
        return True
    holds = S > MIXED_FROM * B
    share = float(np.average(holds, weights=weights))
    return share < FEW and not bool(np.any(S[holds] >= SHORT))


CONTEXT, PREFILL_CONTEXT = "context_tokens", "prefill_context_tokens"


def typical_context(steps: Mapping[str, FloatArray], weights: FloatArray) -> dict[str, float]:
    """Median cached tokens a decoding request (`context_tokens`) and a prefill request (`prefill_context_tokens`) of
    steps (n,) that stand for weights (n,) each; without what the steps do not tell."""
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
    """The steps (n,), with typical cached tokens where they name none."""
    if CONTEXT in steps or not typical:
        return steps
    seen = step_features(steps)
    prefill = typical.get(PREFILL_CONTEXT, 0.0) * seen["n"]
    if PREFILL_CONTEXT in steps:
        prefill = steps[PREFILL_CONTEXT]
    decode = typical.get(CONTEXT, 0.0) * seen["D"]
    return {**steps, CONTEXT: np.asarray(decode + prefill), PREFILL_CONTEXT: np.asarray(prefill)}
