"""Bootstrap of a fit, and the parameter draws stored with it.

Rows, blocks of time or residuals are resampled. Many rows take one Newton step per resample (one-step bootstrap of
M-estimators), few rows a full damped descent. Draws along nearly flat directions are projected back onto the model.
Derivation: docs/theory/fitting.md, "Bootstrap".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import WrongUsage
from latfit.fitting.data import FitData
from latfit.fitting.problem import FitProblem, by_row
from latfit.fitting.solver.levenberg_marquardt import bounded_step
from latfit.fitting.solver.loss import TUNING, score_factor, score_slope, total_cost
from latfit.fitting.solver.many import damped_steps, thetas
from latfit.fitting.solver.objective import prior_rows
from latfit.fitting.solver.solve import Solution
from latfit.fitting.uncertainty.covariance import Uncertainty
from latfit.model import KEPT, LatencyModel, Steps
from latfit.stats import FloatArray
from latfit.threads import on_threads

COMPARED = 120
MISSES = 0.1
_STEPS = 12
_DAMPING, _LEAST_DAMPING = 1e-6, 1e-9
_LONGEST = 1.0
_DIGITS = 7


def from_covariance(problem: FitProblem, solution: Solution, doubt: Uncertainty, n: int = KEPT) -> FloatArray:
    """Draw all parameters (n, p) from the covariance of the free coordinates."""
    if doubt.root is None or not problem.free:
        return np.empty((0, len(problem.model.parameters)))
    rng = np.random.default_rng(problem.options.seed)
    moves = rng.standard_normal((n, len(doubt.root))) @ doubt.root
    return np.stack([problem.theta(z) for z in carried(problem, solution, moves)])


def kept(problem: FitProblem, theta: FloatArray, source: str) -> Mapping[str, Any]:
    """Return the `draws` section of a fit's JSON: the free parameters of up to 200 vectors (n, p)."""
    values = theta[:KEPT, problem.free]
    rounded = [[float(f"{x:.{_DIGITS}g}") for x in row] for row in values.tolist()]
    return {"source": source, "parameters": [p.name for p in problem.free_parameters], "values": rounded}


def carried(problem: FitProblem, solution: Solution, moves: FloatArray) -> FloatArray:
    """Return coordinates (n, p) whose predictions match the first-order effect of the moves (n, p)."""
    part = _compared(problem)
    here = _predicted(part, solution.z)
    wanted = moves @ part.jacobian(solution.z).T
    share = part.weights / part.weights.sum()
    typical = float(np.sqrt(np.median(wanted**2 @ share)))
    found = np.clip(solution.z + moves, problem.lower, problem.upper)
    with np.errstate(all="ignore"):  # a long move may overflow, and is then no match
        miss = np.sqrt((_predicted_all(part, found) - here - wanted) ** 2 @ share)
        lost = np.flatnonzero(~(miss <= MISSES * typical))
        if len(lost):
            found[lost] = _closest(part, solution.z, here + wanted[lost], share, (MISSES * typical) ** 2)
    return found


def _closest(part: FitProblem, start: FloatArray, target: FloatArray, share: FloatArray, enough: float) -> FloatArray:
    """Return coordinates (k, free) whose predictions are closest to targets (k, m), by damped Gauss-Newton steps.

    enough: mean square distance at which a search stops.
    """
    k = len(target)
    z, damping, on = np.tile(start, (k, 1)), np.full(k, _DAMPING), np.arange(k)
    r = _predicted_all(part, z) - target
    cost = r**2 @ share
    for _ in range(_STEPS):
        J = _slopes_all(part, z[on])
        gradient, H = np.einsum("knf,kn->kf", J, share * r[on]), np.swapaxes(J, 1, 2) @ (J * share[:, None])
        low, high = np.maximum(part.lower - z[on], -_LONGEST), np.minimum(part.upper - z[on], _LONGEST)
        trial = z[on] + damped_steps(gradient, H, low, high, damping[on])
        left = _predicted_all(part, trial) - target[on]
        reached = left**2 @ share
        better = reached < cost[on]
        done = better & ((reached < enough) | (reached > 0.999 * cost[on]))
        damping[on] = np.where(better, np.maximum(damping[on] / 5, _LEAST_DAMPING), np.maximum(damping[on], 1e-4) * 30)
        kept = on[better]
        z[kept], r[kept], cost[kept] = trial[better], left[better], reached[better]
        on = on[~done]
        if len(on) == 0:
            break
    return z


