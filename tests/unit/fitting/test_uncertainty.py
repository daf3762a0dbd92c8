"""What the data can tell: condition numbers and standard errors against published values, named combinations."""

import numpy as np
import pytest

from latfit.fitting.data import rows_of
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.solve import Solution, solve
from latfit.fitting.uncertainty.covariance import Uncertainty, relative_error_at, uncertainty
from latfit.fitting.uncertainty.identifiability import condition_number, decompose, log_jacobian
from latfit.fitting.uncertainty.report import identifiability_report
from latfit.model.saturation import Saturation
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import REFERENCE, planted_trace, rich_design

ORACLE = ("tau_0", "w_0", "w_1", "k_B", "k_S", "tau_B", "tau_S")
"""dlnT/dln w_0 and dlnT/dln w_1 at fixed P_max are those of a = w_0/P_max and b = w_1/P_max."""


def jacobian(B: FloatArray, S: FloatArray, theta: FloatArray) -> FloatArray:
    return log_jacobian(Saturation(), theta, {"B": B, "S": S}, ORACLE)


def measured(B: FloatArray, S: FloatArray, T: FloatArray, seed: int = 0) -> Trace:
    """Each cell five times with 3 % noise."""
    B, S, T = (np.repeat(column, 5) for column in (B, S, T))
    return Trace({"B": B, "S": S, "T_ms": T * np.exp(np.random.default_rng(seed).normal(0, 0.03, len(B)))})


def fitted(trace: Trace, options: FitOptions | None = None) -> tuple[FitProblem, Solution, Uncertainty]:
    problem = make_problem(rows_of(trace), options or FitOptions("saturation"))
    solution = solve(problem)
    return problem, solution, uncertainty(problem, solution)


class TestCondition:
    def test_the_rich_design(self) -> None:
        """Published: 111.681 on log-parameters, 29.7984 equilibrated, and standard errors for 3 % noise."""
        J = jacobian(*rich_design(), REFERENCE)
        assert condition_number(np.asarray(np.linalg.svd(J, compute_uv=False), dtype=np.float64)) == pytest.approx(
            111.681, rel=1e-5
        )
        directions = decompose(J, np.ones(len(J)))
        assert directions.condition == pytest.approx(29.7984, rel=1e-5)
        errors = 0.03 * np.sqrt(np.diag(directions.inverse()))
        assert errors == pytest.approx([0.047, 0.107, 0.080, 0.067, 0.075, 0.079, 0.615], abs=6e-4)


class TestCombinations:
    def test_a_rich_design_needs_none(self) -> None:
        problem, solution, doubt = fitted(planted_trace(0.03, repeats=5))
        report = identifiability_report(problem, solution, doubt)
        assert report.unidentified == []
        assert not report.combinations
        assert not report.measure
        assert (report.condition_number_log or 0) > 1

    def test_decode_tells_the_sum_of_two_costs(self) -> None:
        B = np.arange(1.0, 65.0)
        full = {"k_B": 20.0, "k_S": 20.0, "w_0": 0.0, "P_max": 1e6}
        problem, solution, doubt = fitted(measured(B, B, 8 + 0.05 * B), FitOptions("saturation", fixed=full))
        report = identifiability_report(problem, solution, doubt)
        assert ["tau_B", "tau_S"] in report.unidentified
        (found,) = [c for c in report.combinations if c.expression == "tau_B + tau_S"]
        assert found.low <= 0.05 <= found.high
        assert found.value == pytest.approx(0.05, rel=0.1)
        assert any("S" in m.text and m.S[1] > m.B[0] for m in report.measure)

    @pytest.mark.parametrize(("B", "expression"), [(4.0, "tau_0 + 4*tau_B"), (1.0, "tau_0 + tau_B")])
    def test_one_batch_size_tells_the_cost_of_a_step_with_its_requests(self, B: float, expression: str) -> None:
        """Planted: 3 ms a step and 0.5 ms a request."""
        S = np.array([2.0**i for i in range(3, 13)])
        problem, solution, doubt = fitted(
            measured(np.full(10, B), S, 3 + 0.5 * B + 0.02 * S), FitOptions(model="linear")
        )
        report = identifiability_report(problem, solution, doubt)
        assert ["tau_0", "tau_B"] in report.unidentified
        (found,) = report.combinations
        assert found.expression == expression
        assert found.low <= 3 + 0.5 * B <= found.high
        assert found.high < 1.1 * found.low
        assert found.unit == "ms"

    def test_saturated_batches_tell_the_cost_of_a_token_in_sum(self) -> None:
        """All k_B B >> 1, S up to 4096: tau_S and w_1/P_max trade; their sum is 0.002 + 1/60."""
        B, S = rich_design()
        many = B >= 64
        T = Saturation().latency_ms(REFERENCE, {"B": B[many], "S": S[many]})
        named = []
        for seed in range(3):
            problem, solution, doubt = fitted(measured(B[many], S[many], T, seed))
            assert not doubt.estimates["P_max"].identified
            report = identifiability_report(problem, solution, doubt)
            named += [c for c in report.combinations if c.expression == "tau_S + w_1/P_max"]
        assert len(named) >= 2
        for found in named:
            assert found.low <= 0.002 + 1 / 60 <= found.high
            assert found.unit == "ms/token"

    def test_one_batch_size_asks_for_others(self) -> None:
        S = np.array([2.0**i for i in range(12)])
        T = 3 + 0.02 * S
        problem, solution, doubt = fitted(measured(np.ones(12), S, T))
        report = identifiability_report(problem, solution, doubt)
        assert "k_B" in {name for group in report.unidentified for name in group}
        wanted = [m for m in report.measure if "k_B" in m.parameters]
        assert all(m.B[1] > 1 for m in wanted)
        assert all(m.after < m.before for m in report.measure)


class TestUncertainty:
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
