"""Detect that the rows come from several systems that a label column (`gpu`, `tp_size`) separates.

A label separates systems if it explains half of the variance within cells (adjusted R^2).
"""

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData, numbered
from latfit.fitting.diagnostics.messages import POOLED
from latfit.messages import Message as LatfitWarning, message
from latfit.stats import FloatArray
from latfit.trace import Trace

MAX_LABEL_VALUES = 32
MAX_NUMBER_VALUES = 8  # a number with more values is a measure of the step
MIN_ROWS, MIN_CELLS = 20, 3
MIN_EXPLAINED = 0.5
MIN_RATIO, MIN_RATIO_COARSE = 1.1, 1.5  # slowest over fastest value, in equal cells and in half octaves
CELLS_PER_OCTAVE = 2


def pooled_systems(trace: Trace, data: FitData) -> LatfitWarning | None:
    """Return the message on the label that explains most of the differences between equal steps; None without one."""
    if len(trace) != len(data):  # rows that stand for no step were left out
        return None
    logs = np.log(data.observed)
    coarse = [np.round(CELLS_PER_OCTAVE * np.log2(data.B)), np.round(CELLS_PER_OCTAVE * np.log2(data.S))]
    found = {}
    for column, (label, names) in _labels(trace).items():
        for cell, least in ((data.known_cell, MIN_RATIO), (numbered(coarse), MIN_RATIO_COARSE)):
            if (compared := _explained(logs, cell, label)) is not None:
                means, share = compared
                ratio, order = float(np.exp(np.ptp(means))), np.argsort(means)
                if share >= MIN_EXPLAINED and ratio >= least:
                    ends = {"first": names[order[0]], "last": names[order[-1]], "count": len(names)}
                    found[share] = message(POOLED, column=column, explained=100 * share, ratio=ratio, **ends)
                break
    return found[max(found)] if found else None


def _labels(trace: Trace) -> dict[str, tuple[NDArray[np.intp], list[str]]]:
    found = {}
    for name, column in trace.labels().items():
        code, values = trace.coded(name)
        # the codes of selected rows are those of the whole table
        present, number = np.unique(code, return_inverse=True)
        if 1 < len(present) <= (MAX_NUMBER_VALUES if column.dtype.kind in "iuf" else MAX_LABEL_VALUES):
            found[name] = number.ravel(), [values[i] for i in present]
    return found


def _explained(logs: FloatArray, cell: NDArray[np.intp], label: NDArray[np.intp]) -> tuple[FloatArray, float] | None:
    """Return the mean of y by value of the label (g,) and the adjusted R^2; None with too few comparable rows."""
    pairs = np.unique(np.stack([cell, label]), axis=1)
    shared = np.bincount(pairs[0], minlength=int(cell.max()) + 1) > 1
    rows = shared[cell]
    cells, which = np.unique(cell[rows], return_inverse=True)
    groups = np.unique(label[rows])
    freedom = int(rows.sum()) - len(cells) - len(groups) + 1
    if rows.sum() < MIN_ROWS or len(cells) < MIN_CELLS or len(groups) <= label.max() or freedom < 1:
        return None
    y, which = logs[rows], which.ravel()
    y = y - (np.bincount(which, y) / np.bincount(which))[which]
    means = np.bincount(label[rows], y) / np.bincount(label[rows])
    whole = float(y @ y)
    within = float(((y - means[label[rows]]) ** 2).sum())
    if whole <= 0:
        return None
    return means, 1 - (within / freedom) / (whole / (freedom + len(groups) - 1))
