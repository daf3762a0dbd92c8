"""Which parameters the data can tell, and which only in combination.

Let J be the residuals' Jacobian at the optimum, its columns scaled to unit length (so that units do not matter), with
singular values s_1 >= s_2 >= ... and right singular vectors v. A direction v moves the residuals by s per unit: below
1e-8 of s_1 it is exactly flat, and the parameters with a part in it are an alias of each other. The condition number
s_1/s_p of the scaled columns warns of the rest from 1e3 on. The condition number on log-parameters, of J_ij = dlnT_i /
dln theta_j, says how much worse the worst combination of relative changes is told than the best.

A parameter is identified when its standard error is below its own size, or too small to move a step's latency by 10 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.fit.problem import FitProblem
from latfit.model.terms import LatencyModel, Steps
from latfit.stats import FloatArray

FLAT = 1e-8
ILL_CONDITIONED = 1e3
TRADES = 0.3
"""Part in a direction from which a parameter counts as trading against the others in it."""


@dataclass(frozen=True)
class Directions:
    """Scaled Jacobian's decomposition: column lengths (p,), singular values (p,), right vectors (p, p) as rows, and
    groups of columns that are exactly flat together."""

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
        """R (k, p) with R'R = (J'WJ)^-1 in the columns' own units, flat directions left out."""
        keep = self.singular >= FLAT * max(float(self.singular[0]), 1e-300)
        return np.asarray(
            self.right[keep] / self.singular[keep][:, None] / np.where(self.lengths > 0, self.lengths, 1.0)
        )

    def inverse(self) -> FloatArray:
        """(J'WJ)^-1 (p, p) in the columns' own units, flat directions left out."""
        root = self.root()
        return root.T @ root


def condition_number(singular: FloatArray) -> float:
    """Largest over smallest of descending singular values; infinite where the smallest is zero."""
    return float(singular[0] / singular[-1]) if len(singular) and singular[-1] > 0 else np.inf


def decompose(J: FloatArray, weights: FloatArray) -> Directions:
    """Directions of a Jacobian (n, p) whose rows count by weights (n,)."""
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
    """Add a group, united with those it shares a member with."""
    united = sorted({*members, *(i for group in groups if set(group) & set(members) for i in group)})
    groups[:] = [group for group in groups if not set(group) & set(members)] + [united]


def weak_groups(directions: Directions, weak: Sequence[int]) -> list[list[int]]:
    """Parameters that are weakly determined, each with those it trades against in the flattest direction."""
    groups: list[list[int]] = []
    for i in weak:
        direction = np.abs(flattest_for(directions, i))
        merge(groups, [j for j in weak if j == i or direction[j] > TRADES])
    return groups


def flattest_for(directions: Directions, i: int) -> FloatArray:
    """The direction (p,) that adds most to the variance of parameter i."""
    added = np.abs(directions.right[:, i]) / np.maximum(directions.singular, 1e-300)
    return np.asarray(directions.right[int(np.argmax(added))])


def log_jacobian(model: LatencyModel, theta: FloatArray, steps: Steps, names: Sequence[str]) -> FloatArray:
    """dlnT/dln theta_j (n, len(names)) of parameters theta (p,); zero for those that are zero."""
    columns = [i for name in names for i, p in enumerate(model.parameters) if p.name == name]
    T = np.maximum(model.latency_ms(theta, steps), 1e-300)
    return np.asarray(model.gradient(theta, steps)[:, columns] * theta[columns] / T[:, None])


def log_condition(problem: FitProblem, theta: FloatArray) -> float:
    """Condition number on log-parameters of the free parameters that are not zero; infinite for an exact alias."""
    names = [p.name for p, i in zip(problem.free_parameters, problem.free, strict=True) if theta[i] != 0]
    if not names:
        return 1.0
    J = log_jacobian(problem.model, theta, problem.steps, names) * np.sqrt(problem.weights)[:, None]
    return (
        condition_number(np.linalg.svd(np.linalg.qr(J, mode="r"), compute_uv=False)) if len(J) >= len(names) else np.inf
    )
