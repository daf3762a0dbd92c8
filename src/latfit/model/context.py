"""Terms of attention to cached tokens and of prefill, and the saturating term of `+moe` models.

Their meaning: docs/theory/fitting.md#models.
"""

import numpy as np

from latfit.model.base import Parameter
from latfit.model.baselines import TAU_A
from latfit.model.features import SOURCES, Features, decode_only
from latfit.model.saturation import Saturation
from latfit.model.term_model import Separable, Shape, term


def with_prefill(f: Features) -> bool:
    return not decode_only(f)


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
K_E = Shape(
    Parameter("k_E", "1/token", "how fast the weights read saturate with S", positive=True),
    lambda f: (0.5 / float(f["S"].max()), max(3.0, 1.0 / float(f["S"].max()))),
)
