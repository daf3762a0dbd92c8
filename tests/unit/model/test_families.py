"""Every family: its gradient against differences, its table against its latency, its shape, and published values."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from latfit.model.base import LatencyModel, Steps
from latfit.model.context import K_E, TAU_E
from latfit.model.features import StepTable, decode_only, step_features
from latfit.model.registry import FAMILY
from latfit.model.roofline import pmax, tiles
from latfit.model.saturation import Saturation
from latfit.model.term_model import Separable
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
        "tau_H": 0.01, "S_1": 600, "tau_V": 0.01, "tau_C": 0.3, "B_1": 20,
    }  # fmt: skip
    held = {"p", "p_A", "Q", "V", "rho", "w_1"}
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


@pytest.mark.parametrize("name", ["hinge", "hinge+moe"])
def test_the_hinge_has_the_slope_of_its_sides(name: str) -> None:
    model = FAMILY[name]
    theta = random_theta(np.random.default_rng(0), model)
    at = [p.name for p in model.parameters].index("S_0")
    b = theta[[p.name for p in model.parameters].index("b")]
    steps = {"B": np.ones(2), "S": np.array([0.5, 2.0]) * theta[at]}
    assert model.gradient(theta, steps)[:, at] == pytest.approx([0.0, -b])


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


@pytest.mark.parametrize("name", list(FAMILY))
def test_steps_that_remember_their_features_give_the_same_latency(name: str) -> None:
    rng = np.random.default_rng(1)
    steps = random_steps(rng)
    theta = random_theta(rng, FAMILY[name])
    assert np.array_equal(FAMILY[name].latency_ms(theta, StepTable(steps)), FAMILY[name].latency_ms(theta, steps))


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


def test_the_smooth_maximum_lies_between_the_maximum_and_its_bound() -> None:
    x, y = np.array([0.0, 1.0, 5.0, 1e200]), np.array([3.0, 1.0, 1e-3, 1e-200])
    for p in (2.0, 4.0, 8.0):
        value = pmax(x, y, p)
        assert np.all(value >= np.maximum(x, y))
        assert np.all(value <= 2 ** (1 / p) * np.maximum(x, y))
    assert pmax(3.0, np.array([4.0]), 2.0)[0] == pytest.approx(5.0)


def test_tiles_round_up_and_never_fall() -> None:
    S = np.arange(1.0, 1025.0)
    assert np.array_equal(tiles(S, 256, 0.0)[[0, 255, 256, 511, 512]], [256, 256, 512, 512, 768])
    soft = tiles(S, 256, 1 / 16)
    assert np.all(np.diff(soft) >= 0)
    assert np.all(soft <= tiles(S, 256, 0.0))
    assert np.array_equal(soft[[0, 255, 271, 511]], [256, 256, 512, 512])
    assert not tiles(S, 0, 0.0).any()


class TestPublishedValues:
    def test_attention_work_of_a_chunk(self) -> None:
        """256 new tokens on 1000 cached ones: 288896 pairs exactly, 288768 in the continuous form."""
        new, cached = np.array([256.0]), np.array([1000.0])
        steps = {"B": np.ones(1), "S": new, "prefill_tokens": new}
        seen = step_features({**steps, "context_tokens": cached, "prefill_context_tokens": cached})
        assert seen["A"][0] == 288768

    def test_expert_coverage(self) -> None:
        """8 of 128 experts a token: k_E = -ln(1 - 8/128)."""
        S = np.array([16.0, 64.0])
        covered = TAU_E.column({"S": S}, {K_E.parameter.name: -np.log1p(-8 / 128)})
        assert covered == pytest.approx([0.643926, 0.983925], abs=1e-6)

    def test_a_coverage_term_makes_two_valleys(self) -> None:
        """T = 2 + (372 + S) g_.002(S)/2000 + 20 (1 - e^(-.0645385 S)): minima at S = 13 and 507."""
        model = FAMILY["saturation+moe"]
        theta = np.array([2.0, 372.0, 1.0, 2000.0, 1e9, 0.002, 0.0, 0.0, 20.0, 0.0645385])
        S = np.arange(1.0, 2000.0)
        T = model.latency_ms(theta, {"B": np.ones_like(S), "S": S})
        valleys = np.flatnonzero((T[1:-1] < T[:-2]) & (T[1:-1] < T[2:])) + 1
        assert S[valleys].tolist() == [13, 507]
        assert T[valleys] == pytest.approx([20.8577, 22.6897], abs=1e-4)
        between = T[12:507]
        assert between.max() == pytest.approx(23.4949, abs=1e-4)
        feasible = S[T <= 23]
        assert [feasible[0], feasible[-1]] == [7, 1535]
        assert np.array_equal(feasible, [*range(7, 37), *range(152, 1536)])

    def test_without_growth_the_gamma_model_is_the_saturation_model(self) -> None:
        theta = np.array([4.0, 30.0, 1.0, 60.0, 0.15, 0.01, 0.02, 0.002])
        steps = {"B": np.array([8.0]), "S": np.array([512.0])}
        grown_by_nothing = FAMILY["saturation-gamma"].latency_ms(np.append(theta, [0.0, 0.0]), steps)
        assert grown_by_nothing[0] == Saturation().latency_ms(theta, steps)[0]


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
