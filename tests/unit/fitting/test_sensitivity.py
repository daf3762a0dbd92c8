"""Slopes against the closed forms, and terms that add up."""

import numpy as np
import pytest

from latfit.fitting import Sensitivity, sensitivity_of
from latfit.model import FAMILY, Estimate, FitResult, FitStatus
from latfit.model.formulas import saturation_curvature, saturation_factor
from latfit.stats import FloatArray
from tests.conftest import REFERENCE

B, S = np.array([1.0, 8.0, 64.0]), np.array([1.0, 64.0, 512.0, 4096.0])


def on_grid(model: str, theta: FloatArray, B: FloatArray, S: FloatArray) -> Sensitivity:
    parameters = zip(FAMILY[model].parameters, theta, strict=True)
    values = {parameter.name: Estimate(float(value)) for parameter, value in parameters}
    return sensitivity_of(FitResult(model, FitStatus.CONVERGED, values), B, S, {})


def test_slopes_are_those_of_the_formula() -> None:
    """dT/dB = -W k_B gS gB(gB-1) + tau_B and dT/dS = gB gS b - W k_S gB gS(gS-1) + tau_S, with W = a + b S."""
    found = on_grid("saturation", REFERENCE, B, S)
    _, w_0, w_1, p_max, k_B, k_S, tau_B, tau_S = REFERENCE
    for i, b in enumerate(B):
        for j, s in enumerate(S):
            if s < b:
                assert np.isnan(found.T_ms[i, j])
                assert found.dominant[i, j] == ""
                continue
            g_B, g_S = (saturation_factor(k, np.array([x]))[0] for k, x in ((k_B, b), (k_S, s)))
            c_B, c_S = (
                saturation_curvature(k, np.array([x]), np.array([g]))[0] for k, x, g in ((k_B, b, g_B), (k_S, s, g_S))
            )
            W = (w_0 + w_1 * s) / p_max
            dT_dB = -W * k_B * g_S * c_B + tau_B
            dT_dS = g_B * g_S / p_max - W * k_S * g_B * c_S + tau_S
            assert found.slopes["dT_dB"][i, j] == pytest.approx(dT_dB, rel=1e-5, abs=1e-8)
            assert found.slopes["dT_dS"][i, j] == pytest.approx(dT_dS, rel=1e-5, abs=1e-8)
            assert found.slopes["elasticity_S"][i, j] == pytest.approx(dT_dS * s / found.T_ms[i, j], rel=1e-5, abs=1e-8)


def test_where_each_term_dominates() -> None:
    """A straight line: the fixed cost at few tokens, the tokens at many."""
    found = on_grid("linear", np.array([10.0, 0.1, 0.02]), np.array([1.0, 4.0]), np.array([4.0, 4000.0]))
    assert found.dominant.tolist() == [["tau_0", "tau_S"], ["tau_0", "tau_S"]]
    regions = found.regions()
    assert regions["tau_S"] == {"share": 0.5, "B": [1.0, 4.0], "S": [4000.0, 4000.0]}
    assert found.slopes["elasticity_S"][0, 1] == pytest.approx(80 / 90.1, rel=1e-6)
