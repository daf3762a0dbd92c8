"""The models that a fit has to beat: one number, and a straight line in requests and tokens."""

from dataclasses import dataclass

import numpy as np

from latfit.model.terms import Parameter, Steps
from latfit.stats import FloatArray


@dataclass(frozen=True)
class Linear:
    """T = tau_0 + sum of a non-negative cost times a column. Without columns it is the constant model."""

    name: str
    formula: str
    parameters: tuple[Parameter, ...]
    columns: tuple[str, ...]
    rates: tuple[tuple[str, str], ...] = ()
    convex: bool = True

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        return np.asarray(self.gradient(theta, steps) @ theta)

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        return np.stack([np.ones_like(steps["B"]), *(steps[name] for name in self.columns)], axis=1)

    def basis(self, rates: FloatArray, steps: Steps) -> FloatArray:
        return self.gradient(rates, steps)

    def assemble(self, rates: FloatArray, coefficients: FloatArray) -> FloatArray:
        return coefficients


_TAU_0 = Parameter("tau_0", "ms", "fixed cost of a step")

CONSTANT = Linear("constant", "T = tau_0", (_TAU_0,), ())
LINEAR = Linear(
    "linear",
    "T = tau_0 + tau_B*B + tau_S*S",
    (
        _TAU_0,
        Parameter("tau_B", "ms/request", "cost of a request"),
        Parameter("tau_S", "ms/token", "cost of a token"),
    ),
    ("B", "S"),
)
