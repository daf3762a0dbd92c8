"""Bootstrap of a fit: what the parameters would have been on data like these.

Three ways to draw data: `rows` (each measured step counts Poisson(1) times, the limit of drawing rows with
replacement), `block` (contiguous blocks of time within a run count so often, because neighbours share their noise;
Künsch 1989; whole cells where there is no time), `residual` (the cells stay, each row gets the fit plus a residual of
any row; for designed grids, where the design is not random).

A resample differs from the data by O(n^-1/2), so the optimum moves little and Newton steps from the estimate reach it:

    z* = z + argmin_d  1/2 d'H*d - g*'d,    H* = sum w* psi' j j',   g* = -sum w* psi j,     z + d inside the box,

which is the one-step bootstrap of M-estimators (Shao & Tu 1995, section 8.4: it agrees with the full one to first
order). For all resamples at once the sums are products of a weight matrix with the columns [psi j, psi' j j']. Of more
than 3,000 rows, steps are dealt at random to 3,000 groups and whole groups are drawn: groups of independent rows are as
independent as the rows, and the variance they show is off by sqrt(2/3000) = 3 %. So a thousand resamples of 10^5 rows
take about a second. Data of few rows, where curvature matters, get further steps, each with the Jacobian where the last
one ended. The scale of the loss stays what it was.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fit.by_row import by_row
from latfit.fit.folds import in_time
from latfit.fit.loss import score_factor, score_slope
from latfit.fit.problem import FitProblem
from latfit.fit.solve import Solution
from latfit.model.terms import LatencyModel, Steps
from latfit.stats import FloatArray
from latfit.trace.clean import runs_in_time
from latfit.trace.table import Trace

SCHEMES = ("rows", "block", "residual")
FEW_ROWS = 3_000
GROUPS = 3_000
MORE_STEPS = 4
BATCH_VALUES = 2_000_000
_SMALLEST_SLOPE = 0.05

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ParameterDraws:
    """Parameter vectors of resampled data: theta (resamples, p), in the order of the model's parameters."""

    model: LatencyModel
    theta: FloatArray
    scheme: str
    seed: int

    def latency_ms(self, steps: Steps) -> FloatArray:
        """Typical latency in ms (resamples, n) of steps, one row a resample."""
        return np.stack([self.model.latency_ms(theta, steps) for theta in self.theta])

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float]:
        """Percentile interval of a parameter."""
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
    trace: Trace | None = None,
    *,
    resamples: int = 1000,
    scheme: str = "rows",
    seed: int = 0,
    threads: int = 2,
    progress: Progress | None = None,
) -> ParameterDraws:
    """Draws of all parameters. trace: the rows of the problem, which `block` needs. progress: called with (done, of).

    The draws depend on the seed alone, not on the number of threads. Raises WrongUsage for an unknown scheme.
    """
    if scheme not in SCHEMES or (scheme == "block" and trace is None):
        raise WrongUsage(f"{scheme!r} is not known", where="--bootstrap", remedy=f"Choose: {', '.join(SCHEMES)}.")
    if not problem.free or resamples < 1:
        return ParameterDraws(problem.model, np.tile(problem.theta(solution.z), (resamples, 1)), scheme, seed)
    sample = _sampler(problem, solution, trace, scheme)
    size = max(1, min(100, BATCH_VALUES // max(sample.values, 1)))
    batches = [(start, min(size, resamples - start)) for start in range(0, resamples, size)]
    generators = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(len(batches))]
    drawn = np.empty((resamples, len(solution.z)))
    done = 0
    with ThreadPoolExecutor(max_workers=max(threads, 1)) as pool:
        jobs = [pool.submit(sample.draw, count, rng) for (_, count), rng in zip(batches, generators, strict=True)]
        for (start, count), job in zip(batches, jobs, strict=True):
            drawn[start : start + count] = job.result()
            done += count
            if progress:
                progress(done, resamples)
    return ParameterDraws(problem.model, np.stack([problem.theta(z) for z in drawn]), scheme, seed)


@dataclass(frozen=True)
class _Sampler:
    """Units that are drawn: summed columns [g, H] of each (units, p + p(p+1)/2), and how many rows each stands for.

    members: unit of each row of the problem (n,), to reweight rows in further steps; None where sums are all there is.
    residuals: scores to draw from, for the residual scheme; its sums are those of the design alone.
    """

    problem: FitProblem
    solution: Solution
    sums: FloatArray
    counts: FloatArray
    members: NDArray[np.intp] | None
    residual: bool

    @property
    def values(self) -> int:
        return len(self.counts)

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        """z (count, p) of so many resamples."""
        if self.residual:
            return np.stack([self._residual_draw(rng) for _ in range(count)])
        weights = rng.poisson(self.counts, (count, len(self.counts))).astype(np.float64)
        weights *= self.counts.sum() / np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        totals = (weights / self.counts) @ self.sums
        moved = np.stack([self._step(self.solution.z, total) for total in totals])
        if self.members is None:
            return moved
        return np.stack([self._polished(z, w / self.counts) for z, w in zip(moved, weights, strict=True)])

    def _step(self, z: FloatArray, total: FloatArray) -> FloatArray:
        p = len(z)
        hessian = np.empty((p, p))
        upper = np.triu_indices(p)
        hessian[upper] = total[p:]
        hessian.T[upper] = total[p:]
        return z + bounded_step(hessian, total[:p], self.problem.lower - z, self.problem.upper - z)

    def _polished(self, z: FloatArray, weights: FloatArray) -> FloatArray:
        assert self.members is not None
        own = self.problem.weights * weights[self.members]
        for _ in range(MORE_STEPS):
            following = self._step(z, _columns(self.problem, z, self.solution.f_scale).T @ own)
            if float(np.max(np.abs(following - z))) < 1e-6:
                return following
            z = following
        return z

    def _residual_draw(self, rng: np.random.Generator) -> FloatArray:
        """One resample of the residuals: weights of a row's own drawn residuals enter through their mean score."""
        problem, z = self.problem, self.solution.z
        residuals = self.sums
        rows = np.repeat(np.arange(len(problem.observed)), np.maximum(np.round(problem.weights), 1).astype(np.intp))
        errors = rng.choice(residuals, len(rows), p=self.counts)
        loss, f_scale = problem.options.loss, self.solution.f_scale
        for _ in range(MORE_STEPS if len(rows) <= FEW_ROWS else 1):
            shift = problem.residuals_of(problem.model.latency_ms(problem.theta(z), problem.steps))
            shift = shift - problem.residuals(self.solution.z)
            r = shift[rows] + errors
            pull = r * score_factor(loss, r, f_scale)
            slope = _safe_slope(loss, r, f_scale)
            n = len(problem.observed)
            psi, psi_slope = np.bincount(rows, pull, n), np.bincount(rows, slope, n)
            J = problem.jacobian(z)
            hessian = J.T @ (J * psi_slope[:, None])
            z = z + bounded_step(hessian, -J.T @ psi, problem.lower - z, problem.upper - z)
        return z


def _sampler(problem: FitProblem, solution: Solution, trace: Trace | None, scheme: str) -> _Sampler:
    if scheme == "residual":
        r = problem.residuals(solution.z)
        share = problem.weights / problem.weights.sum()
        freedom = max(problem.rows - len(solution.z), 1)
        centred = (r - float(share @ r)) * np.sqrt(problem.rows / freedom)
        return _Sampler(problem, solution, centred, share, None, True)
    if scheme == "rows" or trace is None:
        columns = _columns(problem, solution.z, solution.f_scale)
        if len(problem.weights) > FEW_ROWS:
            sums = _dealt(columns, problem.weights, problem.options.seed)
            return _Sampler(problem, solution, sums, np.ones(len(sums)), None, False)
        each = np.arange(len(problem.weights))
        return _Sampler(problem, solution, columns * problem.weights[:, None], problem.weights, each, False)
    single = by_row(problem, trace)
    unit = blocks(trace)
    columns = _columns(single, solution.z, solution.f_scale) * single.weights[:, None]
    sums = np.zeros((int(unit.max()) + 1, columns.shape[1]))
    np.add.at(sums, unit, columns)
    members = unit if len(unit) <= FEW_ROWS else None
    return _Sampler(single, solution, sums, np.ones(len(sums)), members, False)


def _dealt(columns: FloatArray, weights: FloatArray, seed: int) -> FloatArray:
    """Sums (GROUPS, m) of the columns over steps that are dealt to groups at random."""
    copies = np.maximum(np.round(weights), 1).astype(np.intp)
    rows = np.repeat(np.arange(len(weights)), copies)
    group = np.random.default_rng(seed).permutation(len(rows)) % GROUPS
    share = (weights / copies)[rows]
    return np.stack([np.bincount(group, column[rows] * share, GROUPS) for column in columns.T], axis=1)


def blocks(trace: Trace) -> NDArray[np.intp]:
    """Number of the block that each row (n,) is in: n^(1/3) neighbours in time within a run, or a (B,S) cell."""
    if not in_time(trace):
        table = np.stack([trace.floats("B"), trace.floats("S")], axis=1)
        return np.asarray(np.unique(table, axis=0, return_inverse=True)[1].ravel())
    unit = np.empty(len(trace), dtype=np.intp)
    first = 0
    for rows in runs_in_time(trace):
        length = max(1, round(len(rows) ** (1 / 3)))
        unit[rows] = first + np.arange(len(rows)) // length
        first += -(-len(rows) // length)
    return unit


def _columns(problem: FitProblem, z: FloatArray, f_scale: float) -> FloatArray:
    """[-psi j, psi' j j'] of each row (n, p + p(p+1)/2)."""
    r, J = problem.residuals(z), problem.jacobian(z)
    loss = problem.options.loss
    psi = r * score_factor(loss, r, f_scale)
    left, right = np.triu_indices(J.shape[1])
    return np.concatenate(
        [-J * psi[:, None], J[:, left] * J[:, right] * _safe_slope(loss, r, f_scale)[:, None]], axis=1
    )


def _safe_slope(loss: str, r: FloatArray, f_scale: float) -> FloatArray:
    """psi', kept above a small part of rho' so that the Hessian stays positive for any resample."""
    return np.maximum(score_slope(loss, r, f_scale), _SMALLEST_SLOPE * score_factor(loss, r, f_scale))


def bounded_step(hessian: FloatArray, gradient: FloatArray, low: FloatArray, high: FloatArray) -> FloatArray:
    """argmin over low <= d <= high of 1/2 d'Hd - g'd (p,); flat directions are not moved along."""
    scale = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    scale[scale == 0] = 1.0
    values, vectors = np.linalg.eigh(hessian / np.outer(scale, scale))
    keep = values > 1e-12 * max(float(values[-1]), 1e-300)
    root = (vectors[:, keep] * np.sqrt(values[keep])).T
    target = (vectors[:, keep].T @ (gradient / scale)) / np.sqrt(values[keep])
    free = (vectors[:, keep] @ (target / np.sqrt(values[keep]))) / scale
    if np.all((free >= low) & (free <= high)):
        return np.asarray(free)
    from scipy.optimize import lsq_linear

    inside = np.maximum(high - low, 1e-12)
    with np.errstate(all="ignore"):
        found = lsq_linear(root, target, (low * scale, (low + inside) * scale), method="bvls")
    return np.asarray(np.clip(found.x / scale, low, high))
