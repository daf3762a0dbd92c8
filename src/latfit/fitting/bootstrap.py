"""Intervals of parameters, and the draws stored with a fit: from the covariance, or a bootstrap by one Newton step.

Draws along nearly flat directions are projected back onto the model: docs/theory/fitting.md, "Bootstrap". A cost at
zero keeps the one-sided end of the covariance: a bootstrap is not consistent at a boundary (Andrews 2000).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fitting.covariance import LEVEL, Uncertainty, uncertainty
from latfit.fitting.data import FitData
from latfit.fitting.problem import TUNING, FitProblem, by_row
from latfit.fitting.solver.levenberg_marquardt import Descents, damped_steps, minimise_all
from latfit.fitting.solver.objective import CellProblem, prior_rows, score_factor, score_slope
from latfit.fitting.solver.solve import Solution, sample_rows
from latfit.model import STORED_DRAWS
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
    """Return the `draws` of a fit's JSON: the free parameters of up to STORED_DRAWS vectors (n, p)."""
    values = theta[:STORED_DRAWS, problem.free]
    rounded = [[float(f"{x:.{DIGITS}g}") for x in row] for row in values.tolist()]
    return {"source": source, "parameters": [p.name for p in problem.free_parameters], "values": rounded}


def project_moves(problem: FitProblem, solution: Solution, moves: FloatArray) -> FloatArray:
    """Return coordinates (n, p) whose predictions match the first-order effect of moves; flat ones are fitted."""
    part = sample_rows(problem, MAX_COMPARED_STEPS)
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


def bootstrap(
    problem: FitProblem,
    solution: Solution,
    data: FitData,
    *,
    resamples: int = 1000,
    scheme: str = "rows",
    progress: Progress | None = None,
) -> FloatArray:
    """Draw all parameters (resamples, p) by a bootstrap of rows or blocks; progress is called with (done, total)."""
    z = np.tile(solution.z, (resamples, 1))
    if problem.free and resamples:
        rng = np.random.default_rng(problem.options.seed)
        sums, counts = _unit_sums(by_row(problem, data), solution, blocks(data) if scheme == "block" else None)
        for first in range(0, resamples, BATCH):
            some = slice(first, min(first + BATCH, resamples))
            weights = rng.poisson(counts, (some.stop - first, len(counts))) / counts
            weights *= counts.sum() / np.maximum(weights @ counts, 1.0)[:, None]
            z[some] = project_moves(problem, solution, _newton_moves(problem, solution, weights @ sums, rng))
            if progress:
                progress(some.stop, resamples)
    return problem.theta(z)


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
    """Return sums of [-psi j, psi' j j'] by unit (rows, blocks or random groups), and the observations in each."""
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
    """Return the block of each row (n,): n^(1/3) neighbours in time within a run, or the (B,S) cell."""
    if not data.in_time:
        return data.cell
    unit = np.empty(len(data), dtype=np.intp)
    first = 0
    for rows in data.runs:
        length = max(1, round(len(rows) ** (1 / 3)))
        unit[rows] = first + np.arange(len(rows)) // length
        first += -(-len(rows) // length)
    return unit


METHODS = ("sandwich", "profile", "bootstrap")
MAX_SPAN = math.exp(4)  # of the interval of an identified rate or peak: a factor of e^2 each way
RESAMPLES = 1000  # resamples of bootstrap intervals where nobody says how many


@dataclass(frozen=True)
class DoubtOptions:
    intervals: str = "sandwich"  # see METHODS
    resamples: int = 0  # of a bootstrap, 0 for none
    scheme: str = "auto"  # see `bootstrap.SCHEMES`; `auto`: blocks of time for a trace in time order, else rows
    progress: Progress | None = None  # called with (done, of)


def doubts(
    problem: FitProblem, solution: Solution, data: FitData, options: DoubtOptions
) -> tuple[Uncertainty, Mapping[str, Any], Mapping[str, Any]]:
    """Return the uncertainty of a solved problem, and the `bootstrap` and `draws` of its file."""
    found = uncertainty(problem, solution)
    resampled = options.intervals != "sandwich"
    resamples = options.resamples or (RESAMPLES if resampled else 0)
    if not resamples:
        return found, {}, kept(problem, from_covariance(problem, solution, found), "covariance")
    scheme = options.scheme if options.scheme != "auto" else "block" if data.in_time else "rows"
    theta = bootstrap(problem, solution, data, resamples=resamples, scheme=scheme, progress=options.progress)
    facts = {
        "scheme": scheme,
        "resamples": len(theta),
        "seed": problem.options.seed,
        "level": LEVEL,
        "parameters": {
            p.name: list(_percentile_interval(theta[:, i], LEVEL))
            for i, p in enumerate(problem.model.parameters)
            if p.fixed is None
        },
    }
    found = _resampled(problem, found, theta) if resampled else found
    return found, facts, kept(problem, theta, f"bootstrap, {scheme}")


def check(options: DoubtOptions) -> None:
    for option, value, known in (
        ("--set intervals", options.intervals, METHODS),
        ("--set resample", options.scheme, ("auto", *SCHEMES)),
    ):
        if value not in known:
            raise WrongUsage(f"{value!r} is not known", where=option, remedy=f"Choose one of: {', '.join(known)}.")
    if options.resamples < 0 or 0 < options.resamples < 20:
        raise WrongUsage(
            f"{options.resamples} resamples say nothing",
            where="--bootstrap",
            remedy="Give 20 or more, 1000 for intervals.",
        )


def _percentile_interval(values: FloatArray, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _resampled(problem: FitProblem, found: Uncertainty, theta: FloatArray) -> Uncertainty:
    """Return the uncertainty with percentile intervals of refits (resamples, p), at a level corrected for few rows."""
    estimates, groups = dict(found.estimates), [*found.unidentified]
    n, p = problem.rows, len(problem.free)
    level = math.erf(found.quantile * math.sqrt(n / max(n - p, 1)) / math.sqrt(2))
    for i, parameter in zip(problem.free, problem.free_parameters, strict=True):
        known = estimates[parameter.name]
        if not known.identified or known.low is None:
            continue
        low, high = _percentile_interval(theta[:, i], level)
        spread: float | None = float(np.std(theta[:, i]))
        identified = not parameter.positive or high <= MAX_SPAN * low
        if known.value == 0:
            low, high, spread = 0.0, max(high, known.high or 0.0), known.std_error
        elif not identified:
            spread = None
            groups.append([parameter.name])
        estimates[parameter.name] = structs.replace(known, std_error=spread, low=low, high=high, identified=identified)
    return replace(found, estimates=estimates, unidentified=groups)
