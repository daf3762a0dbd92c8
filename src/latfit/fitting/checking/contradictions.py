"""Detect rows that do not belong together: impossible steps, and rows of several systems.

Impossible steps are about ten times away from comparable ones, e.g. from a wrong unit or a clock jump. Fast ones are
left out of the fit; slow ones belong to the tail and are reported. A label column (`gpu`, `tp_size`) separates systems
if it explains half of the variance within cells (adjusted R^2).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.checking.messages import POOLED
from latfit.fitting.data import FitData, medians, numbered
from latfit.messages import Message as LatfitWarning, message
from latfit.stats import FloatArray, mad_sigma
from latfit.trace import Trace
from latfit.units import format_ms, number

FACTOR = 8.0  # ten, less a margin for noise and the trend
NEIGHBOURS = 6
MIN_CELLS, MIN_CELL_ROWS = 10, 3
MIN_DEVIATIONS = 5.0  # of the noise between neighbouring cells
MAX_NOISE_CELLS = 1000  # from which that noise is computed
MAX_SHARE = 0.1  # of the rows; more are not exceptions
MAX_TREND_ROWS, TREND_PASSES = 20_000, 8
MAX_SHOWN, MAX_STORED = 3, 50


@dataclass(frozen=True, eq=False)
class Contradictions:
    """Rows far from comparable ones (k,), the farthest first, their expected ms, and which are impossible, not slow."""

    rows: NDArray[np.intp]
    expected: FloatArray
    impossible: NDArray[np.bool_]

    @property
    def left_out(self) -> NDArray[np.intp]:
        return self.rows[self.impossible]

    def to_json(self, data: FitData) -> dict[str, Any]:
        steps = [
            {
                **{name: float(column[row]) for name, column in data.steps.items()},
                "T_ms": float(data.observed[row]),
                "expected_ms": float(expected),
                "left_out": bool(impossible),
            }
            for row, expected, impossible in list(zip(self.rows, self.expected, self.impossible, strict=True))[
                :MAX_STORED
            ]
        ]
        left_out = len(self.left_out)
        return {"factor": FACTOR, "left_out": left_out, "kept": len(self.rows) - left_out, "steps": steps}

    def warnings(self, data: FitData) -> list[LatfitWarning]:
        """Return the warnings about impossible steps, and about slow ones of a grid: a log has some in its tail."""
        found = []
        for code, some in (
            ("impossible_steps", self.impossible),
            ("slow_steps", ~self.impossible & (not data.in_time)),
        ):
            if count := int(some.sum()):
                texts = [
                    f"{', '.join(f'{name}={number(float(column[row]))}' for name, column in data.steps.items())}"
                    f" took {format_ms(data.observed[row])} instead of about {format_ms(expected)}"
                    for row, expected in zip(self.rows[some][:MAX_SHOWN], self.expected[some], strict=False)
                ]
                more = [f"{count - MAX_SHOWN:,} more"] if count > MAX_SHOWN else []
                steps = f"{count:,} steps are" if count > 1 else "1 step is"
                found.append(message(code, steps=steps, which="; ".join([*texts, *more])))
        return found


def contradictions(data: FitData) -> Contradictions | None:
    """Return the impossible and the slow rows of one system; None if there are none."""
    varying = [np.log1p(np.maximum(column, 0.0)) for column in data.steps.values() if np.ptp(column) > 0]
    y, cell, apart = np.log(data.observed), data.known_cell, np.log(FACTOR)
    if int(cell.max(initial=-1)) + 1 < MIN_CELLS or not varying or np.ptp(y) < apart:
        return None
    x = np.stack(varying, axis=1)
    r = y - _trend(x, y)
    if np.ptp(r) < apart:
        return None
    middle, first = medians(r, cell), np.unique(cell, return_index=True)[1]
    usual = _beside(x[first], middle)[cell]
    far = (np.abs(r - middle[cell]) > apart) & (np.bincount(cell)[cell] >= MIN_CELL_ROWS)
    alone = far & (np.bincount(cell, far)[cell] <= 2) & np.isnan(usual)
    usual[alone] = middle[cell[alone]]
    rows = np.flatnonzero(np.isfinite(usual))
    if not 0 < len(rows) <= MAX_SHARE * len(data):
        return None
    rows = rows[np.argsort(-np.abs((r - usual)[rows]))]
    return Contradictions(rows, np.exp((y + usual - r)[rows]), (r < usual)[rows])


def _trend(x: FloatArray, y: FloatArray) -> FloatArray:
    """Return a quadratic (n,) in x (n, k), fitted to y (n,) by least absolute deviations."""
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    pairs = [z[:, i] * z[:, j] for i in range(z.shape[1]) for j in range(i + 1)]
    X = np.stack([np.ones(len(z)), *z.T, *pairs], axis=1)
    some = slice(None, None, len(z) // MAX_TREND_ROWS + 1)
    part, target, weights = X[some], y[some], np.ones(len(y[some]))
    for _ in range(TREND_PASSES):
        scaled = part * weights[:, None]
        square = scaled.T @ part
        c = np.linalg.solve(square + 1e-9 * np.trace(square) * np.eye(len(square)), scaled.T @ target)
        off = np.abs(target - part @ c)
        weights = 1 / np.maximum(off, max(0.1 * float(np.median(off)), 1e-9))
    return np.asarray(X @ c)


def _beside(x: FloatArray, r: FloatArray) -> FloatArray:
    """Return the median residual of the nearest cells, for cells that contradict them; NaN for others."""
    # If neighbouring cells differ by as much in general, none of them is an exception.
    some = np.arange(0, len(r), len(r) // MAX_NOISE_CELLS + 1)
    noise = mad_sigma(r[some] - np.median(r[_nearest(x, some)], axis=1))
    limit, usual = max(np.log(FACTOR), MIN_DEVIATIONS * noise), np.full(len(r), np.nan)
    # of two cells that differ by the limit, one is at least half as far from the overall median
    suspects = np.flatnonzero(np.abs(r - np.median(r)) > limit / 2)
    if len(suspects):
        near = r[_nearest(x, suspects)]
        off = r[suspects, None] - near
        against = np.maximum((off > limit / 2).sum(axis=1), (off < -limit / 2).sum(axis=1))
        middle = np.median(near, axis=1)
        odd = (against >= NEIGHBOURS - 1) & (np.abs(r[suspects] - middle) > limit)
        usual[suspects[odd]] = middle[odd]
    return usual


def _nearest(points: FloatArray, some: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the numbers of the nearest other points (k, NEIGHBOURS) for some (k,) of the points (m, d)."""
    from scipy.spatial import cKDTree

    _, found = cKDTree(points).query(points[some], k=NEIGHBOURS + 1)
    other = found != some[:, None]
    other[other.all(axis=1), -1] = False  # of cells at one place the tree may leave out the one that asks
    return np.asarray(found[other].reshape(len(some), NEIGHBOURS))


MAX_LABEL_VALUES = 32
MAX_NUMBER_VALUES = 8  # a number with more values is a measure of the step
MIN_LABELLED_ROWS, MIN_LABELLED_CELLS = 20, 3
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
    if rows.sum() < MIN_LABELLED_ROWS or len(cells) < MIN_LABELLED_CELLS or len(groups) <= label.max() or freedom < 1:
        return None
    y, which = logs[rows], which.ravel()
    y = y - (np.bincount(which, y) / np.bincount(which))[which]
    means = np.bincount(label[rows], y) / np.bincount(label[rows])
    whole = float(y @ y)
    within = float(((y - means[label[rows]]) ** 2).sum())
    if whole <= 0:
        return None
    return means, 1 - (within / freedom) / (whole / (freedom + len(groups) - 1))
