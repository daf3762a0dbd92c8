"""The saturation model against published oracle values, differentiation and its proved shape."""

import numpy as np
import pytest

from latfit.model.formulas import Saturation, saturation_factor
from latfit.stats import FloatArray
from tests.conftest import REFERENCE

MODEL = Saturation()


def at(B: float | FloatArray, S: float | FloatArray, theta: FloatArray = REFERENCE) -> FloatArray:
    return MODEL.latency_ms(theta, {"B": np.atleast_1d(np.asarray(B, float)), "S": np.atleast_1d(np.asarray(S, float))})


class TestValues:
    @pytest.mark.parametrize(
        ("B", "S", "T"), [(1, 1, 376.803), (8, 8, 15.9640), (8, 512, 18.1885), (64, 64, 8.72247), (64, 2048, 44.0117)]
    )
    def test_published_values(self, B: int, S: int, T: float) -> None:
        assert at(B, S)[0] == pytest.approx(T, rel=5e-6)

    def test_saturation_factor_keeps_precision_for_small_arguments(self) -> None:
        x = np.array([1e-12, 1e-9])
        assert saturation_factor(1.0, x) == pytest.approx(1 / x + 0.5, rel=1e-12)


class TestGradient:
    def test_published_values(self) -> None:
        """Oracle in (tau_0, a, b, k_B, k_S, tau_B, tau_S); dT/dw_0 = (dT/da)/P_max."""
        gradient = MODEL.gradient(REFERENCE, {"B": np.array([8.0]), "S": np.array([512.0])})[0]
        assert gradient[0] == 1
        assert gradient[1] * 60 == pytest.approx(1.43961594, rel=1e-8)
        assert gradient[2] * 60 == pytest.approx(737.083361, rel=1e-8)
        assert gradient[4:] == pytest.approx([-44.8409492, -40.0294881, 8, 512], rel=1e-8)
