"""Rows gathered by counting are those gathered by sorting, for few keys and for many."""

import numpy as np
import pytest

from latfit.fitting import problem as module
from latfit.fitting.data import rows_of
from latfit.fitting.problem import collapse
from latfit.trace.table import Trace

ROWS = 30_000


def log(span: int, outlier: bool) -> Trace:
    """Whole B, S and context, latencies that repeat in crowded cells, and one that is a million times the others."""
    rng = np.random.default_rng(span)
    B = rng.integers(1, 9, ROWS).astype(float)
    T = np.round(rng.lognormal(2, 0.3, ROWS), 2)
    T[0] *= 1e6 if outlier else 1
    context = rng.integers(0, span, ROWS).astype(float)
    return Trace({"B": B, "S": B + rng.integers(0, 3, ROWS), "context_tokens": context, "T_ms": T})


@pytest.mark.parametrize("span", [1, 40, 10**9])
@pytest.mark.parametrize("outlier", [False, True])
def test_counting_is_sorting(span: int, outlier: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, names = log(span, outlier), ["B", "S", "context_tokens"]
    counted = collapse(rows_of(trace), names)
    monkeypatch.setattr(module, "COUNTED_FROM", ROWS + 1)
    plain = collapse(rows_of(trace), names)
    for name in ("observed", "counts", "cells"):
        assert np.array_equal(getattr(counted, name), getattr(plain, name)), name
    for name in names:
        assert np.array_equal(counted.steps[name], plain.steps[name]), name
    assert counted.counts.sum() == ROWS


def test_fractions_are_sorted() -> None:
    trace = log(40, False)
    half = collapse(rows_of(trace.with_columns(B=trace["B"] + 0.5)), ["B", "S"])
    assert np.array_equal(half.observed, collapse(rows_of(trace), ["B", "S"]).observed)
