"""Parameter draws that stay with a fit: their spread is that of the fit's parameters and predictions."""

from pathlib import Path

import numpy as np
import pytest

from latfit.fitting.bootstrap import DoubtOptions, from_covariance
from latfit.fitting.covariance import relative_error_at, uncertainty
from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.model.fit_result import STORED_DRAWS, FitResult, parameter_draws
from tests.conftest import planted_trace

TRACE = planted_trace(0.03, repeats=6, seed=1)
STEPS = {"B": np.array([1.0, 8.0, 64.0]), "S": np.array([64.0, 512.0, 2048.0])}


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(TRACE, FitOptions("saturation"))


class TestFromCovariance:
    def test_spread_is_the_standard_error(self, fit: FitResult) -> None:
        """200 draws know a standard deviation to 1/sqrt(400) = 5 %."""
        draws = parameter_draws(fit)
        assert draws is not None
        assert draws.shape == (STORED_DRAWS, 8)
        for i, (name, known) in enumerate(fit.parameters.items()):
            if known.std_error is not None and known.low and known.low > 0:
                assert np.std(draws[:, i]) == pytest.approx(known.std_error, rel=0.2), name

    def test_predictions_spread_as_the_delta_method_says(self, fit: FitResult) -> None:
        problem = make_problem(rows_of(TRACE), FitOptions("saturation"))
        solution = solve(problem)
        theta, doubt = problem.theta(solution.z), uncertainty(problem, solution)
        told = relative_error_at(problem, theta, doubt, STEPS)
        T = np.log([problem.model.latency_ms(d, STEPS) for d in from_covariance(problem, solution, doubt, 400)])
        assert np.std(T, axis=0) == pytest.approx(told, rel=0.2)


class TestKept:
    def test_they_survive_the_file(self, fit: FitResult, tmp_path: Path) -> None:
        fit.write(tmp_path / "a.fit.json")
        again = FitResult.read(tmp_path / "a.fit.json")
        assert np.array_equal(np.array(again.draws["values"]), np.array(fit.draws["values"]))
        assert (tmp_path / "a.fit.json").stat().st_size < 60_000


class TestMethods:
    """Intervals of one fit made in two ways: the data are many and the noise normal, so they agree."""

    def test_a_bootstrap_is_recorded_and_its_draws_kept(self) -> None:
        seen: list[tuple[int, int]] = []
        fit = fit_trace(
            TRACE,
            FitOptions("saturation"),
            doubt=DoubtOptions(resamples=60, progress=lambda done, of: seen.append((done, of))),
        )
        assert fit.bootstrap["resamples"] == 60
        assert fit.bootstrap["scheme"] == "rows"
        assert fit.draws["source"] == "bootstrap, rows"
        assert len(fit.draws["values"]) == 60
        assert seen[-1] == (60, 60)
