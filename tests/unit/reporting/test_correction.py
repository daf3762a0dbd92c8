"""What the page tells of a correction, against one that is planted."""

from dataclasses import replace

import numpy as np
import pytest

from latfit.fitting import sensitivity_of
from latfit.model import Correction, FitResult
from latfit.reporting.fit.correction import correction_tables
from latfit.reporting.fit.page import ReportInput, render
from latfit.trace import Trace
from tests.unit.reporting.conftest import fit_of, machine

PLANTED = Correction(
    {"decode_requests": np.log1p([1.0, 8.0, 64.0]), "prefill_tokens": np.log1p([0.0, 100.0, 1000.0])},
    np.log([[1.0, 1.0, 1.0], [1.02, 1.0, 0.8], [1.0, 1.25, 1.0]]),
)
STEPS = Trace(
    {
        "B": np.array([8.0, 8.0, 8.0, 9.0]),
        "S": np.array([8.0, 8.0, 8.0, 1008.0]),
        "prefill_requests": np.array([0.0, 0.0, 0.0, 1.0]),
        "prefill_tokens": np.array([0.0, 0.0, 0.0, 1000.0]),
        "T_ms": np.ones(4),
    }
)


def corrected(rows: Trace) -> FitResult:
    fit = fit_of(rows)
    known = {"prefill_requests": [0.0, 1.0], "prefill_tokens": [0.0, 1000.0]}
    return replace(fit, correction=PLANTED, domain={**fit.domain, **known})


def test_says_by_phase_how_much_it_changes_and_where_most(rows: Trace) -> None:
    by_phase, largest = correction_tables(corrected(rows), STEPS)
    assert [row[:3] for row in by_phase.rows] == [("decode", "3", "2 %"), ("mixed", "1", "20 %")]
    # a node that no step is near is not shown
    assert largest.rows == [["8", "1,000", "1", "-20.0 %"], ["8", "0", "3", "+2.0 %"]]


def test_without_a_trace_shows_the_largest_nodes(rows: Trace) -> None:
    (largest,) = correction_tables(corrected(rows), None)
    assert largest.rows[0] == ["64", "100", "+25.0 %"]
    assert largest.columns == ["decode requests", "prefill tokens", "correction"]


def test_no_table_without_rows_and_slopes_of_what_is_predicted(rows: Trace) -> None:
    flat = replace(PLANTED, values=np.zeros_like(PLANTED.values))
    assert correction_tables(replace(corrected(rows), correction=flat), None) == []
    fit, B, S = corrected(rows), np.array([8.0]), np.array([8.0])
    assert sensitivity_of(fit, B, S, fit.typical).T_ms[0] == pytest.approx(fit.latency_ms(B, S))


def test_the_page_shows_it_and_nothing_where_there_is_none(rows: Trace) -> None:
    with_it, without = corrected(rows), fit_of(rows)
    assert "Where the correction is largest" in render(ReportInput(machine(gpu=with_it))).html
    assert "correction" not in render(ReportInput(machine(gpu=without))).html
