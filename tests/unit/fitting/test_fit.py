"""Fits against planted truth, second methods and measured data."""

import warnings

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.errors import WrongUsage
from latfit.fitting.covariance import uncertainty
from latfit.fitting.data import rows_of
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions, collapsed, make_problem, weighted_counts
from latfit.fitting.solver.solve import solve
from latfit.model.fit_result import FitStatus
from latfit.model.registry import FAMILY
from latfit.trace.table import Trace
from tests.conftest import REFERENCE, planted_trace

NAMES = [p.name for p in FAMILY["saturation"].parameters]


class TestPlantedTruth:
    def test_noise_free_data_give_the_parameters_back(self) -> None:
        fit = fit_trace(planted_trace(0.0), FitOptions("saturation"))
        assert fit.theta == pytest.approx(REFERENCE, rel=1e-4)
        assert (fit.metrics.mape_pct or np.nan) < 1e-4

    def test_intervals_cover_as_often_as_they_say(self) -> None:
        """60 data sets, 7 parameters: hits are Binomial(420, p) up to correlation within a data set; with p = 0.95 and
        the variance of 60 independent sevens at worst, four standard errors are 4 * sqrt(0.95 * 0.05 / 60)."""
        hits = total = 0
        for seed in range(60):
            problem = make_problem(rows_of(planted_trace(0.03, repeats=3, seed=seed)), FitOptions("saturation"))
            estimates = uncertainty(problem, solve(problem)).estimates
            for name, truth in zip(NAMES, REFERENCE, strict=True):
                estimate = estimates[name]
                if estimate.identified and not estimate.fixed:
                    assert estimate.low is not None
                    assert estimate.high is not None
                    total += 1
                    hits += estimate.low <= truth <= estimate.high
        assert total >= 60 * 6
        assert abs(hits / total - 0.95) < 4 * np.sqrt(0.95 * 0.05 / 60)

    def test_outliers_move_a_robust_fit_little(self) -> None:
        trace = planted_trace(0.02, repeats=5, seed=3)
        slow = np.random.default_rng(4).random(len(trace)) < 0.03
        spoilt = trace.with_columns(T_ms=np.where(slow, trace["T_ms"] * 10, trace["T_ms"]))
        errors = {
            loss: np.abs(
                np.log(
                    fit_trace(spoilt, FitOptions("saturation", loss=loss)).latency_ms(trace["B"], trace["S"])
                    / trace["T_ms"]
                )
            ).mean()
            for loss in ("linear", "huber", "soft_l1")
        }
        assert errors["huber"] < 0.03
        assert errors["soft_l1"] < 0.03
        assert errors["linear"] > 2 * errors["huber"]


class TestOptions:
    def test_fixed_parameters_stay(self) -> None:
        fit = fit_trace(planted_trace(0.02, repeats=3), FitOptions("saturation", fixed={"P_max": 55.0, "tau_0": 0.0}))
        assert fit.parameters["P_max"].value == 55.0
        assert fit.parameters["P_max"].fixed
        assert fit.parameters["tau_0"].value == 0.0

    def test_bounds_hold(self) -> None:
        fit = fit_trace(
            planted_trace(0.02, repeats=3), FitOptions("saturation", bounds={"k_B": (0.3, 0.5), "tau_0": (5.0, 6.0)})
        )
        rounding = 1e-12
        assert 0.3 - rounding <= fit.parameters["k_B"].value <= 0.5 + rounding
        assert 5.0 - rounding <= fit.parameters["tau_0"].value <= 6.0 + rounding

    @pytest.mark.parametrize(
        "options",
        [
            FitOptions(model="nonsense"),
            FitOptions("saturation", loss="nonsense"),
            FitOptions("saturation", residuals="nonsense"),
            FitOptions("saturation", fixed={"nonsense": 1.0}),
            FitOptions("saturation", bounds={"nonsense": (0, 1)}),
            FitOptions("saturation", fixed={"k_B": 1.0}, bounds={"k_B": (0, 1)}),
            FitOptions("saturation", fixed={"k_B": 0.0}),
            FitOptions("saturation", fixed={"tau_0": -1.0}),
        ],
    )
    def test_what_cannot_be_is_wrong_usage(self, options: FitOptions) -> None:
        with pytest.raises(WrongUsage):
            fit_trace(planted_trace(0.0), options)


