"""Steps far from those beside: planted ones are found and only they; fast ones are left out, slow ones kept."""

import numpy as np
import pytest
from numpy.typing import NDArray

from latfit.fitting.checking.contradictions import contradictions
from latfit.fitting.data import fit_data
from latfit.fitting.fit import fit_trace
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import planted_trace


def saturating(B: FloatArray, S: FloatArray) -> FloatArray:
    return np.asarray(4 + 0.02 * B + S / 60 / (1 - np.exp(-0.01 * S)))


def falling(B: FloatArray, S: FloatArray) -> FloatArray:
    return 5 + 400 / S + 0.01 * B


def stepped(B: FloatArray, S: FloatArray) -> FloatArray:
    """Fifteen times as long from 200 tokens on, and again from 16 requests on."""
    return np.where(S > 200, 150.0, 10.0) * np.where(B >= 16, 15.0, 1.0)


TRUTHS = {"saturating": saturating, "falling": falling, "stepped": stepped}


def grid(truth: str, noise: float, seed: int = 0) -> Trace:
    B, S = np.meshgrid(np.arange(1.0, 65.0, 3.0), np.unique(np.round(2 ** np.arange(0.0, 13.0, 0.5))))
    B, S = B[S >= B], S[S >= B]
    scatter = np.exp(np.random.default_rng(seed).normal(0, noise, len(B)))
    return Trace({"B": B, "S": S, "T_ms": TRUTHS[truth](B, S) * scatter})


def found_in(trace: Trace) -> NDArray[np.intp]:
    found = contradictions(fit_data(trace))
    return np.sort(found.rows) if found else np.empty(0, dtype=np.intp)


def with_planted(trace: Trace, factors: list[float], seed: int = 1) -> tuple[Trace, NDArray[np.intp]]:
    rows = np.sort(np.random.default_rng(seed).choice(len(trace), len(factors), replace=False))
    T = trace.floats("T_ms").copy()
    T[rows] *= factors
    return trace.with_columns(T_ms=T), rows


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("noise", [0.0, 0.03, 0.2])
def test_no_step_of_a_latency_that_falls_or_jumps_is_accused(truth: str, noise: float) -> None:
    assert len(found_in(grid(truth, noise))) == 0
    one = grid(truth, noise)
    line = one.select(one.floats("B") == 1)
    assert len(found_in(line)) == 0


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_planted_steps_are_found_and_only_they(truth: str, noise: float) -> None:
    trace, planted = with_planted(grid(truth, noise), [12.0, 1 / 12, 1000.0, 1 / 1000, 50.0, 1 / 50])
    np.testing.assert_array_equal(found_in(trace), planted)


def test_the_rest_is_fitted_as_without_them_and_they_are_named() -> None:
    clean = planted_trace(noise=0.03)
    trace, planted = with_planted(clean, [1 / 1000, 1 / 40, 1 / 15], seed=6)
    rest = fit_trace(clean.select(np.delete(np.arange(len(clean)), planted)))
    found = fit_trace(trace)
    assert (found.model, found.cross_validation.mape_pct) == (rest.model, rest.cross_validation.mape_pct)
    assert {name: each.value for name, each in found.parameters.items()} == {
        name: each.value for name, each in rest.parameters.items()
    }
    (warning,) = [each for each in found.warnings if each.code == "outliers"]
    told = found.diagnostics.contradictions
    assert told is not None
    assert (told["left_out"], told["kept"]) == (3, 0)
    assert warning.message.startswith("3 steps are far from similar steps: ")
    for row in planted:
        step = f"B={clean.floats('B')[row]:g}, S={clean.floats('S')[row]:,g} took "
        assert step in warning.message
    expected = {(step["B"], step["S"]): step["expected_ms"] for step in told["steps"]}
    for row in planted:
        B, S, T = (float(clean.floats(name)[row]) for name in ("B", "S", "T_ms"))
        assert T / 2.5 < expected[B, S] < 2.5 * T


@pytest.mark.parametrize(("factors", "begin"), [([0.01], "1 step is far"), ([0.01] * 5, "5 steps are far")])
def test_the_warning_counts_steps(factors: list[float], begin: str) -> None:
    data = fit_data(with_planted(grid("saturating", 0.03), factors)[0])
    found = contradictions(data)
    assert found is not None
    (warning,) = found.warnings(data)
    assert warning.message.startswith(begin)
    assert ("; 2 more." in warning.message) == (len(factors) == 5)


def test_repeats_speak_for_their_cell() -> None:
    trace = planted_trace(noise=0.03, repeats=5)
    T = trace.floats("T_ms").copy()
    T[[12, 14]] *= 100
    T[33] /= 100
    found = contradictions(fit_data(trace.with_columns(T_ms=T)))
    assert found is not None
    assert dict(zip(found.rows.tolist(), found.impossible.tolist(), strict=True)) == {12: False, 14: False, 33: True}
