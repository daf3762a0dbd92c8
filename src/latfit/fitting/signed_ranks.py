"""Signed ranks of paired differences: intervals that assume neither one scatter nor its shape, for many groups at once.

A difference d_c of two runs in a cell c is symmetric about its change where both runs measured the cell alike: with the
runs swapped it is -d_c. Whatever scatter a cell has and however heavy its tails, the signs of d_c - delta are then coin
flips if the change is delta, independent of their sizes. So Wilcoxon's sum over the cells of a group,

    T(delta) = sum_c sign(d_c - delta) R_c,        R_c the rank of |d_c - delta|,

has a known distribution. Ranks are taken within strata (phases, whose scatter differs tenfold) and divided by the
stratum's count of cells plus one, so that each cell weighs about the same (van Elteren). T falls with delta, at the
Walsh averages (d_i + d_j)/2, i <= j, of each stratum: it is the weight of those above delta less that of those below.
The estimate is their weighted median (Hodges and Lehmann), and the ends of an interval are Walsh averages too.

Groups that overlap go together: with `FLIPS` draws of all cells' signs at once, T of every group is drawn jointly. A
group's p is the share of draws that reach its T, and the groups' common level is the one that the least p of a draw
falls below with the probability that is allowed for all of them (Westfall and Young). Both ends are used, T being
symmetric. Where that probability is too small for so many draws, the normal distribution takes their place, by
Bonferroni: sums of flipped signs have thinner tails.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.stats import FloatArray

FLIPS = 1 << 13
TELLING = 40
"""Draws that have to lie beyond a level, at either end, for the draws to tell it."""


@dataclass(frozen=True, eq=False)
class Group:
    """Cells that are tested together. cells: their numbers (m,).  d: their differences (m,).  stratum: number of each
    one's stratum (m,)."""

    cells: NDArray[np.intp]
    d: FloatArray
    stratum: NDArray[np.intp]

    @cached_property
    def _walsh(self) -> tuple[FloatArray, FloatArray]:
        """Walsh averages in rising order, and twice what each weighs in T."""
        values, weights = [], []
        for d in self._by_stratum(self.d):
            i, j = np.triu_indices(len(d))
            values.append((d[i] + d[j]) / 2)
            weights.append(np.full(len(i), 2 / (len(d) + 1)))
        value, weight = np.concatenate(values), np.concatenate(weights)
        order = np.argsort(value, kind="stable")
        return value[order], weight[order]

    def _by_stratum(self, column: FloatArray) -> list[FloatArray]:
        return [column[self.stratum == stratum] for stratum in np.unique(self.stratum)]

    @property
    def estimate(self) -> float:
        values, weights = self._walsh
        above = np.cumsum(weights)
        half = above[-1] / 2
        low, high = np.searchsorted(above, (half * (1 - 1e-12), half * (1 + 1e-12)))
        return float((values[low] + values[min(high, len(values) - 1)]) / 2)

    @property
    def scores(self) -> FloatArray:
        """R_c (m,) about the estimate."""
        size, found = np.abs(self.d - self.estimate), np.empty(len(self.d))
        for stratum in np.unique(self.stratum):
            rows = np.flatnonzero(self.stratum == stratum)
            found[rows[np.argsort(size[rows], kind="stable")]] = np.arange(1, len(rows) + 1) / (len(rows) + 1)
        return found

    def ends(self, most: float) -> tuple[float | None, float | None]:
        """Between which changes T is no further from zero than `most`; None where it never is further."""
        values, weights = self._walsh
        half = weights.sum() / 2
        beyond = np.flatnonzero(np.cumsum(weights[::-1])[::-1] - half > most + 1e-9)
        below = np.flatnonzero(np.cumsum(weights) - half > most + 1e-9)
        if not len(beyond) or not len(below):
            return None, None
        return float(values[beyond[-1]]), float(values[below[0]])


def most_by_chance(groups: Sequence[Group], allowed: float) -> list[float]:
    """How far T of each group may be from zero so that any of them exceeds it at one end with a probability of
    `allowed` at most, where the change is the one tested everywhere."""
    scores = [group.scores for group in groups]
    if allowed * FLIPS < TELLING:
        from scipy.special import ndtri

        far = -float(ndtri(allowed / len(groups)))
        return [far * math.sqrt(float(score @ score)) for score in scores]
    cells = 1 + max(int(group.cells.max()) for group in groups)
    signs = 2.0 * np.random.default_rng(0).integers(0, 2, (FLIPS, cells), dtype=np.int8) - 1
    drawn = np.stack([signs[:, group.cells] @ score for group, score in zip(groups, scores, strict=True)])
    both = np.round(np.concatenate([drawn, -drawn], axis=1), 9)  # equal sums in another order are equal
    ordered, rare = np.sort(both, axis=1), math.floor(allowed * 2 * FLIPS)
    least = np.full(2 * FLIPS, 2 * FLIPS)  # the least count of draws, over groups, that reach as far as this one
    for own, each in zip(ordered, both, strict=True):
        far_out = np.flatnonzero(each >= own[-1 - rare])
        least[far_out] = np.minimum(least[far_out], 2 * FLIPS - np.searchsorted(own, each[far_out], side="left"))
    level = int(np.sort(least)[rare])  # counts below it, and not it, are rare enough
    return [float(own[2 * FLIPS - level]) if level else math.inf for own in ordered]
