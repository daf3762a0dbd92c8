"""Covariance and 95 % intervals of the parameters, and which are identified: docs/theory/fitting.md, "Covariance".

A sandwich estimate with a variance component per cell, without repeats HC3. Exact aliases come from the singular values
of the scaled Jacobian. Costs at zero get a one-sided interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit.fitting.problem import TUNING, FitProblem
from latfit.fitting.solver.objective import by_cell, prior_rows, score_factor, score_slope, with_priors
from latfit.fitting.solver.solve import Solution
from latfit.model import Estimate, HeldOutErrors, LatencyModel, Steps
from latfit.stats import FloatArray, by_group, student_quantile, weighted_quantile

FLAT = 1e-8


@dataclass(frozen=True)
class Directions:
    lengths: FloatArray  # of the columns (p,)
    singular: FloatArray  # values (p,)
    right: FloatArray  # vectors (p, p) as rows
    flat_groups: list[list[int]]  # columns that are exactly flat together

    def root(self) -> FloatArray:
        """Return R (k, p) with R'R = (J'WJ)^-1 in the columns' units, without flat directions."""
        kept = self.singular >= FLAT * max(float(self.singular[0]), 1e-300)
        lengths = np.where(self.lengths > 0, self.lengths, 1.0)
        return np.asarray(self.right[kept] / self.singular[kept][:, None] / lengths)


def condition_number(singular: FloatArray) -> float:
    """Return largest over smallest of descending singular values; infinite if the smallest is rounding error."""
    known = len(singular) > 0 and singular[-1] > np.finfo(float).eps * singular[0]
    return float(singular[0] / singular[-1]) if known else np.inf


def decompose(J: FloatArray, weights: FloatArray) -> Directions:
    scaled = J * np.sqrt(weights)[:, None]
    lengths = np.linalg.norm(scaled, axis=0)
    dead = lengths <= FLAT * max(float(lengths.max(initial=0.0)), 1e-300)
    unit = scaled / np.where(dead, 1.0, lengths)
    unit[:, dead] = 0.0
    triangle = np.linalg.qr(unit, mode="r")
    _, singular, right = np.linalg.svd(triangle, full_matrices=True)
    padded = np.zeros(J.shape[1])
    padded[: len(singular)] = singular
    groups: list[list[int]] = [[int(i)] for i in np.flatnonzero(dead)]
    for value, direction in zip(padded, right, strict=True):
        members = [int(i) for i in np.flatnonzero(np.abs(direction) > 0.1) if not dead[i]]
        if value < FLAT * padded[0] and members:
            merge(groups, members)
    return Directions(lengths, padded, right, groups)


def merge(groups: list[list[int]], members: Sequence[int]) -> None:
    united = sorted({*members, *(i for group in groups if set(group) & set(members) for i in group)})
    groups[:] = [group for group in groups if not set(group) & set(members)] + [united]


LEVEL = 0.95
MATERIAL = 0.10
MAX_LOG_ERROR = 0.4
"""Largest standard error of ln(rate or peak) of an identified one: the interval spans a factor of 2.2 each way."""
ALONE = 0.1  # smallest 1 - leverage of a row whose residual shows the noise; below, the row nearly fits itself


@dataclass(frozen=True)
class Uncertainty:
    estimates: dict[str, Estimate]  # estimate of each parameter, by name
    condition_number: float  # of the scaled Jacobian
    unidentified: list[list[str]]  # groups of parameters that are not identifiable separately
    directions: Directions | None = None  # decomposition of the Jacobian
    root: FloatArray | None = None  # R (k, p) with R'R the covariance of z, without flat directions
    quantile: float = 1.96  # standard errors from an estimate to the end of its interval


