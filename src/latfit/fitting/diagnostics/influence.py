"""Which cells the fit hangs on, and which cannot be right.

Cook's distance of cell c is g_c' H^-1 g_c / p s^2 over (1 - its leverage)^2, where g_c = sum w psi j is the pull of its
rows and H = sum w psi' j j' the whole Hessian: cheap for every cell, and exact enough to find those that matter. The
first ten are then left out in earnest, by a fit of the other rows: the largest change of ln T over the cells says how
much the fit hangs on that cell, and ln(observed/predicted) under the fit without it is free of its own pull.

A cell far from the fit may only show what the model cannot follow; its neighbours then are as far. So each is compared
with the six nearest cells in the logarithms of all that is known of a step: a cell that differs from their median by
five robust standard deviations of such differences, and by 25 %, stands alone. A cell's latency cannot be that far from
those of almost equal steps on all sides, so that the measurement is at fault.

Two cells cannot both be right where one takes longer than the other, which has as many requests and at least as much
of everything else, by 5 % and by two standard errors of the difference of their repeats, where the fit has it the other
way round (latency may fall in S while start-up work dominates, and the fit then knows it).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem, collapse
from latfit.fitting.solver.levenberg_marquardt import minimise
from latfit.fitting.solver.loss import score_factor
from latfit.fitting.solver.objective import Objective, by_cell
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.identifiability import decompose
from latfit.model import Steps, StepTable
from latfit.stats import FloatArray, by_group, mad_sigma

NEIGHBOURS = 6
ALONE_SIGMA = 5.0
ALONE_RATIO = 1.25
LEFT_OUT = 10
SHOWN = 5
MOST_CELLS = 20_000
MANY_CELLS = 1_500
"""Cells from which a tree of them is worth loading."""

STEPS, CLOSE = 12, 1e-9
"""Steps of a fit without a cell, and the share of its cost that they may leave to be gained."""

ONE_STEP_FROM = 2_000
"""Cells from which leaving one out moves the optimum so little that one step reaches it."""

MOST_COMPARED = 3_000
LONGER = 1.05
SIGMAS = 2.0


@dataclass(frozen=True)
class _Cells:
    """By cell: what is known of it (m, k), rows, geometric mean of T in ms, ln of that over the prediction, and the
    largest relative change of any cell's prediction without it (NaN where it was not tried), each (m,)."""

    columns: dict[str, FloatArray]
    rows: FloatArray
    observed: FloatArray
    apart: FloatArray
    change: FloatArray


def influence(problem: FitProblem, solution: Solution, data: FitData) -> dict[str, Any]:
    """The `influence` of the diagnostics: cells by how much the fit hangs on them, and those that stand alone."""
    rows = collapse(data, list(data.steps))
    cells = int(rows.cells[-1]) + 1
    if len(problem.free) == 0 or cells <= len(problem.free) + 1:
        return {"reason": "too few cells to leave one out"}
    if cells > MOST_CELLS:
        return {"reason": f"more than {MOST_CELLS:,} cells: a single one cannot matter"}
    read = StepTable({name: rows.steps[name] for name in problem.steps})
    single = replace(problem, steps=read, observed=rows.observed, weights=rows.counts, cells=rows.cells)
    found = _left_out(single, solution, rows.steps, cells)
    beside = _beside_neighbours(found)
    sigma = max(mad_sigma(beside), 1e-12)
    alone = np.flatnonzero((np.abs(beside) > ALONE_SIGMA * sigma) & (np.abs(beside) > math.log(ALONE_RATIO)))
    alone = alone[np.argsort(-np.abs(beside[alone]))][:SHOWN]
    heavy = np.argsort(-np.nan_to_num(found.change, nan=-1.0))[:SHOWN]
    impossible = _impossible(found, single)
    return {
        "cells": [_shown(found, beside, int(i)) for i in heavy if np.isfinite(found.change[i])],
        "standing_alone": [_shown(found, beside, int(i)) for i in alone],
        "impossible": impossible,
        "sentence": _sentence(found, beside, alone, impossible),
    }


def _left_out(single: FitProblem, solution: Solution, known: Steps, cells: int) -> _Cells:
    which, w = single.cells, single.weights
    predicted = np.maximum(single.model.latency_ms(single.theta(solution.z), single.steps), 1e-300)
    measured = by_group(np.log(single.observed), which, w)
    apart = by_group(np.log(single.observed) - np.log(predicted), which, w).mean
    first = np.unique(which, return_index=True)[1]
    change = np.full(cells, np.nan)
    for c in np.argsort(-_cook(single, solution, cells))[:LEFT_OUT]:
        inside = np.flatnonzero(which != c)
        theta = single.theta(_refitted(single.rows_at(inside), solution))
        shift = np.log(np.maximum(single.model.latency_ms(theta, single.steps), 1e-300) / predicted)
        change[c] = math.expm1(min(float(np.max(np.abs(shift[inside]))), 20.0))
        apart[c] -= float(shift[which == c].mean())
    return _Cells(
        {name: column[first] for name, column in known.items()}, measured.size, np.exp(measured.mean), apart, change
    )


