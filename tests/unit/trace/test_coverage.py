"""What a trace covers: spans and gaps as planted, drift found where it is and not where it is not."""

import numpy as np
import pytest

from latfit.trace.coverage import count_gaps, coverage_of
from latfit.trace.table import Trace
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


def test_rows_without_a_time_add_none() -> None:
    trace = planted_trace(0.1)
    t_s = np.arange(len(trace), dtype=np.float64)
    t_s[5:] = np.nan
    assert coverage_of(trace.with_columns(t_s=t_s)).seconds == 4.0


def test_drift_is_found_and_sized() -> None:
    """A rise of 30 % over the run: two thirds of it, in the log, lie between the middles of its end thirds."""
    trace = serving_log(4000)
    ramp = np.exp(np.linspace(0, np.log(1.3), 4000))
    found = coverage_of(trace.with_columns(T_ms=trace["T_ms"] * ramp)).drift
    assert found["a"] == pytest.approx(1.3 ** (2 / 3) - 1, abs=0.01)


@pytest.mark.parametrize(
    ("B", "S", "word"),
    [
        ([1, 2, 4, 8, 16], [1, 2, 4, 8, 16], "no prefill steps (S > B)"),
        ([4, 4], [4, 512], "one batch size only"),
        ([1, 2, 3, 4], [1, 2, 3, 4], "few batch sizes (1, 2, 3, 4)"),
        ([1, 2, 16], [1, 2, 16], "few batch sizes (1, 2, 16)"),
        ([1, 2, 4, 8, 16], [512, 513, 600, 700, 800], "no decode steps"),
        ([1, 2, 4, 8, 16, 1], [1, 2, 4, 8, 16, 512], "no prefill steps above 512 tokens"),
    ],
)
def test_what_is_missing_is_said(B: list[int], S: list[int], word: str) -> None:
    trace = Trace({"B": np.array(B, float), "S": np.array(S, float), "T_ms": np.ones(len(B))})
    assert any(word in text for text in coverage_of(trace).missing)