def steps(B: list[float], S: list[float], T: list[float]) -> Trace:
    return Trace({"B": np.array(B, float), "S": np.array(S, float), "T_ms": np.array(T, float)})


class TestHonesty:
    """Data that cannot carry the model: a status that says so, no number with false digits, no library's warning."""

    @pytest.mark.parametrize(
        ("trace", "status"),
        [
            (steps([1], [1], [5]), FitStatus.TOO_FEW_ROWS),
            (steps([1, 2, 4], [1, 2, 4], [5, 6, 7]), FitStatus.TOO_FEW_ROWS),
            (steps([4] * 20, [64] * 20, list(range(5, 25))), FitStatus.ONE_CELL),
            (steps(list(range(1, 21)), list(range(1, 21)), [5] * 20), FitStatus.CONSTANT_LATENCY),
        ],
    )
    def test_unusable_data(self, trace: Trace, status: FitStatus) -> None:
        """A user who holds a parameter means this model and no other."""
        fit = fit_trace(trace, FitOptions("saturation", fixed={"P_max": 60.0}))
        assert fit.status is status
        assert not fit.status.ok
        assert not any(each.identified for each in fit.parameters.values())

    def test_decode_only_cannot_tell_requests_from_tokens(self) -> None:
        B = np.repeat(np.arange(1.0, 65.0), 3)
        fit = fit_trace(
            Trace({"B": B, "S": B, "T_ms": (8 + 0.05 * B) * np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))}),
            FitOptions("saturation"),
        )
        assert fit.status is FitStatus.PARTLY_IDENTIFIED
        assert not fit.parameters["tau_B"].identified
        assert not fit.parameters["tau_S"].identified
        assert any({"tau_B", "tau_S"} <= set(group) for group in fit.identifiability.unidentified)
        assert any("prefill" in warning.remedy for warning in fit.warnings)
        assert fit.latency_ms(np.array([32.0]), np.array([32.0]))[0] == pytest.approx(9.6, rel=0.01)

    def test_one_batch_size_only(self) -> None:
        S = np.repeat(2.0 ** np.arange(12), 4)
        T = 3 + 0.02 * S * np.exp(np.random.default_rng(0).normal(0, 0.01, len(S)))
        fit = fit_trace(Trace({"B": np.ones_like(S), "S": S, "T_ms": T}), FitOptions("saturation"))
        assert not fit.parameters["k_B"].identified
        assert fit.parameters["k_B"].low is None

    @given(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10**6), st.floats(1e-6, 1e9)), min_size=1, max_size=60)
    )
    def test_any_steps_give_a_result_without_a_warning_of_a_library(self, rows: list[tuple[int, int, float]]) -> None:
        B, extra, T = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fit = fit_trace(Trace({"B": B, "S": B + extra, "T_ms": T}), FitOptions("saturation"))
        assert fit.status.sentence
        if fit.status.ok:
            assert np.all(np.isfinite(fit.latency_ms(B, B + extra)))


def test_noisy_cells_weigh_less_by_their_shrunk_variance() -> None:
    """Six rows in each cell, ln T off by 0.1 and by 0.2: sums of squares of 0.06 and 0.24 of 5 degrees of freedom,
    0.03 in all, so variances of (0.06 + 4 * 0.03) / 9 and twice that."""
    off = np.tile([1.0, -1.0], 6) * np.repeat([0.1, 0.2], 6)
    B = np.repeat([1.0, 4.0], 6)
    rows = collapsed(rows_of(Trace({"B": B, "S": B, "T_ms": 5 * np.exp(off)})), FAMILY["linear"])
    quiet, noisy = (weighted_counts(rows, "variance")[rows.steps["B"] == size].sum() for size in (1.0, 4.0))
    assert (quiet, noisy) == pytest.approx((8.0, 4.0))
