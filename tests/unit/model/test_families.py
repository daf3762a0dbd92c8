"""Every family: its gradient against differences, its table against its latency, its shape, and published values."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from latfit.model.features import decode_only, step_features
from latfit.model.registry import FAMILY
from latfit.model.term_model import LatencyModel, Separable, Steps
from latfit.stats import FloatArray

SMOOTH = [name for name in FAMILY if name != "hinge"]
"""Models that have a derivative at every step; the hinge's kink is tested apart."""


def random_steps(rng: np.random.Generator, n: int = 6) -> dict[str, FloatArray]:
    """Steps of every phase: decode-only, prefill-only, mixed."""
    prefill = np.arange(n) % 3 > 0
    decoding = np.where(np.arange(n) % 3 == 1, 0, rng.integers(1, 60, n))
    requests = np.where(prefill, rng.integers(1, 4, n), 0)
    tokens = np.where(prefill, requests * rng.integers(2, 700, n), 0)
    cached = np.where(prefill, rng.integers(0, 5000, n), 0)
    return {
        "B": (decoding + requests).astype(float),
        "S": (decoding + tokens).astype(float),
        "prefill_requests": requests.astype(float),
        "prefill_tokens": tokens.astype(float),
        "prefill_context_tokens": cached.astype(float),
        "context_tokens": (cached + decoding * rng.integers(1, 3000, n)).astype(float),
    }


def random_theta(rng: np.random.Generator, model: LatencyModel) -> FloatArray:
    """Parameters of the size that machines have."""
    size = {
        "tau_0": 5, "w_0": 50, "w_1": 1, "P_max": 60, "k_B": 0.2, "k_S": 0.01, "tau_B": 0.1, "tau_S": 0.02, "b": 0.05,
        "tau_A": 1e-6, "tau_K": 1e-4, "tau_L": 1e-4, "tau_R": 1e-4, "tau_N": 1, "tau_M": 2, "tau_Y": 0.05, "c": 1e-3,
        "tau_X": 1e-6, "tau_Q": 0.02, "S_0": 150, "P_0": 200, "Q_s": 4, "K_0": 2e4, "tau_E": 8, "k_E": 0.03,
        "gamma_B": 0.01, "gamma_S": 1e-3, "p": 4, "Q": 128, "rho": 0, "p_A": 2, "V": 384, "b_B": 0.05,
        "tau_H": 0.01, "S_1": 600, "tau_V": 0.01, "tau_C": 0.3, "B_1": 20, "e_X": 0.5,
    }  # fmt: skip
    held = {"p", "p_A", "e_X", "Q", "V", "rho", "w_1"}
    return np.array([size[q.name] * (1.0 if q.name in held else rng.uniform(0.5, 2)) for q in model.parameters])


@pytest.mark.parametrize("name", SMOOTH)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_gradients_agree_with_central_differences(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, steps = FAMILY[name], random_steps(rng)
    theta = random_theta(rng, model)
    gradient, T = model.gradient(theta, steps), model.latency_ms(theta, steps)
    choices = {choice.parameter.name for choice in model.choices} if isinstance(model, Separable) else set()
    for i, parameter in enumerate(model.parameters):
        if parameter.name in choices:
            assert not gradient[:, i].any()
            continue
        h = 1e-6 * theta[i]
        up, down = theta.copy(), theta.copy()
        up[i], down[i] = theta[i] + h, theta[i] - h
        numeric = (model.latency_ms(up, steps) - model.latency_ms(down, steps)) / (2 * h)
        rounding = 8 * np.finfo(float).eps * T / h
        assert np.all(np.abs(gradient[:, i] - numeric) <= 1e-5 * np.abs(numeric) + 10 * rounding), parameter.name


@pytest.mark.parametrize("name", list(FAMILY))
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_basis_and_coefficients_give_the_same_latency(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, steps = FAMILY[name], random_steps(rng)
    theta = dict(zip([p.name for p in model.parameters], random_theta(rng, model), strict=True))
    outer = np.array([theta[each] for each in model.outer])
    X = model.basis(outer, steps)
    coefficients = np.asarray(rng.uniform(0.1, 1, X.shape[1]), dtype=np.float64)
    assembled = model.assemble(outer, coefficients)
    assert len(assembled) == len(model.parameters)
    assert model.latency_ms(assembled, steps) == pytest.approx(X @ coefficients, rel=1e-10)


def grown(steps: Steps, column: str, by: float) -> dict[str, FloatArray]:
    return {**steps, column: steps[column] + by}


@given(seed=st.integers(0, 10**6), rho=st.sampled_from([0.0, 1 / 16]), more=st.integers(1, 500))
def test_the_roofline_never_gets_cheaper_with_more_to_do(seed: int, rho: float, more: int) -> None:
    rng = np.random.default_rng(seed)
    model, steps = FAMILY["roofline+moe"], random_steps(rng)
    names = [p.name for p in model.parameters]
    theta = random_theta(rng, model)
    theta[names.index("rho")] = rho
    before = model.latency_ms(theta, steps)
    holds = steps["prefill_tokens"] > 0
    longer = {**steps, "S": steps["S"] + more * holds, "prefill_tokens": steps["prefill_tokens"] + more * holds}
    for after in (longer, grown(steps, "context_tokens", float(more))):
        assert np.all(model.latency_ms(theta, after) >= before * (1 - 1e-12))


class TestFeatures:
    def test_a_step_that_says_nothing_of_prefill(self) -> None:
        seen = step_features({"B": np.array([4.0, 4.0]), "S": np.array([4.0, 103.0])})
        assert seen["n"].tolist() == [0, 1]
        assert seen["P"].tolist() == [0, 100]
        assert seen["D"].tolist() == [4, 3]
        assert seen["KD"].tolist() == [0, 0]

    def test_decode_only(self) -> None:
        B = np.arange(1.0, 101.0)
        assert decode_only({"B": B, "S": B})
        assert decode_only({"B": B, "S": np.where(B == 20, 40, B)})
        assert not decode_only({"B": B, "S": np.where(B == 20, 64, B)})
        assert not decode_only({"B": B, "S": 2 * B})
