"""Cliffs: sizes beyond which a step takes abruptly longer, such as captured graphs, tiles and kernel switches.

Lines of ln T over ln size are fitted on either side of a boundary; a cliff is a right line above the left one at both
ends of the gap.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.fitting.data import FitData
from latfit.model import CONTEXT, Cliff, Cliffs, FitResult
from latfit.stats import FloatArray, mad_sigma, student_quantile, student_tail
from latfit.trace import DECODE

LEVEL = 0.05  # probability of any false cliff in a trace of a smooth machine
MIN_STEP = 0.02  # of T; lines on either side of a sharp bend are as far apart on common grids
MAX_RATIO = 1.51  # of neighbouring sizes; a step between sizes further apart cannot be told from growth
MIN_ROWS = 3  # of a size
MAX_ROWS = 200_000
WINDOW, MAX_WINDOW = 3, 6  # sizes on either side: at least, and at most where they lie within WIDTH
WIDTH = 1.6  # ratio of sizes in a longer window
POOLED_ROWS = 8  # rows that the common noise of all sizes counts as, in that of one
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean
NORMAL_MAD = 0.6745


@dataclass(frozen=True, eq=False)
class MeasuredSizes:
    """Measured sizes (m,) of one kind of step: ln T and its standard error."""

    axis: str
    size: FloatArray
    log_ms: FloatArray
    error: FloatArray

    @property
    def tested(self) -> NDArray[np.intp]:
        """Places of the sizes below the tested boundaries."""
        place = np.arange(1, len(self.size) - 2)
        return place[self.size[place + 1] <= MAX_RATIO * self.size[place]]

    @property
    def roughness(self) -> float:
        """By how much sizes deviate from the line through their neighbours, in standard errors; at least 1."""
        if len(self.size) < 3:
            return 1.0
        x, y, error = np.log(self.size), self.log_ms, self.error
        share = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
        off = y[1:-1] - (1 - share) * y[:-2] - share * y[2:]
        noise = np.sqrt(error[1:-1] ** 2 + ((1 - share) * error[:-2]) ** 2 + (share * error[2:]) ** 2)
        return max(float(np.median(np.abs(off / noise))) / NORMAL_MAD, 1.0)

    def part(self, places: slice) -> "MeasuredSizes":
        return MeasuredSizes(self.axis, self.size[places], self.log_ms[places], self.error[places])


def find_cliffs(data: FitData, fit: FitResult) -> Cliffs:
    """Find cliffs of decode steps in B, and of steps with prefill in S. The fit removes what other columns explain."""
    found = [sizes for sizes in _measured_sizes(data.draw(MAX_ROWS), fit) if len(sizes.tested)]
    tests = sum(len(sizes.tested) for sizes in found)
    if not tests:
        return Cliffs(tested=0)
    return Cliffs([cliff for sizes in found for cliff in cliffs_of(sizes, LEVEL / tests)], tests, LEVEL)


def _measured_sizes(data: FitData, fit: FitResult) -> Iterator[MeasuredSizes]:
    decode = data.phase == DECODE
    for axis, rows in (("B", decode), ("S", ~decode)):
        if not rows.any():
            continue
        steps = {name: data.steps[name][rows] for name in data.steps}
        size, observed = steps[axis], data.observed[rows]
        same = _alike(steps, axis)
        log_ms = np.log(observed) - np.log(fit.latency_ms(**steps)) + np.log(fit.latency_ms(**same))
        yield measured_sizes(axis, size, log_ms, data.cell[rows])


def _alike(steps: dict[str, FloatArray], axis: str) -> dict[str, FloatArray]:
    size = steps[axis]
    if axis == "B":
        one = {"B": size, "S": size, "prefill_requests": 0 * size, "prefill_tokens": 0 * size}
        per_request = np.median(steps[CONTEXT] / size) if CONTEXT in steps else 0.0
        typical = {CONTEXT: per_request * size, "prefill_context_tokens": 0 * size}
    else:
        one = {"B": np.minimum(np.median(steps["B"]), size), "S": size}
        typical = {}
    return {name: column for name, column in {**typical, **one}.items() if name in steps}


def measured_sizes(axis: str, size: FloatArray, log_ms: FloatArray, cell: NDArray[np.intp]) -> MeasuredSizes:
    """Return the median ln T by size with its standard error: at least what cells (B, S) of one size differ by."""
    order = np.lexsort((cell, size))
    size, log_ms, cell = size[order], log_ms[order], cell[order]
    groups = [rows for rows in _runs(size) if rows.stop - rows.start >= MIN_ROWS]
    middle = np.array([np.median(log_ms[rows]) for rows in groups])
    off = [log_ms[rows] - at for rows, at in zip(groups, middle, strict=True)]
    pooled = mad_sigma(np.concatenate(off)) if off else 0.0
    cells = [[float(np.median(log_ms[rows][one])) for one in _runs(cell[rows])] for rows in groups]
    freedom = sum(len(each) - 1 for each in cells)
    between = np.sqrt(sum(len(each) * np.var(each) for each in cells) / freedom) if freedom else 0.0
    error = []
    for each, several in zip(off, cells, strict=True):
        n = len(each)
        noise = np.sqrt((n * mad_sigma(each) ** 2 + POOLED_ROWS * pooled**2) / (n + POOLED_ROWS))
        error.append(max(MEDIAN_ERROR * noise / np.sqrt(n), between / np.sqrt(len(several)), 1e-6))
    return MeasuredSizes(axis, np.array([size[rows.start] for rows in groups]), middle, np.array(error))


def _runs(values: NDArray[Any]) -> list[slice]:
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [slice(start, end) for start, end in pairwise(edges)]


def cliffs_of(sizes: MeasuredSizes, alpha: float) -> list[Cliff]:
    """Return the cliffs at level alpha: the clearest splits the sizes, then each part is tested."""
    tested = sizes.tested
    error = sizes.error * sizes.roughness
    best, shown = None, 0.0
    for place in tested.tolist():
        jumps, errors = _jumps(np.log(sizes.size), sizes.log_ms, error, place)
        z = float(((jumps - MIN_STEP) / errors).min())
        if z > shown:
            best, shown = (place, float(jumps.mean()), float(errors.mean())), z
    freedom = max(len(sizes.size) - 3, 2)
    if best is None or student_tail(freedom, shown) > alpha:
        return []
    place, jump, deviation = best
    low, high = (float(np.expm1(jump + deviation * student_quantile(freedom, q))) for q in (0.025, 0.975))
    size, above = (int(each) for each in sizes.size[place : place + 2])
    cost = 1 - (size + 1) / size * float(np.exp(-jump))
    found = Cliff(sizes.axis, size, above, 100 * float(np.expm1(jump)), (100 * low, 100 * high), 100 * cost)
    below, beyond = sizes.part(slice(0, place + 1)), sizes.part(slice(place + 1, None))
    return [*cliffs_of(below, alpha), found, *cliffs_of(beyond, alpha)]


def _jumps(x: FloatArray, y: FloatArray, error: FloatArray, place: int) -> tuple[FloatArray, FloatArray]:
    """Return by how much the line of larger sizes exceeds that up to `place` at both ends of the gap, with errors."""
    ends = x[[place, place + 1]]
    first, last = np.searchsorted(x, [ends[0] - np.log(WIDTH), ends[1] + np.log(WIDTH)])
    below = int(np.clip(place + 1 - first, WINDOW, MAX_WINDOW))
    above = int(np.clip(last - place - 1, WINDOW, MAX_WINDOW))
    left, left_error = _line(x, y, error, slice(max(place + 1 - below, 0), place + 1), ends)
    right, right_error = _line(x, y, error, slice(place + 1, place + 1 + above), ends)
    return right - left, np.hypot(left_error, right_error)


def _line(
    x: FloatArray, y: FloatArray, error: FloatArray, part: slice, at: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the weighted least-squares line at other places, and its standard errors."""
    w = error[part] ** -2
    centre = np.average(x[part], weights=w)
    spread = float(w @ (x[part] - centre) ** 2)
    slope = float(w @ ((x[part] - centre) * y[part])) / spread
    return np.average(y[part], weights=w) + slope * (at - centre), np.sqrt(1 / w.sum() + (at - centre) ** 2 / spread)
