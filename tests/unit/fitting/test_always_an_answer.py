"""Data that carry little still get the best model that they carry, and a sentence about what they cannot tell."""

import numpy as np
import pytest
from benchmarks.planted import a_system, scored

from latfit.fitting import keeps_out
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.model.fit_parts import Baseline, CrossValidation, Diagnostics, Errors, HeldOutErrors
from latfit.stats import FloatArray
from latfit.trace.table import Trace
from tests.conftest import REFERENCE
from tests.unit.planning.test_plan import fit_with

GRID_B = np.repeat(2.0 ** np.arange(6), 8)
GRID_S = GRID_B * np.tile(2.0 ** np.arange(8), 6)
LINE = 3 + 0.1 * GRID_B + 0.01 * GRID_S


def steps(B: FloatArray, S: FloatArray, T: FloatArray, **more: FloatArray) -> Trace:
    return Trace({"B": np.asarray(B, float), "S": np.asarray(S, float), "T_ms": np.asarray(T, float), **more})


def noisy(T: FloatArray, sigma: float = 0.02, seed: int = 0) -> FloatArray:
    return np.asarray(T * np.exp(np.random.default_rng(seed).normal(0, sigma, len(T))))


UP = np.arange(1.0, 41.0)
CASES = {
    "exactly a line": (steps(GRID_B, GRID_S, LINE), "linear"),
    "exactly constant": (steps(GRID_B, GRID_S, np.full(48, 5.0)), "constant"),
    "one batch size": (steps(np.ones(40), UP, noisy(3 + 0.01 * UP)), "linear"),
    "decode only": (steps(UP, UP, noisy(3 + 0.1 * UP)), "linear"),
    "collinear": (steps(GRID_B, 4 * GRID_B, noisy(3 + 0.1 * GRID_B)), "linear"),
    "one cell": (steps(np.full(30, 4), np.full(30, 64), noisy(np.full(30, 5.0))), "constant"),
    "ten rows": (steps(GRID_B[:40:4], GRID_S[:40:4], noisy(LINE[:40:4])), "linear"),
    "two rows": (steps(np.array([1, 2]), np.array([1, 2]), np.array([5.0, 6.0])), "constant"),
    "tiny times": (steps(GRID_B, GRID_S, 1e-9 * noisy(LINE)), "linear"),
    "huge times": (steps(GRID_B, GRID_S, 1e9 * noisy(LINE, seed=3)), "linear"),
    "no context": (steps(GRID_B, GRID_S, noisy(LINE), context_tokens=np.zeros(48)), "linear"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_trace_gets_the_best_model_that_it_carries(case: str) -> None:
    trace, model = CASES[case]
    fit = fit_trace(trace)
    assert fit.status.ok
    assert fit.model in ((model, "hinge", "quadratic") if model == "linear" else (model,))
    predicted = fit.latency_ms(
        trace["B"], trace["S"], **({"context_tokens": np.zeros(48)} if case == "no context" else {})
    )
    assert np.median(np.abs(predicted / trace["T_ms"] - 1)) < 0.1
    assert fit.intervals


@pytest.mark.parametrize("slope", [-0.1, 0.1])
def test_falling_and_spoilt_latencies_are_fitted(slope: float) -> None:
    T = noisy(10 + slope * GRID_B)
    T[::4] *= 20
    fit = fit_trace(steps(GRID_B, GRID_S, T))
    assert fit.status.ok
    assert any(caution.code == "large_error" for caution in fit.warnings)


@pytest.mark.parametrize(("case", "said"), [("one cell", "same B and S"), ("exactly constant", "constant")])
def test_a_constant_says_what_the_data_lack(case: str, said: str) -> None:
    for options in (FitOptions(), FitOptions("saturation")):
        fit = fit_trace(CASES[case][0], options)
        assert fit.model == "constant"
        (caution,) = [caution for caution in fit.warnings if caution.code == "check_model"]
        assert said in caution.message


def test_far_above_the_noise_a_fit_stays_out_and_at_the_noise_the_noise_is_named() -> None:
    wave = noisy(10 * np.tile([1.0, 8.0], 240), 0.02)
    B = np.repeat(2.0 ** (np.arange(48) % 6), 10)
    S = B * np.repeat(2.0 ** (np.arange(48) // 6), 10)
    odd = noisy(np.where(np.log2(S).astype(int) % 2, 10.0, 40.0), 0.02)
    kept_out = keeps_out(fit_trace(steps(B, S, odd), FitOptions("linear")))
    assert kept_out is not None
    assert "repeats" in kept_out.message
    loud = fit_trace(steps(B, S, wave))
    assert any(caution.code == "noise_floor" for caution in loud.warnings)
    assert keeps_out(loud) is None


def errors(mape_pct: float) -> HeldOutErrors:
    return HeldOutErrors(5, mape_pct, mape_pct, mape_pct, 1.0, [mape_pct], mape_pct, None)


@pytest.mark.parametrize(
    ("held_out", "line_held_out", "beats", "stays_out"),
    [(20.0, 21.0, True, ""), (20.0, 19.0, False, ""), (20.0, 9.0, False, "linear baseline 9 %"), (None, 0.5, True, "")],
)
def test_held_out_errors_count_and_not_those_of_fitted_rows(
    held_out: float | None, line_held_out: float, beats: bool, stays_out: str
) -> None:
    """In sample the model is at 2 %, the line at 3 %; they decide only where the model has no held-out error."""
    scores = [CrossValidation(errors=None if each is None else errors(each)) for each in (held_out, line_held_out)]
    baselines = {"linear": Baseline(mape_pct=3.0, cv=scores[1])}
    metrics, noise = Errors(50, mape_pct=2.0), Diagnostics(lack_of_fit={"noise_floor_pct": 19.0})
    fit = fit_with(
        REFERENCE.tolist(), metrics=metrics, cross_validation=scores[0], baselines=baselines, diagnostics=noise
    )
    assert fit.beats_linear is beats
    why = keeps_out(fit)
    assert (why is not None) == bool(stays_out)
    assert why is None or stays_out in why.message
    allowed = keeps_out(fit, max_error_pct=10.0)
    assert (allowed is not None) == (held_out is not None)
    assert allowed is None or "20 %, above the allowed 10 %" in allowed.message


def test_a_line_that_is_far_better_than_a_constant_is_named() -> None:
    fit = fit_trace(steps(GRID_B, GRID_S, noisy(1 + 0.5 * GRID_B)), FitOptions("constant"))
    (caution,) = (each for each in fit.warnings if each.code == "line_as_good")
    assert "better" in caution.message


@pytest.mark.nightly
def test_planted_systems_are_answered_nearly_as_well_as_could_be() -> None:
    found = [scored(a_system(seed)) for seed in (2, 3, 5)]
    assert not [each for each in found if each.failure]
    assert np.median([each.ratio for each in found]) < 1.1
