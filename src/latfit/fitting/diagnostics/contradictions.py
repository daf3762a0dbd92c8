"""Steps whose time is ten times from that of the steps beside them. Slow ones are named, fast ones left out of a fit.

A wrong unit, a clock that jumped or a counter that wrapped puts a step far from all that is like it. No loss bounds
what such rows do to the mean error of a fit, so they are looked for before anything is fitted, and without a model: one
that is off by as much would accuse the steps.

With x the logarithms of all that is known of a step, a trend of ln T is taken out: a quadratic in x by least absolute
deviations (least squares with the weights 1/|r|, a few times over), which steps that are far off do not move. What is
left of a cell (of the steps that agree in all that is known) is the median r of its rows. A cell is impossible where r
lies by ln FACTOR and more from the median of the six cells nearest to it in x, and half as far or more, on the same
side, from all but at most one of them. So

* a latency that falls or bends is not accused: the cells beside fall with it, or lie between;
* nor one that jumps, to however many times as much: of the cells behind a jump each has others behind it beside it. A
  cell that lies alone beyond all others along some axis may stand behind a jump, so it has to be off by FACTOR twice;
* nor are times that scatter by as much everywhere: a cell has to be off by DEVIATIONS of what cells differ by from
  those beside them, too.

Cells found are no neighbours any more, and the rest is looked at again until none is found: two that stand side by side
do not vouch for each other.

A row as far from the median of its own cell is named too, where at most one other is. Nothing lets a step take a tenth
of its time, so fast rows are impossible. A slow one may have been paused, and the tail is what people plan for: it is
named and kept. The loss bounds its pull on the formula, and the error of a step that took longer than predicted is at
most 100 %.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.fitting.diagnostics.influence import nearest
from latfit.stats import FloatArray, mad_sigma
from latfit.units import format_ms, number
from latfit.warning import NO_ACTION, LatfitWarning

FACTOR = 8.0
"""Times the latency beside it: ten, less what noise and the trend may take from them."""

DEVIATIONS, SOME = 5.0, 1000
"""How many standard deviations from the cells beside a cell has to be; cells that tell that deviation."""

NEIGHBOURS = 6
FEWEST_CELLS = 10
FEWEST_ROWS = 3
MOST_SHARE = 0.1
"""Share of the rows beyond which they are no exceptions."""

TREND_ROWS = 20_000
PASSES = 8
TOLD, STORED = 3, 50


@dataclass(frozen=True, eq=False)
class Contradictions:
    """Rows that contradict those beside them (k,), the time in ms that these suggest (k,), and which of them cannot be
    right (k,): the others are slow."""

    rows: NDArray[np.intp]
    expected: FloatArray
    impossible: NDArray[np.bool_]

    @property
    def left_out(self) -> NDArray[np.intp]:
        """The rows that no fit may use."""
        return self.rows[self.impossible]

    def without(self, data: FitData) -> FitData:
        """The rows that a fit may use."""
        return data.sample(np.delete(np.arange(len(data)), self.left_out)) if len(self.left_out) else data

    def to_json(self, data: FitData) -> dict[str, Any]:
        """`contradictions` of the diagnostics: the steps, those farthest off first."""
        order = np.argsort(-np.abs(np.log(data.observed[self.rows] / self.expected)))
        steps = [
            {
                **{name: float(column[self.rows[i]]) for name, column in data.steps.items()},
                "T_ms": float(data.observed[self.rows[i]]),
                "expected_ms": float(self.expected[i]),
                "left_out": bool(self.impossible[i]),
            }
            for i in order[:STORED].tolist()
        ]
        return {
            "factor": FACTOR,
            "left_out": int(self.impossible.sum()),
            "kept": int((~self.impossible).sum()),
            "steps": steps,
        }

    def warnings(self, data: FitData) -> list[LatfitWarning]:
        """What a user should know of them."""
        found = []
        if self.impossible.any():
            message = f"{_steps(self.impossible)} far from those beside: {_told(data, self, self.impossible)}."
            remedy = "Left out of the fit. Check how they were recorded (unit, clock, counters), or measure again."
            found.append(LatfitWarning("impossible_steps", message, remedy))
        if not self.impossible.all():
            message = f"{_steps(~self.impossible)} far slower than those beside: {_told(data, self, ~self.impossible)}."
            remedy = (
                "They count in the tail: where they should not, measure again, or leave them out with --drop outlier."
            )
            if data.in_time:
                remedy = f"{NO_ACTION} They count in the tail, and the loss bounds what they do to the formula."
            found.append(LatfitWarning("slow_steps", message, remedy))
        return found


def _steps(some: NDArray[np.bool_]) -> str:
    rows = int(some.sum())
    return f"{rows:,} steps are" if rows > 1 else "1 step is"


def _told(data: FitData, found: Contradictions, some: NDArray[np.bool_]) -> str:
    """The steps that are farthest off in words."""
    off = np.where(some, np.abs(np.log(data.observed[found.rows] / found.expected)), -1.0)
    texts = []
    for i in np.argsort(-off)[: min(TOLD, int(some.sum()))].tolist():
        row = found.rows[i]
        step = ", ".join(f"{name}={number(float(column[row]))}" for name, column in data.steps.items())
        texts.append(f"{step} took {format_ms(data.observed[row])} instead of about {format_ms(found.expected[i])}")
    more = int(some.sum()) - len(texts)
    return "; ".join([*texts, *([f"{more:,} more"] if more else [])])


def contradictions(data: FitData) -> Contradictions | None:
    """The rows of one system that lie ten times from the steps beside them; None where there is none."""
    x, y = _coordinates(data), np.log(data.observed)
    cells = int(data.known_cell.max(initial=-1)) + 1
    if cells < FEWEST_CELLS or x.shape[1] == 0 or np.ptp(y) < np.log(FACTOR):
        return None
    r = y - _trend(x, y)
    if np.ptp(r) < np.log(FACTOR):
        return None
    middle, first = _medians(r, data.known_cell, cells)
    usual = _beside(x[first], middle)[data.known_cell]
    alone = _alone_in_cell(r, middle, data.known_cell, cells) & np.isnan(usual)
    usual[alone] = middle[data.known_cell[alone]]
    rows = np.flatnonzero(np.isfinite(usual))
    if not 0 < len(rows) <= MOST_SHARE * len(data):
        return None
    return Contradictions(rows, np.exp((y + usual - r)[rows]), (r < usual)[rows])


def _coordinates(data: FitData) -> FloatArray:
    """ln(1 + column) (n, k) of what is known of the steps and varies."""
    varying = [np.log1p(np.maximum(column, 0.0)) for column in data.steps.values() if np.ptp(column) > 0]
    return np.stack(varying, axis=1) if varying else np.empty((len(data), 0))


def _trend(x: FloatArray, y: FloatArray) -> FloatArray:
    """A quadratic (n,) in x (n, k) that follows y (n,) by least absolute deviations."""
    z = (x - x.mean(axis=0)) / x.std(axis=0)
    pairs = [z[:, i] * z[:, j] for i in range(z.shape[1]) for j in range(i + 1)]
    X = np.stack([np.ones(len(z)), *z.T, *pairs], axis=1)
    some = slice(None, None, len(z) // TREND_ROWS + 1)
    part, target, weights = X[some], y[some], np.ones(len(y[some]))
    for _ in range(PASSES):
        scaled = part * weights[:, None]
        square = scaled.T @ part
        c = np.linalg.solve(square + 1e-9 * np.trace(square) * np.eye(len(square)), scaled.T @ target)
        off = np.abs(target - part @ c)
        weights = 1 / np.maximum(off, max(0.1 * float(np.median(off)), 1e-9))
    return np.asarray(X @ c)


def _medians(r: FloatArray, cell: NDArray[np.intp], cells: int) -> tuple[FloatArray, NDArray[np.intp]]:
    """Median of each cell (m,), and one of its rows."""
    order = np.lexsort((r, cell))
    rows = np.bincount(cell, minlength=cells)
    start = np.cumsum(rows) - rows
    return 0.5 * (r[order[start + (rows - 1) // 2]] + r[order[start + rows // 2]]), order[start]


def _alone_in_cell(r: FloatArray, middle: FloatArray, cell: NDArray[np.intp], cells: int) -> NDArray[np.bool_]:
    """Rows (n,) that are far from the median of their cell, where at most one other is."""
    far = np.abs(r - middle[cell]) > np.log(FACTOR)
    far &= (np.bincount(cell, minlength=cells) >= FEWEST_ROWS)[cell]
    return np.asarray(far & (np.bincount(cell, far, cells) <= 2)[cell])


def _beside(x: FloatArray, r: FloatArray) -> FloatArray:
    """What the cells beside say r (m,) should be, of cells that contradict them; NaN of all others."""
    # Where cells differ from those beside them by as much anyhow, none of them is an exception.
    some = np.arange(0, len(r), len(r) // SOME + 1)
    beside = np.median(r[nearest(x, some, NEIGHBOURS)], axis=1)
    least_off = max(np.log(FACTOR), DEVIATIONS * mad_sigma(r[some] - beside))
    found, limit = np.full(len(r), np.nan), least_off * np.where(_alone_at_an_end(x), 2.0, 1.0)
    # of two cells that differ by so much one is half as far from the middle of all
    far = np.abs(r - np.median(r)) > limit / 2
    while True:
        kept = np.flatnonzero(np.isnan(found))
        asked = np.flatnonzero(far[kept])
        if len(kept) < FEWEST_CELLS or len(asked) == 0:
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
    """Cells (m,) that lie alone beyond all others along some axis."""
    ends = np.zeros(len(x), dtype=bool)
    for column in x.T:
        for end in (column.min(), column.max()):
            there = column == end
            ends |= there & (there.sum() == 1)
    return ends
