"""How the latency answers to B and S, and which term it consists of where.

Slopes are central differences of the model's own formula in the logarithm of B or S, dT/dx = (dT/dln x)/x with steps of
h = 1e-4, so that they hold for every model (error h^2/6 of the third derivative); the elasticity is dlnT/dlnx: by how
many percent T grows for one percent more. A step keeps its phase while it is moved, and a further request brings its
cached context with it. A fit of decode steps alone tells only what a request costs together with its token: its slopes
in B move S along, and it has none in S.

Terms: a cost that may be zero enters the latency by T(theta) - T(theta with it at zero), which is its own term where T
is linear in it; what remains when all of them are zero is the work that rates and peaks describe. A term dominates
where it is the largest.

A correction multiplies the formula by a factor, which is taken as constant about a step: T, slopes in ms and terms have
it, elasticities are those of the formula.
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
    """On a grid of B (b,) and S (s,), NaN where S < B: T in ms (b, s); slopes by name (b, s), dT_dB and dT_dS in
    ms/request and ms/token, elasticity_B and elasticity_S; terms in ms (b, s) by name, and the name of the largest
    (b, s), empty where S < B."""

    B: FloatArray
    S: FloatArray
    T_ms: FloatArray
    slopes: Mapping[str, FloatArray]
    terms: Mapping[str, FloatArray]
    dominant: NDArray[np.object_]

    def regions(self) -> dict[str, dict[str, Any]]:
        """Where each term dominates: share of the grid, and the spans of B and S."""
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
        """A pandas DataFrame, one row a step: B, S, T_ms, slopes in ms, elasticities, the largest term."""
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
    """Slopes and terms of a fit on a grid, where its data reach. typical: cached tokens a request (see
    `model.features`)."""
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
    """Steps to ask about: every pair of B (b,) and S (s,) with S >= B. typical: cached tokens a request (see
    `model.features`).  among: the pairs (b, s) that are wanted, else all.  together: slopes in B with a token a
    request, none in S."""

    B: FloatArray
    S: FloatArray
    typical: Mapping[str, float] | None = None
    among: NDArray[np.bool_] | None = None
    together: bool = False


def sensitivity(model: LatencyModel, theta: FloatArray, grid: Grid) -> Sensitivity:
    """Slopes and terms of a fitted model on a grid."""
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
    """Steps of B requests and S tokens (n,), with so many cached tokens a request. holds: whether one of the requests
    is in prefill (n,); where it is not given, those with S > B."""
    prefill = np.asarray(S > B if holds is None else holds).astype(np.float64)
    return StepTable(with_typical_context({"B": B, "S": S, "prefill_requests": prefill}, typical or {}))


def terms_of(model: LatencyModel, theta: FloatArray, steps: Steps) -> dict[str, FloatArray]:
    """Terms of the latency in ms (n,) by the name of their cost, and `work`; those that are zero are left out."""
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
