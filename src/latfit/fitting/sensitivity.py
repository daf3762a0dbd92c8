"""Slopes of the latency in B and S, and the dominant term of each step.

Slopes are central differences in ln B and ln S, so they work for every model. A term is what the latency loses if its
cost is zero. Definition: docs/theory/fitting.md, "Sensitivity".
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.model import FitResult, LatencyModel, Steps, StepTable, with_typical_context
from latfit.stats import FloatArray

WORK = "work"
_H = 1e-4
IN_MS = ("dT_dB", "dT_dS")


@dataclass(frozen=True)
class Sensitivity:
    """Slopes and terms on a grid of B (b,) and S (s,); NaN or empty where S < B.

    Attributes
    ----------
    T_ms
        Latency in ms (b, s).
    slopes
        dT_dB in ms/request, dT_dS in ms/token, elasticity_B and elasticity_S, (b, s) each.
    terms
        Terms in ms (b, s), by name.
    dominant
        Name of the largest term (b, s).
    """

    B: FloatArray
    S: FloatArray
    T_ms: FloatArray
    slopes: Mapping[str, FloatArray]
    terms: Mapping[str, FloatArray]
    dominant: NDArray[np.object_]

    def regions(self) -> dict[str, dict[str, Any]]:
        """Return where each term dominates: share of the grid, and spans of B and S."""
        valid = self.dominant != ""
        found = {}
        for name in self.terms:
            rows, columns = np.nonzero(self.dominant == name)
            if len(rows):
                spans = {"B": self.B[rows], "S": self.S[columns]}
                found[name] = {
                    "share": len(rows) / int(valid.sum()),
                    **{axis: [float(values.min()), float(values.max())] for axis, values in spans.items()},
                }
        return found

    @property
    def frame(self) -> Any:
        """A pandas DataFrame, one row per step: B, S, T_ms, slopes in ms, elasticities, the largest term."""
        import pandas as pd

        rows, columns = np.nonzero(self.dominant != "")
        slopes = {f"{name}_ms" if name.startswith("dT") else name: grid for name, grid in self.slopes.items()}
        grids = {"T_ms": self.T_ms, **slopes, "largest_term": self.dominant}
        return pd.DataFrame(
            {"B": self.B[rows], "S": self.S[columns], **{name: grid[rows, columns] for name, grid in grids.items()}}
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "B": self.B.tolist(),
            "S": self.S.tolist(),
            "T_ms": _listed(self.T_ms),
            **{name: _listed(grid) for name, grid in self.slopes.items()},
            "dominant": [[name or None for name in row] for row in self.dominant.tolist()],
            "regions": self.regions(),
        }


def sensitivity_of(fit: FitResult, B: FloatArray, S: FloatArray, typical: Mapping[str, float]) -> Sensitivity:
    """Return slopes and terms of a fit on a grid, within its measured range.

    typical: cached tokens per request (see `model.features`).
    """
    grid_B, grid_S = np.meshgrid(B, S, indexing="ij")
    inside = ~fit.outside_domain(grid_B, grid_S)
    found = sensitivity(fit.structure, fit.theta, Grid(B, S, typical, inside, together=not fit.knows_prefill))
    if fit.correction is None:
        return found
    valid = np.isfinite(found.T_ms)
    steps = steps_at(grid_B[valid], grid_S[valid], typical)
    factor = _on_grid(valid, np.exp(fit.correction.of_steps(steps)))
    slopes = {name: grid * factor if name in IN_MS else grid for name, grid in found.slopes.items()}
    terms = {name: grid * factor for name, grid in found.terms.items()}
    return replace(found, T_ms=found.T_ms * factor, slopes=slopes, terms=terms)


@dataclass(frozen=True, eq=False)
class Grid:
    """Grid of steps: every pair of B (b,) and S (s,) with S >= B.

    Attributes
    ----------
    typical
        Cached tokens per request (see `model.features`).
    among
        Mask of the requested pairs (b, s); None for all.
    together
        Move S with B, and return no slopes in S.
    """

    B: FloatArray
    S: FloatArray
    typical: Mapping[str, float] | None = None
    among: NDArray[np.bool_] | None = None
    together: bool = False


def sensitivity(model: LatencyModel, theta: FloatArray, grid: Grid) -> Sensitivity:
    """Return slopes and terms of a model at parameters theta (p,) on a grid."""
    B, S, typical, together = grid.B, grid.S, grid.typical, grid.together
    grid_B, grid_S = np.meshgrid(B, S, indexing="ij")
    valid = grid_S >= grid_B
    if grid.among is not None:
        valid = valid & grid.among
    b, s = grid_B[valid], grid_S[valid]
    holds = s > b

    def latency(requests: FloatArray, tokens: FloatArray) -> FloatArray:
        return model.latency_ms(theta, steps_at(requests, tokens, typical, holds))

    T = latency(b, s)
    up, down = np.exp(_H), np.exp(-_H)
    more, less = (s * up, s * down) if together else (s, s)
    per_B = (latency(b * up, more) - latency(b * down, less)) / (2 * _H)
    per_S = (latency(b, s * up) - latency(b, s * down)) / (2 * _H) if not together else np.full(len(s), np.nan)
    terms = terms_of(model, theta, steps_at(b, s, typical))
    names = np.array(list(terms), dtype=object)
    largest = names[np.argmax(np.stack(list(terms.values())), axis=0)]
    dominant = np.full(valid.shape, "", dtype=object)
    dominant[valid] = largest
    safe = np.maximum(T, 1e-300)
    slopes = {"dT_dB": per_B / b, "dT_dS": per_S / s, "elasticity_B": per_B / safe, "elasticity_S": per_S / safe}
    slopes = {name: _on_grid(valid, values) for name, values in slopes.items()}
    by_name = {name: _on_grid(valid, values) for name, values in terms.items()}
    return Sensitivity(B, S, _on_grid(valid, T), slopes, by_name, dominant)


def steps_at(
    B: FloatArray,
    S: FloatArray,
    typical: Mapping[str, float] | None = None,
    holds: NDArray[np.bool_] | None = None,
) -> StepTable:
    """Return steps of B requests and S tokens (n,), with `typical` cached tokens per request.

    holds: whether one request is in prefill (n,), by default S > B.
    """
    prefill = np.asarray(S > B if holds is None else holds).astype(np.float64)
    return StepTable(with_typical_context({"B": B, "S": S, "prefill_requests": prefill}, typical or {}))


def terms_of(model: LatencyModel, theta: FloatArray, steps: Steps) -> dict[str, FloatArray]:
    """Return the nonzero terms of the latency in ms (n,), by the name of their cost, and `work` for the rest."""
    T = model.latency_ms(theta, steps)
    terms: dict[str, FloatArray] = {}
    rest = T.copy()
    for i, parameter in enumerate(model.parameters):
        if parameter.positive or parameter.fixed is not None or theta[i] == 0:
            continue
        without = theta.copy()
        without[i] = 0.0
        part = T - model.latency_ms(without, steps)
        if np.any(np.abs(part) > 1e-12 * np.abs(T)):
            terms[parameter.name] = part
            rest = rest - part
    if np.any(np.abs(rest) > 1e-9 * np.abs(T)) or not terms:
        terms[WORK] = rest
    return terms


def _on_grid(valid: NDArray[np.bool_], values: FloatArray) -> FloatArray:
    grid = np.full(valid.shape, np.nan)
    grid[valid] = values
    return grid


def _listed(grid: FloatArray) -> list[list[float | None]]:
    return [[float(x) if np.isfinite(x) else None for x in row] for row in grid]
