"""Steps that cannot tell what is asked of them: an honest status or an error, each with what to measure. Warnings of
libraries are errors in every test."""

import numpy as np
import pytest

from latfit.errors import BadInput
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.fit_result import FitStatus
from latfit.stats import FloatArray
from latfit.trace.table import WEIGHT, Trace
from tests.conftest import planted_trace, rich_design


def noisy(B: FloatArray, S: FloatArray, T: FloatArray) -> Trace:
    """Steps whose latency has 2 % noise."""
    noise = np.exp(np.random.default_rng(0).normal(0, 0.02, len(B)))
    return Trace({"B": B, "S": S, "T_ms": T * noise})


def one_B() -> Trace:
    S = np.repeat(2.0 ** np.arange(2, 12), 4)
    return noisy(np.full_like(S, 4.0), S, 3 + 0.02 * S)


def one_S() -> Trace:
    B = np.repeat(np.arange(1.0, 65.0), 3)
    return noisy(B, np.full_like(B, 512.0), 3 + 0.2 * B)


def all_saturated() -> Trace:
    B, S = (np.repeat(axis.ravel(), 4) for axis in np.meshgrid([64.0, 128.0, 256.0], [2048.0, 4096.0, 8192.0, 16384.0]))
    return noisy(B, S, 4 + S / 60 + 0.02 * B)


def collinear() -> Trace:
    B = np.repeat(np.arange(1.0, 65.0), 3)
    return noisy(B, B, 8 + 0.05 * B)


CASES = {
    "one B": (one_B(), "saturation", {"tau_0", "P_max", "k_B", "tau_B"}),
    "one B, line": (one_B(), "linear", {"tau_0", "tau_B"}),
    "one S": (one_S(), "saturation", {"tau_0", "P_max", "k_S", "tau_S"}),
    "one S, line": (one_S(), "linear", {"tau_0", "tau_S"}),
    "saturated": (all_saturated(), "saturation", {"P_max", "k_B", "k_S"}),
    "S = B": (collinear(), "saturation", {"P_max", "k_S", "tau_B", "tau_S"}),
    "S = B, line": (collinear(), "linear", {"tau_B", "tau_S"}),
}
"""Steps, a model, and the parameters that the steps cannot tell."""


@pytest.mark.parametrize(("trace", "model", "unknown"), CASES.values(), ids=CASES.keys())
def test_what_the_steps_cannot_tell_is_named(trace: Trace, model: str, unknown: set[str]) -> None:
    fit = fit_trace(trace, FitOptions(model=model))
    assert fit.status is FitStatus.PARTLY_IDENTIFIED
    for name in unknown:
        assert not fit.parameters[name].identified, name
        assert fit.parameters[name].std_error is None
    assert {name for group in fit.identifiability.unidentified for name in group} >= unknown
    inside = fit.latency_ms(trace["B"], trace["S"])
    assert np.median(np.abs(inside / trace["T_ms"] - 1)) < 0.02


def test_one_huge_outlier_leaves_the_parameters_where_they_were() -> None:
    clean = planted_trace(0.02, repeats=4)
    T = clean["T_ms"].copy()
    T[10] *= 1e6
    before, after = (
        fit_trace(clean, FitOptions("saturation")),
        fit_trace(clean.with_columns(T_ms=T), FitOptions("saturation")),
    )
    for name, known in before.parameters.items():
        if known.identified and known.std_error:
            assert abs(after.parameters[name].value - known.value) < 1.5 * known.std_error, name


class TestWeights:
    def test_rows_of_weight_zero_are_as_if_they_were_not_there(self) -> None:
        trace = planted_trace(0.02, repeats=3)
        weights = np.where(np.arange(len(trace)) % 5 == 0, 0.0, 1.0)
        fit = fit_trace(trace.with_columns(**{WEIGHT: weights}), FitOptions("saturation"))
        without = fit_trace(trace.select(weights > 0), FitOptions("saturation"))
        assert fit.metrics.n == without.metrics.n
        assert fit.theta == pytest.approx(without.theta, rel=1e-9)

    @pytest.mark.parametrize("weight", [0.0, -1.0, np.inf])
    def test_weights_that_count_nothing_are_bad_input(self, weight: float) -> None:
        B, S = rich_design()
        with pytest.raises(BadInput, match=WEIGHT):
            fit_trace(
                Trace({"B": B, "S": S, "T_ms": 4 + 0.01 * S, WEIGHT: np.full(len(B), weight)}), FitOptions("saturation")
            )


def test_a_line_that_misses_points_at_the_model_that_does_not() -> None:
    fit = fit_trace(planted_trace(0.02, repeats=3), FitOptions(model="linear"))
    (caution,) = [caution for caution in fit.warnings if caution.code == "large_error"]
    assert "--model saturation" in caution.remedy
