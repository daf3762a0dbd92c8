"""Ways to leave rows out, and dated drift."""

import math

import numpy as np
import pytest

from latfit.fitting.checking.crossval import (
    assign_folds,
    beyond,
    by_fold,
    cross_validate,
    expanding_in_runs,
)
from latfit.fitting.data import fit_data
from latfit.fitting.diagnostics.drift import change_point, drift
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import REFERENCE, planted_trace


def log_trace(rows: int, runs: int = 2, seed: int = 0) -> Trace:
    """A log of several runs, in mixed order."""
    rng = np.random.default_rng(seed)
    B = rng.integers(1, 65, rows).astype(float)
    S = np.where(rng.random(rows) < 0.3, B + rng.integers(1, 2048, rows), B)
    T = (5 + 0.1 * B + 0.02 * S) * np.exp(rng.normal(0, 0.05, rows))
    run = np.array([f"users={i}" for i in rng.integers(0, runs, rows)], dtype=object)
    return Trace({"B": B, "S": S, "T_ms": T, "t_s": rng.permutation(rows).astype(float), "run": run})


class TestFolds:
    def test_within_each_run_training_is_earlier_than_testing(self) -> None:
        trace = log_trace(400)
        for train, test in expanding_in_runs(fit_data(trace)):
            for run in set(trace["run"].tolist()):
                earlier = trace["t_s"][train][trace["run"][train] == run]
                later = trace["t_s"][test][trace["run"][test] == run]
                assert earlier.max() < later.min()

    def test_cells_leave_together(self) -> None:
        trace = planted_trace(0.1, repeats=4)
        _, fold = assign_folds(fit_data(trace))
        for train, test in by_fold(fold):
            cells = [{(trace["B"][i], trace["S"][i]) for i in part} for part in (train, test)]
            assert not cells[0] & cells[1]

    def test_extrapolation_trains_on_fewer_tokens(self) -> None:
        trace = planted_trace(0.1)
        fold = beyond(fit_data(trace), "S")
        assert fold is not None
        assert trace["S"][fold[0]].max() < trace["S"][fold[1]].min()
        assert beyond(fit_data(trace.select(trace["S"] == 64)), "S") is None


class TestValidation:
    def test_errors_on_rows_left_out_are_those_of_the_noise(self) -> None:
        """Where the model is right, E|e^x - 1| of normal noise s is s sqrt(2/pi) to second order."""
        trace = planted_trace(0.05, repeats=20, seed=2)
        scored = cross_validate(fit_data(trace), FitOptions("saturation"), REFERENCE)
        assert scored is not None
        expected = 100 * 0.05 * math.sqrt(2 / math.pi)
        assert scored.scores.mape_pct == pytest.approx(expected, rel=0.1)
        assert scored.scores.errors is not None
        assert (scored.scores.errors.mape_pct_sd or 0) < 1
        assert len(scored.held_out.rows) == len(trace)


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

    def test_a_single_outlier_is_no_change(self) -> None:
        series = np.random.default_rng(3).normal(0, 0.05, 500)
        series[250] = 50.0
        found = change_point(series)
        assert found is not None
        assert found.p_value > 0.01
