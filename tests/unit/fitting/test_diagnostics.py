"""The floor of the noise, influence of cells, and the error taken apart."""

import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from latfit.fitting.checking.crossval import cross_validate
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.diagnostics.diagnose import diagnose, error_parts, lack_of_fit
from latfit.fitting.diagnostics.influence import influence
from latfit.fitting.problem import FitOptions, log_ratios, make_problem
from latfit.fitting.solver.solve import solve
from latfit.fitting.uncertainty.covariance import uncertainty
from latfit.trace.table import Trace
from tests.conftest import planted_trace


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
    monkeypatch.setattr("latfit.fitting.diagnostics.diagnose.MAX_WRITTEN_ROWS", 2000)
    monkeypatch.setattr("latfit.fitting.diagnostics.diagnose.MAX_FLOOR_ROWS", 2000)
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
