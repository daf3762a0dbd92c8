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
take about a second. Data of few rows, where curvature matters, get a descent of several steps, each with the Jacobian
where the last one ended, damped (Levenberg) where the cost would rise; the steps of others are carried back onto the
model where it bends away (see `draws`). The scale of the loss stays what it was. A prior's mean is drawn like a
measurement, from its own standard deviation.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fit.bounded import bounded_step
from latfit.fit.by_row import by_row
from latfit.fit.draws import carried
from latfit.fit.folds import in_time
from latfit.fit.loss import TUNING, score_factor, score_slope, total_cost
from latfit.fit.priors import prior_rows
from latfit.fit.problem import FitProblem
from latfit.fit.solve import Solution
from latfit.model.terms import LatencyModel, Steps
from latfit.stats import FloatArray
from latfit.trace.clean import runs_in_time
from latfit.trace.table import Trace

SCHEMES = ("rows", "block", "residual")
FEW_ROWS = 3_000
GROUPS = 3_000
MOST_STEPS = 12
FIRST_DAMPING = 1e-3
CLOSE = 1e-7
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
        known = self._prior_errors(count, rng)
        if self.residual:
            return np.stack([self._residual_draw(rng, off) for off in known])
        weights = rng.poisson(self.counts, (count, len(self.counts))).astype(np.float64)
        weights *= self.counts.sum() / np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        if self.members is not None:
            return np.stack([self._refitted(w / self.counts, off) for w, off in zip(weights, known, strict=True)])
        totals = (weights / self.counts) @ self.sums
        moved = np.stack([self._step(self.solution.z, *pair) for pair in zip(totals, known, strict=True)])
        return carried(self.problem, self.solution, moved - self.solution.z)

    def _step(self, z: FloatArray, total: FloatArray, known: FloatArray, damping: float = 0.0) -> FloatArray:
        """Where the quadratic of a resample's sums (p + p(p+1)/2,) is least, in the box."""
        p = len(z)
        hessian = np.empty((p, p))
        upper = np.triu_indices(p)
        hessian[upper] = total[p:]
        hessian.T[upper] = total[p:]
        residuals, J = self._priors(z, known)
        hessian, gradient = hessian + J.T @ J, total[:p] - J.T @ residuals
        hessian[np.diag_indices(p)] *= 1 + damping
        return z + bounded_step(hessian, gradient, self.problem.lower - z, self.problem.upper - z)

    def _priors(self, z: FloatArray, known: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Residuals and Jacobian of the priors, whose means are `known` standard deviations off (k,)."""
        residuals, J = prior_rows(self.problem, z, self.solution.f_scale)
        return residuals + self.solution.f_scale / TUNING[self.problem.options.loss] * known, J

    def _prior_errors(self, count: int, rng: np.random.Generator) -> FloatArray:
        """How far the means of the priors are off in each resample (count, k): they are drawn like measurements."""
        free = {p.name for p in self.problem.free_parameters}
        return rng.standard_normal((count, len(free & set(self.problem.options.priors))))

    def _refitted(self, weights: FloatArray, known: FloatArray) -> FloatArray:
        """z of the problem with its units reweighted (units,)."""
        assert self.members is not None
        own = self.problem.weights * weights[self.members]
        return self._descent(_Resample(self.problem, self.solution.f_scale, own), known)

    def _residual_draw(self, rng: np.random.Generator, known: FloatArray) -> FloatArray:
        """z of the problem with the fit plus drawn residuals as its latencies."""
        problem = self.problem
        rows = np.repeat(np.arange(len(problem.observed)), np.maximum(np.round(problem.weights), 1).astype(np.intp))
        errors = rng.choice(self.sums, len(rows), p=self.counts)
        here = problem.residuals(self.solution.z)
        return self._descent(_Resample(problem, self.solution.f_scale, np.ones(len(rows)), rows, errors, here), known)

    def _descent(self, resample: "_Resample", known: FloatArray) -> FloatArray:
        """Damped Newton steps from the estimate; one for many rows, which are quadratic enough."""

        def cost(z: FloatArray) -> float:
            residuals, _ = self._priors(z, known)
            return resample.cost(z) + 0.5 * float(residuals @ residuals)

        z, damping = self.solution.z, 0.0
        here, total = cost(z), resample.sums(z)
        for _ in range(MOST_STEPS):
            trial = self._step(z, total, known, damping)
            there = cost(trial)
            if there > here:
                damping = max(10 * damping, FIRST_DAMPING)
                continue
            z, gained, here, damping = trial, here - there, there, damping / 10
            if gained <= CLOSE * here or len(resample.weights) > FEW_ROWS:
                break
            total = resample.sums(z)
        return z


@dataclass(frozen=True)
class _Resample:
    """A problem with other weights (m,), or with other residuals: errors (m,) about what the estimate predicts for rows
    (m,), whose residuals were `centre` (n,)."""

    problem: FitProblem
    f_scale: float
    weights: FloatArray
    rows: NDArray[np.intp] | None = None
    errors: FloatArray | None = None
    centre: FloatArray | None = None

    def cost(self, z: FloatArray) -> float:
        return total_cost(self.problem.options.loss, self._residuals(z), self.f_scale, self.weights)

    def sums(self, z: FloatArray) -> FloatArray:
        """sum of weight [-psi j, psi' j j'] (p + p(p+1)/2,)."""
        r, J, loss = self._residuals(z), self.problem.jacobian(z), self.problem.options.loss
        psi = self.weights * r * score_factor(loss, r, self.f_scale)
        slope = self.weights * _safe_slope(loss, r, self.f_scale)
        if self.rows is not None:
            psi, slope = (np.bincount(self.rows, each, len(J)).astype(np.float64) for each in (psi, slope))
        hessian = J.T @ (J * slope[:, None])
        return np.concatenate([-J.T @ psi, hessian[np.triu_indices(J.shape[1])]])

    def _residuals(self, z: FloatArray) -> FloatArray:
        r = self.problem.residuals(z)
        if self.rows is None or self.errors is None or self.centre is None:
            return r
        return np.asarray((r - self.centre)[self.rows] + self.errors)


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
