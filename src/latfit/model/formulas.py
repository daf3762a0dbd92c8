"""The simple formulas: constant, line, hinge and quadratic as baselines, saturation, and saturation with a context.

T(B,S) = tau_0 + (w_0 + w_1 S) v / (P_max (1 - e^(-k_B B)) (1 - e^(-k_S S))) + tau_B B + tau_S S with v = 1, or v = 1 +
gamma_B B + gamma_S S. All terms: docs/theory/fitting.md#models.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from latfit.model.features import SOURCES, Features, decode_only
from latfit.model.term_model import Expression, Parameter, Separable, Steps, Term, shape, term
from latfit.stats import FloatArray


def with_prefill(f: Features) -> bool:
    return not decode_only(f)


TAU_0 = term("tau_0", "ms", "fixed cost of a step", lambda S: S**0)
TAU_B = term("tau_B", "ms/request", "cost of a request", lambda B: B)
TAU_S = term("tau_S", "ms/token", "cost of a token", lambda S: S)
TAU_A = term("tau_A", "ms/token^2", "attention work of prefill, a pair of tokens", lambda A: A, with_prefill)
KINK = term(
    "b",
    "ms/token",
    "cost of a token above S_0, in addition to tau_S",
    lambda S, S_0: np.maximum(S - S_0, 0.0),
    S_0=lambda S, S_0: -np.asarray(S > S_0, dtype=np.float64),
)


def _kink_range(f: Features) -> tuple[float, float]:
    """Return the range of S_0, up to 2/3 of the longest step: beyond it few steps determine the slope."""
    low = max(0.5 * float(f["S"].min()), 0.5)
    return low, max(float(f["S"].max()) * 2 / 3, 2 * low)


CONSTANT = Separable("constant", "T = tau_0", (TAU_0,), columns=())

LINEAR = Separable("linear", "T = tau_0 + tau_B*B + tau_S*S", (TAU_0, TAU_B, TAU_S))

QUADRATIC = Separable(
    "quadratic",
    "T = tau_0 + tau_B*B + tau_S*S + tau_A*A",
    (TAU_0, TAU_B, TAU_S, TAU_A),
    columns=SOURCES,
)

HINGE = Separable(
    "hinge",
    "T = tau_0 + tau_B*B + tau_S*S + b*max(S - S_0, 0)",
    (TAU_0, TAU_B, TAU_S, KINK),
    (shape("S_0", "tokens", "tokens that saturate the hardware", _kink_range),),
)


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
        return np.stack(np.broadcast_arrays(1.0, g, S * g, B, S), axis=-1)

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


TAU_K = term(
    "tau_K", "ms/token", "cached token that decoding attends to, in a step without prefill", lambda m, KD: (1 - m) * KD
)
TAU_L = term(
    "tau_L",
    "ms/token",
    "cached token that decoding attends to, in a step with prefill",
    lambda m, KD: m * KD,
    with_prefill,
)
TAU_R = term("tau_R", "ms/token", "cached token that prefill attends to", lambda KP: KP, with_prefill)
TAU_N = term("tau_N", "ms/request", "cost of a request in prefill", lambda n: n, with_prefill)
TAU_M = term("tau_M", "ms", "cost of a step that contains prefill", lambda m: m, with_prefill)
TAU_Y = term("tau_Y", "ms/request", "decoding request in a step with prefill", lambda m, D: m * D, with_prefill)

CONTEXT = Separable(
    "context",
    f"{Saturation().formula} + tau_K*(1-m)*KD + tau_L*m*KD + tau_R*KP + tau_A*A + tau_N*n + tau_M*m + tau_Y*m*D",
    (TAU_K, TAU_L, TAU_R, TAU_A, TAU_N, TAU_M, TAU_Y),
    base=Saturation(),
    columns=SOURCES,
)

TAU_E = term(
    "tau_E",
    "ms",
    "weights read: grows with S up to this value",
    lambda S, k_E: -np.expm1(-k_E * S),
    k_E=lambda S, k_E: S * np.exp(-k_E * S),
)
K_E = shape(
    "k_E",
    "1/token",
    "how fast the weights read saturate with S",
    lambda f: (0.5 / float(f["S"].max()), max(3.0, 1.0 / float(f["S"].max()))),
)
