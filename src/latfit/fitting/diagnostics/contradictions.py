"""Detect impossible steps: about ten times away from comparable ones, e.g. from a wrong unit or a clock jump.

A quadratic in the logarithms of all columns, fitted by least absolute deviations, removes the trend of ln T. A cell
stands out if its median differs by ln FACTOR from that of its six nearest cells, and by half, on the same side, from
five of them. A row stands out if it and at most one other differ by ln FACTOR from their cell. Fast ones are left out.
Slow ones belong to the tail: reported, but kept.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.influence import nearest
from latfit.fitting.diagnostics.messages import message
from latfit.messages import Message as LatfitWarning
from latfit.stats import FloatArray, mad_sigma
from latfit.units import format_ms, number

FACTOR = 8.0  # ten, less a margin for noise and the trend
NEIGHBOURS = 6
MIN_CELLS, MIN_CELL_ROWS = 10, 3
MIN_DEVIATIONS = 5.0  # of the scatter between neighbouring cells
MAX_SCATTER_CELLS = 1000  # cells that the scatter is computed from
MAX_SHARE = 0.1  # of the rows; more are not exceptions
MAX_TREND_ROWS, TREND_PASSES = 20_000, 8
MAX_SHOWN, MAX_STORED = 3, 50


@dataclass(frozen=True, eq=False)
class Contradictions:
    """Rows far from comparable ones (k,), the expected time in ms (k,), and which are impossible rather than slow."""

    rows: NDArray[np.intp]
    expected: FloatArray
    impossible: NDArray[np.bool_]

    @property
    def left_out(self) -> NDArray[np.intp]:
        """Row numbers that a fit must not use."""
        return self.rows[self.impossible]

    def without(self, data: FitData) -> FitData:
        """Return the rows that a fit may use."""
        return data.sample(np.delete(np.arange(len(data)), self.left_out)) if len(self.left_out) else data

    def to_json(self, data: FitData) -> dict[str, Any]:
        """Return `contradictions` of the diagnostics, the steps farthest off first."""
        order = np.argsort(-np.abs(np.log(data.observed[self.rows] / self.expected)))
        steps = [
            {
                **{name: float(column[self.rows[i]]) for name, column in data.steps.items()},
                "T_ms": float(data.observed[self.rows[i]]),
                "expected_ms": float(self.expected[i]),
                "left_out": bool(self.impossible[i]),
            }
            for i in order[:MAX_STORED].tolist()
        ]
        return {
            "factor": FACTOR,
            "left_out": int(self.impossible.sum()),
            "kept": int((~self.impossible).sum()),
            "steps": steps,
        }

    def warnings(self, data: FitData) -> list[LatfitWarning]:
        """Return the warnings about impossible and slow steps."""
        slow = "slow_steps_of_log" if data.in_time else "slow_steps"
        return [
            message(code, steps=_count(some), which=_describe(data, self, some))
            for code, some in (("impossible_steps", self.impossible), (slow, ~self.impossible))
            if some.any()
        ]


def _count(some: NDArray[np.bool_]) -> str:
    rows = int(some.sum())
    return f"{rows:,} steps are" if rows > 1 else "1 step is"


def _describe(data: FitData, found: Contradictions, some: NDArray[np.bool_]) -> str:
    """Describe the steps that are farthest off."""
    off = np.where(some, np.abs(np.log(data.observed[found.rows] / found.expected)), -1.0)
    texts = []
    for i in np.argsort(-off)[: min(MAX_SHOWN, int(some.sum()))].tolist():
        row = found.rows[i]
        step = ", ".join(f"{name}={number(float(column[row]))}" for name, column in data.steps.items())
        texts.append(f"{step} took {format_ms(data.observed[row])} instead of about {format_ms(found.expected[i])}")
    more = int(some.sum()) - len(texts)
    return "; ".join([*texts, *([f"{more:,} more"] if more else [])])


def contradictions(data: FitData) -> Contradictions | None:
    """Return the impossible and the slow rows of one system; None if there are none."""
    x, y = _coordinates(data), np.log(data.observed)
    cells = int(data.known_cell.max(initial=-1)) + 1
    if cells < MIN_CELLS or x.shape[1] == 0 or np.ptp(y) < np.log(FACTOR):
        return None
    r = y - _trend(x, y)
    if np.ptp(r) < np.log(FACTOR):
        return None
    middle, first = _medians(r, data.known_cell, cells)
    usual = _beside(x[first], middle)[data.known_cell]
    alone = _alone_in_cell(r, middle, data.known_cell, cells) & np.isnan(usual)
    usual[alone] = middle[data.known_cell[alone]]
    rows = np.flatnonzero(np.isfinite(usual))
    if not 0 < len(rows) <= MAX_SHARE * len(data):
        return None
    return Contradictions(rows, np.exp((y + usual - r)[rows]), (r < usual)[rows])


def _coordinates(data: FitData) -> FloatArray:
    """Return ln(1 + column) (n, k) of the columns that vary."""
    varying = [np.log1p(np.maximum(column, 0.0)) for column in data.steps.values() if np.ptp(column) > 0]
    return np.stack(varying, axis=1) if varying else np.empty((len(data), 0))


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


def _medians(r: FloatArray, cell: NDArray[np.intp], cells: int) -> tuple[FloatArray, NDArray[np.intp]]:
    """Return the median of each cell (m,), and one of its rows."""
    order = np.lexsort((r, cell))
    rows = np.bincount(cell, minlength=cells)
    start = np.cumsum(rows) - rows
    return 0.5 * (r[order[start + (rows - 1) // 2]] + r[order[start + rows // 2]]), order[start]


def _alone_in_cell(r: FloatArray, middle: FloatArray, cell: NDArray[np.intp], cells: int) -> NDArray[np.bool_]:
    """Return rows (n,) that differ by ln FACTOR from their cell's median, with at most one other such row."""
    far = np.abs(r - middle[cell]) > np.log(FACTOR)
    far &= (np.bincount(cell, minlength=cells) >= MIN_CELL_ROWS)[cell]
    return np.asarray(far & (np.bincount(cell, far, cells) <= 2)[cell])


