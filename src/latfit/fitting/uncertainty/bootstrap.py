"""Bootstrap of a fit, and the parameter draws stored with it.

Rows or blocks (of time, or cells) are resampled, and each resample takes one Newton step (one-step bootstrap of
M-estimators). Draws along nearly flat directions are projected back onto the model. Derivation:
docs/theory/fitting.md, "Bootstrap".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem, by_row
from latfit.fitting.solver.levenberg_marquardt import Descents, damped_steps, minimise_all
from latfit.fitting.solver.loss import TUNING, score_factor, score_slope
from latfit.fitting.solver.objective import CellProblem, prior_rows
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.covariance import Uncertainty
from latfit.model import STORED_DRAWS, LatencyModel
from latfit.stats import FloatArray

SCHEMES = ("rows", "block")
GROUPS = 3_000  # random groups of rows that are resampled in place of more rows
BATCH = 100  # resamples drawn together
MAX_COMPARED_STEPS = 120
MAX_MISS = 0.1  # of a draw's predictions, as a share of the typical move
MAX_STEPS, MIN_GAIN = 25, 1e-3  # of a projection: steps, and share of the miss that one has to gain
MIN_SLOPE = 0.05  # of psi', as a share of rho': the Hessian of any resample is positive
FLAT_SD = 2.0  # prior standard deviation of a coordinate, which bounds moves along flat directions
DIGITS = 7

Progress = Callable[[int, int], None]


def from_covariance(problem: FitProblem, solution: Solution, doubt: Uncertainty, n: int = STORED_DRAWS) -> FloatArray:
    """Draw all parameters (n, p) from the covariance of the free coordinates."""
    if doubt.root is None or not problem.free:
        return np.empty((0, len(problem.model.parameters)))
    rng = np.random.default_rng(problem.options.seed)
    moves = rng.standard_normal((n, len(doubt.root))) @ doubt.root
    return problem.theta(project_moves(problem, solution, moves))


def kept(problem: FitProblem, theta: FloatArray, source: str) -> Mapping[str, Any]:
    """Return the `draws` section of a fit's JSON: the free parameters of up to 200 vectors (n, p)."""
    values = theta[:STORED_DRAWS, problem.free]
    rounded = [[float(f"{x:.{DIGITS}g}") for x in row] for row in values.tolist()]
    return {"source": source, "parameters": [p.name for p in problem.free_parameters], "values": rounded}


def project_moves(problem: FitProblem, solution: Solution, moves: FloatArray) -> FloatArray:
    """Return coordinates (n, p) whose predictions match the first-order effect of the moves (n, p). Moves along nearly
    flat directions do not match by themselves: they are fitted, by squares, from the optimum."""
    part = _compared(problem)
    part = replace(part, options=replace(part.options, loss="linear", priors={}))
    wanted, share = moves @ part.jacobian(solution.z).T, part.weights / part.weights.sum()
    rows = CellProblem(part, np.zeros(len(share)), share, np.arange(len(share)))
    alike, found = Descents.alike(rows, 1.0, len(moves)), np.clip(solution.z + moves, problem.lower, problem.upper)
    descents = replace(alike, y=rows.predicted(solution.z) + wanted)
    with np.errstate(all="ignore"):  # a long move may overflow, and is then no match
        miss = 2 * descents.costs(found)[0]
    lost = np.flatnonzero(~(miss <= MAX_MISS**2 * float(np.median(wanted**2 @ share))))
    if len(lost):
        starts = np.tile(solution.z, (len(lost), 1))
        found[lost] = [end.z for end in minimise_all(descents.at(lost), starts, MAX_STEPS, MIN_GAIN)]
    return found


def _compared(problem: FitProblem) -> FitProblem:
    """Return a sample of the rows: evenly spaced by weight, plus the extremes of every column."""
    if len(problem.observed) <= MAX_COMPARED_STEPS:
        return problem
    reached = np.cumsum(problem.weights)
    evenly = np.searchsorted(reached, (np.arange(MAX_COMPARED_STEPS) + 0.5) / MAX_COMPARED_STEPS * reached[-1])
    corners = [extreme(column) for column in problem.steps.values() for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.concatenate([evenly, np.array(corners)])).astype(np.int64)
    return problem.rows_at(rows)


