"""The interface of a latency model: parameters, columns, and the separable form that the search uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

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

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        """Where a parameter that is no rate is searched on these steps; None where its unit says it."""
        ...

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """T in ms (n,) for parameters theta (p,), in the order of `parameters`; (k, n) for k vectors at once, given as
        (p, k, 1)."""
        ...

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """dT/dtheta (n, p), or (k, n, p) of k vectors as above."""
        ...

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        """The non-negative columns (n, m) that the latency is linear in, given the outer parameters."""
        ...

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        """theta (p,) from outer parameters and linear coefficients (m,)."""
        ...
