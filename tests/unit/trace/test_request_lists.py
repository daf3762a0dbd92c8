"""Lists of a step's requests: what is kept of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latfit.trace.read import ingest
from latfit.trace.readers.engines import request_terms


def test_a_step_by_hand() -> None:
    """Chunks of 100 behind 400 and 28 behind none, beside two requests that decode."""
    work, longest = request_terms([100, 1, 28, 1], [400, 900, 0, 50], 4, 130)
    assert work == 100 * (400 + 50) + 28 * 14
    assert longest == 500
    assert request_terms([1, 1], [7, 9], 2, 2) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("extend", "past", "B", "S"),
    [
        ([100, 1], [0], 2, 101),
        ([100, 1], [0, 5], 3, 101),
        ([100, 1], [0, 5], 2, 150),
        ([100, 0], [0, 5], 2, 100),
        ([100, 1], [-1, 5], 2, 101),
        (None, None, 2, 101),
        (["a"], [1], 1, 1),
        ("12", {"a": 1}, 1, 1),
    ],
)
def test_lists_of_other_steps_are_refused(extend: Any, past: Any, B: float, S: float) -> None:
    assert np.isnan(request_terms(extend, past, B, S)).all()


def steps(n: int = 400, seed: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    """Steps of two prefills of unequal length each, whose attention costs what it is and not what averages make."""
    rng = np.random.default_rng(seed)
    extend = [[int(a), int(b), *[1] * 4] for a, b in zip(rng.integers(2, 900, n), rng.integers(2, 60, n), strict=True)]
    past = [[int(k), 0, *[300] * 4] for k in rng.integers(0, 3000, n)]
    p, k = np.array(extend, dtype=float), np.array(past, dtype=float)
    work = np.sum(np.where(p > 1, p * (k + p / 2), 0.0), axis=1)
    T = 6.0 + 0.01 * p.sum(axis=1) + 4e-5 * work
    columns = {"B": np.full(n, 6), "S": p.sum(axis=1).astype(int), "T_ms": T * np.exp(rng.normal(0, 0.005, n))}
    held = {"prefill_requests": np.full(n, 2), "prefill_tokens": p[:, :2].sum(axis=1).astype(int)}
    cached = {"context_tokens": k.sum(axis=1).astype(int), "prefill_context_tokens": k[:, :2].sum(axis=1).astype(int)}
    return {**columns, **held, **cached, "extend_lengths": extend, "past_kv_lengths": past}, work


@pytest.mark.parametrize("kind", ["parquet", "json"])
def test_tables(tmp_path: Path, kind: str) -> None:
    columns, work = steps()
    columns["past_kv_lengths"][7] = [5]
    path = tmp_path / f"steps.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
    else:
        plain = {name: np.asarray(each).tolist() if name[0] in "BSTc" else list(each) for name, each in columns.items()}
        rows = [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]
        path.write_text("\n".join(json.dumps(row, default=int) for row in rows))
    read = ingest(path)
    found = read.trace.floats("prefill_attention")
    P, KP = (float(read.trace[name][7]) for name in ("prefill_tokens", "prefill_context_tokens"))
    assert found[7] == pytest.approx(P * (KP + P / 2) / 2)  # by averages
    assert np.delete(found, 7) == pytest.approx(np.delete(work, 7))
    assert read.trace.provenance["refused_lists"] == 1
    assert "extend_lengths" not in read.trace
