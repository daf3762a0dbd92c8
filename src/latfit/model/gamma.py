"""The saturation model whose work grows faster than its tokens.

T(B,S) = tau_0 + (w_0 + w_1 S) v / (P_max (1 - e^(-k_B B)) (1 - e^(-k_S S))) + tau_B B + tau_S S,
v = 1 + gamma_B B + gamma_S S

The columns are those of `saturation` with g_B g_S v in place of g_B g_S. Written out
there would be five columns from four parameters, so the gammas are searched like rates. T stays convex in S at fixed B
and in B at fixed S: x g, x^2 g are products of non-negative increasing convex functions.
"""

from dataclasses import dataclass

import numpy as np

from latfit.model.saturation import Saturation
from latfit.model.terms import Parameter, Steps, saturation_factor
from latfit.stats import FloatArray


@dataclass(frozen=True)
class SaturationGamma:
    """The saturation model with work that grows by gamma_B a request and gamma_S a token."""

    name: str = "saturation-gamma"
    formula: str = (
        "T = tau_0 + (w_0 + w_1*S)*(1 + gamma_B*B + gamma_S*S) / (P_max*(1 - exp(-k_B*B))*(1 - exp(-k_S*S)))"
        " + tau_B*B + tau_S*S"
    )
    parameters: tuple[Parameter, ...] = (
        *Saturation().parameters,
        Parameter("gamma_B", "1/request", "growth of the work with requests"),
        Parameter("gamma_S", "1/token", "growth of the work with tokens"),
    )
    columns: tuple[str, ...] = ("B", "S")
    rates: tuple[tuple[str, str], ...] = (("k_B", "B"), ("k_S", "S"))
    outer: tuple[str, ...] = ("k_B", "k_S", "gamma_B", "gamma_S")
    convex: bool = True

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        """A gamma beyond the second end leaves only the growing part, which P_max then scales."""
        if not name.startswith("gamma_"):
            return None
        return 0.0, 100.0 / float(steps[name.removeprefix("gamma_")].min())

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        tau_0, w_0, w_1, p_max, k_b, k_s, tau_b, tau_s, gamma_b, gamma_s = theta
        B, S = steps["B"], steps["S"]
        g = saturation_factor(k_b, B) * saturation_factor(k_s, S) * (1 + gamma_b * B + gamma_s * S)
        return np.asarray(tau_0 + (w_0 + w_1 * S) / p_max * g + tau_b * B + tau_s * S)

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        _, w_0, w_1, p_max, k_b, k_s, _, _, gamma_b, gamma_s = theta
        B, S = steps["B"], steps["S"]
        plain = Saturation().gradient(theta[:8], steps)
        growth = 1 + gamma_b * B + gamma_s * S
        plain[:, 1:6] *= growth[:, None]
        bare = (w_0 + w_1 * S) / p_max * saturation_factor(k_b, B) * saturation_factor(k_s, S)
        return np.concatenate([plain, (bare * B)[:, None], (bare * S)[:, None]], axis=1)

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        plain = Saturation().basis(outer[:2], steps)
        plain[:, 1:3] *= (1 + outer[2] * steps["B"] + outer[3] * steps["S"])[:, None]
        return plain

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        return np.concatenate([Saturation().assemble(outer[:2], coefficients), outer[2:]])
