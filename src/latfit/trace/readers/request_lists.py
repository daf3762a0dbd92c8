"""Lists of a step's requests: how many tokens each computes (`extend_lengths`), and how many it has cached
(`past_kv_lengths`), as forward-pass records of Dynamo and of SGLang hooks have them.

Of a step with chunks p behind k cached tokens two sums are kept, which averages over requests only approximate: the
attention work of its prefill A = sum p (k + p/2), and its longest prefill L = max (k + p). A request that computes one
token decodes. Lists that are not of as many requests and tokens as the step says (several records merged into one, or
cut short) are not taken: such steps are counted, and have what averages make of their totals, or nothing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from latfit.stats import FloatArray
from latfit.trace.table import Array

EXTEND, PAST = "extend_lengths", "past_kv_lengths"
WORK, LONGEST = "prefill_attention", "longest_prefill"
REFUSED = "refused_lists"
"""In the provenance: steps whose lists were not taken."""


def request_terms(extend: Any, past: Any, B: float, S: float) -> tuple[float, float]:
    """(A in token pairs, L in tokens) of a step of B requests and S tokens; NaN where the lists are not of it."""
    if extend is None or past is None:
        return np.nan, np.nan
    try:
        p, k = (np.asarray(each, dtype=np.float64).ravel() for each in (extend, past))
    except (TypeError, ValueError):
        return np.nan, np.nan
    if not len(p) == len(k) == B or p.sum() != S or np.any(p < 1) or np.any(k < 0):
        return np.nan, np.nan
    chunks = p > 1
    if not chunks.any():
        return 0.0, 0.0
    p, k = p[chunks], k[chunks]
    return float(np.sum(p * (k + p / 2))), float(np.max(k + p))


def with_request_terms(columns: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, int]]:
    """Columns of steps with the two sums in the place of their lists, and how many lists were refused, as a fact."""
    found = {name: column for name, column in columns.items() if name not in (EXTEND, PAST)}
    if len(columns) != len(found) + 2 or not {"B", "S"} <= set(found):
        return found, {}
    B, S = (np.asarray(found[name], dtype=np.float64).tolist() for name in ("B", "S"))
    lists = zip(columns[EXTEND].tolist(), columns[PAST].tolist(), B, S, strict=True)
    terms: FloatArray = np.array([request_terms(*row) for row in lists], dtype=np.float64).reshape(-1, 2)
    return filled({**found, WORK: terms[:, 0], LONGEST: terms[:, 1]})


def filled(columns: dict[str, Array]) -> tuple[dict[str, Array], dict[str, int]]:
    """Columns of steps with averages where lists were refused, and how many were, as a fact."""
    refused = np.isnan(columns[WORK]) & (np.asarray(columns["B"], dtype=np.float64) > 0)
    if not refused.any():
        return columns, {}
    totals = ("prefill_requests", "prefill_tokens", "prefill_context_tokens")
    if all(name in columns for name in totals):
        n, P, KP = (np.asarray(columns[name], dtype=np.float64) for name in totals)
        n = np.maximum(n, 1.0)
        columns[WORK] = np.where(refused, P * (KP + P / 2) / n, columns[WORK])
        columns[LONGEST] = np.where(refused, (KP + P) / n, columns[LONGEST])
    return columns, {REFUSED: int(np.count_nonzero(refused))}
