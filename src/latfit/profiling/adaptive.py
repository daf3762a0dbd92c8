"""The adaptive design: measure next where a millisecond teaches most about the prediction of all cells.

What a visit costs is its samples and the steps that warm it up before, and where these are dear a visit takes more
samples; so the best of all cells and lengths of a visit, by the fall of the summed variance over the cost in ms, is
measured next. Because theta is not known before, the model is fitted again whenever a tenth more was measured, and at
least three times as long as the last fit took.

Parameters that the fit left at zero are mostly not asked about: visits are chosen as if they were known to be zero,
which leaves more for the others. A tenth of the time is chosen for all parameters, and all of it once the others are
known well enough. What is best for a model is blind to what the model lacks, so a twentieth of the time goes to cells
that were never measured, the cheapest first, until all were. The run ends when the prediction's 95 % interval, with all
parameters, is within the precision at every cell.

The first cells come before any fit. They are chosen by ln det M per cost (D-optimality), for a polynomial in ln B, ln S
and the phases, whose slopes need no theta.

What a visit teaches. Let x be a cell, ln T(x; theta) the model, and J(x) its slopes in theta. A cell that was sampled n
times has a median known up to noise of variance (pi/2) s^2 / n, and the model misses it by something of variance m^2
that no repetition removes, so it is fitted with weight w(n) = 1 / (m^2 + (pi/2) s^2 / n), and the information about
theta is M = sum of w(n) J J'. The prediction at x then has variance J' M^-1 J; with m^2 and s^2 estimated from n cells
and p parameters, its 95 % interval is t(n - p) times the root of that.

What is asked for is the sum of that variance over the cells, sum_x o(x) J(x)' M^-1 J(x) = tr(A M^-1) with A = sum of
o J J': V-optimality (also called I-optimality; Atkinson, Donev & Tobias 2007, sections 10 and 17). The importance o(x)
is one, and (width / precision)^2 for a cell whose interval is within the precision already. k more samples of a cell
raise its weight by d = w(n + k) - w(n), and by Sherman & Morrison

    tr(A M^-1) - tr(A (M + d J J')^-1) = d J' M^-1 A M^-1 J / (1 + d J' M^-1 J).

Because w saturates at 1 / m^2, no cell is repeated for ever, and the more a model misses the more cells are measured.

Many parameters cannot be below zero, and a fit leaves at zero those that it has no use for. Such a bound helps: its
parameter's error is cut off on one side. The intervals do not rely on that, and count all parameters.

s is the robust spread within cells. m^2 is where the residuals r are as large as they should be, sum w(n) r^2 = n - p
(Paule & Mandel 1982).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.model import LatencyModel
from latfit.profiling.result import cell_columns
from latfit.profiling.sampler import SAMPLES_PER_VISIT, Visitor, Visits, anchor_cells
from latfit.profiling.shapes import StepShape
from latfit.stats import MAD_TO_SIGMA, FloatArray
from latfit.trace import WEIGHT, Trace

LEAST_NOISE = 1e-3
LARGEST_MISFIT = 10.0
RIDGE = 1e-9

Times = Sequence[Sequence[float]]
"""The samples of each cell in ms, warm-up steps aside; empty where it was not measured."""


@dataclass(frozen=True)
class Surface:
    """A fitted model: its structure, parameters theta (p,), and which of them were free."""

    model: LatencyModel
    theta: FloatArray
    free: Sequence[int]

    def moving(self) -> "Surface":
        """The same, with parameters that the fit left at zero taken as known to be."""
        return replace(self, free=[index for index in self.free if self.theta[index] > 0])

    def log_ms(self, cells: Trace) -> FloatArray:
        found: FloatArray = np.log(np.maximum(self.model.latency_ms(self.theta, _floats(cells)), 1e-12))
        return found

    def slopes(self, cells: Trace) -> FloatArray:
        """d ln T / d theta (cells, free); each column scaled to length one, columns that are flat left out."""
        steps = _floats(cells)
        T = np.maximum(self.model.latency_ms(self.theta, steps), 1e-12)
        slopes = self.model.gradient(self.theta, steps)[:, list(self.free)] / T[:, None]
        return unit_columns(slopes)


@dataclass(frozen=True)
class Knowledge:
    """What a fit knows: slopes (cells, p), inverse information (p, p), noise s and misfit m, half width of the 95 %
    interval of every cell's prediction (cells,), how much each cell's prediction is asked for (cells,), and the mean
    relative error of predicting a measured cell by a fit without it."""

    slopes: FloatArray
    covariance: FloatArray
    noise: float
    misfit: float
    half_widths: FloatArray
    importance: FloatArray
    left_out_error: float

    def gain(self, counts: FloatArray, more: int) -> FloatArray:
        """Fall of tr(A M^-1) (cells,) from `more` samples of a cell, for cells sampled `counts` times."""
        growth = weight(counts + more, self.noise, self.misfit) - weight(counts, self.noise, self.misfit)
        pulled = self.slopes @ self.covariance
        asked = (self.slopes * self.importance[:, None]).T @ self.slopes
        spread = np.einsum("ij,ij->i", pulled, self.slopes)
        return np.asarray(growth * np.einsum("ij,jk,ik->i", pulled, asked, pulled) / (1 + growth * spread))

    def after(self, cell: int, count: float, more: int) -> "Knowledge":
        """The same once `cell`, sampled `count` times, has `more` samples (Sherman & Morrison)."""
        counts = np.array([count, count + more])
        less, grown = weight(counts, self.noise, self.misfit).tolist()
        step = self.covariance @ self.slopes[cell]
        scale = (grown - less) / (1 + (grown - less) * float(self.slopes[cell] @ step))
        return replace(self, covariance=self.covariance - np.outer(step, step) * scale)


def knowledge(surface: Surface, table: Trace, times: Times, precision: float) -> Knowledge:
    """What `surface` knows of the cells in `table`, given the samples of each."""
    from scipy.stats import t

    counts = np.array([float(len(each)) for each in times])
    measured = np.flatnonzero(counts)
    slopes, noise = surface.slopes(table), within_cells(times)
    medians = np.array([np.median(np.log(np.array(times[index]))) for index in measured.tolist()])
    freedom = max(1, len(measured) - slopes.shape[1])
    residuals = medians - surface.log_ms(table)[measured]
    misfit = _misfit(residuals, counts[measured], noise, freedom)
    weights = weight(counts, noise, misfit)
    information = (slopes * weights[:, None]).T @ slopes
    information += RIDGE * np.trace(information) / len(information) * np.eye(len(information))
    covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
    variance = np.maximum(np.einsum("ij,jk,ik->i", slopes, covariance, slopes), 0.0)
    half_widths = np.asarray(float(t.ppf(0.975, freedom)) * np.sqrt(variance), dtype=np.float64)
    importance = np.minimum(1.0, (half_widths / precision) ** 2)
    error = _left_out_error(residuals, (weights * variance)[measured]) if len(measured) > slopes.shape[1] else 1.0
    return Knowledge(slopes, covariance, noise, misfit, half_widths, importance, error)


def _left_out_error(residuals: FloatArray, leverage: FloatArray) -> float:
    """Mean relative error at cells (n,) of the fits that leave each out, in closed form: r / (1 - h) (Allen 1974)."""
    left_out = residuals / np.maximum(1.0 - leverage, 1e-6)
    return float(np.mean(np.abs(np.expm1(-np.clip(left_out, -LARGEST_MISFIT, LARGEST_MISFIT)))))


def rows_to_fit(table: Trace, times: Times, misfit: float | None = None) -> Trace:
    """A row for each measured cell: its median, with weight w(n) over the mean of these; alike where m is not known."""
    counts = np.array([float(len(each)) for each in times])
    measured = np.flatnonzero(counts)
    weights = weight(counts[measured], within_cells(times), misfit) if misfit else np.ones(len(measured))
    medians = np.array([np.median(times[index]) for index in measured.tolist()])
    return table.select(measured).with_columns(T_ms=medians, **{WEIGHT: weights / weights.mean()})


def within_cells(times: Times) -> float:
    """Robust standard deviation of ln T within cells; at least LEAST_NOISE."""
    logs = [np.log(np.array(each)) for each in times if len(each) > 1]
    spreads = [np.median(np.abs(each - np.median(each))) for each in logs]
    return max(LEAST_NOISE, MAD_TO_SIGMA * float(np.median(spreads)) if spreads else 0.0)


def weight(counts: FloatArray, noise: float, misfit: float) -> FloatArray:
    """w(n) = 1 / (m^2 + pi/2 s^2 / n), zero for n = 0."""
    return np.asarray(counts / (misfit**2 * counts + np.pi / 2 * noise**2))


def unit_columns(slopes: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(slopes, axis=0)
    kept = lengths > 1e-12 * lengths.max(initial=1e-300)
    return np.asarray(slopes[:, kept] / lengths[kept])


def _misfit(residuals: FloatArray, counts: FloatArray, noise: float, freedom: int) -> float:
    """m with sum w(n) r^2 = n - p, by bisection of its logarithm; LEAST_NOISE where less explains the residuals."""
    low, high = LEAST_NOISE, LARGEST_MISFIT
    for _ in range(40):
        middle = float(np.sqrt(low * high))
        too_small = float(weight(counts, noise, middle) @ residuals**2) > freedom
        low, high = (middle, high) if too_small else (low, middle)
    return low


def _floats(cells: Trace) -> dict[str, FloatArray]:
    return {name: cells.floats(name) for name in cells.columns if name != "phase"}


LENGTHS = (SAMPLES_PER_VISIT, 2 * SAMPLES_PER_VISIT, 4 * SAMPLES_PER_VISIT)
"""Samples that a visit may take."""

VISITS_BETWEEN_ANCHORS = 3
ALL_SHARE = 0.1
"""Share of the time in which all parameters are asked for, also those that the fit left at zero."""

GROWTH_PER_FIT = 0.1
MEASURING_PER_FIT = 3.0
UNMEASURED_SHARE = 0.05
FIRST_BEYOND_PARAMETERS = 3
USUAL_WARMUP = 1.5
"""Warm-up of a visit before there were any, in the cell's quickest steps."""

