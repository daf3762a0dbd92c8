"""A finished fit applied: predictions, their intervals, and errors on unseen steps."""

import numpy as np
import pytest
from msgspec import structs

from latfit.errors import BadInput
from latfit.fitting.fit import fit_trace
from latfit.fitting.prediction import NO_PREFILL, evaluate, known_levels, predict, typical_ms
from latfit.fitting.problem import FitOptions
from latfit.fitting.sensitivity import sensitivity_of
from latfit.model.fit_result import FitResult
from latfit.trace.table import Trace
from tests.conftest import planted_trace


@pytest.fixture(scope="module")
def fit() -> FitResult:
    return fit_trace(planted_trace(0.1, repeats=40, seed=1), FitOptions("saturation"))


@pytest.fixture(scope="module")
def decode() -> FitResult:
    """Decode steps alone: only tau_B + tau_S = 0.05 is told."""
    B = np.repeat(np.arange(1.0, 65.0), 8)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.02, len(B)))
    return fit_trace(Trace({"B": B, "S": B, "T_ms": (8 + 0.05 * B) * noise}), FitOptions(model="linear"))


@pytest.fixture(scope="module")
def cached() -> FitResult:
    """Decode and prefill at 100, 200 or 400 cached tokens a request, 200 being the median."""
    B = np.repeat(np.arange(1.0, 65.0), 6)
    S = B + np.tile([0.0, 0.0, 0.0, 100.0, 300.0, 900.0], 64)
    context = B * np.tile([100.0, 200.0, 400.0], 128)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.01, len(B)))
    T = (5 + 0.02 * B + 0.01 * S + 2e-4 * context) * noise
    return fit_trace(Trace({"B": B, "S": S, "T_ms": T, "context_tokens": context}), FitOptions(model="context"))


def test_intervals_hold_as_often_as_they_say_on_new_steps(fit: FitResult) -> None:
    fresh = planted_trace(0.1, repeats=40, seed=2)
    found = evaluate(fit, fresh)
    assert set(found["interval_coverage"]) == {f"{level:g}" for level in known_levels(fit)}
    for level, share in found["interval_coverage"].items():
        # 1720 new steps and about as many calibration scores: binomial errors of both add up
        error = np.sqrt(2 * float(level) * (1 - float(level)) / len(fresh))
        assert abs(share - float(level)) < 4 * error


def test_errors_are_those_of_the_planted_noise(fit: FitResult) -> None:
    """Half-normal mean of 10 % noise is 8 %: E|e^z - 1| of z ~ N(0, 0.1), to first order 0.1 sqrt(2/pi)."""
    found = evaluate(fit, planted_trace(0.1, repeats=40, seed=3))
    assert found["metrics"]["mape_pct"] == pytest.approx(10 * np.sqrt(2 / np.pi), rel=0.06)
    assert found["outside_domain"] == 0
    assert sum(score["n"] for score in found["by_phase"].values()) == 1720


def test_a_column_that_the_fit_used_and_nothing_stands_for_has_to_be_given(cached: FitResult) -> None:
    with pytest.raises(BadInput, match="context_tokens"):
        typical_ms(structs.replace(cached, typical={}), Trace({"B": np.ones(1), "S": np.ones(1)}))


class TestDecodeOnly:
    """A fit of decode steps alone: prefill is flagged, has no interval, and the flag survives the file."""

    def test_prefill_is_not_told(self, decode: FitResult) -> None:
        assert decode.identifiability.prefill is False
        again = FitResult.from_json(decode.to_json(), "memory")
        found = predict(again, Trace({"B": np.array([8.0, 8.0]), "S": np.array([8.0, 64.0])}))
        assert found.why_outside.tolist() == ["", NO_PREFILL]
        assert np.isfinite(found.low).tolist() == np.isfinite(found.high).tolist() == [True, False]

    def test_evaluation_counts_it(self, decode: FitResult) -> None:
        B, S = np.array([8.0, 8.0, 16.0]), np.array([8.0, 64.0, 512.0])
        found = evaluate(decode, Trace({"B": B, "S": S, "T_ms": 8 + 0.05 * B}))
        assert found["outside_domain"] == 2
        assert any(note.startswith("2 steps contain prefill") for note in found["notes"])

    def test_a_request_counts_with_its_token(self, decode: FitResult) -> None:
        """Only tau_B + tau_S is told, planted at 0.05: the slope along S = B, whichever of the two the fit gave it."""
        grid = np.array([4.0, 32.0])
        found = sensitivity_of(decode, grid, grid, {})
        assert np.diag(found.slopes["dT_dB"]) == pytest.approx([0.05, 0.05], rel=0.05)
        assert np.all(np.isnan(found.slopes["dT_dS"]))


class TestContext:
    """Steps that name no context have the trace's; those that name one keep it."""

    def test_steps_that_name_none_have_the_typical_one(self, cached: FitResult) -> None:
        # a decode step with a prefill request beside it has one request less to read the cache for
        assert cached.typical["context_tokens"] == pytest.approx(200, rel=0.05)
        bare = Trace({"B": np.array([32.0]), "S": np.array([32.0])})
        found = predict(cached, bare)
        assert found.T_ms == pytest.approx([5 + 0.64 + 0.32 + 2e-4 * 6400], rel=0.02)
        assert any("median context" in note for note in found.notes)
