"""Slopes of the latency in B and S, and the most costly term of a step: docs/theory/fitting.md, "Sensitivity"."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.model import FitResult, LatencyModel, Steps, StepTable, with_typical_context
from latfit.stats import FloatArray

WORK = "work"
_H = 1e-4


@dataclass(frozen=True)
class Sensitivity:
    """Slopes and terms on a grid of B (b,) and S (s,); NaN or empty where S < B."""

    B: FloatArray
    S: FloatArray
    T_ms: FloatArray  # latency in ms (b, s)
    slopes: Mapping[str, FloatArray]  # dT_dB in ms/request, dT_dS in ms/token, elasticity_B, elasticity_S (b, s)
    terms: Mapping[str, FloatArray]  # terms in ms (b, s), by name
    dominant: NDArray[np.object_]  # name of the largest term (b, s)

    def regions(self) -> dict[str, dict[str, Any]]:
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
        """A pandas DataFrame, one row per step."""
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
    """Return slopes and terms on a grid within the measured range; `typical`: cached tokens per request."""
    grid_B, grid_S = np.meshgrid(B, S, indexing="ij")
    valid = (grid_S >= grid_B) & ~fit.outside_domain(grid_B, grid_S)
    b, s = grid_B[valid], grid_S[valid]
    holds = (s > b).astype(np.float64)

    def steps_at(requests: FloatArray, tokens: FloatArray) -> Steps:
        return StepTable(with_typical_context({"B": requests, "S": tokens, "prefill_requests": holds}, typical))

    def latency(requests: FloatArray, tokens: FloatArray) -> FloatArray:
        return fit.structure.latency_ms(fit.theta, steps_at(requests, tokens))

    def on_grid(values: FloatArray) -> FloatArray:
        grid = np.full(valid.shape, np.nan)
        grid[valid] = values
        return grid

    steps, up, down = steps_at(b, s), np.exp(_H), np.exp(-_H)
    factor = fit.corrected(np.ones(len(b)), steps)
    T, per_S = latency(b, s), np.full(len(s), np.nan)
    more, less = (s * up, s * down) if not fit.knows_prefill else (s, s)
    per_B = (latency(b * up, more) - latency(b * down, less)) / (2 * _H)
    if fit.knows_prefill:
        per_S = (latency(b, s * up) - latency(b, s * down)) / (2 * _H)
    terms = terms_of(fit.structure, fit.theta, steps)
    dominant = np.full(valid.shape, "", dtype=object)
    dominant[valid] = np.array(list(terms), dtype=object)[np.argmax(np.stack(list(terms.values())), axis=0)]
    safe = np.maximum(T, 1e-300)
    slopes = {
        "dT_dB": factor * per_B / b,
        "dT_dS": factor * per_S / s,
        "elasticity_B": per_B / safe,
        "elasticity_S": per_S / safe,
    }
    return Sensitivity(
        B,
        S,
        on_grid(factor * T),
        {name: on_grid(values) for name, values in slopes.items()},
        {name: on_grid(factor * values) for name, values in terms.items()},
        dominant,
    )


def terms_of(model: LatencyModel, theta: FloatArray, steps: Steps) -> dict[str, FloatArray]:
    """Return the nonzero terms in ms (n,) by the name of their cost, and `work` for the rest."""
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


def _listed(grid: FloatArray) -> list[list[float | None]]:
    return [[float(x) if np.isfinite(x) else None for x in row] for row in grid]