def _compared(problem: FitProblem) -> FitProblem:
    """Return a sample of the rows: evenly spaced by weight, plus the extremes of every column."""
    if len(problem.observed) <= COMPARED:
        return problem
    reached = np.cumsum(problem.weights)
    evenly = np.searchsorted(reached, (np.arange(COMPARED) + 0.5) / COMPARED * reached[-1])
    corners = [extreme(column) for column in problem.steps.values() for extreme in (np.argmin, np.argmax)]
    rows = np.unique(np.concatenate([evenly, np.array(corners)])).astype(np.int64)
    return problem.rows_at(rows)


def _predicted(part: FitProblem, z: FloatArray) -> FloatArray:
    return np.asarray(_predicted_all(part, z[None])[0])


def _predicted_all(part: FitProblem, z: FloatArray) -> FloatArray:
    """Return ln T, or T for absolute residuals, (k, m) at coordinates (k, free)."""
    T = part.model.latency_ms(thetas(part, z), part.steps)
    T = np.broadcast_to(T, (len(z), len(part.observed)))
    return T if part.options.residuals == "absolute" else np.log(np.maximum(T, 1e-300))


def _slopes_all(part: FitProblem, z: FloatArray) -> FloatArray:
    """Return the slopes of `_predicted_all` by z (k, m, free)."""
    theta = thetas(part, z)
    chain = part.chain(theta[:, :, 0].T)
    J = part.model.gradient(theta, part.steps)[..., part.free] * chain[:, None]
    if part.options.residuals == "absolute":
        return np.asarray(J)
    return np.asarray(J / np.maximum(part.model.latency_ms(theta, part.steps), 1e-300)[..., None])


FEW_ROWS = 3_000
"""Up to this many rows curvature may matter, so each resample gets a full descent."""

MOST_STEPS = 12
FIRST_DAMPING = 1e-3
CLOSE = 1e-7
LEAST_DAMPING = 1e-9
"""Keeps the quadratic definite; along a flat direction its minimum in a box is not unique."""

ROUNDING = 1e-12
"""A cost closer to zero than this, relative to its scale, is set to zero."""
_SMALLEST_SLOPE = 0.05


@dataclass(frozen=True)
class Resample:
    """A problem with resampled weights or residuals.

    Attributes
    ----------
    weights
        Weight of each resampled row (m,).
    rows, errors
        Row number and drawn residual (m,), for the residual bootstrap only.
    centre
        Residuals at the estimate (n,), for the residual bootstrap only.
    """

    problem: FitProblem
    f_scale: float
    weights: FloatArray
    rows: NDArray[np.intp] | None = None
    errors: FloatArray | None = None
    centre: FloatArray | None = None

    def cost(self, z: FloatArray) -> float:
        return total_cost(self.problem.options.loss, self._residuals(z), self.f_scale, self.weights)

    def sums(self, z: FloatArray) -> FloatArray:
        """Return the weighted sums of [-psi j, psi' j j'] (p + p(p+1)/2,)."""
        r, J, loss = self._residuals(z), self.problem.jacobian(z), self.problem.options.loss
        psi = self.weights * r * score_factor(loss, r, self.f_scale)
        slope = self.weights * safe_slope(loss, r, self.f_scale)
        if self.rows is not None:
            psi, slope = (np.bincount(self.rows, each, len(J)).astype(np.float64) for each in (psi, slope))
        hessian = J.T @ (J * slope[:, None])
        return np.concatenate([-J.T @ psi, hessian[np.triu_indices(J.shape[1])]])

    def _residuals(self, z: FloatArray) -> FloatArray:
        r = self.problem.residuals(z)
        if self.rows is None or self.errors is None or self.centre is None:
            return r
        return np.asarray((r - self.centre)[self.rows] + self.errors)


