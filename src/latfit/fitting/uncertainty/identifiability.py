"""Identifiability of parameters: flat directions, and identifiable combinations.

A singular value decomposition of the scaled Jacobian finds exact aliases. Two parameters that compensate each other in
a flat direction have one combination across it, a sum, product or ratio, which is reported with its interval (delta
method). Derivation: docs/theory/fitting.md, "Identifiability".
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.fitting.problem import FitProblem
from latfit.model import Combination, LatencyModel, Steps
from latfit.stats import FloatArray

FLAT = 1e-8
TRADES = 0.3  # component in a direction from which a parameter compensates the others in it


@dataclass(frozen=True)
class Directions:
    """Singular value decomposition of the scaled Jacobian. lengths: of the columns (p,). singular: values (p,). right:
    vectors (p, p) as rows. flat_groups: columns that are exactly flat together."""

    lengths: FloatArray
    singular: FloatArray
    right: FloatArray
    flat_groups: list[list[int]]

    @property
    def condition(self) -> float:
        return condition_number(self.singular)

    @property
    def flat(self) -> FloatArray:
        """Right vectors (k, p) of the flat directions."""
        return self.right[self.singular < FLAT * max(float(self.singular[0]), 1e-300)]

    def root(self) -> FloatArray:
        """Return R (k, p) with R'R = (J'WJ)^-1 in the columns' units, without flat directions."""
        keep = self.singular >= FLAT * max(float(self.singular[0]), 1e-300)
        return np.asarray(
            self.right[keep] / self.singular[keep][:, None] / np.where(self.lengths > 0, self.lengths, 1.0)
        )

    def inverse(self) -> FloatArray:
        """Return (J'WJ)^-1 (p, p) in the columns' units, without flat directions."""
        root = self.root()
        return root.T @ root


def condition_number(singular: FloatArray) -> float:
    """Return largest over smallest of descending singular values; infinite if the smallest is rounding error."""
    known = len(singular) > 0 and singular[-1] > np.finfo(float).eps * singular[0]
    return float(singular[0] / singular[-1]) if known else np.inf


def decompose(J: FloatArray, weights: FloatArray) -> Directions:
    """Decompose a Jacobian (n, p) with row weights (n,)."""
    scaled = J * np.sqrt(weights)[:, None]
    lengths = np.linalg.norm(scaled, axis=0)
    dead = lengths <= FLAT * max(float(lengths.max(initial=0.0)), 1e-300)
    unit = scaled / np.where(dead, 1.0, lengths)
    unit[:, dead] = 0.0
    triangle = np.linalg.qr(unit, mode="r")
    _, singular, right = np.linalg.svd(triangle, full_matrices=True)
    padded = np.zeros(J.shape[1])
    padded[: len(singular)] = singular
    groups: list[list[int]] = [[int(i)] for i in np.flatnonzero(dead)]
    for value, direction in zip(padded, right, strict=True):
        members = [int(i) for i in np.flatnonzero(np.abs(direction) > 0.1) if not dead[i]]
        if value < FLAT * padded[0] and members:
            merge(groups, members)
    return Directions(lengths, padded, right, groups)


def merge(groups: list[list[int]], members: Sequence[int]) -> None:
    """Add a group, merged with the groups it shares a member with."""
    united = sorted({*members, *(i for group in groups if set(group) & set(members) for i in group)})
    groups[:] = [group for group in groups if not set(group) & set(members)] + [united]


def weak_groups(directions: Directions, weak: Sequence[int]) -> list[list[int]]:
    """Group weakly determined parameters with those they compensate in their flattest direction."""
    groups: list[list[int]] = []
    for i in weak:
        direction = np.abs(flattest_for(directions, i))
        merge(groups, [j for j in weak if j == i or direction[j] > TRADES])
    return groups


def flattest_for(directions: Directions, i: int) -> FloatArray:
    """Return the direction (p,) that adds most to the variance of parameter i."""
    added = np.abs(directions.right[:, i]) / np.maximum(directions.singular, 1e-300)
    return np.asarray(directions.right[int(np.argmax(added))])


def log_jacobian(model: LatencyModel, theta: FloatArray, steps: Steps, names: Sequence[str]) -> FloatArray:
    """Return dlnT/dln theta_j (n, len(names)) at parameters theta (p,); zero for parameters that are zero."""
    columns = [i for name in names for i, p in enumerate(model.parameters) if p.name == name]
    T = np.maximum(model.latency_ms(theta, steps), 1e-300)
    return np.asarray(model.gradient(theta, steps)[:, columns] * theta[columns] / T[:, None])


def log_condition(problem: FitProblem, theta: FloatArray) -> float:
    """Return the condition number of `log_jacobian` for nonzero free parameters; infinite for an exact alias."""
    names = [p.name for p, i in zip(problem.free_parameters, problem.free, strict=True) if theta[i] != 0]
    if not names:
        return 1.0
    weights = np.add.reduceat(problem.weights, problem.firsts)  # rows of one cell have one slope
    J = log_jacobian(problem.model, theta, problem.rows_at(problem.firsts).steps, names) * np.sqrt(weights)[:, None]
    return (
        condition_number(np.linalg.svd(np.linalg.qr(J, mode="r"), compute_uv=False)) if len(J) >= len(names) else np.inf
    )


