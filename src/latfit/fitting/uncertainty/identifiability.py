"""Exact aliases of parameters, by the singular value decomposition of the scaled Jacobian."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.stats import FloatArray

FLAT = 1e-8


@dataclass(frozen=True)
class Directions:
    lengths: FloatArray  # of the columns (p,)
    singular: FloatArray  # values (p,)
    right: FloatArray  # vectors (p, p) as rows
    flat_groups: list[list[int]]  # columns that are exactly flat together

    def root(self) -> FloatArray:
        """Return R (k, p) with R'R = (J'WJ)^-1 in the columns' units, without flat directions."""
        kept = self.singular >= FLAT * max(float(self.singular[0]), 1e-300)
        lengths = np.where(self.lengths > 0, self.lengths, 1.0)
        return np.asarray(self.right[kept] / self.singular[kept][:, None] / lengths)

    def inverse(self) -> FloatArray:
        root = self.root()
        return root.T @ root


def condition_number(singular: FloatArray) -> float:
    """Return largest over smallest of descending singular values; infinite if the smallest is rounding error."""
    known = len(singular) > 0 and singular[-1] > np.finfo(float).eps * singular[0]
    return float(singular[0] / singular[-1]) if known else np.inf


def decompose(J: FloatArray, weights: FloatArray) -> Directions:
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
    united = sorted({*members, *(i for group in groups if set(group) & set(members) for i in group)})
    groups[:] = [group for group in groups if not set(group) & set(members)] + [united]
