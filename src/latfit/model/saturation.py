"""The saturation model, and its variant whose work grows faster than its tokens.

T(B,S) = tau_0 + (w_0 + w_1 S) v / (P_max (1 - e^(-k_B B)) (1 - e^(-k_S S))) + tau_B B + tau_S S

with v = 1, or v = 1 + gamma_B B + gamma_S S. Properties: docs/theory/fitting.md#models.
"""

from dataclasses import dataclass

import numpy as np

from latfit.model.base import Parameter, Steps
from latfit.stats import FloatArray


def saturation_factor(k: float, x: FloatArray) -> FloatArray:
    """g_k(x) >= 1 for k > 0, x > 0."""
    return np.asarray(-1.0 / np.expm1(-k * x), dtype=np.float64)


def saturation_curvature(k: float, x: FloatArray, g: FloatArray) -> FloatArray:
    """g(g-1), the factor in both slopes of g."""
    return np.asarray(np.exp(-k * x) * g * g, dtype=np.float64)


@dataclass(frozen=True)
class Saturation:
    """The saturation model over the columns B and S."""

    name: str = "saturation"
    formula: str = "T = tau_0 + (w_0 + w_1*S) / (P_max*(1 - exp(-k_B*B))*(1 - exp(-k_S*S))) + tau_B*B + tau_S*S"
    parameters: tuple[Parameter, ...] = (
        Parameter("tau_0", "ms", "fixed cost of a step"),
        Parameter("w_0", "tokens", "work of a step before its first token, in token equivalents"),
        Parameter("w_1", "1", "work of a token; fixes the gauge", positive=True, fixed=1.0),
        Parameter("P_max", "tokens/ms", "peak rate of the saturating part", positive=True),
        Parameter("k_B", "1/request", "how fast the batch fills the machine", positive=True),
        Parameter("k_S", "1/token", "how fast the tokens fill the machine", positive=True),
        Parameter("tau_B", "ms/request", "cost of a request that no batching hides"),
        Parameter("tau_S", "ms/token", "cost of a token that no batching hides"),
    )
    columns: tuple[str, ...] = ("B", "S")
    rates: tuple[tuple[str, str], ...] = (("k_B", "B"), ("k_S", "S"))
    outer: tuple[str, ...] = ("k_B", "k_S")

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        return None

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        tau_0, w_0, w_1, p_max, k_b, k_s, tau_b, tau_s = theta
        B, S = steps["B"], steps["S"]
        g = saturation_factor(k_b, B) * saturation_factor(k_s, S)
        return np.asarray(tau_0 + (w_0 + w_1 * S) / p_max * g + tau_b * B + tau_s * S)

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        _, w_0, w_1, p_max, k_b, k_s, _, _ = theta
        B, S = steps["B"], steps["S"]
        g_b, g_s = saturation_factor(k_b, B), saturation_factor(k_s, S)
        g = g_b * g_s
        work_ms = (w_0 + w_1 * S) / p_max
        slopes = np.empty((8, *g.shape))
        slopes[0] = 1.0
        np.divide(g, p_max, out=slopes[1])
        np.multiply(S, slopes[1], out=slopes[2])
        np.multiply(-work_ms, slopes[1], out=slopes[3])
        slopes[4] = -work_ms * g_s * B * saturation_curvature(k_b, B, g_b)
        slopes[5] = -work_ms * g_b * S * saturation_curvature(k_s, S, g_s)
        slopes[6], slopes[7] = B, S
        return np.moveaxis(slopes, 0, -1)

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        B, S = steps["B"], steps["S"]
        g = saturation_factor(float(outer[0]), B) * saturation_factor(float(outer[1]), S)
        columns = np.empty((5, len(B)))
        columns[0], columns[1], columns[2], columns[3:] = 1.0, g, S * g, (B, S)
        return columns.T

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        tau_0, a, b, tau_b, tau_s = coefficients
        # b = 0 is an infinite peak: a cost of a token too small to matter stands in for it
        b = max(b, 1e-9 * float(np.max(coefficients)), 1e-300)
        return np.array([tau_0, a / b, 1.0, 1 / b, outer[0], outer[1], tau_b, tau_s])


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
        plain[..., 1:6] *= growth[..., None]
        bare = (w_0 + w_1 * S) / p_max * saturation_factor(k_b, B) * saturation_factor(k_s, S)
        return np.concatenate([plain, (bare * B)[..., None], (bare * S)[..., None]], axis=-1)

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        plain = Saturation().basis(outer[:2], steps)
        plain[:, 1:3] *= (1 + outer[2] * steps["B"] + outer[3] * steps["S"])[:, None]
        return plain

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        return np.concatenate([Saturation().assemble(outer[:2], coefficients), outer[2:]])
