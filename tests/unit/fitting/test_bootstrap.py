"""Resampled fits against the sandwich, against full refits, and for repeatability."""

import numpy as np
import pytest

from latfit.fitting.bootstrap import SCHEMES, bootstrap
from latfit.fitting.covariance import uncertainty
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.trace.table import Trace
from tests.conftest import planted_trace

TRACE = planted_trace(0.03, repeats=8, seed=1)


class TestSpread:
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_agrees_with_the_sandwich(self, scheme: str) -> None:
        """Same data, same asymptotics: 400 draws know a standard deviation to 1/sqrt(800) = 3.5 %, and the two ways
        differ by what 43 cells of eight rows leave open; cells as blocks know it to 1/sqrt(86) = 11 %."""
        problem = make_problem(rows_of(TRACE), FitOptions("saturation"))
        solution = solve(problem)
        stated = uncertainty(problem, solution).estimates
        draws = bootstrap(problem, solution, fit_data(TRACE), resamples=400, scheme=scheme)
        for i, parameter in enumerate(problem.model.parameters):
            error = stated[parameter.name].std_error
            if error is not None:
                tolerance = 0.5 if scheme == "block" else 0.3
                assert np.std(draws[:, i]) == pytest.approx(error, rel=tolerance)

    def test_blocks_see_what_neighbours_share(self) -> None:
        """An autocorrelated log: the mean's variance is larger by (1+rho)/(1-rho) than rows pretend."""
        rng = np.random.default_rng(2)
        n, rho = 4000, 0.8
        noise = np.zeros(n)
        for i in range(1, n):
            noise[i] = rho * noise[i - 1] + rng.normal(0, 0.05)
        columns = {"B": np.ones(n), "S": np.ones(n), "T_ms": 10 * np.exp(noise), "t_s": np.arange(n, dtype=float)}
        trace = Trace(columns)
        problem = make_problem(rows_of(trace), FitOptions(model="constant"))
        solution = solve(problem)
        spread = {
            scheme: float(np.std(bootstrap(problem, solution, fit_data(trace), resamples=300, scheme=scheme)))
            for scheme in ("rows", "block")
        }
        # blocks of 16 neighbours see most of the factor 3
        assert 2.0 < spread["block"] / spread["rows"] < 3.3
