"""The adaptive design: measure next where a millisecond teaches most about the prediction of all cells.

What a visit teaches is derived in `knowledge`. What it costs is its samples and the steps that warm it up before, and
where these are dear a visit takes more samples; so the best of all cells and lengths of a visit, by the fall of the
summed variance over the cost in ms, is measured next. Because theta is not known before, the model is fitted again
whenever a tenth more was measured, and at least three times as long as the last fit took.

Parameters that the fit left at zero are mostly not asked about: visits are chosen as if they were known to be zero,
which leaves more for the others. A tenth of the time is chosen for all parameters, and all of it once the others are
known well enough. What is best for a model is blind to what the model lacks, so a twentieth of the time goes to cells
that were never seen, the cheapest first, until all were. The run ends when the prediction's 95 % interval, with all
parameters, is within the precision at every cell.

The first cells come before any fit. They are chosen by ln det M per cost (D-optimality), for a polynomial in ln B, ln S
and the phases, whose slopes need no theta.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from latfit.profiler.knowledge import RIDGE, Knowledge, Surface, knowledge, rows_to_fit, unit_columns
from latfit.profiler.record import cell_columns
from latfit.profiler.runner import Visitor, anchor_cells
from latfit.profiler.visits import SAMPLES_PER_VISIT, Visits
from latfit.profiler.workload import StepShape
from latfit.stats import FloatArray
from latfit.trace.table import Trace

LENGTHS = (SAMPLES_PER_VISIT, 2 * SAMPLES_PER_VISIT, 4 * SAMPLES_PER_VISIT)
"""Samples that a visit may take."""

VISITS_BETWEEN_ANCHORS = 3
ALL_SHARE = 0.1
"""Share of the time in which all parameters are asked for, also those that the fit left at zero."""

GROWTH_PER_FIT = 0.1
MEASURING_PER_FIT = 3.0
UNSEEN_SHARE = 0.05
FIRST_BEYOND_PARAMETERS = 3
FIRST_WARMUP, LATER_WARMUP = 3.0, 1.5
"""Warm-up of a cell's first visit and of a later one, in its quickest steps, before there were any."""

Refit = Callable[[Trace], Surface | None]
"""Fits a trace with a weighted row for each measured cell; None where that gives nothing usable."""


