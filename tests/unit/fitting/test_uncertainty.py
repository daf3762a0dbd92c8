"""What the data can tell: condition numbers and standard errors against published values."""

import numpy as np
import pytest

from latfit.fitting.covariance import condition_number, decompose, relative_error_at, uncertainty, without_bends
from latfit.fitting.data import rows_of
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.model.formulas import Saturation
from latfit.stats import FloatArray
from tests.conftest import REFERENCE, planted_trace, rich_design

ORACLE = ("tau_0", "w_0", "w_1", "k_B", "k_S", "tau_B", "tau_S")
"""dlnT/dln w_0 and dlnT/dln w_1 at fixed P_max are those of a = w_0/P_max and b = w_1/P_max."""


def jacobian(B: FloatArray, S: FloatArray, theta: FloatArray) -> FloatArray:
    """dlnT/dln theta (n, 7)."""
    model, steps = Saturation(), {"B": B, "S": S}
    columns = [i for name in ORACLE for i, p in enumerate(model.parameters) if p.name == name]
    slopes = model.gradient(theta, steps)[:, columns] * theta[columns]
    return np.asarray(slopes / model.latency_ms(theta, steps)[:, None])


class TestCondition:
    def test_the_rich_design(self) -> None:
        """Published: 111.681 on log-parameters, 29.7984 equilibrated, and standard errors for 3 % noise."""
        J = jacobian(*rich_design(), REFERENCE)
        assert condition_number(np.asarray(np.linalg.svd(J, compute_uv=False), dtype=np.float64)) == pytest.approx(
            111.681, rel=1e-5
        )
        directions = decompose(J, np.ones(len(J)))
        assert condition_number(directions.singular) == pytest.approx(29.7984, rel=1e-5)
        errors = 0.03 * np.linalg.norm(directions.root(), axis=0)
        assert errors == pytest.approx([0.047, 0.107, 0.080, 0.067, 0.075, 0.079, 0.615], abs=6e-4)


class TestUncertainty:
    def test_without_bends_only_the_line_is_known(self) -> None:
        problem = make_problem(rows_of(planted_trace(0.03, repeats=3)), FitOptions("saturation"))
        doubt = uncertainty(problem, solve(problem))
        found = without_bends(problem, doubt)
        bends = {"w_0", "P_max", "k_B", "k_S"}
        assert all(doubt.estimates[name].identified for name in bends)
        assert {name for name, each in found.estimates.items() if each.std_error is None and not each.fixed} == bends
        assert not any(found.estimates[name].identified for name in bends)
        assert any(bends <= set(group) for group in found.unidentified)
        for name in {"tau_0", "tau_B", "tau_S"}:
            assert found.estimates[name] == doubt.estimates[name]

    def test_error_of_a_prediction_is_that_of_repeated_fits(self) -> None:
        """80 data sets: the standard deviation of ln T agrees with the delta method within its own 4 sigma, which for
        80 draws is 4/sqrt(160) = 32 %, and 10 % for the robust loss."""
        steps = {"B": np.array([4.0, 128.0]), "S": np.array([64.0, 4096.0])}
        logs, stated = [], []
        for seed in range(80):
            problem = make_problem(rows_of(planted_trace(0.03, repeats=3, seed=seed)), FitOptions("saturation"))
            solution = solve(problem)
            theta = problem.theta(solution.z)
            logs.append(np.log(problem.model.latency_ms(theta, steps)))
            stated.append(relative_error_at(problem, theta, uncertainty(problem, solution), steps))
        assert np.mean(stated, axis=0) == pytest.approx(np.std(logs, axis=0), rel=0.42)
