"""Resampled fits against the sandwich, against full refits, and for repeatability."""

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.fitting.data import fit_data, rows_of
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.fitting.uncertainty.bootstrap import SCHEMES, blocks, bootstrap
from latfit.fitting.uncertainty.covariance import uncertainty
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
                assert np.std(draws.theta[:, i]) == pytest.approx(error, rel=tolerance)

    def test_newton_steps_end_where_full_refits_do(self) -> None:
        """One resample written out as a trace and fitted from scratch, with the scale of the loss free."""
        problem = make_problem(rows_of(TRACE), FitOptions("saturation", loss="linear"))
        solution = solve(problem)
        rng = np.random.default_rng(5)
        refits = []
        for _ in range(60):
            counts = rng.poisson(1.0, len(TRACE))
            again = make_problem(
                rows_of(TRACE.select(np.repeat(np.arange(len(TRACE)), counts))), FitOptions("saturation", loss="linear")
            )
            refits.append(again.theta(solve(again, warm=again.coordinates(problem.theta(solution.z))).z))
        draws = bootstrap(problem, solution, resamples=400)
        free = [i for i, p in enumerate(problem.model.parameters) if p.fixed is None]
        # 60 refits know a standard deviation to 1/sqrt(120) = 9 %
        assert np.std(draws.theta, axis=0)[free] == pytest.approx(np.std(refits, axis=0)[free], rel=0.4)

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
            scheme: float(np.std(bootstrap(problem, solution, fit_data(trace), resamples=300, scheme=scheme).theta))
            for scheme in ("rows", "block")
        }
        # blocks of 16 neighbours see most of the factor 3
        assert 2.0 < spread["block"] / spread["rows"] < 3.3


class TestDraws:
    def test_progress_ends_at_all_of_them(self) -> None:
        problem = make_problem(rows_of(TRACE), FitOptions("saturation"))
        seen: list[tuple[int, int]] = []
        bootstrap(problem, solve(problem), resamples=250, progress=lambda done, of: seen.append((done, of)))
        assert seen[-1] == (250, 250)
        assert seen == sorted(seen)

    def test_draws_give_latencies_and_intervals(self) -> None:
        problem = make_problem(rows_of(TRACE), FitOptions("saturation"))
        solution = solve(problem)
        draws = bootstrap(problem, solution, resamples=100)
        steps = {"B": np.array([8.0, 64.0]), "S": np.array([512.0, 2048.0])}
        T = np.stack([problem.model.latency_ms(theta, steps) for theta in draws.theta])
        assert T.shape == (100, 2)
        centre = problem.model.latency_ms(problem.theta(solution.z), steps)
        assert np.median(T, axis=0) == pytest.approx(centre, rel=0.02)
        low, high = draws.interval("P_max")
        assert low < problem.theta(solution.z)[3] < high
        assert set(draws.to_json()["parameters"]) == {p.name for p in problem.model.parameters if p.fixed is None}

    def test_draws_stay_inside_the_box(self) -> None:
        problem = make_problem(rows_of(TRACE), FitOptions("saturation", bounds={"k_B": (0.149, 0.151)}))
        draws = bootstrap(problem, solve(problem), resamples=100)
        k_B = draws.theta[:, 4]
        assert k_B.min() >= 0.149 * (1 - 1e-12)
        assert k_B.max() <= 0.151 * (1 + 1e-12)

    def test_wrong_scheme(self) -> None:
        problem = make_problem(rows_of(TRACE), FitOptions("saturation"))
        with pytest.raises(WrongUsage):
            bootstrap(problem, solve(problem), scheme="nonsense")

    def test_nothing_free_and_two_rows(self) -> None:
        problem = make_problem(rows_of(TRACE), FitOptions(model="constant", fixed={"tau_0": 5.0}))
        assert np.all(bootstrap(problem, solve(problem), resamples=3).theta == 5.0)
        two = Trace({"B": np.ones(2), "S": np.ones(2), "T_ms": np.array([4.0, 6.0])})
        small = make_problem(rows_of(two), FitOptions(model="constant"))
        assert np.all(np.isfinite(bootstrap(small, solve(small), resamples=20).theta))


def test_blocks_never_cross_runs() -> None:
    n = 100
    trace = Trace(
        {
            "B": np.ones(n),
            "S": np.ones(n),
            "T_ms": np.ones(n),
            "t_s": np.tile(np.arange(50.0), 2),
            "run": np.repeat(np.array(["a", "b"], dtype=object), 50),
        }
    )
    unit = blocks(fit_data(trace))
    assert not set(unit[:50]) & set(unit[50:])


def test_a_resample_with_flat_directions_stays_where_the_first_order_says() -> None:
    """Decode steps of a line: three of the five parameters are free to move against each other. The steps of a resample
    move predictions by about their standard error, a part in a thousand, wherever the parameters go."""
    rng = np.random.default_rng(3)
    B = rng.integers(1, 65, 6000).astype(float)
    T = (17 + 0.6 * B) * np.exp(0.05 * rng.standard_normal(len(B)))
    problem = make_problem(
        rows_of(Trace({"B": B, "S": B, "T_ms": T, "t_s": np.arange(len(B)) * 0.1})), FitOptions("saturation")
    )
    solution = solve(problem)
    draws = bootstrap(problem, solution, resamples=200)
    steps = {"B": np.array([1.0, 16.0, 64.0]), "S": np.array([1.0, 16.0, 64.0])}
    T = np.stack([problem.model.latency_ms(theta, steps) for theta in draws.theta])
    moved = np.abs(np.log(T / problem.model.latency_ms(problem.theta(solution.z), steps)))
    assert moved.max() < 0.02
