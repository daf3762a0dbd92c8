"""Rows that are means over windows: bends are claimed only where the spread within windows is known."""

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


def decode_windows(rows: int = 120, noise: float = 0.02, seed: int = 0) -> Trace:
    """Means over steps whose batch sizes are Poisson's, with mean sizes from 4 to 64."""
    rng = np.random.default_rng(seed)
    found = []
    for mean in np.exp(rng.uniform(np.log(4), np.log(64), rows)):
        B = np.maximum(rng.poisson(mean, STEPS), 1).astype(float)
        found.append((B.mean(), float((corner(B) * np.exp(rng.normal(0, noise, STEPS))).mean()), B.std()))
    B, T, spread = np.array(found).T
    return Trace({"B": B, "S": B, "T_ms": T, "B_sd": spread})


def test_with_a_known_spread_a_bend_is_fitted_within_its_curvature() -> None:
    """Half the curvature times the variance of Poisson batches is 2 % at the corner."""
    fitted = fit_trace(decode_windows(), FitOptions("roofline"))
    at = np.array([8.0, 12.0, 16.0, 20.0, 32.0, 60.0])
    assert np.max(np.abs(fitted.latency_ms(B=at, S=at) / corner(at) - 1)) < 0.03
    assert fitted.warnings[0].code == "window_means"


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


def test_the_largest_steps_of_windows_count_as_measured() -> None:
    """A step with a whole prompt is in its window, though in no mean. A file that states none adds nothing."""
    means = decode_windows()
    stated = {"largest_step_requests": 90, "largest_step_tokens": 512}
    for facts, most in ((stated, 512), ({"parts": {"a": stated, "b": {}}}, means["S"].max())):
        fitted = fit_trace(Trace(dict(means.columns), {"source": "metrics", **facts}), FitOptions("linear"))
        assert fitted.domain["S"][1] == most
