"""Profile likelihood against published scans, and against the curvature where the data are rich."""

import math

import numpy as np
import pytest

from latfit.fitting.data import rows_of
from latfit.fitting.problem import FitOptions, FitProblem, make_problem
from latfit.fitting.solver.solve import Solution, solve
from latfit.fitting.uncertainty.covariance import uncertainty
from latfit.fitting.uncertainty.profile_likelihood import Held, profile_interval, within
from latfit.model.saturation import Saturation
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import REFERENCE, planted_trace, rich_design

SCAN = np.geomspace(1e-8, 1e2, 241)
SIGMA = 0.03
LINEAR_IN_TOKENS = np.array([4.0, 30.0, 1.0, 6e4, 0.15, 1e-5, 0.02, 0.002])


def noise_free(theta: FloatArray, rows: FloatArray | None = None) -> tuple[FitProblem, Solution]:
    """The exact optimum of noise-free data, with k_S and P_max free over the whole scan."""
    B, S = rich_design()
    B, S = (B, S) if rows is None else (B[rows > 0], S[rows > 0])
    trace = Trace({"B": B, "S": S, "T_ms": Saturation().latency_ms(theta, {"B": B, "S": S})})
    problem = make_problem(rows_of(trace), FitOptions("saturation", loss="linear"))
    problem = within(within(problem, "k_S", 1e-9, 1e3), "P_max", 1e-4, 1e13)
    return problem, Solution(problem.coordinates(theta), 0.0, 1.0, True)


def profile_curve(problem: FitProblem, solution: Solution, name: str, values: FloatArray, sigma: float) -> FloatArray:
    """D(x) (k,) of a free parameter at values in its unit (k,): the 95 % set is where it is below 3.84."""
    position = [p.name for p in problem.free_parameters].index(name)
    parameter, scale = problem.free_parameters[position], float(problem.scales[problem.free[position]])
    curve, held = np.empty(len(values)), Held(problem, solution, position)
    for i in np.argsort(values):
        x = math.log(values[i] / scale) if parameter.positive else float(values[i]) / scale
        curve[i] = 2 * max(held.cost(x) - solution.cost, 0.0) / sigma**2
    return curve


class TestPublished:
    def test_rich_design(self) -> None:
        """Nodes of a 241-point scan inside the set: .00909 to .0110."""
        problem, solution = noise_free(REFERENCE)
        near = SCAN[(SCAN > 2e-3) & (SCAN < 5e-2)]
        inside = near[profile_curve(problem, solution, "k_S", near, SIGMA) <= 3.84146]
        assert inside[0] == pytest.approx(0.00909, abs=5e-6)
        assert inside[-1] == pytest.approx(0.0110, abs=5e-5)
        interval = profile_interval(problem, solution, "k_S", sigma=SIGMA)
        assert interval.low is not None
        assert interval.high is not None
        assert 0.00826 < interval.low <= 0.00909
        assert 0.0110 <= interval.high < 0.01212

    def test_open_below_where_only_a_product_is_told(self) -> None:
        """k_S = 1e-5: open below; the last node inside is 8.25e-5, the next one 9.09e-5."""
        interval = profile_interval(*noise_free(LINEAR_IN_TOKENS), "k_S", sigma=SIGMA)
        assert interval.low is None
        assert interval.high is not None
        assert 8.25e-5 <= interval.high <= 9.09e-5

    def test_open_at_both_ends_where_all_is_saturated(self) -> None:
        B, S = rich_design()
        interval = profile_interval(*noise_free(REFERENCE, ((B >= 32) & (S >= 1024)).astype(float)), "k_S", sigma=SIGMA)
        assert interval.low is None
        assert interval.high is None


class TestAgainstCurvature:
    @pytest.mark.parametrize("loss", ["linear", "huber"])
    @pytest.mark.parametrize("name", ["tau_0", "P_max", "k_B"])
    def test_rich_data_give_the_same_interval(self, loss: str, name: str) -> None:
        """Wilks: both are 95 % intervals; with 860 rows they differ by higher-order terms only."""
        problem = make_problem(rows_of(planted_trace(0.03, repeats=20, seed=3)), FitOptions("saturation", loss=loss))
        solution = solve(problem)
        wald = uncertainty(problem, solution).estimates[name]
        interval = profile_interval(problem, solution, name)
        assert wald.std_error is not None
        for mine, theirs in ((interval.low, wald.low), (interval.high, wald.high)):
            assert mine is not None
            assert theirs is not None
            assert abs(mine - theirs) < 0.6 * wald.std_error

    def test_a_cost_at_zero_is_open_or_zero_below(self) -> None:
        B, S = rich_design()
        theta = REFERENCE.copy()
        theta[6] = 0.0
        T = Saturation().latency_ms(theta, {"B": B, "S": S}) * np.exp(np.random.default_rng(0).normal(0, 0.03, len(B)))
        problem = make_problem(rows_of(Trace({"B": B, "S": S, "T_ms": T})), FitOptions("saturation"))
        interval = profile_interval(problem, solve(problem), "tau_B")
        assert interval.low is None or interval.low >= 0
        assert interval.high is not None