@dataclass(frozen=True)
class ParameterDraws:
    """Parameter vectors of resampled data: theta (resamples, p), in the order of the model's parameters."""

    model: LatencyModel
    theta: FloatArray
    scheme: str
    seed: int

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Return the percentile interval of a parameter."""
        column = self.theta[:, [p.name for p in self.model.parameters].index(name)]
        low, high = np.quantile(column, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)

    def to_json(self, level: float = 0.95) -> dict[str, Any]:
        spans = {p.name: list(self.interval(p.name, level)) for p in self.model.parameters if p.fixed is None}
        return {
            "scheme": self.scheme,
            "resamples": len(self.theta),
            "seed": self.seed,
            "level": level,
            "parameters": spans,
        }


def bootstrap(
    problem: FitProblem,
    solution: Solution,
    data: FitData,
    *,
    resamples: int = 1000,
    scheme: str = "rows",
    progress: Progress | None = None,
) -> ParameterDraws:
    """Draw all parameters by a bootstrap of the rows of a problem. scheme: `rows` or `block`. progress: called with
    (done, total) after each batch. Raises WrongUsage for an unknown scheme."""
    seed = problem.options.seed
    if scheme not in SCHEMES:
        raise WrongUsage(f"{scheme!r} is not known", where="--bootstrap", remedy=f"Choose: {', '.join(SCHEMES)}.")
    z = np.tile(solution.z, (resamples, 1))
    if problem.free and resamples:
        rng = np.random.default_rng(seed)
        sums, counts = _unit_sums(by_row(problem, data), solution, blocks(data) if scheme == "block" else None)
        for first in range(0, resamples, BATCH):
            some = slice(first, min(first + BATCH, resamples))
            weights = rng.poisson(counts, (some.stop - first, len(counts))) / counts
            weights *= counts.sum() / np.maximum(weights @ counts, 1.0)[:, None]
            z[some] = project_moves(problem, solution, _newton_moves(problem, solution, weights @ sums, rng))
            if progress:
                progress(some.stop, resamples)
    return ParameterDraws(problem.model, problem.theta(z), scheme, seed)


def _newton_moves(problem: FitProblem, solution: Solution, sums: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Return the Newton step in the box (k, p) of each resample's sums (k, p + p(p+1)/2), prior means drawn anew."""
    k, p = len(sums), len(solution.z)
    hessian = np.empty((k, p, p))
    row, column = np.triu_indices(p)
    hessian[:, row, column] = hessian[:, column, row] = sums[:, p:]
    sigma = solution.f_scale / TUNING[problem.options.loss]
    residuals, J = prior_rows(problem, solution.z, solution.f_scale)
    drawn = residuals + sigma * rng.standard_normal((k, len(residuals)))
    hessian += J.T @ J + (sigma / FLAT_SD) ** 2 * np.eye(p)
    low, high = (np.tile(end - solution.z, (k, 1)) for end in (problem.lower, problem.upper))
    return damped_steps(drawn @ J - sums[:, :p], hessian, low, high, np.full(k, 1e-9))


def _unit_sums(problem: FitProblem, solution: Solution, unit: NDArray[np.intp] | None) -> tuple[FloatArray, FloatArray]:
    """Return the sums of [-psi j, psi' j j'] of each unit (units, p + p(p+1)/2), and the observations it counts as.
    Units are blocks, or rows; random groups of rows where there are many."""
    r, J, loss = problem.residuals(solution.z), problem.jacobian(solution.z), problem.options.loss
    factor = score_factor(loss, r, solution.f_scale)
    slope = np.maximum(score_slope(loss, r, solution.f_scale), MIN_SLOPE * factor)
    left, right = np.triu_indices(J.shape[1])
    columns = np.concatenate([-J * (r * factor)[:, None], J[:, left] * J[:, right] * slope[:, None]], axis=1)
    columns *= problem.weights[:, None]
    if unit is None:
        if len(r) <= GROUPS:
            return columns, problem.weights
        unit = np.random.default_rng(problem.options.seed).permutation(len(r)) % GROUPS
    sums = np.stack([np.bincount(unit, column) for column in columns.T], axis=1)
    return np.asarray(sums, dtype=np.float64), np.ones(len(sums))


def blocks(data: FitData) -> NDArray[np.intp]:
    """Return the block number of each row (n,): n^(1/3) neighbours in time within a run, or the (B,S) cell."""
    if not data.in_time:
        return data.cell
    unit = np.empty(len(data), dtype=np.intp)
    first = 0
    for rows in data.runs:
        length = max(1, round(len(rows) ** (1 / 3)))
        unit[rows] = first + np.arange(len(rows)) // length
        first += -(-len(rows) // length)
    return unit
