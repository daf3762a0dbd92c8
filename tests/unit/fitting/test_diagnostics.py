"""The floor of the noise, and the error taken apart."""

import numpy as np
import pytest
from scipy.special import kolmogorov

from latfit.fitting.checking.crossval import cross_validate
from latfit.fitting.checking.diagnose import error_parts, lack_of_fit
from latfit.fitting.checking.drift import kolmogorov_tail
from latfit.fitting.covariance import uncertainty
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
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
        held = cross_validate(fit_data(trace), options, theta)[1]
        assert held is not None
        return error_parts(problem, theta, uncertainty(problem, solution), fit_data(trace), held)

    def test_shares_add_up_and_name_the_noise(self) -> None:
        found = self.parts(planted_trace(0.05, repeats=20, seed=1), "saturation")
        names = ("measurement_noise", "model_structure", "parameter_uncertainty")
        assert sum(found[name] for name in names) == pytest.approx(1)
        assert found["rms_pct"] == pytest.approx(5, rel=0.05)
        assert found["measurement_noise"] > 0.9


@pytest.mark.parametrize("x", [0.0, 0.2, 0.31, 0.5, 1.0, 1.63, 3.0])
def test_kolmogorovs_distribution_is_that_of_scipy(x: float) -> None:
    assert kolmogorov_tail(x) == pytest.approx(kolmogorov(x), rel=1e-6)
