"""Measurements that would identify weakly determined parameters.

Candidate cells on a grid of powers of two are ranked by how much they lower the largest relative variance of the
parameters (Fisher information with a weak prior). The best cells are reported as a box of B and S. Derivation:
docs/theory/fitting.md, "Identifiability".
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.problem import FitProblem
from latfit.fitting.solver.solve import Solution
from latfit.model import Measurement, StepTable
from latfit.stats import FloatArray, mad_sigma

ALMOST = (0.6, 0.8, 0.9, 0.97)
"""Shares of the best gain from which a cell counts as good; the first that yields a region is used."""

PURE = 0.9
"""Smallest share of good cells in a reported region."""

WORTH = 0.75
"""Largest ratio of the standard error after a measurement to the one before for it to be reported."""
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
    after = np.maximum(now - gain / sizes[weak] ** 2, 1e-300)
    worst = np.max(after, axis=1)
    before, best = float(now.max()), float(worst.min())
    if best > WORTH**2 * before:
        return None
    lowered = np.log(before / worst)
    for share in ALMOST:
        good = lowered >= share * float(lowered.max())
        spans = _box(candidates, good, int(np.argmax(lowered)))
        for name, (low, high) in spans.items():
            good &= (candidates[name] >= low) & (candidates[name] <= high)
        text = _described(problem, candidates, good, spans)
        if text is not None:
            return Measurement(tuple(group), spans["B"], spans["S"], float(np.sqrt(before)), float(np.sqrt(best)), text)
    return None


def _box(candidates: Mapping[str, FloatArray], good: NDArray[np.bool_], best: int) -> dict[str, tuple[float, float]]:
    """Return the spans of B and S around the best cell with the most good cells, at least PURE of all in the box."""
    known = [np.unique(candidates[name], return_inverse=True) for name in ("B", "S")]
    at = tuple(index for _, index in known)
    before, after = (
        [np.arange(index[best] + 1), np.arange(index[best] + 1, len(values) + 1)] for values, index in known
    )
    corners = np.ix_(*before, *after)

    def counted(cells: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Count the cells in every box (first B, last B, first S, last S)."""
        grid = np.zeros([len(values) + 1 for values, _ in known], dtype=np.int64)
        np.add.at(grid[1:, 1:], at, cells.astype(np.int64))
        summed = grid.cumsum(axis=0).cumsum(axis=1)
        low_B, high_B, low_S, high_S = corners
        return np.asarray(summed[high_B, high_S] - summed[low_B, high_S] - summed[high_B, low_S] + summed[low_B, low_S])

    held = counted(good)
    pure = held >= PURE * counted(np.ones(len(good), dtype=bool))
    low_B, high_B, low_S, high_S = np.unravel_index(int(np.argmax(np.where(pure, held, -1))), held.shape)
    ends = zip(known, (low_B, low_S), (high_B, high_S), strict=True)
    spans = [(values[low], values[index[best] + high]) for (values, index), low, high in ends]
    return {name: (float(low), float(high)) for name, (low, high) in zip(("B", "S"), spans, strict=True)}


def _described(
    problem: FitProblem,
    candidates: Mapping[str, FloatArray],
    good: NDArray[np.bool_],
    spans: Mapping[str, tuple[float, float]],
) -> str | None:
    """Describe the region, relative to decode or prefill steps if it contains only those; None if it is unbounded."""
    prefill = candidates["S"] > candidates["B"]
    kind = "decode" if not prefill[good].any() else "prefill" if prefill[good].all() else "any"
    among = {"decode": ~prefill, "prefill": prefill, "any": np.ones(len(prefill), dtype=bool)}[kind]
    words = {name: _span_words(name, spans[name], candidates[name][among]) for name in ("B", "S")}
    for name in ("B", "S"):
        if words[name] == f"any {name}" and not _holds_near(candidates[name][good], problem.steps[name]):
            words[name] = _other_words(problem, name)
    said = [text for name, text in words.items() if text != f"any {name}"]
    if kind == "decode":
        return f"measure decode steps (S = B) with {words['B']}"
    if kind == "prefill":
        return f"measure steps with prefill (S > B){' at ' if said else ''}{' and '.join(said)}"
    if said:
        return f"measure {words['B']} at {words['S']}"
    single = [name for name in ("B", "S") if np.ptp(problem.steps[name]) == 0]
    return other_than(problem, single[0]) if single else None


def _holds_near(good: FloatArray, measured: FloatArray) -> bool:
    """Return whether a good value (m,) is within a factor of two of the only measured one; True if several were."""
    return bool(np.ptp(measured) > 0 or np.any(np.abs(np.log2(good / measured[0])) < 1))


def other_than(problem: FitProblem, name: str) -> str:
    """Suggest a measurement if a column has a single value."""
    return f"measure steps with {_other_words(problem, name)}"


def _other_words(problem: FitProblem, name: str) -> str:
    return f"{name} other than {problem.steps[name][0]:g}"


def _span_words(name: str, span: tuple[float, float], among: FloatArray) -> str:
    """Describe a span by the ends that differ from those of all candidates (n,)."""
    low, high = span
    from_start, to_end = low <= float(among.min()), high >= float(among.max())
    if low == high:
        return f"{name} = {low:g}"
    if from_start and to_end:
        return f"any {name}"
    if from_start:
        return f"{name} ≤ {high:g}"
    return f"{name} ≥ {low:g}" if to_end else f"{low:g} ≤ {name} ≤ {high:g}"


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
