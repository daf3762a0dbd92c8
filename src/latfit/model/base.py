"""What every latency model is built from: parameters, columns of steps, and the saturation factor.

The saturation factor g_k(x) = 1 / (1 - e^(-k x)) is how much slower a unit of work runs at size x than at full load.
Computed as -1/expm1(-k x), which keeps full precision for k x -> 0, where g -> 1/(k x) + 1/2. Its slopes are
dg/dk = -x g(g-1) and dg/dx = -k g(g-1), with g(g-1) = e^(-k x) g^2: no overflow for large k x, no cancellation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from latfit.stats import FloatArray

Steps = Mapping[str, FloatArray]
"""Columns of steps by trace name (`B`, `S`, `context_tokens`, ...), each (n,) float64."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a formula.

    positive: above zero by nature (rates and peaks), so it is searched and its interval built on the log scale;
    the others may be exactly zero. fixed: the value it is held at unless a user frees it.
    """

    name: str
    unit: str
    meaning: str
    positive: bool = False
    fixed: float | None = None


class LatencyModel(Protocol):
    """Structure of a formula; numbers live in `FitResult`.

    Every model is separable: given its outer parameters (rates inside exponentials, corners of smooth maxima, tile
    lengths) the latency is basis @ coefficients with coefficients >= 0, which is what the search over them uses.
    """

    @property
    def name(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...
    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of `Steps` that the formula reads."""
        ...

    @property
    def rates(self) -> tuple[tuple[str, str], ...]:
        """(rate, the column it multiplies) for each rate."""
        ...

    @property
    def outer(self) -> tuple[str, ...]:
        """Parameters that the latency is not linear in, in the order that `basis` takes them."""
        ...

    @property
    def convex(self) -> bool:
        """Whether T is convex in S at fixed B and in B at fixed S for every admissible parameter vector."""
        ...

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        """Where a parameter that is no rate is searched on these steps; None where its unit says it."""
        ...

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """T in ms (n,) for parameters theta (p,), in the order of `parameters`."""
        ...

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """dT/dtheta (n, p)."""
        ...

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        """The non-negative columns (n, m) that the latency is linear in, given the outer parameters."""
        ...

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        """theta (p,) from outer parameters and linear coefficients (m,)."""
        ...


def saturation_factor(k: float, x: FloatArray) -> FloatArray:
    """g_k(x) >= 1 for k > 0, x > 0."""
    return np.asarray(-1.0 / np.expm1(-k * x), dtype=np.float64)


def saturation_curvature(k: float, x: FloatArray, g: FloatArray) -> FloatArray:
    """g(g-1), the factor in both slopes of g."""
    return np.asarray(np.exp(-k * x) * g * g, dtype=np.float64)
