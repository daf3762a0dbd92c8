"""A finished fit applied: predictions, their intervals, errors on unseen steps, and the change between two fits."""

from dataclasses import replace

import numpy as np
import pytest

from latfit.errors import BadInput, WrongUsage
from latfit.fit import fit_trace
from latfit.fit.apply import change, evaluate, known_levels, predict, typical_ms
from latfit.model.result import FitResult
from latfit.trace.table import Trace
from tests.conftest import planted_trace, rich_design


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(planted_trace(0.1, repeats=40, seed=1))


def test_intervals_hold_as_often_as_they_say_on_new_steps(fit: FitResult) -> None:
    fresh = planted_trace(0.1, repeats=40, seed=2)
    found = evaluate(fit, fresh)
    assert set(found["interval_coverage"]) == {f"{level:g}" for level in known_levels(fit)}
    for level, share in found["interval_coverage"].items():
        # 1720 new steps and about as many calibration scores: binomial errors of both add up
        error = np.sqrt(2 * float(level) * (1 - float(level)) / len(fresh))
        assert abs(share - float(level)) < 4 * error


def test_errors_are_those_of_the_planted_noise(fit: FitResult) -> None:
    """Half-normal mean of 10 % noise is 8 %: E|e^z - 1| of z ~ N(0, 0.1), to first order 0.1 sqrt(2/pi)."""
    found = evaluate(fit, planted_trace(0.1, repeats=40, seed=3))
    assert found["metrics"]["mape_pct"] == pytest.approx(10 * np.sqrt(2 / np.pi), rel=0.06)
    assert found["outside_domain"] == 0
    assert sum(score["n"] for score in found["by_phase"].values()) == 1720


def test_steps_outside_what_was_measured_are_counted(fit: FitResult) -> None:
    steps = Trace({"B": np.array([1.0, 1.0, 300.0]), "S": np.array([1.0, 5000.0, 300.0])})
    assert predict(fit, steps).outside.tolist() == [False, True, True]


def test_a_level_without_factors_is_refused(fit: FitResult) -> None:
    with pytest.raises(WrongUsage, match=r"0\.42"):
        predict(fit, planted_trace(0.1), 0.42)


def test_a_column_that_the_fit_used_has_to_be_given() -> None:
    B, S = rich_design()
    context = np.arange(len(B)) * 100.0
    trace = Trace({"B": B, "S": S, "context_tokens": context, "T_ms": 5 + 0.01 * S + 0.001 * context})
    fit = fit_trace(trace)
    known = replace(fit, model=fit.model)
    assert np.all(np.isfinite(typical_ms(known, trace)))
    if "context_tokens" in fit.structure.columns:
        with pytest.raises(BadInput, match="context_tokens"):
            typical_ms(fit, Trace({"B": B, "S": S}))


def test_a_planted_slowdown_is_found(fit: FitResult) -> None:
    trace = planted_trace(0.1, repeats=40, seed=5)
    slower = fit_trace(trace.with_columns(T_ms=trace["T_ms"] * 1.2))
    found = change(fit, slower)
    assert found.median == pytest.approx(0.2, abs=0.03)
    assert found.least <= found.median <= found.most


def test_fits_without_a_common_range_cannot_be_compared(fit: FitResult) -> None:
    with pytest.raises(BadInput, match="no common"):
        change(fit, replace(fit, domain={"B": [1000, 2000], "S": [1, 4096]}))
