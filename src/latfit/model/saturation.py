"""The saturation model, and its variant whose work grows faster than its tokens.

T(B,S) = tau_0 + (w_0 + w_1 S) v / (P_max (1 - e^(-k_B B)) (1 - e^(-k_S S))) + tau_B B + tau_S S with v = 1, or v = 1 +
gamma_B B + gamma_S S.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from latfit.model.base import Parameter, Steps
from latfit.model.baselines import TAU_0, TAU_B, TAU_S
from latfit.model.term_model import Expression, Term
from latfit.stats import FloatArray

PARAMETERS = (
    Parameter("tau_0", "ms", "fixed cost of a step"),
    Parameter("w_0", "tokens", "work of a step before its first token, in token equivalents"),
    Parameter("w_1", "1", "work of a token; fixes the gauge", positive=True, fixed=1.0),
    Parameter("P_max", "tokens/ms", "peak rate of the saturating part", positive=True),
    Parameter("k_B", "1/request", "rate at which requests saturate the hardware", positive=True),
    Parameter("k_S", "1/token", "rate at which tokens saturate the hardware", positive=True),
    Parameter("tau_B", "ms/request", "cost of a request that no batching hides"),
    Parameter("tau_S", "ms/token", "cost of a token that no batching hides"),
)
GROWTH = (
    Parameter("gamma_B", "1/request", "growth of the work with requests"),
    Parameter("gamma_S", "1/token", "growth of the work with tokens"),
)
FORMULA = "T = tau_0 + (w_0 + w_1*S){growth} / (P_max*(1 - exp(-k_B*B))*(1 - exp(-k_S*S))) + tau_B*B + tau_S*S"


def saturation_factor(k: float, x: FloatArray) -> FloatArray:
    """Return g_k(x) = 1 / (1 - e^(-k x)) for k > 0, x > 0."""
    return -1.0 / np.expm1(-k * x)


def growing_work(B: FloatArray, S: FloatArray, k_B: float, k_S: float, gamma_B: float, gamma_S: float) -> FloatArray:
    """Return v over the two saturations."""
    return saturation_factor(k_B, B) * saturation_factor(k_S, S) * (1.0 + gamma_B * B + gamma_S * S)


WORK = Term(PARAMETERS[1], Expression(growing_work))
WORK_OF_TOKENS = Term(
    PARAMETERS[2],
    Expression(lambda B, S, k_B, k_S, gamma_B, gamma_S: S * growing_work(B, S, k_B, k_S, gamma_B, gamma_S)),
)


def saturation_curvature(k: float, x: FloatArray, g: FloatArray) -> FloatArray:
    """Return g (g - 1), the factor in both slopes of g."""
    return np.asarray(np.exp(-k * x) * g * g, dtype=np.float64)


@dataclass(frozen=True)
class Saturation:
    """The saturating model at the heart. grows: whether the work grows by gamma_B and gamma_S."""

    grows: bool = False
    columns: tuple[str, ...] = ("B", "S")
    rates: tuple[tuple[str, str], ...] = (("k_B", "B"), ("k_S", "S"))
    terms: tuple[Term, ...] = (TAU_0, TAU_B, TAU_S, WORK, WORK_OF_TOKENS)  # with w_0 and w_1 over P_max

    @property
    def name(self) -> str:
        return "saturation-gamma" if self.grows else "saturation"

    @property
    def formula(self) -> str:
        return FORMULA.format(growth="*(1 + gamma_B*B + gamma_S*S)" if self.grows else "")

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*PARAMETERS, *GROWTH) if self.grows else PARAMETERS

    @property
    def outer(self) -> tuple[str, ...]:
        return ("k_B", "k_S", "gamma_B", "gamma_S") if self.grows else ("k_B", "k_S")

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        """Return the search range of a gamma; beyond it only the growing part is left, scaled by P_max."""
        if not name.startswith("gamma_"):
            return None
        return 0.0, 100.0 / float(steps[name.removeprefix("gamma_")].min())

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        tau_0, w_0, w_1, p_max, k_b, k_s, tau_b, tau_s, *gamma = theta
        B, S = steps["B"], steps["S"]
        g = _work_factor(k_b, k_s, gamma, steps)
        return np.asarray(tau_0 + (w_0 + w_1 * S) / p_max * g + tau_b * B + tau_s * S)

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        _, w_0, w_1, p_max, k_b, k_s, _, _, *gamma = theta
        B, S = steps["B"], steps["S"]
        g_b, g_s = saturation_factor(k_b, B), saturation_factor(k_s, S)
        g = g_b * g_s
        work_ms = (w_0 + w_1 * S) / p_max
        slopes = np.empty((len(theta), *g.shape))
        slopes[0] = 1.0
        np.divide(g, p_max, out=slopes[1])
        np.multiply(S, slopes[1], out=slopes[2])
        np.multiply(-work_ms, slopes[1], out=slopes[3])
        slopes[4] = -work_ms * g_s * B * saturation_curvature(k_b, B, g_b)
        slopes[5] = -work_ms * g_b * S * saturation_curvature(k_s, S, g_s)
        slopes[6], slopes[7] = B, S
        if gamma:
            slopes[1:6] *= 1 + gamma[0] * B + gamma[1] * S
            slopes[8:] = work_ms * g * np.stack([np.broadcast_to(x, g.shape) for x in (B, S)])
        return np.moveaxis(slopes, 0, -1)

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        B, S = steps["B"], steps["S"]
        k_b, k_s, *gamma = outer
        g = _work_factor(k_b, k_s, gamma, steps)
        columns = np.empty((*g.shape, 5))
        for i, column in enumerate((np.ones_like(g), g, S * g, B, S)):
            columns[..., i] = column
        return columns

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        tau_0, a, b, tau_b, tau_s = coefficients
        # b = 0 is an infinite peak; a negligible cost of a token takes its place.
        b = max(b, 1e-9 * float(np.max(coefficients)), 1e-300)
        return np.array([tau_0, a / b, 1.0, 1 / b, *outer[:2], tau_b, tau_s, *outer[2:]])


def _work_factor(k_b: float, k_s: float, gamma: Sequence[float], steps: Steps) -> FloatArray:
    B, S = steps["B"], steps["S"]
    if gamma:
        return growing_work(B, S, k_b, k_s, *gamma)
    return saturation_factor(k_b, B) * saturation_factor(k_s, S)