Refit = Callable[[Trace], Surface | None]
"""Fits a trace with a weighted row for each measured cell; None where that gives nothing usable."""


class AdaptiveDesign:
    """A design for `run_profile`.

    guess_ms: a step's time (cells,) before anything is measured. half_width: of the 95 % interval of the worst
    predicted cell. prediction_error: mean relative error on cells left out of the fit. Both are None before a first
    fit.
    """

    def __init__(self, refit: Refit, guess_ms: Sequence[float]) -> None:
        self._refit = refit
        self._guess_ms = np.array(guess_ms, dtype=np.float64)
        self._surface: Surface | None = None
        self._known: tuple[Knowledge, Knowledge] | None = None
        self._unmeasured_s = self._all_s = 0.0
        self._number = 0
        self._moving_width = math.inf
        self.half_width: float | None = None
        self.prediction_error: float | None = None
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
        self.prediction_error = moving.left_out_error

    def _next_visits(self, run: Visits, lasting_s: float, visit: Visitor) -> bool:
        """Visits for so long; False where no cell can be paid for."""
        started_s, known = run.elapsed_s(), self._known
        while True:
            counts = np.array([float(len(run.times_ms(index))) for index in range(len(run.cells))])
            of_all = self._moving_width <= run.precision or self._all_s <= ALL_SHARE * run.elapsed_s()
            chosen = self._unmeasured(run, counts) or self._best(run, known[of_all] if known else None, counts)
            if chosen is None:
                return run.elapsed_s() > started_s
            before_s = run.elapsed_s()
            visit(*chosen)
            if not counts[chosen[0]]:
                self._unmeasured_s += run.elapsed_s() - before_s
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

    def _unmeasured(self, run: Visits, counts: FloatArray) -> tuple[int, int] | None:
        """The cheapest cell that was never measured, where its visit is within these cells' share of the time."""
        cost = self._cost_ms(run, SAMPLES_PER_VISIT)
        unmeasured = np.flatnonzero((counts == 0) & self._payable(run, cost))
        if not len(unmeasured):
            return None
        index = int(unmeasured[np.argmin(cost[unmeasured])])
        within = self._unmeasured_s + cost[index] / 1e3 <= UNMEASURED_SHARE * run.elapsed_s()
        return (index, SAMPLES_PER_VISIT) if within else None

    def _payable(self, run: Visits, cost: FloatArray) -> FloatArray:
        left_ms = run.left_ms()
        return np.array([i not in run.limits and cost[i] <= left_ms and run.affordable(i) for i in range(len(cost))])

    def _anchored(self, run: Visits, visit: Visitor) -> bool:
        """Two cells are measured by every process, so that the interval between processes can be told."""
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
        beside_ms = max(0.0, run.overhead_s * 1e3) / max(1, sum(run.visits))
        return np.asarray((_median_warmup(run) + samples) * step_ms + beside_ms)


def _median_warmup(run: Visits) -> float:
    """Return what warming up takes in a visit, in the cell's quickest steps."""
    spent: dict[tuple[int, int], float] = {}
    for sample in run.samples:
        visit = sample.cell, sample.visit
        steps = sample.T_ms / run.quickest_ms[sample.cell] if sample.warmup else 0.0
        spent[visit] = spent.get(visit, 0.0) + steps
    return float(np.median(list(spent.values()) or [USUAL_WARMUP]))


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
