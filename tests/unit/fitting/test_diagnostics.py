"""The floor of the noise, and the error taken apart."""

import warnings

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from latfit.fitting.checking.crossval import cross_validate
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.diagnostics.diagnose import diagnose, error_parts, lack_of_fit
from latfit.fitting.problem import FitOptions, log_ratios, make_problem
from latfit.fitting.solver.solve import solve
from latfit.fitting.uncertainty.covariance import uncertainty
from latfit.trace.table import Trace
from tests.conftest import planted_trace


def test_the_floor_is_that_of_the_noise() -> None:
    """Leave-one-out medians of many repeats: mean |e^x - 1| = s sqrt(2/pi) for normal noise s."""
    trace = planted_trace(0.05, repeats=60, seed=4)
    predicted = planted_trace(0.0, repeats=60)["T_ms"]
    found = lack_of_fit(fit_data(trace), np.log(trace["T_ms"] / predicted))
    for name in ("floor_mape_pct", "noise_floor_pct", "model_mape_pct"):
        assert found[name] == pytest.approx(100 * 0.05 * np.sqrt(2 / np.pi), rel=0.05)


class TestErrorParts:
    def parts(self, trace: Trace, model: str) -> dict[str, float]:
        options = FitOptions(model=model)
        problem = make_problem(rows_of(trace), options)
        solution = solve(problem)
        theta = problem.theta(solution.z)
        scored = cross_validate(fit_data(trace), options, theta)
        assert scored is not None
        return error_parts(problem, theta, uncertainty(problem, solution), fit_data(trace), scored.held_out)

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
            found = diagnose(problem, theta, doubt, fit_data(trace), log_ratio, left_out)
        assert found.drift is not None
