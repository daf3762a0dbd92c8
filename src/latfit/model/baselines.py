"""Simple models as baselines: constant, linear, hinge (a kink in S), quadratic attention."""

import numpy as np

from latfit.model.base import Parameter
from latfit.model.features import SOURCES, Features, decode_only
from latfit.model.term_model import Separable, Shape, term

TAU_0 = term("tau_0", "ms", "fixed cost of a step", lambda S: S**0)
TAU_B = term("tau_B", "ms/request", "cost of a request", lambda B: B)
TAU_S = term("tau_S", "ms/token", "cost of a token", lambda S: S)
TAU_A = term(
    "tau_A", "ms/token^2", "attention work of prefill, a pair of tokens", lambda A: A, lambda f: not decode_only(f)
)
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
    (
        Shape(
            Parameter("S_0", "tokens", "tokens that saturate the hardware", positive=True),
            _kink_range,
        ),
    ),
)