CERTAIN = 0.25  # largest standard error of a combination, as a share of its value
PEAK = "tokens/ms"
MAX_POWER_ERROR = 0.05  # of a product's exponent from 1 or -1, and of a sum's factor from the one value of B or S


def combinations(
    problem: FitProblem,
    theta: FloatArray,
    root: FloatArray,
    directions: Directions,
    groups: Sequence[Sequence[int]],
    quantile: float,
) -> list[Combination]:
    """Return the identifiable combinations of pairs that compensate each other, for groups of free coordinates. root: R
    (k, p) with R'R the covariance of the coordinates z. quantile: standard errors from a value to the end of its
    interval."""
    found: dict[str, Combination] = {}
    for group in groups:
        alive = [i for i in group if directions.lengths[i] > 0]
        for i in alive:
            direction = flattest_for(directions, i)
            partners = np.flatnonzero(np.abs(direction) > TRADES).tolist()
            among = set(alive) if len(alive) > 1 else set(partners)
            members = sorted(among & {i, *partners}, key=lambda k: _order(problem, k))
            flat = direction / np.where(directions.lengths > 0, directions.lengths, 1.0)
            for pair in itertools.combinations(members, 2):
                if (
                    np.all(flat[list(pair)])
                    and (known := _across(problem, theta, root, flat, pair, quantile)) is not None
                ):
                    found.setdefault(known.expression, known)
    return list(found.values())


def _order(problem: FitProblem, i: int) -> tuple[bool, bool, int]:
    """Return the place of a free coordinate in an expression: costs of a step, other costs, rates and peaks."""
    parameter = problem.free_parameters[i]
    return parameter.unit != "ms", parameter.positive, i


def _across(
    problem: FitProblem, theta: FloatArray, root: FloatArray, flat: FloatArray, pair: tuple[int, int], quantile: float
) -> Combination | None:
    """Return the combination of two free coordinates that does not change along a flat direction (p,) in z. None unless
    it is much more certain than either parameter."""
    parameters, at = [problem.free_parameters[i] for i in pair], [problem.free[i] for i in pair]
    names, units, positive = ([getattr(p, field) for p in parameters] for field in ("name", "unit", "positive"))
    values, slopes = theta[at], np.where(positive, theta[at], problem.scales[at])
    if not all(positive):
        for k in np.flatnonzero([unit == PEAK for unit in units]).tolist():  # one over a peak rate is a cost
            values[k], slopes[k], names[k], units[k] = 1 / values[k], -1 / values[k], f"w_1/{names[k]}", "ms/token"
    move, gradient = flat[list(pair)] * slopes, np.zeros(len(flat))
    if not any(p.positive and p.unit != PEAK for p in parameters) and not all(positive):
        known = [1.0, *(float(problem.steps[name][0]) for name in ("B", "S") if np.ptp(problem.steps[name]) == 0)]
        factor = min(known, key=lambda value: abs(-move[0] / move[1] - value))
        if units[0] != units[1] and abs(-move[0] / move[1] / factor - 1) > MAX_POWER_ERROR:
            return None
        written = names[1] if abs(factor - 1) < 1e-6 else f"{factor:.4g}*{names[1]}"
        expression, unit, value = f"{names[0]} + {written}", units[0], float(values[0] + factor * values[1])
        gradient[list(pair)] = slopes[0], factor * slopes[1]
    else:
        if np.any(values <= 0):
            return None
        power = -(move[0] / values[0]) / (move[1] / values[1])
        if abs(abs(power) - 1) > MAX_POWER_ERROR:
            return None
        power = math.copysign(1.0, power)
        expression = f"{names[0]}{'*' if power > 0 else '/'}{names[1]}"
        unit, value = _unit([(units[0], 1), (units[1], int(power))]), float(values[0] * values[1] ** power)
        gradient[list(pair)] = value * slopes / values * (1.0, power)
    error = float(np.linalg.norm(root @ gradient)) / value if value > 0 else math.inf
    return _with_interval(expression, value, error, unit, quantile) if error <= CERTAIN else None


def _unit(parts: Sequence[tuple[str, int]]) -> str:
    """Return the unit of a product of powers of quantities."""
    powers: Counter[str] = Counter()
    for unit, power in parts:
        above, _, below = unit.partition("/")
        for words, sign in ((above, power), (below, -power)):
            powers.update({word if word == "ms" else word.rstrip("s"): sign for word in words.strip("()").split()})
    above, below = (
        " ".join(name for name, power in powers.items() if power * sign > 0 and name != "1") for sign in (1, -1)
    )
    return f"{above or '1'}/{below}" if below else above or "1"


def _with_interval(expression: str, value: float, error: float, unit: str, quantile: float) -> Combination:
    """Return a combination with its interval on the log scale; error: relative standard error."""
    reach = math.exp(quantile * error)
    return Combination(expression, value, value / reach, value * reach, unit)
