"""What a trace covers: spans and gaps as planted, drift found where it is and not where it is not."""

import numpy as np
import pytest

from latfit.trace.coverage import count_gaps, coverage_of
from latfit.trace.table import Trace, phases
from tests.conftest import planted_trace
from tests.unit.trace.test_clean import serving_log


def test_spans_and_phases() -> None:
    trace = planted_trace(0.01, repeats=2)
    found = coverage_of(trace)
    assert (found.rows, found.cells) == (86, 43)
    assert dict(found.spans)["B"] == pytest.approx((1, 256))
    assert dict(found.spans)["S"] == pytest.approx((1, 4096))
    assert sum(found.phases.values()) == 86
    assert found.seconds is None


def test_missing_counter_values_are_gaps() -> None:
    trace = serving_log()
    kept = np.ones(len(trace), dtype=bool)
    kept[[5, 6, 1000]] = False
    assert count_gaps(trace.select(kept)) == 3
    assert count_gaps(planted_trace(0.1)) is None


def test_drift_is_found_and_sized() -> None:
    """A rise of 30 % over the run: two thirds of it, in the log, lie between the middles of its end thirds."""
    trace = serving_log(4000)
    ramp = np.exp(np.linspace(0, np.log(1.3), 4000))
    found = coverage_of(trace.with_columns(T_ms=trace["T_ms"] * ramp)).drift
    assert found["a"] == pytest.approx(1.3 ** (2 / 3) - 1, abs=0.01)


def test_drift_is_not_seen_where_only_the_load_changes() -> None:
    trace = serving_log(4000)
    order = np.argsort(trace["B"], kind="stable")
    ramped = trace.select(order).with_columns(t_s=trace["t_s"], step=trace["step"])
    assert coverage_of(ramped).drift == {}


def test_false_alarms_are_rare() -> None:
    """At 1 % and a floor of 2 % drift, 40 runs without drift give none or, with probability 0.06, one or more."""
    assert sum(len(coverage_of(serving_log(1000, seed=seed)).drift) for seed in range(40)) <= 3


@pytest.mark.parametrize(
    ("B", "S", "word"),
    [
        ([1, 2, 4, 8, 16], [1, 2, 4, 8, 16], "no prefill steps (S > B)"),
        ([4, 4], [4, 512], "one batch size only"),
        ([1, 2, 4, 8, 16], [512, 513, 600, 700, 800], "no decode steps"),
        ([1, 2, 4, 8, 16, 1], [1, 2, 4, 8, 16, 512], "no prefill steps above 512 tokens"),
    ],
)
def test_what_is_missing_is_said(B: list[int], S: list[int], word: str) -> None:
    trace = Trace({"B": np.array(B, float), "S": np.array(S, float), "T_ms": np.ones(len(B))})
    assert any(word in text for text in coverage_of(trace).missing)


def test_phases_follow_from_the_columns() -> None:
    B, S = np.array([2.0, 1.0, 3.0]), np.array([2.0, 64.0, 66.0])
    bare = Trace({"B": B, "S": S, "T_ms": B})
    assert phases(bare).tolist() == ["decode", "prefill or mixed", "prefill or mixed"]
    split = bare.with_columns(prefill_tokens=np.array([0.0, 64.0, 64.0]))
    assert phases(split).tolist() == ["decode", "prefill", "mixed"]