@dataclass(frozen=True)
class Refit:
    """Fits of resamples of a solved problem. known: drawn errors of its k prior means, in standard deviations (k,)."""

    problem: FitProblem
    solution: Solution

    def prior_errors(self, count: int, rng: np.random.Generator) -> FloatArray:
        """Draw the errors of the prior means (count, k), in standard deviations."""
        free = {p.name for p in self.problem.free_parameters}
        return rng.standard_normal((count, len(free & set(self.problem.options.priors))))

    def one_step(self, sums: FloatArray, known: FloatArray) -> FloatArray:
        """Return z (m, p) after one Newton step with sums (m, p + p(p+1)/2), projected onto the model."""
        moved = np.stack([self._step(self.solution.z, *pair) for pair in zip(sums, known, strict=True)])
        return carried(self.problem, self.solution, moved - self.solution.z)

    def descent(self, resample: Resample, known: FloatArray) -> FloatArray:
        """Return z (p,) after damped Newton steps from the estimate."""

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
            if gained <= CLOSE * here:
                break
            total = resample.sums(z)
        return z

    def _step(self, z: FloatArray, total: FloatArray, known: FloatArray, damping: float = 0.0) -> FloatArray:
        """Return the minimum in the box of the quadratic with sums (p + p(p+1)/2,)."""
        p = len(z)
        hessian = np.empty((p, p))
        upper = np.triu_indices(p)
        hessian[upper] = total[p:]
        hessian.T[upper] = total[p:]
        residuals, J = self._priors(z, known)
        hessian, gradient = hessian + J.T @ J, total[:p] - J.T @ residuals
        hessian[np.diag_indices(p)] *= 1 + max(damping, LEAST_DAMPING)
        low, high = self.problem.lower, self.problem.upper
        moved = z + bounded_step(hessian, gradient, low - z, high - z)
        return np.where(moved - low < ROUNDING, low, moved)

    def _priors(self, z: FloatArray, known: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return residuals and Jacobian of the priors."""
        residuals, J = prior_rows(self.problem, z, self.solution.f_scale)
        return residuals + self.solution.f_scale / TUNING[self.problem.options.loss] * known, J


def score_columns(problem: FitProblem, z: FloatArray, f_scale: float) -> FloatArray:
    """Return [-psi j, psi' j j'] of each row (n, p + p(p+1)/2)."""
    r, J = problem.residuals(z), problem.jacobian(z)
    loss = problem.options.loss
    psi = r * score_factor(loss, r, f_scale)
    left, right = np.triu_indices(J.shape[1])
    return np.concatenate([-J * psi[:, None], J[:, left] * J[:, right] * safe_slope(loss, r, f_scale)[:, None]], axis=1)


def safe_slope(loss: str, r: FloatArray, f_scale: float) -> FloatArray:
    """Return psi', kept above a small part of rho' so that the Hessian stays positive for any resample."""
    return np.maximum(score_slope(loss, r, f_scale), _SMALLEST_SLOPE * score_factor(loss, r, f_scale))


SCHEMES = ("rows", "block", "residual")
GROUPS = 3_000
BATCH_VALUES = 2_000_000
THREADS = 2

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ParameterDraws:
    """Parameter vectors of resampled data: theta (resamples, p), in the order of the model's parameters."""

    model: LatencyModel
    theta: FloatArray
    scheme: str
    seed: int

    def latency_ms(self, steps: Steps) -> FloatArray:
        """Return the typical latency of steps in ms (resamples, n)."""
        return np.stack([self.model.latency_ms(theta, steps) for theta in self.theta])

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
    """Draw all parameters by a bootstrap. The draws depend on the problem's seed only, not on the number of threads.

    Parameters
    ----------
    data
        Rows of the problem; required by `block`.
    scheme
        `rows`, `block` or `residual`.
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
    if not problem.free or resamples < 1:
        return ParameterDraws(problem.model, np.tile(problem.theta(solution.z), (resamples, 1)), scheme, seed)
    sample: _Reweighted | _Redrawn = (
        _Redrawn.of(problem, solution) if scheme == "residual" else _reweighted(problem, solution, data, scheme)
    )
    size = max(1, min(100, BATCH_VALUES // max(sample.values, 1)))
    batches = [(start, min(size, resamples - start)) for start in range(0, resamples, size)]
    generators = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(len(batches))]
    drawn = np.empty((resamples, len(solution.z)))
    done = 0
    with on_threads(THREADS) as pool:
        jobs = [pool.submit(sample.draw, count, rng) for (_, count), rng in zip(batches, generators, strict=True)]
        for (start, count), job in zip(batches, jobs, strict=True):
            drawn[start : start + count] = job.result()
            done += count
            if progress:
                progress(done, resamples)
    return ParameterDraws(problem.model, np.stack([problem.theta(z) for z in drawn]), scheme, seed)


@dataclass(frozen=True)
class _Reweighted:
    """Units (rows, blocks or groups) resampled by weight.

    columns are the sums [g, H] of each unit (units, p + p(p+1)/2). members: unit of each row (n,), for full descents;
    None if only sums are kept.
    """

    refit: Refit
    sums: FloatArray
    counts: FloatArray
    members: NDArray[np.intp] | None

    @property
    def values(self) -> int:
        return len(self.counts)

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        """Draw `count` resamples and return their z (count, p)."""
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
    """Residual bootstrap: residuals to draw from (m,), their rows (m,), and the residuals' Jacobian (n, p)."""

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
        """Draw `count` resamples and return their z (count, p)."""
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
        """Return sums of [-psi j, psi' j j'] at the estimate (count, p + p(p+1)/2).

        They use the mean psi'; that of a resample differs by O(m^-1/2).
        """
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


def _reweighted(problem: FitProblem, solution: Solution, data: FitData | None, scheme: str) -> _Reweighted:
    if scheme == "rows" or data is None:
        columns, refit = score_columns(problem, solution.z, solution.f_scale), Refit(problem, solution)
        if len(problem.weights) > FEW_ROWS:
            sums = _dealt(columns, problem.weights, problem.options.seed)
            return _Reweighted(refit, sums, np.ones(len(sums)), None)
        each = np.arange(len(problem.weights))
        return _Reweighted(refit, columns * problem.weights[:, None], problem.weights, each)
    single = by_row(problem, data)
    unit = blocks(data)
    columns = score_columns(single, solution.z, solution.f_scale) * single.weights[:, None]
    sums = np.zeros((int(unit.max()) + 1, columns.shape[1]))
    np.add.at(sums, unit, columns)
    members = unit if len(unit) <= FEW_ROWS else None
    return _Reweighted(Refit(single, solution), sums, np.ones(len(sums)), members)


def _dealt(columns: FloatArray, weights: FloatArray, seed: int) -> FloatArray:
    """Return sums (GROUPS, m) of the columns over random groups of steps."""
    copies = np.maximum(np.round(weights), 1).astype(np.intp)
    rows = np.repeat(np.arange(len(weights)), copies)
    group = np.random.default_rng(seed).permutation(len(rows)) % GROUPS
    share = (weights / copies)[rows]
    return np.stack([np.bincount(group, column[rows] * share, GROUPS) for column in columns.T], axis=1)


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
