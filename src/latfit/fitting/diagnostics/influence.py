"""Influence of cells on a fit, and cells that contradict their neighbours.

Cook's distance picks ten cells; each is left out by one Newton step. The largest change of a prediction says how much
the fit depends on the cell. A cell stands alone if its residual differs from the median of its six nearest
cells (in the logarithms of all columns) by five robust standard deviations and by 25 %.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem, collapse
from latfit.fitting.solver.loss import score_factor
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.identifiability import decompose
from latfit.model import Steps, StepTable
from latfit.stats import FloatArray, by_group, mad_sigma

NEIGHBOURS = 6
ALONE_SIGMA, ALONE_RATIO = 5.0, 1.25
LEFT_OUT, SHOWN = 10, 5
MAX_CELLS = 20_000  # among more, no single cell matters
MIN_CELLS_FOR_TREE = 1_500  # from here a k-d tree is worth loading


@dataclass(frozen=True)
class _Cells:
    """By cell (m,): its columns, rows, geometric mean of T in ms, ln of that over the prediction, and the largest
    relative change of any prediction without it (NaN where it was not left out)."""

    columns: dict[str, FloatArray]
    rows: FloatArray
    observed: FloatArray
    apart: FloatArray
    change: FloatArray


def influence(problem: FitProblem, solution: Solution, data: FitData) -> dict[str, Any]:
    """Return the cells by their influence on the fit, and those that stand alone."""
    rows = collapse(data, list(data.steps))
    cells = int(rows.cells[-1]) + 1
    if len(problem.free) == 0 or cells <= len(problem.free) + 1:
        return {"reason": "too few cells to leave one out"}
    if cells > MAX_CELLS:
        return {"reason": f"more than {MAX_CELLS:,} cells: a single one cannot matter"}
    read = StepTable({name: rows.steps[name] for name in problem.steps})
    single = replace(problem, steps=read, observed=rows.observed, weights=rows.counts, cells=rows.cells)
    found = _left_out(single, solution, rows.steps, cells)
    beside = _beside_neighbours(found)
    sigma = max(mad_sigma(beside), 1e-12)
    alone = np.flatnonzero((np.abs(beside) > ALONE_SIGMA * sigma) & (np.abs(beside) > math.log(ALONE_RATIO)))
    alone = alone[np.argsort(-np.abs(beside[alone]))][:SHOWN]
    heavy = np.argsort(-np.nan_to_num(found.change, nan=-1.0))[:SHOWN]
    return {
        "cells": [_shown(found, beside, int(i)) for i in heavy if np.isfinite(found.change[i])],
        "standing_alone": [_shown(found, beside, int(i)) for i in alone],
        "sentence": _sentence(found, beside, alone),
    }


def _left_out(single: FitProblem, solution: Solution, known: Steps, cells: int) -> _Cells:
    """Leave out the cells with the largest Cook's distance, by one Newton step from the optimum."""
    which, w = single.cells, single.weights
    predicted = np.maximum(single.model.latency_ms(single.theta(solution.z), single.steps), 1e-300)
    measured = by_group(np.log(single.observed), which, w)
    apart = by_group(np.log(single.observed) - np.log(predicted), which, w).mean
    first = np.unique(which, return_index=True)[1]
    r, J = single.residuals(solution.z), single.jacobian(solution.z)
    psi, inverse = r * score_factor(single.options.loss, r, solution.f_scale), decompose(J, w).inverse()
    pull = np.stack([np.bincount(which, w * psi * column, cells) for column in J.T], axis=1)
    leverage = np.bincount(which, w * np.einsum("ij,jk,ik->i", J, inverse, J), cells)
    moved = pull @ inverse / np.maximum(1 - leverage, 0.05)[:, None]
    change, scale = np.full(cells, np.nan), 1.0 if single.options.residuals == "relative" else 1 / predicted[first]
    for c in np.argsort(-np.einsum("ij,ij->i", moved, pull))[:LEFT_OUT]:
        shift = scale * (J[first] @ moved[c])
        change[c] = math.expm1(min(float(np.max(np.abs(np.delete(shift, c)))), 20.0))
        apart[c] -= float(shift[c])
    return _Cells(
        {name: column[first] for name, column in known.items()}, measured.size, np.exp(measured.mean), apart, change
    )


def _beside_neighbours(found: _Cells) -> FloatArray:
    """Return each cell's residual minus the median residual of its nearest cells (m,)."""
    logs = np.stack([np.log1p(np.maximum(column, 0.0)) for column in found.columns.values()], axis=1)
    count = min(NEIGHBOURS, len(logs) - 1)
    near = nearest(logs, np.arange(len(logs)), count)
    return np.asarray(found.apart - np.median(found.apart[near], axis=1))


def nearest(points: FloatArray, asked: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """Return the numbers of the nearest other points (k, count) for some (k,) of the points (m, d)."""
    if len(points) > MIN_CELLS_FOR_TREE:
        return _nearest_by_tree(points, asked, count)
    apart = np.zeros((len(asked), len(points)))
    for column in points.T:
        apart += (column[asked, None] - column) ** 2
    apart[np.arange(len(asked)), asked] = np.inf
    return np.argpartition(apart, count - 1, axis=1)[:, :count]


def _nearest_by_tree(points: FloatArray, asked: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    from scipy.spatial import cKDTree

    _, found = cKDTree(points).query(points[asked], k=count + 1)
    other = found != asked[:, None]
    other[other.all(axis=1), -1] = False  # of cells at one place the tree may leave out the one that asks
    return np.asarray(found[other].reshape(len(asked), count))


def _shown(found: _Cells, beside: FloatArray, i: int) -> dict[str, float | None]:
    steps = {name: float(column[i]) for name, column in found.columns.items()}
    return {
        **steps,
        "rows": float(found.rows[i]),
        "T_ms": float(found.observed[i]),
        "expected_ms": float(found.observed[i] * np.exp(-found.apart[i])),
        "beside_neighbours": float(np.expm1(beside[i])),
        "change_without": float(found.change[i]) if np.isfinite(found.change[i]) else None,
    }


def _sentence(found: _Cells, beside: FloatArray, alone: NDArray[np.intp]) -> str:
    if len(alone) == 0:
        return "No cell stands apart from its neighbours."
    i = int(alone[0])
    at = ", ".join(f"{name}={found.columns[name][i]:g}" for name in found.columns)
    size, side = abs(math.expm1(float(beside[i]))) * 100, "above" if beside[i] > 0 else "below"
    more = f"; {len(alone) - 1} more" if len(alone) > 1 else ""
    return (
        f"The cell {at} took {found.observed[i]:.4g} ms, {size:.0f} % {side} what the cells beside it suggest: measure"
        f" it again{more}."
    )
