"""Intervals beyond the measured tokens: wider by what an extrapolation inside the data was off."""

import numpy as np
import pytest
from msgspec import structs

from latfit.fitting.fit import fit_trace
from latfit.fitting.prediction import CANNOT_TELL, TOO_FAR, predict
from latfit.fitting.problem import FitOptions
from latfit.model.fit_parts import CrossValidation, HeldOutErrors
from latfit.model.fit_result import FitResult
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import planted_trace


@pytest.fixture(scope="module")
def line() -> FitResult:
    return fit_trace(planted_trace(0.05, repeats=6), FitOptions(model="linear"))


def asked(fit: FitResult, trained: float, p90: float) -> FitResult:
    beyond = HeldOutErrors(1, p90 / 2, p90 / 2, p90, 1.0, [p90 / 2], p90 / 2, None, trained_up_to_S=trained)
    scores = CrossValidation(extrapolation_S=beyond)
    return structs.replace(fit, cross_validation=scores, domain={**fit.domain, "S": [1.0, 4000.0]})


def test_limits_widen_by_the_error_beyond_the_data_and_once_more_at_its_distance(line: FitResult) -> None:
    """Trained up to 1000 and tested up to 4000: 16000 is one such distance outside, 64000 two."""
    factors = asked(line, 1000.0, 20.0).widening(np.ones(4), np.array([10.0, 4000.0, 16000.0, 64000.0]))
    assert factors == pytest.approx([1.0, 1.0, 1.44, 1.728])


def test_a_level_that_few_steps_leave_open_falls_back_to_a_lower_one(line: FitResult) -> None:
    upper, lower = ({"0.95": factor, "0.995": None} for factor in (1.2, 0.9))
    limits = {"ratio_quantiles": upper, "lower_quantiles": lower, "reason": "19 steps"}
    fit = structs.replace(line, intervals={**limits, "by_phase": {"decode": limits}})
    steps = Trace({"B": np.full(1, 4.0), "S": np.full(1, 4.0)})
    found = predict(fit, steps, 0.99)
    T = found.T_ms[0]
    assert (found.level[0], found.low[0], found.high[0]) == pytest.approx((0.9, 0.9 * T, 1.2 * T))
    assert "Intervals of decode steps are at 90 %. No interval at 99 % for decode steps: 19 steps." in found.notes


def test_nothing_is_told_where_nothing_was_asked(line: FitResult) -> None:
    fit = structs.replace(asked(line, 1000.0, 20.0), cross_validation=CrossValidation())
    found = predict(fit, Trace({"B": np.ones(2), "S": np.array([4000.0, 4001.0])}))
    assert np.isfinite(found.low[0])
    assert np.isnan(found.low[1])
    assert CANNOT_TELL in found.notes


def test_no_interval_is_given_more_than_three_tested_distances_outside(line: FitResult) -> None:
    """Tested from 1000 to 4000: three such distances end at 256,000."""
    found = predict(asked(line, 1000.0, 20.0), Trace({"B": np.ones(2), "S": np.array([255_000.0, 257_000.0])}))
    assert np.isfinite([found.low[0], found.high[0]]).all()
    assert np.isnan([found.low[1], found.high[1], found.level[1]]).all()
    assert TOO_FAR in found.notes


def test_a_wrong_form_is_covered_beyond_its_data() -> None:
    """A line through steps whose latency is quadratic in S: of those beyond, the widened interval holds all, the plain
    one none."""
    S = np.repeat(np.arange(64.0, 2049.0, 64.0), 4)
    rng = np.random.default_rng(0)

    def steps(tokens: FloatArray) -> Trace:
        T = (5 + 0.02 * tokens + 1e-5 * tokens**2) * np.exp(rng.normal(0, 0.02, len(tokens)))
        return Trace({"B": np.ones_like(tokens), "S": tokens, "T_ms": T})

    fit = fit_trace(steps(S), FitOptions(model="linear"))
    beyond = steps(np.arange(6000.0, 8001.0, 100.0))
    found, T = predict(fit, beyond), beyond["T_ms"]
    factor = fit.widening(beyond.floats("B"), beyond.floats("S"))
    assert np.all((found.low <= T) & (found.high >= T))
    assert np.all(found.high / factor < T)


def test_two_cells_tell_no_slope_and_a_step_far_outside_says_how_far() -> None:
    """Two measured cells of 5 and 9 ms: at S = 100,000 there is no interval, and the step says that it lies 1,000 times
    outside."""
    rng = np.random.default_rng(0)
    S = np.repeat([1.0, 100.0], 40)
    T = np.where(S == 1, 5.0, 9.0) * np.exp(rng.normal(0, 0.01, len(S)))
    fit = fit_trace(Trace({"B": np.ones_like(S), "S": S, "T_ms": T}), FitOptions(model="linear"))
    found = predict(fit, Trace({"B": np.ones(1), "S": np.array([100_000.0])}))
    assert np.isnan(found.low[0])
    assert np.isnan(found.high[0])
    assert found.why_no_interval[0]
    assert found.why_outside[0] == "outside the measured range: S 1,000× above the measured 100"
    assert "The step lies outside the measured range: S 1,000× above the measured 100." in found.notes