def uncertainty(problem: FitProblem, solution: Solution) -> Uncertainty:
    if not problem.free:
        return Uncertainty(_fixed_estimates(problem), 1.0, [])
    cells = by_cell(problem).cells
    J = cells.residual_slopes(cells.theta(solution.z), cells.steps)
    directions = decompose(*with_priors(cells, solution.z, solution.f_scale, J))
    at_low, at_high = solution.z <= problem.lower, solution.z >= problem.upper
    flat = {i for group in directions.flat_groups for i in group}
    interior = np.array([i for i in range(len(solution.z)) if not (at_low[i] or at_high[i])], dtype=int)
    root, freedom = sandwich_root(problem, solution, J, interior)
    errors = np.full(len(solution.z), np.nan)
    errors[interior] = np.linalg.norm(root, axis=0)
    quantile = student_quantile(freedom, 0.5 + LEVEL / 2)
    known = _identified(problem, solution, J, errors, interior)
    known[list(flat)] = False
    everything = root
    if len(interior) < len(solution.z):
        everything, _ = sandwich_root(problem, solution, J, np.arange(len(solution.z)))
    all_errors = np.linalg.norm(everything, axis=0)
    estimates = _fixed_estimates(problem)
    for i, parameter in enumerate(problem.free_parameters):
        if bool(at_low[i]) and problem.lower[i] == 0 and not parameter.positive and i not in flat:
            end = quantile * float(all_errors[i])  # a cost at zero: one end, from the curvature alone
            known_cost = end > 0 and _moved(problem, J[:, i], end) <= 2 * MATERIAL
            high = end * float(problem.scales[problem.free[i]])
            estimates[parameter.name] = Estimate(0.0, None, 0.0, high, parameter.unit, identified=known_cost)
        elif parameter.name in problem.options.bounds and (at_low[i] or at_high[i]):
            held = float(problem.theta(solution.z)[problem.free[i]])
            estimates[parameter.name] = Estimate(held, None, None, None, parameter.unit)
        else:
            estimates[parameter.name] = _estimate(problem, solution, i, errors[i], quantile, bool(known[i]))
    named = [p.name for p in problem.free_parameters]
    groups = [[named[i] for i in group] for group in directions.flat_groups]
    groups += [[name] for i, name in enumerate(named) if not estimates[name].identified and i not in flat]
    ordered = {p.name: estimates[p.name] for p in problem.model.parameters}
    return Uncertainty(ordered, condition_number(directions.singular), groups, directions, everything, quantile)


def sandwich_root(
    problem: FitProblem, solution: Solution, J: FloatArray, interior: NDArray[np.int64]
) -> tuple[FloatArray, float]:
    """Return R (k, p) with R'R the covariance of `interior` coordinates, others fixed, and degrees of freedom."""
    rows = problem.rows
    if len(interior) == 0:
        return np.zeros((0, 0)), float(max(rows - 1, 1))
    loss, w, firsts, cells_of = problem.options.loss, problem.weights, problem.firsts, by_cell(problem).cells
    sizes = np.diff(firsts, append=len(w))
    root = decompose(J[:, interior], cells_of.weights).root()
    p = len(root)
    r = problem.residuals(solution.z)
    pull, slope = score_factor(loss, r, solution.f_scale), score_slope(loss, r, solution.f_scale)
    Ji = J[:, interior]
    # If every row is in the tail of the loss, the slope is unknown; assume one row that is not.
    mean_slope = max(float(w @ slope), 1.0) / rows
    spread = float(w @ (slope - mean_slope) ** 2) / rows
    correction = 1 + p / rows * spread / mean_slope**2
    score = pull * r
    shift, cells = _cell_variance(problem, score, p)
    kept = np.repeat(1 - np.sum((Ji @ root.T) ** 2, axis=1), sizes)
    typical = float(np.sqrt(w @ score**2 / max(rows - p, 1)))
    left_out = np.where(kept > ALONE, score / np.maximum(kept, ALONE), typical)
    scores = [Ji * np.sqrt(np.add.reduceat(w * left_out**2, firsts))[:, None]]
    if shift > 0:
        summed = np.zeros((problem.cells.max() + 1, Ji.shape[1]))
        np.add.at(summed, cells_of.cells, Ji * np.add.reduceat(w * pull, firsts)[:, None])
        scores.append(np.sqrt(shift) * summed)
    scores.append(solution.f_scale / TUNING[loss] * prior_rows(problem, solution.z, solution.f_scale)[1][:, interior])
    known, weights = with_priors(cells_of, solution.z, solution.f_scale, J, mean_slope / correction)
    half = decompose(known[:, interior], weights).root()
    inner = np.linalg.qr(np.concatenate(scores) @ half.T, mode="r")
    return inner @ half * (correction / mean_slope), float(max(cells - p, 1) if shift > 0 else max(rows - p, 1))


def relative_error_at(problem: FitProblem, theta: FloatArray, doubt: Uncertainty, steps: Steps) -> FloatArray:
    """Return the standard error of ln T (n,) at steps due to the parameters (delta method)."""
    if doubt.root is None:
        return np.zeros(len(steps["B"]))
    slopes = problem.slopes(theta, steps) / np.maximum(problem.model.latency_ms(theta, steps), 1e-300)[:, None]
    return np.asarray(np.linalg.norm(slopes @ doubt.root.T, axis=1))


