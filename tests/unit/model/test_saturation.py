"""The saturation model against published oracle values, differentiation and its proved shape."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.model.saturation import Saturation, saturation_factor
from latfit.stats import FloatArray
from tests.conftest import REFERENCE

MODEL = Saturation()


def at(B: float | FloatArray, S: float | FloatArray, theta: FloatArray = REFERENCE) -> FloatArray:
    return MODEL.latency_ms(theta, {"B": np.atleast_1d(np.asarray(B, float)), "S": np.atleast_1d(np.asarray(S, float))})


parameters = st.tuples(
    st.floats(0, 10),
    st.floats(0, 1000),
    st.just(1.0),
    st.floats(0.1, 1000),
    st.floats(1e-3, 5),
    st.floats(1e-4, 5),
    st.floats(0, 1),
    st.floats(0, 0.1),
).map(np.array)


class TestValues:
    @pytest.mark.parametrize(
        ("B", "S", "T"), [(1, 1, 376.803), (8, 8, 15.9640), (8, 512, 18.1885), (64, 64, 8.72247), (64, 2048, 44.0117)]
    )
    def test_published_values(self, B: int, S: int, T: float) -> None:
        assert at(B, S)[0] == pytest.approx(T, rel=5e-6)

    def test_scale_symmetry_is_exact(self) -> None:
        scaled = REFERENCE.copy()
        scaled[1:4] *= 7.3
        assert at(8, 512, scaled)[0] == pytest.approx(at(8, 512)[0], rel=1e-13)

    def test_asymptotic_token_rate_is_below_the_peak(self) -> None:
        S = 1e9
        assert S / at(64, S)[0] == pytest.approx(53.5682, rel=1e-5)

    def test_saturation_factor_keeps_precision_for_small_arguments(self) -> None:
        x = np.array([1e-12, 1e-9])
        assert saturation_factor(1.0, x) == pytest.approx(1 / x + 0.5, rel=1e-12)

    def test_saturation_factor_does_not_overflow(self) -> None:
        assert saturation_factor(10.0, np.array([1e6]))[0] == 1.0


class TestGradient:
    def test_published_values(self) -> None:
        """Oracle in (tau_0, a, b, k_B, k_S, tau_B, tau_S); dT/dw_0 = (dT/da)/P_max."""
        gradient = MODEL.gradient(REFERENCE, {"B": np.array([8.0]), "S": np.array([512.0])})[0]
        assert gradient[0] == 1
        assert gradient[1] * 60 == pytest.approx(1.43961594, rel=1e-8)
        assert gradient[2] * 60 == pytest.approx(737.083361, rel=1e-8)
        assert gradient[4:] == pytest.approx([-44.8409492, -40.0294881, 8, 512], rel=1e-8)

    @given(parameters, st.integers(1, 256), st.integers(0, 4000))
    def test_agrees_with_central_differences(self, theta: FloatArray, B: int, extra: int) -> None:
        steps = {"B": np.array([float(B)]), "S": np.array([float(B + extra)])}
        gradient = MODEL.gradient(theta, steps)[0]
        T = MODEL.latency_ms(theta, steps)[0]
        for i in range(len(theta)):
            h = 1e-6 * max(theta[i], 1e-3)
            up, down = theta.copy(), theta.copy()
            up[i], down[i] = theta[i] + h, theta[i] - h
            numeric = (MODEL.latency_ms(up, steps)[0] - MODEL.latency_ms(down, steps)[0]) / (2 * h)
            rounding = 4 * np.finfo(float).eps * T / h
            assert gradient[i] == pytest.approx(numeric, rel=1e-4, abs=10 * rounding + 1e-9)

    @given(parameters, st.integers(1, 256), st.integers(0, 4000))
    def test_basis_and_coefficients_give_the_same_latency(self, theta: FloatArray, B: int, extra: int) -> None:
        steps = {"B": np.array([float(B)]), "S": np.array([float(B + extra)])}
        tau_0, w_0, _, p_max, k_b, k_s, tau_b, tau_s = theta
        coefficients = np.array([tau_0, w_0 / p_max, 1 / p_max, tau_b, tau_s])
        rates = np.array([k_b, k_s])
        assert MODEL.basis(rates, steps) @ coefficients == pytest.approx(MODEL.latency_ms(theta, steps), rel=1e-12)
        assert MODEL.assemble(rates, coefficients) == pytest.approx(theta, rel=1e-12, abs=1e-12)


class TestShape:
    @given(parameters, st.integers(1, 64))
    def test_convex_in_tokens_in_requests_and_along_rays(self, theta: FloatArray, B: int) -> None:
        x = np.linspace(1, 2000, 400)
        for T in (at(np.full_like(x, B), x, theta), at(x, np.full_like(x, 2000.0), theta), at(x, 3.7 * x, theta)):
            assert np.all(np.diff(T, 2) >= -1e-9 * np.abs(T[1:-1]))

    def test_not_jointly_convex(self) -> None:
        theta = REFERENCE.copy()
        theta[[1, 4, 6, 7]] = [0, 0.05, 0, 0]
        ends = at(np.array([2.0, 8.0]), np.array([100.0, 900.0]), theta)
        assert ends == pytest.approx([31.7066, 49.5043], rel=1e-5)
        assert at(5, 500, theta)[0] > ends.mean()
