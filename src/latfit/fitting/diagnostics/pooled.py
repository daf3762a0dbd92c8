"""Whether the rows of a trace come from several systems that a label tells apart.

A label is a column that latfit knows no meaning of, with few values: `device`, `gpu`, `tp_size`. On one system, rows
with the same B, S and context take the same time, give or take noise; so rows are compared within such cells only, over
the cells in which two values of the label occur or more. With y = ln T less the mean of its cell, of n rows in c cells
and g values of the label, the share of the differences that the label explains is

    R^2 = 1 - (SS_within / (n - c - g + 1)) / (SS / (n - c))

with SS the squares of y and SS_within those about the means by value (the adjusted R^2 of a one-way analysis of
variance). Where no cell holds two values, cells are half octaves of B and S; what size does within those is noise then,
and only a larger difference is told.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData, numbered
from latfit.stats import FloatArray
from latfit.trace import Trace
from latfit.warning import LatfitWarning

POOLED = "pooled_systems"
"""Code of the warning."""

EXPLAINS_AWAY = ("noise_floor", "large_error")
"""Codes of warnings that only say again that several systems differ."""

MOST_VALUES = 32
MOST_NUMBERS = 8
"""Values of a label that is text, and of one that is a number: a count with more is a measure of the step."""

FEWEST_ROWS, FEWEST_CELLS = 20, 3
EXPLAINS = 0.5
LEAST_RATIO, LEAST_RATIO_COARSE = 1.1, 1.5
PER_OCTAVE = 2


@dataclass(frozen=True)
class Pooled:
    """A label, its values from the fastest to the slowest, the slowest over the fastest at equal steps, and the share
    of the differences that it explains."""

    column: str
    values: tuple[str, ...]
    ratio: float
    explained: float

    def warning(self) -> LatfitWarning:
        named = f"{self.values[0]} to {self.values[-1]}"
        return LatfitWarning(
            POOLED,
            f"These rows are of several systems: {self.column} ({len(self.values)} values, {named}) explains"
            f" {100 * self.explained:.0f} % of the differences between steps of equal B and S, up to {self.ratio:.2g}"
            " times.",
            f"Fit each by itself: --map path={self.column}.",
        )


def pooled_systems(trace: Trace, data: FitData) -> Pooled | None:
    """The label that tells the systems of a trace apart, the one that explains most; None where none does."""
    if len(trace) != len(data):  # rows that stand for no step were left out
        return None
    logs = np.log(data.observed)
    coarse = [np.round(PER_OCTAVE * np.log2(data.B)), np.round(PER_OCTAVE * np.log2(data.S))]
    found = []
    for column, (label, names) in _labels(trace).items():
        for cell, least in ((data.known_cell, LEAST_RATIO), (numbered(coarse), LEAST_RATIO_COARSE)):
            told = _explained(logs, cell, label)
            if told is not None:
                means, explained = told
                ratio = float(np.exp(means.max() - means.min()))
                if explained >= EXPLAINS and ratio >= least:
                    ordered = tuple(names[i] for i in np.argsort(means))
                    found.append(Pooled(column, ordered, ratio, explained))
                break
    return max(found, key=lambda each: each.explained, default=None)


def _labels(trace: Trace) -> dict[str, tuple[NDArray[np.intp], list[str]]]:
    """Columns of few values without a meaning of their own: number of each row's value (n,), and the values."""
    found = {}
    for name, column in trace.labels().items():
        code, values = trace.coded(name)
        # the codes of selected rows are those of the whole table
        present, number = np.unique(code, return_inverse=True)
        if 1 < len(present) <= (MOST_NUMBERS if column.dtype.kind in "iuf" else MOST_VALUES):
            found[name] = number.ravel(), [values[i] for i in present]
    return found


def _explained(logs: FloatArray, cell: NDArray[np.intp], label: NDArray[np.intp]) -> tuple[FloatArray, float] | None:
    """(mean of y by value of the label (g,), adjusted R^2); None where too few rows can be compared."""
    pairs = np.unique(np.stack([cell, label]), axis=1)
    shared = np.bincount(pairs[0], minlength=int(cell.max()) + 1) > 1
    rows = shared[cell]
    cells, which = np.unique(cell[rows], return_inverse=True)
    groups = np.unique(label[rows])
    freedom = int(rows.sum()) - len(cells) - len(groups) + 1
    if rows.sum() < FEWEST_ROWS or len(cells) < FEWEST_CELLS or len(groups) <= label.max() or freedom < 1:
        return None
    y, which = logs[rows], which.ravel()
    y = y - (np.bincount(which, y) / np.bincount(which))[which]
    means = np.bincount(label[rows], y) / np.bincount(label[rows])
    whole = float(y @ y)
    within = float(((y - means[label[rows]]) ** 2).sum())
    if whole <= 0:
        return None
    return means, 1 - (within / freedom) / (whole / (freedom + len(groups) - 1))
