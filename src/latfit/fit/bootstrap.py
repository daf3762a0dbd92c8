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
from latfit.fit.by_row import by_row
from latfit.fit.folds import in_time
from latfit.fit.loss import score_factor
from latfit.fit.problem import FitProblem
from latfit.fit.resample import FEW_ROWS, Refit, Resample, safe_slope, score_columns
from latfit.fit.solve import Solution
from latfit.model.terms import LatencyModel, Steps
from latfit.stats import FloatArray
from latfit.trace.clean import runs_in_time
from latfit.trace.table import Trace

SCHEMES = ("rows", "block", "residual")
GROUPS = 3_000
BATCH_VALUES = 2_000_000

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
    sample: _Reweighted | _Redrawn = (
        _Redrawn.of(problem, solution) if scheme == "residual" else _reweighted(problem, solution, trace, scheme)
    )
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
class _Reweighted:
    """Units that are drawn so often: summed columns [g, H] of each (units, p + p(p+1)/2), and how many rows each stands
    for.

    members: unit of each row of the problem (n,), to reweight rows in a full descent; None where sums are all there is.
    """

    refit: Refit
    sums: FloatArray
    counts: FloatArray
    members: NDArray[np.intp] | None

    @property
    def values(self) -> int:
        return len(self.counts)

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        """z (count, p) of so many resamples."""
        known = self.refit.prior_errors(count, rng)
        weights = rng.poisson(self.counts, (count, len(self.counts))).astype(np.float64)
        weights *= self.counts.sum() / np.maximum(weights.sum(axis=1, keepdims=True), 1.0)
        if self.members is None:
            return self.refit.one_step((weights / self.counts) @ self.sums, known)
        problem, f_scale = self.refit.problem, self.refit.solution.f_scale
        rows = (problem.weights * (w / self.counts)[self.members] for w in weights)
        return np.stack(
            [self.refit.descent(Resample(problem, f_scale, own), off) for own, off in zip(rows, known, strict=True)]
        )


@dataclass(frozen=True)
class _Redrawn:
    """Residuals that are drawn for every step: those to draw from (m,), the row that each stands for (m,), and the
    residuals' Jacobian (n, p)."""

    refit: Refit
    residuals: FloatArray
    rows: NDArray[np.intp]
    J: FloatArray

    @staticmethod
    def of(problem: FitProblem, solution: Solution) -> "_Redrawn":
        r = problem.residuals(solution.z)
        rows = np.repeat(np.arange(len(r)), np.maximum(np.round(problem.weights), 1).astype(np.intp))
        freedom = max(len(rows) - len(solution.z), 1)
        centred = (r - float(np.mean(r[rows]))) * np.sqrt(len(rows) / freedom)
        return _Redrawn(Refit(problem, solution), centred[rows], rows, problem.jacobian(solution.z))

    @property
    def values(self) -> int:
        return len(self.rows)

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        """z (count, p) of so many resamples."""
        known = self.refit.prior_errors(count, rng)
        if self.values > FEW_ROWS:
            return self.refit.one_step(self._sums(count, rng), known)
        problem, solution, n = self.refit.problem, self.refit.solution, self.values
        here = problem.residuals(solution.z)
        return np.stack(
            [
                self.refit.descent(
                    Resample(problem, solution.f_scale, np.ones(n), self.rows, rng.choice(self.residuals, n), here), off
                )
                for off in known
            ]
        )

    def _sums(self, count: int, rng: np.random.Generator) -> FloatArray:
        """Sums [-psi j, psi' j j'] at the estimate (count, p + p(p+1)/2), with the mean psi', from which that of a
        resample differs by a part in the root of the rows."""
        loss, f_scale = self.refit.problem.options.loss, self.refit.solution.f_scale
        psi = self.residuals * score_factor(loss, self.residuals, f_scale)
        copies = np.bincount(self.rows, minlength=len(self.J)).astype(np.float64)
        hessian = self.J.T @ (self.J * copies[:, None]) * float(np.mean(safe_slope(loss, self.residuals, f_scale)))
        several = len(self.rows) > len(self.J)
        sums = np.empty((count, self.J.shape[1] + len(hessian) * (len(hessian) + 1) // 2))
        sums[:, self.J.shape[1] :] = hessian[np.triu_indices(len(hessian))]
        for row in sums:
            drawn = psi[rng.integers(len(psi), size=len(psi))]
            row[: self.J.shape[1]] = -self.J.T @ (np.bincount(self.rows, drawn, len(self.J)) if several else drawn)
        return sums


def _reweighted(problem: FitProblem, solution: Solution, trace: Trace | None, scheme: str) -> _Reweighted:
    if scheme == "rows" or trace is None:
        columns, refit = score_columns(problem, solution.z, solution.f_scale), Refit(problem, solution)
        if len(problem.weights) > FEW_ROWS:
            sums = _dealt(columns, problem.weights, problem.options.seed)
            return _Reweighted(refit, sums, np.ones(len(sums)), None)
        each = np.arange(len(problem.weights))
        return _Reweighted(refit, columns * problem.weights[:, None], problem.weights, each)
    single = by_row(problem, trace)
    unit = blocks(trace)
    columns = score_columns(single, solution.z, solution.f_scale) * single.weights[:, None]
    sums = np.zeros((int(unit.max()) + 1, columns.shape[1]))
    np.add.at(sums, unit, columns)
    members = unit if len(unit) <= FEW_ROWS else None
    return _Reweighted(Refit(single, solution), sums, np.ones(len(sums)), members)


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
