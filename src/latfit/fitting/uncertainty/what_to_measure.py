"""Measurements that would identify weakly determined parameters.

Candidate cells on a grid of powers of two are ranked by how much they lower the largest relative variance of the
parameters (Fisher information with a weak prior). The best one is reported. Derivation: docs/theory/fitting.md,
"Identifiability".
"""

from collections.abc import Sequence

import numpy as np

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.solve import Solution
from latfit.model import Measurement, StepTable, with_typical_context
from latfit.stats import FloatArray, mad_sigma

MAX_ERROR_LEFT = 0.75  # of the standard error before a measurement; a smaller gain is not worth it
REPEATS = 10.0  # of the cell that is suggested
NEARLY_SATURATED, NEARLY_LINEAR = 3.0, 0.05  # k x of a rate that the data just miss, at the least and the largest x
PRIOR_LOG, PRIOR_COST = 5.0, 10.0  # standard deviations in z
LEAST_SPREAD = 1e-3


def measurements(problem: FitProblem, solution: Solution, groups: Sequence[Sequence[str]]) -> list[Measurement]:
    """Return a measurement for each group of parameters that is not identified, unless no cell would help."""
    if not groups or not problem.free:
        return []
    theta = _plausible(problem, problem.theta(solution.z))
    free, z, cells = problem.free_parameters, problem.coordinates(theta), _candidates(problem)
    sigma = max(mad_sigma(problem.residuals(solution.z), problem.weights), LEAST_SPREAD)
    present = problem.residual_slopes(theta, problem.steps) / sigma
    prior = np.array([PRIOR_LOG if p.positive else PRIOR_COST for p in free])
    covariance = np.linalg.inv(present.T @ (present * problem.weights[:, None]) + np.diag(prior**-2.0))
    rows = problem.residual_slopes(theta, cells) / sigma * np.sqrt(REPEATS)
    moved = rows @ covariance
    gain = moved**2 / (1 + np.einsum("ij,ij->i", moved, rows))[:, None]
    sizes = np.array([1.0 if p.positive else max(float(value), 0.1) for p, value in zip(free, z, strict=True)])
    before, names = np.diag(covariance) / sizes**2, [p.name for p in free]
    found: dict[str, Measurement] = {}
    for group in groups:
        weak = [names.index(name) for name in group if name in names]
        if not weak:
            continue
        worst = np.max(np.maximum(before[weak] - gain[:, weak] / sizes[weak] ** 2, 1e-300), axis=1)
        best, now = int(np.argmin(worst)), float(before[weak].max())
        if worst[best] <= MAX_ERROR_LEFT**2 * now:
            B, S = float(cells["B"][best]), float(cells["S"][best])
            text = f"measure decode steps (S = B) near B = {B:g}"
            if S > B:
                text = f"measure steps with prefill (S > B) near B = {B:g}, S = {S:g}"
            errors = float(np.sqrt(now)), float(np.sqrt(worst[best]))
            found[text] = Measurement(tuple(group), _octave(B), _octave(S), *errors, text)
    return list(found.values())


def _octave(middle: float) -> tuple[float, float]:
    """Return the ends of an octave about a value, whole and at least 1."""
    return max(float(np.round(middle / np.sqrt(2))), 1.0), float(np.round(middle * np.sqrt(2)))


def other_than(problem: FitProblem, name: str) -> str:
    """Suggest a measurement if a column has a single value."""
    return f"measure steps with {name} other than {problem.steps[name][0]:g}"


def _candidates(problem: FitProblem) -> StepTable:
    """Return cells on a grid of powers of two: decode steps and steps with one prefill, at the median context."""
    steps = problem.steps
    tops = (4 * max(float(steps["B"].max()), 1.0), 8 * max(float(steps["S"].max()), 1.0))
    B, S = (x.ravel() for x in np.meshgrid(*(2.0 ** np.arange(int(np.log2(top)) + 1) for top in tops)))
    B, S = B[S >= B], S[S >= B]
    holds = (S > B).astype(np.float64)
    context = float(np.median(steps["context_tokens"] / steps["B"])) if "context_tokens" in steps else 0.0
    columns = {"B": B, "S": S, "prefill_requests": holds, "prefill_tokens": holds * (S - B + 1)}
    every = with_typical_context(columns, {"context_tokens": context})
    return StepTable({name: every[name] for name in steps if name in every})


def _plausible(problem: FitProblem, theta: FloatArray) -> FloatArray:
    """Return theta with saturated rates moved to values that the data would just miss."""
    index, moved = {p.name: i for i, p in enumerate(problem.model.parameters)}, theta.copy()
    for rate, column in problem.model.rates:
        if rate not in problem.fixed:
            x, i = problem.steps[column], index[rate]
            full, linear = NEARLY_SATURATED / float(x.min()), NEARLY_LINEAR / float(x.max())
            moved[i] = min(max(theta[i], linear), max(full, linear))
    return moved
