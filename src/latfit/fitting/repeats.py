"""What steps that were measured several times have of their own.

A smooth correction says of a measured step what its neighbours say too. A machine knows more of it: a kernel picked for
a batch of 7 and for no other. With u_cv the mean log ratio of step c to what is predicted of it, in visit v,

    u_cv = a_c + d_cv,    a_c ~ (0, tau^2),    d_cv ~ (0, sigma^2).

A visit is an unbroken run of repeats: these share what the machine did at that time, so they count once. Where rows
have no time each is a visit. sigma^2 is the mean square within steps, tau^2 what the mean square of their means has
beyond it (the analysis of variance: Searle, Casella & McCulloch, Variance Components, 1992, ch. 3), and the best linear
prediction of a_c from n_c visits with mean m_c is

    a_c = m_c tau^2 / (tau^2 + sigma^2 / n_c).

m_c is Huber's, so that one visit while the machine was held up does not move it. Whether it pays is asked of visits
left out: each is predicted from the others of its step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.stats import MAD_TO_SIGMA, FloatArray, by_group, distinct

HUBER = 1.345
PASSES = 3
EXACT = 1e-9
"""Scatter of ln T below which visits count as equal."""
FEWEST = 5
"""Steps with several visits from which what is theirs is told from what is a visit's."""


@dataclass(frozen=True, eq=False)
class Visits:
    """mean: log ratio of each visit (v,).  step: number of its step (v,), all from 0 on in use.  row: the visit of each
    row (k,)."""

    mean: FloatArray
    step: NDArray[np.intp]
    row: NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class OwnOfSteps:
    """value: what the step of each row has of its own, in ln T (k,).  Of each visit to a step that has several (v,):
    step, its number; row, one of its rows; off, its log ratio; told, what the others say of it."""

    value: FloatArray
    step: NDArray[np.intp]
    row: NDArray[np.intp]
    off: FloatArray
    told: FloatArray

    def gain(self, without: FloatArray, kept: FloatArray) -> "Gain":
        """What visits left out gain. without, kept: by how much a table that must not fall is above what is said here
        of the steps of the rows, in ln T (k,), without and with what they have of their own."""
        before = 100 * np.abs(np.expm1(without[self.row] - self.off))
        after = 100 * np.abs(np.expm1(kept[self.row] + self.told - self.off))
        steps = by_group(before - after, distinct(self.step)[1], np.ones(len(self.step)))
        mean = float(np.mean(before - after))
        spread = float(np.sqrt(np.sum((steps.size * (steps.mean - mean)) ** 2))) / len(self.step)
        return Gain(float(np.mean(before)), float(np.mean(after)), spread, len(self.step))


@dataclass(frozen=True)
class Gain:
    """Errors in percent of visits left out, before and after, the standard error of their difference over steps, and
    how many visits they are of."""

    before: float
    after: float
    error: float
    visits: int


def visits_of(step: NDArray[np.intp], visit: NDArray[np.intp] | None, off: FloatArray) -> Visits:
    """The visits of rows (k,). step: number of each row's step.  visit: of its visit, None where rows have no time.
    off: log ratios."""
    step = distinct(step)[1]
    if visit is None:
        return Visits(off, step, np.arange(len(off)))
    row = distinct(step * (int(visit.max(initial=0)) + 1) + visit)[1]
    of_visit = np.zeros(int(row.max(initial=-1)) + 1, dtype=np.intp)
    of_visit[row] = step
    return Visits(by_group(off, row, np.ones(len(off))).mean, of_visit, row)


def own_of_steps(visits: Visits) -> OwnOfSteps | None:
    """None where too few steps were visited more than once to tell, or they have nothing of their own."""
    step, u, count = visits.step, visits.mean, np.bincount(visits.step)
    several = count[step] > 1
    if np.sum(count > 1) < FEWEST:
        return None
    # deviations from medians would be too small: of three visits one is the median
    about = np.abs(u - by_group(u, step, np.ones(len(u))).mean[step]) * np.sqrt(count / np.maximum(count - 1, 1))[step]
    scale = max(MAD_TO_SIGMA * float(np.median(about[several])), EXACT)
    off = np.abs(u - _medians(step, u)[step])
    for _ in range(PASSES):
        weight = np.minimum(1.0, HUBER * scale / np.maximum(off, 1e-300))
        groups = by_group(u, step, weight)
        off = np.abs(u - groups.mean[step])
    within = float(groups.squares.sum()) / max(groups.freedom, 1.0)
    between = (float(groups.size @ groups.mean**2) - len(count) * within) / float(groups.size.sum())
    if between <= 0:
        return None
    value = groups.mean * between / (between + within / groups.size)
    rest = (groups.size[step] - weight)[several]
    others = (groups.size[step] * groups.mean[step] - weight * u)[several] / rest
    told = others * between / (between + within / rest)
    row = np.zeros(len(u), dtype=np.intp)
    row[visits.row] = np.arange(len(visits.row))
    return OwnOfSteps(value[step][visits.row], step[several], row[several], u[several], told)


def _medians(group: NDArray[np.intp], values: FloatArray) -> FloatArray:
    """Median of the values (v,) of each group, all from 0 on in use."""
    ordered, count = values[np.lexsort((values, group))], np.bincount(group)
    first = np.cumsum(count) - count
    return np.asarray((ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2)
