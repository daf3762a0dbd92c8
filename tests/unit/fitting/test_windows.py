"""Rows that are means over windows: a planted curve comes back where the spread within windows is known, and is not
claimed where it is not."""

from collections.abc import Callable

import numpy as np
import pytest

from latfit.errors import WrongUsage
from latfit.fitting.fit import fit_trace
from latfit.fitting.problem import FitOptions
from latfit.fitting.windows import Windows
from latfit.stats import FloatArray
from latfit.trace.clean import clean
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


def test_whole_numbers_are_steps_unless_a_user_says_otherwise() -> None:
    B = np.repeat(np.arange(1.0, 41.0), 3)
    trace = Trace({"B": B, "S": B, "T_ms": corner(B) * np.exp(np.random.default_rng(0).normal(0, 0.02, len(B)))})
    codes = [[each.code for each in fit_trace(trace, FitOptions(window_means=said)).warnings] for said in (False, True)]
    assert ["window_means" in found for found in codes] == [False, True]
    told = trace.with_columns(window_ms=np.full(len(B), 1000.0))
    assert "window_means" in [each.code for each in fit_trace(told).warnings]


def linear(steps: dict[str, FloatArray]) -> FloatArray:
    return np.asarray(3 + 0.2 * steps["B"] + 0.01 * steps["S"])


def squares(steps: dict[str, FloatArray]) -> FloatArray:
    return np.asarray(1 + steps["B"] ** 2 + 0.5 * steps["B"] * steps["S"] + 0.1 * steps["S"] ** 2)


@pytest.mark.parametrize("formula", [linear, squares])
def test_the_mean_over_a_window_is_exact_to_second_order(
    formula: Callable[[dict[str, FloatArray]], FloatArray],
) -> None:
    B, S = np.array([20.0, 40.0]), np.array([120.0, 400.0])
    B_sd, S_sd = np.array([3.0, 5.0]), np.array([20.0, 60.0])
    found = Windows({"B": B, "S": S}, B_sd, S_sd).log_excess(formula)  # type: ignore[arg-type]
    if formula is linear:
        np.testing.assert_allclose(found, 0, atol=1e-12)
        return
    # prefill is independent of decode, so the covariance of B and S is the variance of B
    mean = 1 + B**2 + B_sd**2 + 0.5 * (B * S + B_sd**2) + 0.1 * (S**2 + S_sd**2)
    np.testing.assert_allclose(np.exp(found), mean / squares({"B": B, "S": S}), rtol=1e-12)


def test_idle_windows_are_dropped_by_name() -> None:
    trace = decode_windows(20)
    B = trace.floats("B").copy()
    B[:4] = [0.0, 0.2, 0.9, 0.99]
    cleaned = clean(trace.with_columns(B=B, S=B))
    assert dict(cleaned.dropped) == {"idle": 4}
    single = Trace({name: trace[name][:1] for name in ("B", "S", "T_ms")})
    assert clean(single.with_columns(B=np.array([0.5]), S=np.array([1.0]))).dropped == {"idle": 1}


def test_steps_with_a_whole_prompt_are_measured_though_no_mean_holds_one() -> None:
    """3.9 requests decode in each step, a tenth of the steps holds a prompt of 100 tokens besides."""
    means = {"B": [4.0], "S": [13.9], "prefill_requests": [0.1], "prefill_tokens": [10.0]}
    steps = {name: np.array(column) for name, column in means.items()}
    spread = np.array([0.0])
    reached = Windows(steps, spread, None).reached()
    assert reached["B"] == pytest.approx([3.9, 4.9])
    assert reached["S"] == pytest.approx([3.9, 103.9])
    chunks = Windows(steps, spread, None, most_requests=6.0, most_tokens=64.0).reached()
    assert chunks["B"] == pytest.approx([3.9, 6.0])
    assert chunks["S"] == pytest.approx([3.9, 64.0])
    assert Windows(steps, None, None).reached() == {}


def test_a_fit_of_windows_is_good_as_far_as_their_steps_reached() -> None:
    trace = mixed_windows()
    fit = fit_trace(trace, FitOptions(model="linear"))
    prompts = trace.floats("prefill_tokens") / np.clip(trace.floats("prefill_requests"), 1e-9, 1)
    assert fit.domain["S"][1] > np.max(prompts) > np.max(trace.floats("S"))