def _cell_variance(problem: FitProblem, score: FloatArray, p: int) -> tuple[float, int]:
    """Return (variance of the cell effect, number of cells) by one-way analysis of variance."""
    found = by_group(score, problem.cells, problem.weights)
    cells, rows = len(found.size), problem.rows
    if rows <= cells or cells <= p:
        return 0.0, cells
    between = float(found.size @ found.mean**2) / (cells - p)
    return max(0.0, (between - found.within) / max(found.typical_size, 1e-12)), cells


def _identified(
    problem: FitProblem, solution: Solution, J: FloatArray, errors: FloatArray, interior: NDArray[np.int64]
) -> NDArray[np.bool_]:
    known = np.zeros(len(errors), dtype=bool)
    for i in interior.tolist():
        parameter = problem.free_parameters[i]
        size = MAX_LOG_ERROR if parameter.positive else solution.z[i]
        small = not parameter.positive and _moved(problem, J[:, i], errors[i]) <= MATERIAL
        known[i] = errors[i] <= size or small
    return known


def _moved(problem: FitProblem, slopes: FloatArray, error: float) -> float:
    """Return by what share an error of a coordinate moves T at the 95 % quantile of its slopes by cell (m,)."""
    rows = np.diff(problem.firsts, append=len(problem.weights)).astype(np.float64)
    return weighted_quantile(np.abs(slopes), 0.95, rows) * error / problem.unit


def _estimate(problem: FitProblem, solution: Solution, i: int, error: float, quantile: float, known: bool) -> Estimate:
    index = problem.free[i]
    parameter, scale = problem.model.parameters[index], float(problem.scales[index])
    z = float(solution.z[i])
    value = scale * (float(np.exp(z)) if parameter.positive else z)
    if not known:
        return Estimate(value, None, None, None, parameter.unit, identified=False)
    if parameter.positive:
        low, high = (float(value * np.exp(side * quantile * error)) for side in (-1, 1))
        return Estimate(value, value * error, low, high, parameter.unit)
    low, high = (value + side * quantile * error * scale for side in (-1, 1))
    return Estimate(value, error * scale, max(low, 0.0), high, parameter.unit)


def _fixed_estimates(problem: FitProblem) -> dict[str, Estimate]:
    """Return estimates of parameters fixed by the user or the gauge, or because no step depends on them."""
    found = {}
    for p in problem.model.parameters:
        if p.name in problem.fixed:
            told = p.name in problem.options.fixed or p.fixed is not None
            found[p.name] = Estimate(problem.fixed[p.name], None, None, None, p.unit, identified=told, fixed=told)
    return found


LINE = {"tau_0", "tau_B", "tau_S"}
MIN_GAIN = 0.005  # share of a line's error by which a model has to be better: folds are fitted no more exactly


def line_as_good(problem: FitProblem, own: HeldOutErrors | None, line: HeldOutErrors | None) -> bool:
    """Return whether a line predicts held-out rows as well as the problem's model, which contains it as a limit."""
    names, bends = {p.name for p in problem.model.parameters}, _bends(problem.model)
    is_extended_line = LINE <= names <= bends | LINE and not bends.isdisjoint(p.name for p in problem.free_parameters)
    if own is None or line is None or not is_extended_line or LINE & problem.options.constrained:
        return False
    errors, baseline = own.mape_pct_by_fold, line.mape_pct_by_fold
    if len(errors) != len(baseline) or len(errors) < 2:
        return False
    gains = np.log(np.maximum(baseline, 1e-9) / np.maximum(errors, 1e-9))
    return float(gains.mean()) <= max(float(np.std(gains, ddof=1)) / math.sqrt(len(gains)), MIN_GAIN)


def without_bends(problem: FitProblem, doubt: Uncertainty) -> Uncertainty:
    """Return the uncertainty with all parameters that bend the curve as one group that is not identified."""
    free = [p.name for p in problem.free_parameters if p.name in _bends(problem.model)]
    lost = [name for name in free if name not in problem.options.constrained]
    estimates = dict(doubt.estimates)
    for name in lost:
        estimates[name] = structs.replace(estimates[name], std_error=None, low=None, high=None, identified=False)
    joined = [name for group in doubt.unidentified if set(group) - LINE for name in group]
    others = [group for group in doubt.unidentified if not set(group) - LINE]
    return replace(doubt, estimates=estimates, unidentified=[*others, list(dict.fromkeys([*lost, *joined]))])


def _bends(model: LatencyModel) -> set[str]:
    return {p.name for p in model.parameters if p.positive} | {*model.outer, "w_0"}
