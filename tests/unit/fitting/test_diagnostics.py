"""Residual tests against published values, the floor, influence of cells, and the error taken apart."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from latfit.fitting.checking.crossval import cross_validate
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.diagnostics.diagnose import (
    autocorrelation,
    diagnose,
    error_parts,
    heteroscedasticity,
    lack_of_fit,
    normality,
    trend,
)
from latfit.fitting.diagnostics.influence import influence
from latfit.fitting.problem import FitOptions, log_ratios, make_problem
from latfit.fitting.solver.solve import solve
from latfit.fitting.uncertainty.covariance import uncertainty
from latfit.stats import FloatArray
from latfit.trace.read import Reading, ingest
from latfit.trace.table import Trace
from tests.conftest import planted_trace

I = np.arange(1, 201)  # noqa: E741
B: FloatArray = np.asarray(1.0 + (7 * I) % 32, dtype=np.float64)
S: FloatArray = np.asarray(B + (37 * I) % 500, dtype=np.float64)
E = np.sin(I) * (1 + S / 500) + 0.3 * np.cos(0.2 * I) + 0.002 * I
"""The series that the published values belong to."""


class TestPublished:
    def test_shapiro_wilk(self) -> None:
        found = normality(E)
        assert found["statistic"] == pytest.approx(0.957166, abs=5e-7)
        assert found["p_value"] == pytest.approx(9.88195e-6, rel=1e-4)

    def test_breusch_pagan(self) -> None:
        found = heteroscedasticity(B, S, E)
        assert found["statistic"] == pytest.approx(23.4460, abs=5e-5)
        assert found["p_value"] == pytest.approx(8.10518e-6, rel=1e-5)

    def test_durbin_watson_and_ljung_box(self) -> None:
        found = autocorrelation(E)
        assert found["durbin_watson"] == pytest.approx(0.854055, abs=5e-7)
        assert found["statistic"] == pytest.approx(824.836, abs=5e-4)
        assert found["p_value"] == pytest.approx(9.43e-171, rel=1e-2)

    def test_trend_with_standard_errors_for_autocorrelation(self) -> None:
        found = trend(E)
        assert found["slope_per_row"] == pytest.approx(0.00154577, rel=1e-5)
        assert found["p_value"] == pytest.approx(0.130505, abs=5e-7)


class TestResiduals:
    def test_anderson_darling_sees_heavy_tails(self) -> None:
        rng = np.random.default_rng(0)
        assert normality(rng.standard_normal(500))["anderson_darling_p_value"] > 0.01
        assert normality(rng.standard_t(2, 500))["anderson_darling_p_value"] < 1e-6

    def test_many_rows_are_sampled_and_it_is_said(self) -> None:
        found = normality(np.random.default_rng(1).standard_normal(20_000))
        assert found["n"] == 5000
        assert "always reject" in found["note"]

    @given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=80))
    def test_any_residuals_give_a_number_or_a_reason(self, values: list[float]) -> None:
        series = np.array(values)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for found in (normality(series), autocorrelation(series), trend(series)):
                assert "reason" in found or "test" in found
            assert heteroscedasticity(np.arange(1.0, len(series) + 1), np.full(len(series), 512.0), series)


class TestFloor:
    def test_the_sentence_names_the_floor_of_the_noise(self) -> None:
        """Leave-one-out medians of many repeats: mean |e^x - 1| = s sqrt(2/pi) for normal noise s."""
        trace = planted_trace(0.05, repeats=60, seed=4)
        predicted = planted_trace(0.0, repeats=60)["T_ms"]
        data = fit_data(trace)
        found = lack_of_fit(data.observed, data.cell, np.log(trace["T_ms"] / predicted), 7)
        assert found["floor_mape_pct"] == pytest.approx(100 * 0.05 * np.sqrt(2 / np.pi), rel=0.05)
        assert found["sentence"] == "No function of B and S can do better than 4 % here."
        assert found["p_value"] > 1e-3


def spoilt(factor: float) -> Trace:
    """Planted data of which the cell B=8, S=1024 was measured wrongly."""
    trace = planted_trace(0.02, repeats=4, seed=6)
    wrong = (trace["B"] == 8) & (trace["S"] == 1024)
    return trace.with_columns(T_ms=np.where(wrong, trace["T_ms"] * factor, trace["T_ms"]))


class TestInfluence:
    @pytest.mark.parametrize("factor", [0.3, 3.0])
    def test_a_wrong_cell_is_pointed_at(self, factor: float) -> None:
        trace = spoilt(factor)
        problem = make_problem(rows_of(trace), FitOptions("saturation"))
        found = influence(problem, solve(problem), fit_data(trace))
        worst = found["standing_alone"][0]
        assert (worst["B"], worst["S"]) == (8, 1024)
        assert worst["beside_neighbours"] == pytest.approx(factor - 1, rel=0.3)
        assert "B=8, S=1024" in found["sentence"]

    def test_clean_cells_are_not(self) -> None:
        trace = planted_trace(0.02, repeats=4, seed=7)
        problem = make_problem(rows_of(trace), FitOptions("saturation"))
        found = influence(problem, solve(problem), fit_data(trace))
        assert found["standing_alone"] == []
        assert all(cell["change_without"] < 0.2 for cell in found["cells"])

    def test_leaving_a_cell_out_is_what_a_fit_without_it_says(self) -> None:
        trace = spoilt(0.3)
        problem = make_problem(rows_of(trace), FitOptions("saturation"))
        solution = solve(problem)
        found = influence(problem, solution, fit_data(trace))["standing_alone"][0]
        right = (trace["B"] != 8) | (trace["S"] != 1024)
        again = make_problem(rows_of(trace.select(right)), FitOptions("saturation"))
        without = again.model.latency_ms(again.theta(solve(again).z), {"B": np.array([8.0]), "S": np.array([1024.0])})
        assert found["expected_ms"] == pytest.approx(without[0], rel=0.02)

    def test_the_impossible_cell_of_a_real_data_set(self, measured_steps: Path) -> None:
        """One H100 prefill of 128 tokens took longer than those of 256 and 512 tokens."""
        where = "hardware == 'h100-80gb' and model == 'llama2-70b' and tp == 8"
        trace = ingest(measured_steps / "splitwise_a100_h100_tp4_tp8.parquet", Reading(where=where)).trace
        problem = make_problem(rows_of(trace), FitOptions("saturation"))
        found = influence(problem, solve(problem), fit_data(trace))
        named = {(cell["B"], cell["S"]) for cell in [*found["impossible"], *found["standing_alone"]]}
        assert (1, 128) in named


class TestErrorParts:
    def parts(self, trace: Trace, model: str) -> dict[str, float]:
        options = FitOptions(model=model)
        problem = make_problem(rows_of(trace), options)
        solution = solve(problem)
        scored = cross_validate(fit_data(trace), options, problem.theta(solution.z))
        assert scored is not None
        return error_parts(problem, solution, uncertainty(problem, solution), fit_data(trace), scored.held_out)

    def test_shares_add_up_and_name_the_noise(self) -> None:
        found = self.parts(planted_trace(0.05, repeats=20, seed=1), "saturation")
        names = ("measurement_noise", "model_structure", "parameter_uncertainty")
        assert sum(found[name] for name in names) == pytest.approx(1)
        assert found["measurement_noise"] > 0.9

    def test_a_wrong_model_is_named(self) -> None:
        found = self.parts(planted_trace(0.02, repeats=10, seed=2), "constant")
        assert found["model_structure"] > 0.9

    def test_without_repeats_two_parts_stay_together(self) -> None:
        found = self.parts(planted_trace(0.05, repeats=1, seed=3), "saturation")
        assert found["structure_and_noise"] + found["parameter_uncertainty"] == pytest.approx(1)


def test_some_cells_of_many_tell_what_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 batch sizes with six S each, of which the first holds most of the rows and scatters three times as much."""
    cell = np.repeat(np.arange(120), np.where(np.arange(120) % 6 == 0, 500, 10))
    residuals = np.random.default_rng(0).normal(0, np.where(cell % 6 == 0, 0.15, 0.05))
    every = lack_of_fit(np.exp(residuals), cell, residuals, 3)
    monkeypatch.setattr("latfit.fitting.diagnostics.diagnose.WRITTEN_OUT", 2000)
    monkeypatch.setattr("latfit.fitting.diagnostics.diagnose.MANY", 2000)
    part = lack_of_fit(np.exp(residuals), cell, residuals, 3)
    assert part["cells"] == every["cells"] / 6
    assert part["repeated_rows"] == pytest.approx(every["repeated_rows"] / 6, rel=0.25)
    for name in ("floor_mape_pct", "model_mape_pct"):
        assert part[name] == pytest.approx(every[name], rel=0.1)