def _beside(x: FloatArray, r: FloatArray) -> FloatArray:
    """Return the median residual of the nearest cells, for cells that contradict them; NaN for others."""
    # If neighbouring cells differ by as much in general, none of them is an exception.
    some = np.arange(0, len(r), len(r) // MAX_SCATTER_CELLS + 1)
    beside = np.median(r[nearest(x, some, NEIGHBOURS)], axis=1)
    least_off = max(np.log(FACTOR), MIN_DEVIATIONS * mad_sigma(r[some] - beside))
    found, limit = np.full(len(r), np.nan), least_off * np.where(_alone_at_an_end(x), 2.0, 1.0)
    # of two cells that differ by the limit, one is at least half as far from the overall median
    far = np.abs(r - np.median(r)) > limit / 2
    while True:
        kept = np.flatnonzero(np.isnan(found))
        asked = np.flatnonzero(far[kept])
        if len(kept) < MIN_CELLS or len(asked) == 0:
            return found
        near = r[kept][nearest(x[kept], asked, NEIGHBOURS)]
        off, usual, least = r[kept[asked], None] - near, np.median(near, axis=1), limit[kept[asked]]
        half = least[:, None] / 2
        against = np.maximum((off > half).sum(axis=1), (off < -half).sum(axis=1))
        accused = (against >= NEIGHBOURS - 1) & (np.abs(r[kept[asked]] - usual) > least)
        if not accused.any():
            return found
        found[kept[asked[accused]]] = usual[accused]


def _alone_at_an_end(x: FloatArray) -> NDArray[np.bool_]:
    """Return cells (m,) alone at an end of an axis: they may stand behind a jump, so they need twice the distance."""
    ends = np.zeros(len(x), dtype=bool)
    for column in x.T:
        for end in (column.min(), column.max()):
            there = column == end
            ends |= there & (there.sum() == 1)
    return ends
