"""Ways to leave rows out, and dated drift."""

import math

import numpy as np
import pytest

from latfit.fitting.checking.crossval import cross_validate, mean_error
from latfit.fitting.checking.drift import change_point, drift
from latfit.fitting.data import fit_data
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import REFERENCE, planted_trace


class TestValidation:
    def test_errors_on_rows_left_out_are_those_of_the_noise(self) -> None:
        """Where the model is right, E|e^x - 1| of normal noise s is s sqrt(2/pi) to second order."""
        trace = planted_trace(0.05, repeats=20, seed=2)
        scores, held = cross_validate(fit_data(trace), FitOptions("saturation"), REFERENCE)
        assert held is not None
        expected = 100 * 0.05 * math.sqrt(2 / math.pi)
        assert scores.mape_pct == pytest.approx(expected, rel=0.1)
        assert scores.errors is not None
        assert (scores.errors.mape_pct_sd or 0) < 1
        assert len(held.rows) == len(trace)

    def test_a_single_row_of_a_phase_does_not_decide_a_fold(self) -> None:
        """40 steps of either phase; the fold has all of prefill, 2 % off, and one of decode, which is met exactly."""
        B = np.full(80, 4.0)
        data = fit_data(Trace({"B": B, "S": np.repeat([4.0, 400.0], 40), "T_ms": np.linspace(1.0, 2.0, 80)}))
        fold, errors = np.arange(39, 80), np.append(1e-6, np.full(40, 2.0))
        assert mean_error(data, fold, errors) == pytest.approx(2.0)


class TestDrift:
    def ar(self, n: int, rho: float, rng: np.random.Generator) -> FloatArray:
        series = np.empty(n)
        series[0] = rng.normal(0, 1 / math.sqrt(1 - rho**2))
        for i in range(1, n):
            series[i] = rho * series[i - 1] + rng.normal()
        return series

    def test_false_alarms_are_as_rare_as_stated(self) -> None:
        """200 autocorrelated series without a change: at most Binomial(200, 5 %) plus four standard errors."""
        rng = np.random.default_rng(1)
        alarms = 0
        for _ in range(200):
            found = change_point(self.ar(500, 0.5, rng))
            assert found is not None
            alarms += found.p_value < 0.05
        assert alarms <= 200 * 0.05 + 4 * math.sqrt(200 * 0.05 * 0.95)

    def test_a_change_is_found_and_dated(self) -> None:
        rng = np.random.default_rng(2)
        n = 1000
        trace = Trace(
            {
                "B": np.ones(n),
                "S": np.ones(n),
                "T_ms": np.ones(n),
                "t_s": np.arange(n) * 0.5,
                "run": np.array(["a"] * n, dtype=object),
            }
        )
        jump = np.where(np.arange(n) >= 700, math.log(1.1), 0.0)
        found = drift(fit_data(trace), rng.normal(0, 0.05, n) + jump).runs["a"]
        assert found.t_s == pytest.approx(350, abs=10)
        assert found.relative_shift == pytest.approx(0.1, abs=0.02)
        assert drift(fit_data(trace), rng.normal(0, 0.05, n)).runs == {}
