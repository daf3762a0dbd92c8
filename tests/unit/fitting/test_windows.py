"""Rows that are means over windows: a planted curve comes back where the spread within windows is known, and is not
claimed where it is not."""

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.stats import FloatArray
from latfit.trace.table import Trace

STEPS = 200


def corner(B: FloatArray) -> FloatArray:
    """A roofline whose corner lies at 16 requests, in ms."""
    return np.asarray(2 + 0.5 * (16.0**4 + B**4) ** 0.25)


def dense(D: FloatArray, P: FloatArray) -> FloatArray:
    """A corner at 64 tokens, and 2 ms more where a step holds prefill."""
    return np.asarray(3 + 0.2 * (64.0**4 + (D + P) ** 4) ** 0.25 + 0.05 * D + 2.0 * (P > 0))


def decode_windows(rows: int = 120, noise: float = 0.02, seed: int = 0) -> Trace:
    """Means over steps whose batch sizes are Poisson's, with mean sizes from 4 to 64."""
    rng = np.random.default_rng(seed)
    found = []
    for mean in np.exp(rng.uniform(np.log(4), np.log(64), rows)):
        B = np.maximum(rng.poisson(mean, STEPS), 1).astype(float)
        found.append((B.mean(), float((corner(B) * np.exp(rng.normal(0, noise, STEPS))).mean()), B.std()))
    B, T, spread = np.array(found).T
    return Trace({"B": B, "S": B, "T_ms": T, "B_sd": spread, "S_sd": spread})


def mixed_windows(rows: int = 120, seed: int = 1) -> Trace:
    """The same with prefill of 128 to 1,024 tokens in some of the steps."""
    rng = np.random.default_rng(seed)
    found = []
    for mean, share, size in zip(
        np.exp(rng.uniform(np.log(4), np.log(64), rows)),
        rng.uniform(0.02, 0.5, rows),
        rng.choice([128, 256, 512, 1024], rows),
        strict=True,
    ):
        D = np.maximum(rng.poisson(mean, STEPS), 1).astype(float)
        n = (rng.random(STEPS) < share).astype(float)
        P = n * np.round(size * np.exp(rng.normal(0, 0.3, STEPS)))
        T = dense(D, P) * np.exp(rng.normal(0, 0.02, STEPS))
        found.append((*(x.mean() for x in (D + n, D + P, T, n, P)), (D + n).std(), (D + P).std()))
    names = ("B", "S", "T_ms", "prefill_requests", "prefill_tokens", "B_sd", "S_sd")
    return Trace(dict(zip(names, np.array(found).T, strict=True)))


AT = np.array([8.0, 12.0, 16.0, 20.0, 32.0, 60.0])


def test_a_curve_comes_back_from_windows_and_not_from_their_means() -> None:
    trace = decode_windows()
    fitted = fit_trace(trace, FitOptions("roofline"))
    off = fitted.latency_ms(B=AT, S=AT) / corner(AT) - 1
    assert np.max(np.abs(off)) < 0.012
    as_steps = fit_trace(trace.only(["B", "S", "T_ms"]), FitOptions("roofline"))
    naive = as_steps.latency_ms(B=AT, S=AT) / corner(AT) - 1
    # half the curvature times the variance, which is B
    h = 0.1
    bend = (corner(AT + h) - 2 * corner(AT) + corner(AT - h)) / h**2
    np.testing.assert_allclose(naive[1:4], (0.5 * bend * AT / corner(AT))[1:4], atol=0.008)
    assert np.max(np.abs(naive)) > 0.017


@pytest.mark.parametrize("columns", [("B_sd", "S_sd"), ("B_sd",), ()])
def test_prefill_in_some_of_the_steps_is_told_by_its_counts(columns: tuple[str, ...]) -> None:
    trace = mixed_windows()
    kept = ["B", "S", "T_ms", *(("prefill_requests", "prefill_tokens") if columns else ()), *columns]
    found = fit_trace(trace.only(kept), FitOptions("roofline"))
    D, P = np.array([8.0, 16.0, 32.0, 16.0, 16.0, 32.0]), np.array([0.0, 0.0, 0.0, 128.0, 512.0, 256.0])
    n = (P > 0).astype(float)
    known = {"prefill_requests": n, "prefill_tokens": P} if columns else {}
    off = np.abs(found.latency_ms(B=D + n, S=D + P, **known) / dense(D, P) - 1)
    if columns:
        assert off.max() < 0.065
    else:
        assert off.max() > 0.1


def test_without_a_spread_only_what_is_linear_is_claimed() -> None:
    trace = decode_windows().only(["B", "S", "T_ms"])
    found = fit_trace(trace)
    assert found.model in ("linear", "constant")
    (warning,) = [each for each in found.warnings if each.code == "window_means"]
    assert "only what is linear in B and S is identifiable" in warning.message
    assert "B_sd" in warning.remedy
    named = fit_trace(trace, FitOptions("roofline"))
    assert "the bends of roofline may be those of the windows" in named.warnings[0].message


def test_a_correction_of_windows_is_refused() -> None:
    with pytest.raises(WrongUsage, match=r"means over windows.*\+correction"):
        fit_trace(decode_windows(30), FitOptions("roofline+correction"))


def test_a_fit_of_windows_is_good_as_far_as_their_steps_reached() -> None:
    trace = mixed_windows()
    fit = fit_trace(trace, FitOptions(model="linear"))
    prompts = trace.floats("prefill_tokens") / np.clip(trace.floats("prefill_requests"), 1e-9, 1)
    assert fit.domain["S"][1] > np.max(prompts) > np.max(trace.floats("S"))