def _cook(single: FitProblem, solution: Solution, cells: int) -> FloatArray:
    """Cook's distance of each cell (m,), up to a factor."""
    r, J, w = single.residuals(solution.z), single.jacobian(solution.z), single.weights
    psi = r * score_factor(single.options.loss, r, solution.f_scale)
    inverse = decompose(J, w).inverse()
    pull = np.stack([np.bincount(single.cells, w * psi * column, cells) for column in J.T], axis=1)
    leverage = np.bincount(single.cells, w * np.einsum("ij,jk,ik->i", J, inverse, J), cells)
    return np.asarray(np.einsum("ij,jk,ik->i", pull, inverse, pull) / np.maximum(1 - leverage, 0.05) ** 2)


def _refitted(part: FitProblem, solution: Solution) -> FloatArray:
    """z of a fit of some of the rows, from the full fit's optimum and with its scale of the loss."""
    steps = STEPS if len(part.observed) < ONE_STEP_FROM else 1
    return minimise(Objective(by_cell(part), solution.f_scale), solution.z, steps, CLOSE).z


def _beside_neighbours(found: _Cells) -> FloatArray:
    """How far each cell is from the fit, minus the median of that over its nearest cells (m,)."""
    logs = np.stack([np.log1p(np.maximum(column, 0.0)) for column in found.columns.values()], axis=1)
    count = min(NEIGHBOURS, len(logs) - 1)
    near = nearest(logs, np.arange(len(logs)), count)
    return np.asarray(found.apart - np.median(found.apart[near], axis=1))


def nearest(points: FloatArray, asked: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    """The other points (k, count) nearest to each that is asked for (k,), of points (m, d)."""
    if len(points) > MANY_CELLS:
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


def _impossible(found: _Cells, single: FitProblem) -> list[dict[str, float]]:
    """Cells that take longer than one with the same B and at least as much of everything else, worst first."""
    cells, w, logs = len(found.rows), single.weights, np.log(single.observed)
    if cells > MOST_COMPARED or not np.any(found.rows > 1):
        return []
    mean, typical = np.log(found.observed), np.log(found.observed) - found.apart
    squares = by_group(logs, single.cells, w).squares
    pooled = float(squares.sum()) / max(float(found.rows.sum()) - cells, 1.0)
    variance = (squares + pooled) / np.maximum(found.rows, 1.0) / found.rows
    worst = []
    for i in range(cells):
        more = found.columns["B"] == found.columns["B"][i]
        for column in found.columns.values():
            more &= column >= column[i]
        excess = mean[i] - mean
        certain = (
            more
            & (typical >= typical[i])
            & (excess > math.log(LONGER))
            & (excess > SIGMAS * np.sqrt(variance[i] + variance))
        )
        if certain.any():
            other = int(np.argmax(np.where(certain, excess, -np.inf)))
            worst.append((float(excess[other]), i, other))
    return [
        {
            **{name: float(column[i]) for name, column in found.columns.items()},
            "T_ms": float(found.observed[i]),
            "than_S": float(found.columns["S"][j]),
            "than_T_ms": float(found.observed[j]),
        }
        for _, i, j in sorted(worst, reverse=True)[:SHOWN]
    ]


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


def _sentence(found: _Cells, beside: FloatArray, alone: NDArray[np.intp], impossible: list[dict[str, float]]) -> str:
    if len(alone) == 0 and impossible:
        first = impossible[0]
        return (
            f"The cell B={first['B']:g}, S={first['S']:g} took {first['T_ms']:.4g} ms, longer than the"
            f" {first['than_T_ms']:.4g} ms of S={first['than_S']:g}: both cannot be right, so measure them again."
        )
    if len(alone) == 0:
        return "No cell stands apart from its neighbours."
    i = int(alone[0])
    at = ", ".join(f"{name}={found.columns[name][i]:g}" for name in found.columns)
    size = abs(math.expm1(float(beside[i]))) * 100
    side = "above" if beside[i] > 0 else "below"
    more = f"; {len(alone) - 1} more" if len(alone) > 1 else ""
    return (
        f"The cell {at} took {found.observed[i]:.4g} ms, {size:.0f} % {side} what the cells beside it suggest: measure"
        f" it again{more}."
    )
