"""Scores of steps that were predicted while left out, how many independent ones they are worth, and their limits.

The score of a step is s = ln(observed/predicted). With n scores and k = ceil((n+1) level), the k-th smallest is not
exceeded by a new step with probability at least `level`, and at most 1/(n+1) more, whatever the model and the noise,
while steps are exchangeable (Vovk et al. 2005). Given the scores, the coverage is Beta(k, n+1-k). Where k > n the data
cannot tell that level. Below, the k-th largest does the same. A two-sided interval at level c takes the lower and the
upper factor at (1+c)/2.

The repeats of a cell of a grid share what the model misses there: five repeats of seven cells are not 35 scores. With r
the intraclass correlation of the scores (analysis of variance), m repeats of a cell are worth m/(1 + (m-1) r)
independent scores (Kish 1965): each counts 1/(1 + (m-1) r), and n is what they count together. So where the noise of
single steps decides (r = 0) every step counts, and where the cell decides (r = 1) every cell.

Neighbours in time share their noise too: f steps in a row are worth one (see `autocorrelation`), and each counts 1/f.
In a grid only the share 1 - r of the variance that is a step's own can be shared in time. The variance of the mean of
all scores is the sum of both parts, so a step of a cell counts 1/(r m + (1 - r) f). Steps of one visit to a cell share
both: time alone makes cells differ as if v of their steps were one, v being f, or the steps of a visit where these are
fewer. So v times the variance within cells is taken off that between them before r is found. f is the likely one here;
all steps together count at most what they count without regard to cells, by the f that allows for its error.

The number of independent scores is n in every rank and every band; where it is too small for a level, there is no
limit. New steps are those of a fresh run: the next few of the same run resemble its last ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.fit.autocorrelation import Persistence, TimeOrder, clipped, persistence
from latfit.fit.by_row import numbered
from latfit.fit.crossval import HeldOut
from latfit.stats import FloatArray
from latfit.trace.table import Trace


@dataclass(frozen=True)
class Scores:
    """Scores (m,) in rising order, with the fold of each and how many independent ones it is worth, with regard to what
    neighbours in time share (weight) and without (by_cell); steps and (B,S) cells that they come from; in_time: what
    was found of neighbours in time."""

    score: FloatArray
    fold: NDArray[np.int64]
    weight: FloatArray
    by_cell: FloatArray
    steps: int
    cells: int
    in_time: Persistence

    @staticmethod
    def of(trace: Trace, order: TimeOrder, left_out: HeldOut, ordered: bool) -> "Scores":
        """Of rows of a trace that were left out. ordered: they are rows of a log rather than cells of a grid."""
        cell = numbered([trace.floats(name)[left_out.rows] for name in ("B", "S")])
        score, weight = left_out.log_ratio, left_out.weights
        told = persistence(order.series(left_out.rows, score))
        if ordered or not len(cell):
            counts, by_cell = weight / told.steps_for_one, weight
        else:
            counts, by_cell = (weight * worth(score, weight, cell, known) for known in (told, None))
        rising = np.argsort(score, kind="stable")
        steps, cells = round(float(weight.sum())), int(cell.max(initial=-1)) + 1
        return Scores(score[rising], left_out.fold[rising], counts[rising], by_cell[rising], steps, cells, told)

    def among(self, rows: NDArray[np.bool_]) -> "Scores":
        """Those of the scores (m,) that are true."""
        return replace(
            self,
            score=self.score[rows],
            fold=self.fold[rows],
            weight=self.weight[rows],
            by_cell=self.by_cell[rows],
        )

    def without_time(self) -> "Scores":
        """The same as if steps shared nothing with their neighbours in time."""
        return replace(self, weight=self.by_cell, in_time=Persistence())

    @property
    def independent(self) -> float:
        """How many independent scores they are worth."""
        return float(self.weight.sum())

    @cached_property
    def _sides(self) -> Mapping[int, tuple[FloatArray, FloatArray]]:
        """By side: side times the scores (m,) in order, and how many independent ones there are up to each (m,)."""
        return {1: (self.score, np.cumsum(self.weight)), -1: (-self.score[::-1], np.cumsum(self.weight[::-1]))}

    def limit(self, level: float, side: int = 1) -> float | None:
        """The limit that side times a new score stays below."""
        return _limit_of(*self._sides[side], level)


def worth(
    score: FloatArray, weight: FloatArray, cell: NDArray[np.intp], in_time: Persistence | None = None
) -> FloatArray:
    """How many independent scores one of the steps in each row (m,) is worth, at most 1.

    score (m,) of rows that stand for weight steps each (m,), in cells (m,).  in_time: what of a step's own part of the
    score its neighbours in time share.
    """
    told = in_time or Persistence()
    size = np.bincount(cell, weights=weight)
    n, cells = float(weight.sum()), len(size)
    if n - cells < 1 or cells < 2:
        return np.asarray(1.0 / np.maximum(size[cell], told.steps_for_one))
    x = clipped(score, weight)
    mean = np.bincount(cell, weights=weight * x) / size
    within = float(weight @ (x - mean[cell]) ** 2) / (n - cells)
    between = float(size @ (mean - float(weight @ x) / n) ** 2) / (cells - 1)
    typical = (n - float(size @ size) / n) / (cells - 1)
    by_cell = max(between - told.in_visit * within, 0.0)
    shared = min(by_cell / max(by_cell + typical * within, 1e-300), 1.0)
    worth_one = 1.0 / (shared * np.maximum(size, 1.0) + (1 - shared) * told.likely)
    return np.asarray(worth_one * min(1.0, n / told.steps_for_one / float(size @ worth_one)))[cell]


def conformal_rank(n: int, level: float) -> int | None:
    """k = ceil((n+1) level), the rank among n scores that a new one stays below with that probability; None where n is
    too small to tell."""
    k = math.ceil((n + 1) * level - 1e-9)
    return k if 1 <= k <= n else None


def coverage_law(n: int, level: float) -> tuple[float, float] | None:
    """(k, n+1-k) of the Beta law that the coverage of a limit from n scores has, given the scores."""
    k = conformal_rank(n, level)
    return None if k is None else (float(k), float(n + 1 - k))


def upper_limit(scores: FloatArray, level: float, weights: FloatArray | None = None) -> float | None:
    """The score (n,) that a new one stays below with probability `level`; None where n cannot tell.

    weights: how many independent scores each stands for (n,).
    """
    weights = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(scores, kind="stable")
    return _limit_of(scores[order], np.cumsum(weights[order]), level)


def _limit_of(rising: FloatArray, reached: FloatArray, level: float) -> float | None:
    """The same of scores (n,) that are in order, with the sum of weights up to each (n,)."""
    n = float(reached[-1]) if len(reached) else 0.0
    rank = (n + 1) * level
    if n <= 0 or rank > n + 1e-9:
        return None
    return float(rising[min(int(np.searchsorted(reached, rank - 1e-9 * n)), len(rising) - 1)])