class AdaptiveDesign:
    """A design for `run_profile`. guess_ms: a step's time (cells,) before anything is measured; half_width: how well
    the worst predicted cell was known at the end (None before a first fit)."""

    def __init__(self, refit: Refit, guess_ms: Sequence[float]) -> None:
        self._refit = refit
        self._guess_ms = np.array(guess_ms, dtype=np.float64)
        self._surface: Surface | None = None
        self._known: tuple[Knowledge, Knowledge] | None = None
        self._unseen_s = self._all_s = 0.0
        self._number = 0
        self._moving_width = math.inf
        self.half_width: float | None = None
        self.fits = 0

    def __call__(self, run: Visits, visit: Visitor) -> bool:
        table = cell_columns(run.cells)
        for index in first_cells(run.cells, self._guess_ms):
            if not run.visits[index] and index not in run.limits:
                if not run.affordable(index) or run.left_ms() <= 0:
                    return False
                visit(index)
        while run.left_ms() > 0:
            started_s = run.elapsed_s()
            self._learn(run, table)
            fit_s = run.elapsed_s() - started_s
            enough = self._known is not None and self.half_width is not None and self.half_width <= run.precision
            if enough and self._anchored(run, visit):
                return True
            if not self._next_visits(run, max(GROWTH_PER_FIT * run.elapsed_s(), MEASURING_PER_FIT * fit_s), visit):
                return False
        return False

    def _learn(self, run: Visits, table: Trace) -> None:
        times = [run.times_ms(index) for index in range(len(run.cells))]
        if not any(times):
            return
        rows = rows_to_fit(table, times, self._known[0].misfit if self._known else None)
        self._surface = self._refit(rows) or self._surface
        self.fits += 1
        if self._surface is None:
            return
        moving, whole = (
            knowledge(each, table, times, run.precision) for each in (self._surface.moving(), self._surface)
        )
        self._known = moving, whole
        open_cells = [index for index in range(len(run.cells)) if index not in run.limits]
        self._moving_width = float(moving.half_widths[open_cells].max())
        self.half_width = float(whole.half_widths[open_cells].max())

    def _next_visits(self, run: Visits, lasting_s: float, visit: Visitor) -> bool:
        """Visits for so long; False where no cell can be paid for."""
        started_s, known = run.elapsed_s(), self._known
        while True:
            counts = np.array([float(len(run.times_ms(index))) for index in range(len(run.cells))])
            of_all = self._moving_width <= run.precision or self._all_s <= ALL_SHARE * run.elapsed_s()
            chosen = self._unseen(run, counts) or self._best(run, known[of_all] if known else None, counts)
            if chosen is None:
                return run.elapsed_s() > started_s
            before_s = run.elapsed_s()
            visit(*chosen)
            if not counts[chosen[0]]:
                self._unseen_s += run.elapsed_s() - before_s
            elif of_all:
                self._all_s += run.elapsed_s() - before_s
            if self._number % VISITS_BETWEEN_ANCHORS == 0:
                self._visit_anchor(run, visit)
            self._number += 1
            if known:
                moving, whole = (each.after(chosen[0], counts[chosen[0]], chosen[1]) for each in known)
                known = moving, whole
            if run.elapsed_s() - started_s >= lasting_s:
                return True

    def _best(self, run: Visits, known: Knowledge | None, counts: FloatArray) -> tuple[int, int] | None:
        """Cell and samples of the visit that teaches most in a ms; None where none can be paid for."""
        best: tuple[float, int, int] | None = None
        for samples in LENGTHS if known else LENGTHS[:1]:
            cost = self._cost_ms(run, samples)
            gain = known.gain(counts, samples) if known else 1 / (1 + counts)
            rate = np.where(self._payable(run, cost), gain / cost, -1.0)
            index = int(np.argmax(rate))
            if rate[index] >= 0 and (best is None or rate[index] > best[0]):
                best = float(rate[index]), index, samples
        return best[1:] if best else None

    def _unseen(self, run: Visits, counts: FloatArray) -> tuple[int, int] | None:
        """The cheapest cell that was never seen, where its visit is within these cells' share of the time."""
        cost = self._cost_ms(run, SAMPLES_PER_VISIT)
        unseen = np.flatnonzero((counts == 0) & self._payable(run, cost))
        if not len(unseen):
            return None
        index = int(unseen[np.argmin(cost[unseen])])
        within = self._unseen_s + cost[index] / 1e3 <= UNSEEN_SHARE * run.elapsed_s()
        return (index, SAMPLES_PER_VISIT) if within else None

    def _payable(self, run: Visits, cost: FloatArray) -> FloatArray:
        left_ms = run.left_ms()
        return np.array([i not in run.limits and cost[i] <= left_ms and run.affordable(i) for i in range(len(cost))])

    def _anchored(self, run: Visits, visit: Visitor) -> bool:
        """Two cells are seen by every process, so that the interval between processes can be told."""
        for index in sorted(anchor_cells(run)):
            while run.visits[index] < len(run.devices) and run.affordable(index) and index not in run.limits:
                visit(index)
        return True

    def _visit_anchor(self, run: Visits, visit: Visitor) -> None:
        """The quickest cell once more: most cells are visited once, and drift must show all the same."""
        index = min(anchor_cells(run), key=lambda each: run.quickest_ms[each], default=None)
        if index is not None and run.affordable(index):
            visit(index)

    def _cost_ms(self, run: Visits, samples: int) -> FloatArray:
        """What a visit of each cell takes: warm-up and samples, by times measured or guessed, and what visits took
        beside their steps."""
        known = np.array(run.quickest_ms)
        ratio = np.median(known[known > 0] / self._guess_ms[known > 0]) if np.any(known > 0) else 1.0
        step_ms = np.where(known > 0, known, ratio * self._guess_ms)
        first, later = _warmups(run)
        warmup = np.where(np.array(run.visits) < len(run.devices), first, later)
        beside_ms = max(0.0, run.overhead_s * 1e3) / max(1, sum(run.visits))
        return np.asarray((warmup + samples) * step_ms + beside_ms)


def _warmups(run: Visits) -> tuple[float, float]:
    """What warming up took, in a cell's quickest steps: medians over visits by a new process, and by one that knew the
    cell."""
    spent: dict[tuple[int, int], float] = {}
    for sample in run.samples:
        if sample.warmup:
            visit = sample.cell, sample.visit
            spent[visit] = spent.get(visit, 0.0) + sample.T_ms / run.quickest_ms[sample.cell]
    first = [ratio for (_, visit), ratio in spent.items() if visit < len(run.devices)]
    later = [ratio for (_, visit), ratio in spent.items() if visit >= len(run.devices)]
    return float(np.median(first or [FIRST_WARMUP])), float(np.median(later or [LATER_WARMUP]))


def first_cells(cells: Sequence[StepShape], guess_ms: FloatArray) -> list[int]:
    """Indices of the cells to begin with: greedily the largest gain for the cost, for a polynomial of logarithms."""
    slopes = unit_columns(_polynomial(cells))
    wanted = min(len(cells), slopes.shape[1] + FIRST_BEYOND_PARAMETERS)
    covariance = np.eye(slopes.shape[1]) / RIDGE
    chosen: list[int] = []
    for _ in range(wanted):
        spread = np.einsum("ij,jk,ik->i", slopes, covariance, slopes)
        score = np.log1p(spread) / (guess_ms + np.median(guess_ms))
        score[chosen] = -1.0
        index = int(np.argmax(score))
        chosen.append(index)
        step = covariance @ slopes[index]
        covariance = covariance - np.outer(step, step) / (1 + float(slopes[index] @ step))
    return chosen


def _polynomial(cells: Sequence[StepShape]) -> FloatArray:
    B, S = (np.log([float(value) for value in axis]) for axis in ([c.B for c in cells], [c.S for c in cells]))
    cached = np.log1p([float(c.context_tokens) for c in cells])
    prefill = np.array([float(c.phase == "prefill") for c in cells])
    mixed = np.array([float(c.phase == "mixed") for c in cells])
    columns = [np.ones(len(cells)), B, S, B**2, S**2, B * S, cached, prefill, mixed]
    return np.column_stack([column for column in columns if np.any(column)])
