"""Bootstrap of a fit, and the parameter draws stored with it.

Rows or blocks (of time, or cells) are resampled, and each resample takes one Newton step (one-step bootstrap of
M-estimators). Draws along nearly flat directions are projected back onto the model. Derivation:
docs/theory/fitting.md, "Bootstrap".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem, by_row
from latfit.fitting.solver.levenberg_marquardt import damped_steps, thetas
from latfit.fitting.solver.loss import TUNING, score_factor, score_slope
from latfit.fitting.solver.objective import prior_rows
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.covariance import Uncertainty
from latfit.model import STORED_DRAWS, LatencyModel
from latfit.stats import FloatArray

SCHEMES = ("rows", "block")
GROUPS = 3_000  # random groups of steps that are resampled in place of more rows
BATCH = 100  # resamples drawn together
MAX_COMPARED_STEPS = 120
MAX_MISS = 0.1  # of a draw's predictions, as a share of the typical move
MAX_STEPS = 12
MAX_MOVE = 1.0  # of a coordinate in one step of a projection
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
    """Return coordinates (n, p) whose predictions match the first-order effect of the moves (n, p)."""
    part = _compared(problem)
    here = _predicted(part, solution.z[None])[0]
    wanted = moves @ part.jacobian(solution.z).T
    share = part.weights / part.weights.sum()
    typical = float(np.sqrt(np.median(wanted**2 @ share)))
    found = np.clip(solution.z + moves, problem.lower, problem.upper)
    with np.errstate(all="ignore"):  # a long move may overflow, and is then no match
        miss = np.sqrt((_predicted(part, found) - here - wanted) ** 2 @ share)
        lost = np.flatnonzero(~(miss <= MAX_MISS * typical))
        if len(lost):
            found[lost] = _closest(part, solution.z, here + wanted[lost], share, (MAX_MISS * typical) ** 2)
    return found


def _closest(part: FitProblem, start: FloatArray, target: FloatArray, share: FloatArray, enough: float) -> FloatArray:
    """Return coordinates (k, free) whose predictions are closest to targets (k, m), by damped Gauss-Newton steps.

    enough: mean square distance at which a search stops.
    """
    k = len(target)
    z, damping, on = np.tile(start, (k, 1)), np.full(k, 1e-6), np.arange(k)
    r = _predicted(part, z) - target
    cost = r**2 @ share
    for _ in range(MAX_STEPS):
        J = _slopes(part, z[on])
        gradient, H = np.einsum("knf,kn->kf", J, share * r[on]), np.swapaxes(J, 1, 2) @ (J * share[:, None])
        low, high = np.maximum(part.lower - z[on], -MAX_MOVE), np.minimum(part.upper - z[on], MAX_MOVE)
        trial = z[on] + damped_steps(gradient, H, low, high, damping[on])
        left = _predicted(part, trial) - target[on]
        reached = left**2 @ share
        better = reached < cost[on]
        done = better & ((reached < enough) | (reached > 0.999 * cost[on]))
        damping[on] = np.where(better, np.maximum(damping[on] / 5, 1e-9), np.maximum(damping[on], 1e-4) * 30)
        moved = on[better]
        z[moved], r[moved], cost[moved] = trial[better], left[better], reached[better]
        on = on[~done]
        if len(on) == 0:
            break
    return z


def _compared(problem: FitProblem) -> FitProblem:
    """Return a sample of the rows: evenly spaced by weight, plus the extremes of every column."""
    if len(problem.observed) <= MAX_COMPARED_STEPS:
        return problem
    reached = np.cumsum(problem.weights)
    evenly = np.searchsorted(reached, (np.arange(MAX_COMPARED_STEPS) + 0.5) / MAX_COMPARED_STEPS * reached[-1])
    corners = [extreme(column) for column in problem.steps.values() for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.concatenate([evenly, np.array(corners)])).astype(np.int64)
    return problem.rows_at(rows)


def _predicted(part: FitProblem, z: FloatArray) -> FloatArray:
    """Return ln T, or T for absolute residuals, (k, m) at coordinates (k, free)."""
    T = part.model.latency_ms(thetas(part, z), part.steps)
    T = np.broadcast_to(T, (len(z), len(part.observed)))
    return T if part.options.residuals == "absolute" else np.log(np.maximum(T, 1e-300))


def _slopes(part: FitProblem, z: FloatArray) -> FloatArray:
    """Return the slopes of `_predicted` by z (k, m, free)."""
    theta = thetas(part, z)
    J = part.model.gradient(theta, part.steps)[..., part.free] * part.chain(theta[:, :, 0].T)[:, None]
    if part.options.residuals == "absolute":
        return np.asarray(J)
    return np.asarray(J / np.maximum(part.model.latency_ms(theta, part.steps), 1e-300)[..., None])


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
    data: FitData | None = None,
    *,
    resamples: int = 1000,
    scheme: str = "rows",
    progress: Progress | None = None,
) -> ParameterDraws:
    """Draw all parameters by a bootstrap.

    Parameters
    ----------
    data
        Rows of the problem; required by `block`.
    scheme
        `rows` or `block`.
    progress
        Called with (done, total) after each batch.

    Raises
    ------
    WrongUsage
        For an unknown scheme, or `block` without data.
    """
    seed = problem.options.seed
    if scheme not in SCHEMES or (scheme == "block" and data is None):
        raise WrongUsage(f"{scheme!r} is not known", where="--bootstrap", remedy=f"Choose: {', '.join(SCHEMES)}.")
    z = np.tile(solution.z, (resamples, 1))
    if problem.free and resamples:
        rng = np.random.default_rng(seed)
        sums, counts = _unit_sums(problem, solution, data if scheme == "block" else None)
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


def _unit_sums(problem: FitProblem, solution: Solution, data: FitData | None) -> tuple[FloatArray, FloatArray]:
    """Return the sums of [-psi j, psi' j j'] of each unit (units, p + p(p+1)/2), and its steps (units,).

    Units are rows, random groups of many rows, or with data the blocks of its rows.
    """
    if data is not None:
        problem = by_row(problem, data)
    r, J, loss = problem.residuals(solution.z), problem.jacobian(solution.z), problem.options.loss
    factor = score_factor(loss, r, solution.f_scale)
    slope = np.maximum(score_slope(loss, r, solution.f_scale), MIN_SLOPE * factor)
    left, right = np.triu_indices(J.shape[1])
    columns = np.concatenate([-J * (r * factor)[:, None], J[:, left] * J[:, right] * slope[:, None]], axis=1)
    if data is None and len(r) <= GROUPS:
        return columns * problem.weights[:, None], problem.weights
    if data is not None:
        rows, unit = np.arange(len(r)), blocks(data)
    else:
        rows = np.repeat(np.arange(len(r)), np.maximum(np.round(problem.weights), 1).astype(np.intp))
        unit = np.random.default_rng(problem.options.seed).permutation(len(rows)) % GROUPS
    share = (problem.weights / np.bincount(rows))[rows]
    sums = np.stack([np.bincount(unit, column[rows] * share) for column in columns.T], axis=1)
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
