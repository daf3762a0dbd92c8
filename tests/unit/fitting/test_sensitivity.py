"""Slopes against the closed forms, and terms that add up."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from latfit.fitting.sensitivity import WORK, Grid, sensitivity, steps_at, terms_of
from latfit.model.registry import FAMILY
from latfit.model.saturation import Saturation, saturation_curvature, saturation_factor
from tests.conftest import REFERENCE

B, S = np.array([1.0, 8.0, 64.0]), np.array([1.0, 64.0, 512.0, 4096.0])


def test_slopes_are_those_of_the_formula() -> None:
    """dT/dB = -W k_B gS gB(gB-1) + tau_B and dT/dS = gB gS b - W k_S gB gS(gS-1) + tau_S, with W = a + b S."""
    found = sensitivity(Saturation(), REFERENCE, Grid(B, S))
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


@given(st.sampled_from(sorted(FAMILY)), st.integers(0, 50))
def test_terms_add_up_for_every_linear_model(name: str, seed: int) -> None:
    model = FAMILY[name]
    rng = np.random.default_rng(seed)
    theta = np.array([p.fixed if p.fixed is not None else rng.uniform(0.1, 2.0) for p in model.parameters])
    steps = steps_at(np.array([1.0, 4.0, 32.0]), np.array([1.0, 200.0, 3000.0]), {"context_tokens": 100.0})
    terms = terms_of(model, theta, steps)
    assert sum(terms.values()) == pytest.approx(model.latency_ms(theta, steps), rel=1e-9)


def test_where_each_term_dominates() -> None:
    """A straight line: the fixed cost at few tokens, the tokens at many."""
    found = sensitivity(
        FAMILY["linear"], np.array([10.0, 0.1, 0.02]), Grid(np.array([1.0, 4.0]), np.array([4.0, 4000.0]))
    )
    assert found.dominant.tolist() == [["tau_0", "tau_S"], ["tau_0", "tau_S"]]
    regions = found.regions()
    assert regions["tau_S"] == {"share": 0.5, "B": [1.0, 4.0], "S": [4000.0, 4000.0]}
    assert found.slopes["elasticity_S"][0, 1] == pytest.approx(80 / 90.1, rel=1e-6)


def test_work_is_what_no_cost_accounts_for() -> None:
    terms = terms_of(Saturation(), REFERENCE, steps_at(np.array([8.0]), np.array([512.0])))
    g = saturation_factor(0.15, np.array([8.0])) * saturation_factor(0.01, np.array([512.0]))
    assert terms[WORK] == pytest.approx(512 / 60 * g)
    assert terms["w_0"] == pytest.approx(30 / 60 * g)


def test_a_grid_without_a_valid_cell() -> None:
    found = sensitivity(Saturation(), REFERENCE, Grid(np.array([64.0]), np.array([1.0])))
    assert np.all(np.isnan(found.T_ms))
    assert found.regions() == {}
    assert found.to_json()["T_ms"] == [[None]]