class TestDegenerate:
    @settings(max_examples=30)
    @example([(3, 0, 0.25), (3, 4, 0.25), (4, 0, 4.0), (4, 0, 4.0)])  # the loss bounds every row
    @given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.floats(0.1, 10)), min_size=4, max_size=30))
    def test_any_rows_are_explained_without_a_warning(self, rows: list[tuple[int, int, float]]) -> None:
        columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]
        trace = Trace(
            {"B": columns[0], "S": columns[0] + columns[1], "T_ms": columns[2], "t_s": np.arange(float(len(rows)))}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            problem = make_problem(rows_of(trace), FitOptions(model="linear"))
            solution = solve(problem)
            theta = problem.theta(solution.z)
            scored = cross_validate(fit_data(trace), FitOptions(model="linear"), theta)
            left_out, doubt = scored.held_out if scored else None, uncertainty(problem, solution)
            log_ratio = log_ratios(problem, theta, fit_data(trace))
            found = diagnose(problem, solution, doubt, fit_data(trace), log_ratio, left_out)
        assert found.influence is not None
        assert found.drift is not None

    def test_constant_latency(self) -> None:
        n = 30
        trace = Trace({"B": np.ones(n), "S": np.ones(n), "T_ms": np.full(n, 5.0)})
        problem = make_problem(rows_of(trace), FitOptions(model="constant"))
        solution = solve(problem)
        assert influence(problem, solution, fit_data(trace))["reason"]
