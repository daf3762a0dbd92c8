"""The interface of a latency model: parameters, columns, and the separable form that the solver uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from latfit.stats import FloatArray

Steps = Mapping[str, FloatArray]  # columns of steps by trace name (`B`, `S`, `context_tokens`, ...), each (n,) float64


@dataclass(frozen=True)
class Parameter:
    name: str
    unit: str
    meaning: str
    positive: bool = False  # above zero by nature (rates and peaks), searched on the log scale; others may be zero
    fixed: float | None = None  # value it has unless a user frees it


class LatencyModel(Protocol):
    """Structure of a separable formula: given its outer parameters, latency is basis @ coefficients >= 0."""

    @property
    def name(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def parameters(self) -> tuple[Parameter, ...]: ...
    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def rates(self) -> tuple[tuple[str, str], ...]: ...

    @property
    def outer(self) -> tuple[str, ...]:
        """Parameters that the latency is not linear in, in the order of `basis`."""
        ...

    def span(self, name: str, steps: Steps) -> tuple[float, float] | None:
        """Return the search range of a parameter on these steps; None if its unit decides."""
        ...

    def latency_ms(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """Return T in ms (n,) for parameters theta (p,); (k, n) for k vectors at once, given as (p, k, 1)."""
        ...

    def gradient(self, theta: FloatArray, steps: Steps) -> FloatArray:
        """Return dT/dtheta (n, p); (k, n, p) for k vectors."""
        ...

    def basis(self, outer: FloatArray, steps: Steps) -> FloatArray:
        """Return the non-negative columns (n, m) that the latency is linear in; (k, n, m) for outer (q, k, 1)."""
        ...

    def assemble(self, outer: FloatArray, coefficients: FloatArray) -> FloatArray:
        """Return theta (p,) from outer parameters and linear coefficients (m,)."""
        ...
