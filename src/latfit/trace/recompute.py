"""Steps in which a preempted request computes again what it had, told from decoding.

vLLM counts a request as one that generates from its first token on. Where it loses its KV blocks and comes back, the
tokens that it computes again, its prompt and its output so far, count as generation too. Of D requests that decode with
k draft tokens each, a step computes at most D (1 + k) tokens, so one with G above that holds such a request. The step
does not tell how many there are; it is taken for one, which has

    R = G - (D - 1) - drafts of the others

tokens, their drafts as recorded, else k each. It counts as a request in prefill with R tokens, as which an engine
schedules and computes it; R stands in `recomputed_tokens` besides. A last chunk of at most 1 + k tokens cannot be told.

k is what the engine says. Where it says nothing, drafts are told by how common they are: where more than `COMMON` of
the steps that only decode compute more tokens than they have requests, k is the largest number of further tokens a
request that nine tenths of these steps stay within; preemption is rare, and its steps are longer by hundreds of tokens.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from latfit.stats import FloatArray
from latfit.trace.columns import PHASES
from latfit.trace.serving_engine import engine_facts, is_record
from latfit.trace.table import Trace

COMMON, USUAL, FEW = 0.3, 0.9, 20
MOST_DRAFTS = 64
NEEDED = ("B", "S", "prefill_requests", "prefill_tokens")
"""Beside `step`: a record has a row a step, and no means."""


def with_recompute(trace: Trace) -> Trace:
    """An engine's record with recomputed tokens as prefill, and a column of them; as it is where there are none, and
    any other trace."""
    if "recomputed_tokens" in trace or not len(trace) or not is_record(trace.provenance):
        return trace
    if not all(name in trace for name in (*NEEDED, "step")):
        return trace
    B, S, n, P = (trace.floats(name) for name in NEEDED)
    D, G = B - n, S - P
    k = draft_tokens(trace.provenance, D, G, n)
    with np.errstate(invalid="ignore"):
        found = (D >= 1) & (D * (1 + k) < G)
    if not found.any():
        return trace
    drafts = (D - 1) * k
    if "draft_tokens" in trace:
        drafts = np.minimum(np.nan_to_num(trace.floats("draft_tokens")), drafts)
    again = np.where(found, G - (D - 1) - drafts, 0.0)
    columns: dict[str, Any] = {
        "prefill_requests": (n + found).astype(trace["prefill_requests"].dtype),
        "prefill_tokens": (P + again).astype(trace["prefill_tokens"].dtype),
        "recomputed_tokens": again.astype(np.int64),
    }
    if "phase" in trace:
        _, prefill, mixed = PHASES
        phase = np.array(trace["phase"], dtype=object)
        phase[found] = np.where(D[found] > 1, mixed, prefill)
        columns["phase"] = phase
    return trace.with_columns(**columns)


def draft_tokens(provenance: Mapping[str, Any], D: FloatArray, G: FloatArray, n: FloatArray) -> int:
    """k of the engine that made steps (n,) of D requests that decode G tokens beside n in prefill."""
    facts = engine_facts([("", provenance)])
    said = facts.values.get("num_speculative_tokens")
    if said is not None:
        return int(said)
    if several := facts.differing.get("num_speculative_tokens"):
        return int(max(several))
    alone = (n == 0) & (D >= 1) & np.isfinite(G)
    if np.count_nonzero(alone) < FEW or np.mean(G[alone] > D[alone]) <= COMMON:
        return 0
    usual = float(np.quantile(G[alone] / D[alone], USUAL))
    return int(min(np.ceil(usual) - 1, MOST_DRAFTS))
