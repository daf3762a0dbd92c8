"""The adaptive design: the cells that determine a fit come first, and an error estimate at the end.

Cells are ordered by the information that they add for their cost: greedily the largest rise of ln det M per ms
(D-optimality; Atkinson, Donev & Tobias 2007, section 12), for a polynomial in ln B, ln S, cached tokens and the phases,
which needs no fit. A run that ends early has then measured what a fit needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from latfit.model import LatencyModel
from latfit.profiling.result import ProfileResult, cell_columns
from latfit.profiling.shapes import StepShape
from latfit.stats import FloatArray
from latfit.trace import Trace

RIDGE = 1e-9
MAX_LOG_ERROR = 10.0


@dataclass(frozen=True)
class Surface:
    """A fitted model: its structure, parameters theta (p,), and which of them were free."""

    model: LatencyModel
    theta: FloatArray
    free: Sequence[int]

    def log_ms(self, cells: Trace) -> FloatArray:
        found: FloatArray = np.log(np.maximum(self.model.latency_ms(self.theta, _floats(cells)), 1e-12))
        return found

    def slopes(self, cells: Trace) -> FloatArray:
        """Return d ln T / d theta (cells, p) of the free parameters that the fit did not leave at zero, each column
        scaled to length one; columns that are flat are left out."""
        moving = [index for index in self.free if self.theta[index] > 0]
        gradient = self.model.gradient(self.theta, _floats(cells))[:, moving]
        return _unit_columns(gradient / np.exp(self.log_ms(cells))[:, None])


Refit = Callable[[Trace], Surface | None]
"""Fits a trace with a row for each measured cell; None if that gives nothing usable."""


def order_by_information(cells: Sequence[StepShape], cost_ms: Sequence[float]) -> list[int]:
    """Return the indices of all cells, those first that tell a fit most for their cost."""
    slopes = _unit_columns(_polynomial(cells))
    cost = np.array(cost_ms) + np.median(cost_ms)  # every visit has a cost besides its steps
    covariance = np.eye(slopes.shape[1]) / RIDGE
    order: list[int] = []
    for _ in cells:
        score = np.log1p(np.einsum("ij,jk,ik->i", slopes, covariance, slopes)) / cost
        score[order] = -1.0
        order.append(int(np.argmax(score)))
        step = covariance @ slopes[order[-1]]
        covariance = covariance - np.outer(step, step) / (1 + float(slopes[order[-1]] @ step))
    return order


def left_out_error(result: ProfileResult, refit: Refit) -> float:
    """Return the mean relative error at measured cells of fits that leave each out; 1 if there are too few for a fit.

    In closed form: the residual over one minus the leverage (Allen 1974).
    """
    measured = np.flatnonzero(result.measured)
    medians = np.array([np.median(result.times_ms[index]) for index in measured.tolist()])
    table = cell_columns(result.cells).select(measured)
    surface = refit(table.with_columns(T_ms=medians)) if len(measured) else None
    if surface is None:
        return 1.0
    directions, size, _ = np.linalg.svd(surface.slopes(table), full_matrices=False)
    directions = directions[:, size > RIDGE * size.max(initial=0.0)]
    if len(measured) <= directions.shape[1]:
        return 1.0
    leverage = np.sum(directions**2, axis=1)
    left_out = (np.log(medians) - surface.log_ms(table)) / np.maximum(1.0 - leverage, 1e-6)
    return float(np.mean(np.abs(np.expm1(-np.clip(left_out, -MAX_LOG_ERROR, MAX_LOG_ERROR)))))


def _polynomial(cells: Sequence[StepShape]) -> FloatArray:
    B, S = (np.log([float(getattr(cell, name)) for cell in cells]) for name in ("B", "S"))
    cached = np.log1p([float(cell.context_tokens) for cell in cells])
    phases = [np.array([float(cell.phase == phase) for cell in cells]) for phase in ("prefill", "mixed")]
    columns = [np.ones(len(cells)), B, S, B**2, S**2, B * S, cached, *phases]
    return np.column_stack([column for column in columns if np.any(column)])


def _unit_columns(slopes: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(slopes, axis=0)
    kept = lengths > 1e-12 * lengths.max(initial=1e-300)
    return np.asarray(slopes[:, kept] / lengths[kept])


def _floats(cells: Trace) -> dict[str, FloatArray]:
    return {name: cells.floats(name) for name in cells.columns if name != "phase"}
