"""Parameter draws that stay with a fit: their spread is that of the fit's parameters and predictions."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, make_problem
from latfit.fitting.solver.solve import solve
from latfit.fitting.uncertainty.bootstrap import from_covariance
from latfit.fitting.uncertainty.covariance import relative_error_at, uncertainty
from latfit.fitting.uncertainty.intervals import DoubtOptions
from latfit.model.fit_result import (
    STORED_DRAWS,
    FitResult,
    fit_from_json,
    latency_draws,
    parameter_draws,
    read_fit,
    write_fit,
)
from latfit.trace.table import Trace
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

    def test_flat_directions_do_not_move_predictions_away(self) -> None:
        """Decode steps: P_max, w_0 and the rates are free to move together, and the draws still predict the steps."""
        B = np.repeat(np.arange(1.0, 65.0), 3)
        noise = np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))
        fit = fit_trace(Trace({"B": B, "S": B, "T_ms": (8 + 0.05 * B) * noise}), FitOptions("saturation"))
        draws = parameter_draws(fit)
        assert draws is not None
        T = latency_draws(fit, draws, B, B)
        # two parameters from 192 steps of 1 %: a prediction is known to some 0.2 %
        assert np.max(np.std(np.log(T), axis=0)) < 0.01
        assert np.median(T, axis=0) == pytest.approx(fit.latency_ms(B, B), rel=0.005)

    def test_the_seed_decides(self) -> None:
        same, again, other = (fit_trace(TRACE, FitOptions("saturation", seed=seed)).draws for seed in (3, 3, 4))
        assert same == again
        assert same != other


class TestKept:
    def test_they_survive_the_file(self, fit: FitResult, tmp_path: Path) -> None:
        write_fit(tmp_path / "a.fit.json", fit)
        again = read_fit(tmp_path / "a.fit.json")
        assert np.array_equal(np.array(again.draws["values"]), np.array(fit.draws["values"]))
        assert (tmp_path / "a.fit.json").stat().st_size < 60_000

    def test_a_fit_without_them_says_none(self, fit: FitResult) -> None:
        document = json.loads(json.dumps(fit.to_json(), default=float))
        del document["draws"]
        assert parameter_draws(fit_from_json(document, "old")) is None

    def test_more_than_are_kept_start_again(self, fit: FitResult) -> None:
        few, many = parameter_draws(fit, 50, seed=1), parameter_draws(fit, 2 * STORED_DRAWS, seed=1)
        assert few is not None
        assert many is not None
        assert np.array_equal(few, many[:50])
        assert np.array_equal(many[:STORED_DRAWS], many[STORED_DRAWS:])


class TestMethods:
    """Intervals of one fit made in two ways: the data are many and the noise normal, so they agree."""

    def test_both_ways_agree(self, fit: FitResult) -> None:
        stated = fit.parameters["P_max"]
        assert stated.low is not None
        assert stated.high is not None
        width = stated.high - stated.low
        doubt = DoubtOptions("bootstrap", resamples=400)
        other = fit_trace(TRACE, FitOptions("saturation"), doubt=doubt).parameters["P_max"]
        assert other.value == stated.value
        assert other.low == pytest.approx(stated.low, abs=0.35 * width)
        assert other.high == pytest.approx(stated.high, abs=0.35 * width)

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

    def test_a_log_in_time_order_is_resampled_in_blocks(self) -> None:
        logged = TRACE.with_columns(t_s=np.arange(len(TRACE), dtype=float))
        assert (
            fit_trace(logged, FitOptions("saturation"), doubt=DoubtOptions(resamples=40)).bootstrap["scheme"] == "block"
        )

    def test_resamples_stay_near_the_estimate(self) -> None:
        """172 steps in 43 cells, k_S unseen: every resample ends in the valley of the estimate, none at the edge of the
        search range."""
        fit = fit_trace(
            planted_trace(0.02, repeats=4, seed=3), FitOptions("saturation"), doubt=DoubtOptions(resamples=300)
        )
        for name in ("P_max", "k_B"):
            low, high = fit.bootstrap["parameters"][name]
            assert 0.7 * fit.parameters[name].value < low < high < 1.4 * fit.parameters[name].value

    @pytest.mark.parametrize(
        "options",
        [DoubtOptions("none"), DoubtOptions(scheme="none"), DoubtOptions(resamples=5), DoubtOptions(resamples=-1)],
    )
    def test_what_cannot_be_is_wrong_usage(self, options: DoubtOptions) -> None:
        with pytest.raises(WrongUsage):
            fit_trace(TRACE, FitOptions("saturation"), doubt=options)
