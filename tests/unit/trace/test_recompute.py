"""Recomputed tokens told from decoding, on an engine whose every request is known."""

import numpy as np
import pytest

from latfit.trace.coverage import coverage_of
from latfit.trace.serving_engine import engine_notes
from latfit.trace.step_records import with_recompute
from latfit.trace.table import Trace

RECORD = {"run_started": "2026-01-01T00:00:00", "source": "vllm stat logger"}


def engine(k: int, preemptions: int, n: int = 400, seed: int = 0) -> tuple[Trace, np.ndarray]:
    """Steps of requests that decode with k drafts each, some beside a prefill; in some of them one request computes
    what it had again. The tokens of these (n,)."""
    rng = np.random.default_rng(seed)
    D = rng.integers(1, 20, n)
    prefill = np.where(rng.random(n) < 0.2, rng.integers(10, 500, n), 0)
    again = np.zeros(n, dtype=np.int64)
    rows = rng.choice(n, preemptions, replace=False)
    again[rows] = rng.integers(60, 600, preemptions)
    G = np.where(again > 0, (D - 1) * (1 + k) + again, D * (1 + k))
    requests = (prefill > 0).astype(np.int64)
    columns = {
        "B": D + requests,
        "S": G + prefill,
        "T_ms": np.full(n, 10.0),
        "step": np.arange(n),
        "prefill_requests": requests,
        "prefill_tokens": prefill,
        "phase": np.where(prefill > 0, "mixed", "decode").astype(object),
        "draft_tokens": np.where(again > 0, D - 1, D) * k,
    }
    return Trace(columns, RECORD), again


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("told", [True, False])
def test_what_was_computed_again_is_found(k: int, told: bool) -> None:
    """Whether the engine says its k or not."""
    trace, again = engine(k, 12)
    if told:
        trace = trace.with_provenance(num_speculative_tokens=k)
    found = with_recompute(trace)
    assert found["recomputed_tokens"].tolist() == again.tolist()
    assert (found["prefill_tokens"] - trace["prefill_tokens"]).tolist() == again.tolist()
    assert (found["prefill_requests"] - trace["prefill_requests"]).tolist() == (again > 0).tolist()
    assert found["S"] is trace["S"]
    alone = (again > 0) & (trace["prefill_requests"] == 0)
    assert set(found["phase"][alone & (trace["B"] > 1)]) <= {"mixed"}
    assert set(found["phase"][alone & (trace["B"] == 1)]) <= {"prefill"}
    decodes = found["phase"] == "decode"
    assert (found["S"][decodes] <= found["B"][decodes] * (1 + k)).all()
    assert found["prefill_requests"].dtype == trace["prefill_requests"].dtype


def test_what_is_told_of_drafts() -> None:
    """They are decode steps, of three drafts each; the engine says so, or the steps do."""
    trace, _ = engine(3, 12)
    found = with_recompute(trace.with_provenance(num_speculative_tokens=3))
    told = " ".join(engine_notes(found.with_columns(accepted_tokens=trace["draft_tokens"] // 3)))
    assert "up to 3 tokens drafted" in told
    assert "33 % were accepted" in told
    assert f"{found['recomputed_tokens'].sum():,} tokens were computed again" in told
    assert "no decode steps (S = B)" not in coverage_of(found).missing
    (silent,) = engine_notes(engine(3, 0)[0])
    assert "up to 4 tokens a step" in silent


def test_a_log_from_a_real_preemption() -> None:
    """Eight requests and 404 tokens, all counted as generation: seven decode, one computes 397 tokens again."""
    columns = {"B": [8, 8], "S": [8, 404], "T_ms": [9.0, 143.0], "step": [4, 5]}
    none = {"prefill_requests": [0, 0], "prefill_tokens": [0, 0], "phase": ["decode", "decode"]}
    trace = Trace({name: np.array(values) for name, values in {**columns, **none}.items()}, {"format": "vllm"})
    found = with_recompute(trace)
    assert found["recomputed_tokens"].tolist() == [0, 397]
    assert found["phase"].tolist() == ["decode", "mixed"]
