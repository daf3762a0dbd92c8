"""Measurements that would identify weakly determined parameters.

Candidate cells on a grid of powers of two are ranked by how much they lower the largest relative variance of the
parameters (Fisher information with a weak prior). The best one is reported. Derivation: docs/theory/fitting.md,
"Identifiability".
"""

from collections.abc import Mapping, Sequence

import numpy as np

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.solve import Solution
from latfit.model import Measurement, StepTable
from latfit.stats import FloatArray, mad_sigma

MAX_ERROR_LEFT = 0.75  # of the standard error before a measurement; a smaller gain is not worth it
_FULL, _LINEAR = 3.0, 0.05
_PRIOR_LOG, _PRIOR_COST = 5.0, 10.0
_LEAST_SPREAD = 1e-3


def measurements(problem: FitProblem, solution: Solution, groups: Sequence[Sequence[str]]) -> list[Measurement]:
    """Return a measurement for each group of parameters that is not identified, unless no cell would help."""
    if not groups or not problem.free:
        return []
    theta = _plausible(problem, problem.theta(solution.z))
    z = problem.coordinates(theta)
    candidates = _candidates(problem)
    sigma = max(mad_sigma(problem.residuals(solution.z), problem.weights), _LEAST_SPREAD)
    rows = problem.residual_slopes(theta, candidates) / sigma
    present = problem.residual_slopes(theta, problem.steps) / sigma
    information = present.T @ (present * problem.weights[:, None]) + np.diag(1 / _prior(problem) ** 2)
    sizes = np.array([1.0 if p.positive else max(float(z[i]), 0.1) for i, p in enumerate(problem.free_parameters)])
    repeats = max(10.0, problem.rows / (10.0 * (int(problem.cells.max()) + 1)))
    found = (_for_group(problem, group, candidates, rows * np.sqrt(repeats), information, sizes) for group in groups)
    return list({m.text: m for m in found if m is not None}.values())


def _for_group(
    problem: FitProblem,
    group: Sequence[str],
    candidates: Mapping[str, FloatArray],
    rows: FloatArray,
    information: FloatArray,
    sizes: FloatArray,
) -> Measurement | None:
    names = [p.name for p in problem.free_parameters]
    weak = [names.index(name) for name in group if name in names]
    if not weak:
        return None
    covariance = np.linalg.pinv(information, hermitian=True)
    moved = rows @ covariance
    gain = moved[:, weak] ** 2 / (1 + np.einsum("ij,ij->i", moved, rows))[:, None]
    now = np.diag(covariance)[weak] / sizes[weak] ** 2
    worst = np.max(np.maximum(now - gain / sizes[weak] ** 2, 1e-300), axis=1)
    best, before = int(np.argmin(worst)), float(now.max())
    if worst[best] > MAX_ERROR_LEFT**2 * before:
        return None
    B, S = float(candidates["B"][best]), float(candidates["S"][best])
    decode = f"measure decode steps (S = B) near B = {B:g}"
    text = decode if S == B else f"measure steps with prefill (S > B) near B = {B:g}, S = {S:g}"
    after = float(np.sqrt(worst[best]))
    return Measurement(tuple(group), _octave(B), _octave(S), float(np.sqrt(before)), after, text)


def _octave(middle: float) -> tuple[float, float]:
    """Return the ends of an octave about a value, whole and at least 1."""
    return max(float(np.round(middle / np.sqrt(2))), 1.0), float(np.round(middle * np.sqrt(2)))


def other_than(problem: FitProblem, name: str) -> str:
    """Suggest a measurement if a column has a single value."""
    return f"measure steps with {name} other than {problem.steps[name][0]:g}"


def _candidates(problem: FitProblem) -> StepTable:
    """Return candidate cells on a grid of powers of two.

    Other columns are those of a decode step, or of a step with one prefill, at the median context per request.
    """
    B_top, S_top = (float(problem.steps[name].max()) for name in ("B", "S"))
    Bs = 2.0 ** np.arange(int(np.log2(4 * max(B_top, 1.0))) + 1)
    Ss = 2.0 ** np.arange(int(np.log2(8 * max(S_top, 1.0))) + 1)
    B, S = (axis.ravel() for axis in np.meshgrid(Bs, np.unique(np.concatenate([Ss, Bs]))))
    B, S = B[S >= B], S[S >= B]
    columns = {"B": B, "S": S}
    holds = (S > B).astype(np.float64)
    if "context_tokens" in problem.steps:
        each = float(np.median(problem.steps["context_tokens"] / problem.steps["B"]))
        columns["context_tokens"] = each * (B - holds)
    if "prefill_context_tokens" in problem.steps:
        columns["prefill_context_tokens"] = np.zeros_like(S)
    if "prefill_tokens" in problem.steps:
        columns["prefill_tokens"] = holds * (S - B + 1)
    if "prefill_requests" in problem.steps:
        columns["prefill_requests"] = holds
    return StepTable(columns)


def _plausible(problem: FitProblem, theta: FloatArray) -> FloatArray:
    """Return theta with saturated rates moved to values that the data would just miss."""
    index = {p.name: i for i, p in enumerate(problem.model.parameters)}
    moved = theta.copy()
    for rate, column in problem.model.rates:
        x, i = problem.steps[column], index[rate]
        if rate in problem.fixed:
            continue
        full, linear = _FULL / float(x.min()), _LINEAR / float(x.max())
        moved[i] = min(max(theta[i], linear), max(full, linear))
    return moved


def _prior(problem: FitProblem) -> FloatArray:
    return np.array([_PRIOR_LOG if p.positive else _PRIOR_COST for p in problem.free_parameters])
