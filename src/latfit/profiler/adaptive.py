"""The adaptive design: measure next where a millisecond teaches most about the fitted model.

Let x be a cell, ln T(x; theta) the model, and J(x) its slopes in theta. A cell that was sampled n times has a median
known up to noise of variance (pi/2) s^2 / n, and the model misses it by something of variance m^2 that no repetition
removes, so it counts with weight w(n) = 1 / (m^2 + (pi/2) s^2 / n), and the information about theta is M = sum of
w(n) J J'. A further visit of k samples raises the weight by d = w(n + k) - w(n), and by the matrix determinant lemma

    ln det(M + d J J') - ln det M = ln(1 + d J' M^-1 J),

which is the gain that D-optimality asks for (Atkinson, Donev & Tobias 2007, sections 10 and 17). Divided by the visit's
cost in ms, the best of all cells is measured next. Because w saturates at 1 / m^2, cells are not repeated for ever, and
because theta is not known before, the model is fitted again after every few visits.

The prediction at x has variance J' M^-1 J; with m^2 and s^2 estimated from n cells and p parameters, its 95 % interval
is t(n - p) times the root of that. The run ends when it is below the precision at every cell of the grid.

The first cells come before any fit. They are chosen in the same way for a polynomial in ln B, ln S and the phases,
whose slopes need no theta.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from latfit.model.terms import LatencyModel
from latfit.profiler.record import cell_columns
from latfit.profiler.runner import anchor_cells
from latfit.profiler.visits import SAMPLES_PER_VISIT, Visits
from latfit.profiler.workload import StepShape
from latfit.stats import MAD_TO_SIGMA, FloatArray
from latfit.trace.table import Trace

STEPS_PER_VISIT = SAMPLES_PER_VISIT + 2
VISITS_BETWEEN_FITS = 8
VISITS_BETWEEN_ANCHORS = 3
MEASURING_PER_FIT = 3.0
"""Between two fits at least so many times a fit's time is measured, where that takes no more visits than the above."""

FIRST_BEYOND_PARAMETERS = 3
LEAST_NOISE = 1e-3
RIDGE = 1e-9


@dataclass(frozen=True)
class Surface:
    """A fitted model: its structure, parameters theta (p,), and which of them were free."""

    model: LatencyModel
    theta: FloatArray
    free: Sequence[int]

    def log_ms(self, cells: Trace) -> FloatArray:
        found: FloatArray = np.log(np.maximum(self.model.latency_ms(self.theta, _floats(cells)), 1e-12))
        return found

    def slopes(self, cells: Trace) -> FloatArray:
        """d ln T / d theta (cells, free); each column scaled to length one, columns that are flat left out."""
        steps = _floats(cells)
        T = np.maximum(self.model.latency_ms(self.theta, steps), 1e-12)
        slopes = self.model.gradient(self.theta, steps)[:, list(self.free)] / T[:, None]
        return _unit_columns(slopes)


Refit = Callable[[Trace], Surface | None]
"""Fits a trace with a row for each measured cell; None where that gives nothing usable."""


@dataclass(frozen=True)
class Knowledge:
    """What a fit knows: slopes (cells, p), inverse information (p, p), noise s and misfit m, half width of the 95 %
    interval of every cell's prediction (cells,)."""

    slopes: FloatArray
    covariance: FloatArray
    noise: float
    misfit: float
    half_widths: FloatArray

    def gain(self, counts: FloatArray) -> FloatArray:
        """Growth of ln det M (cells,) from one more visit, for cells sampled `counts` times."""
        more = _weight(counts + SAMPLES_PER_VISIT, self.noise, self.misfit) - _weight(counts, self.noise, self.misfit)
        return np.asarray(np.log1p(more * np.einsum("ij,jk,ik->i", self.slopes, self.covariance, self.slopes)))

    def after(self, cell: int, count: float) -> "Knowledge":
        """The same once `cell`, sampled `count` times, has one more visit (Sherman & Morrison)."""
        more = _weight(np.array([count + SAMPLES_PER_VISIT]), self.noise, self.misfit)
        less = _weight(np.array([count]), self.noise, self.misfit)
        step = self.covariance @ self.slopes[cell]
        scale = float((more - less)[0])
        updated = self.covariance - np.outer(step, step) * scale / (1 + scale * float(self.slopes[cell] @ step))
        return Knowledge(self.slopes, updated, self.noise, self.misfit, self.half_widths)


class AdaptiveDesign:
    """A design for `run_profile`. guess_ms: a step's time (cells,) before anything is measured; half_width: how well
    the worst predicted cell was known at the end (None before a first fit)."""

    def __init__(self, refit: Refit, guess_ms: Sequence[float]) -> None:
        self._refit = refit
        self._guess_ms = np.array(guess_ms, dtype=np.float64)
        self._surface: Surface | None = None
        self.half_width: float | None = None
        self.fits = 0

    def __call__(self, run: Visits, visit: Callable[[int], None]) -> bool:
        table = cell_columns(run.cells)
        for index in first_cells(run.cells, self._guess_ms):
            if not run.visits[index] and index not in run.limits:
                if not run.affordable(index) or run.left_ms() <= 0:
                    return False
                visit(index)
        while run.left_ms() > 0:
            started = time.perf_counter()
            known = self._know(run, table)
            fit_s = time.perf_counter() - started
            enough = known is not None and self.half_width is not None and self.half_width <= run.precision
            if enough and self._anchored(run, visit):
                return True
            if not self._next_visits(run, known, fit_s, visit):
                return False
        return False

    def _know(self, run: Visits, table: Trace) -> Knowledge | None:
        measured = [index for index in range(len(run.cells)) if run.times_ms(index)]
        rows = table.select(np.array(measured)).with_columns(
            T_ms=np.array([np.median(run.times_ms(index)) for index in measured])
        )
        self._surface = self._refit(rows) or self._surface
        self.fits += 1
        if self._surface is None:
            return None
        found = knowledge(self._surface, table, [run.times_ms(index) for index in range(len(run.cells))])
        open_cells = [index for index in range(len(run.cells)) if index not in run.limits]
        self.half_width = float(found.half_widths[open_cells].max())
        return found

    def _next_visits(self, run: Visits, known: Knowledge | None, fit_s: float, visit: Callable[[int], None]) -> bool:
        """Visits until the next fit is due; False where no cell can be paid for."""
        started_s = run.elapsed_s()
        for number in range(VISITS_BETWEEN_FITS):
            counts = np.array([float(len(run.times_ms(index))) for index in range(len(run.cells))])
            gain = known.gain(counts) if known else 1 / (1 + counts)
            cost = self._cost_ms(run)
            payable = [i not in run.limits and cost[i] <= run.left_ms() and run.affordable(i) for i in range(len(cost))]
            if not any(payable):
                return number > 0
            index = int(np.argmax(np.where(payable, gain / cost, -1.0)))
            visit(index)
            if number % VISITS_BETWEEN_ANCHORS == 0:
                self._visit_anchor(run, visit)
            if known:
                known = known.after(index, counts[index])
            if number and run.elapsed_s() - started_s > MEASURING_PER_FIT * fit_s:
                break
        return True

    def _anchored(self, run: Visits, visit: Callable[[int], None]) -> bool:
        """Two cells are seen by every process, so that the interval between processes can be told."""
        for index in sorted(anchor_cells(run)):
            while run.visits[index] < len(run.devices) and run.affordable(index) and index not in run.limits:
                visit(index)
        return True

    def _visit_anchor(self, run: Visits, visit: Callable[[int], None]) -> None:
        """The quickest cell once more: most cells are visited once, and drift must show all the same."""
        index = min(anchor_cells(run), key=lambda each: run.quickest_ms[each], default=None)
        if index is not None and run.affordable(index):
            visit(index)

    def _cost_ms(self, run: Visits) -> FloatArray:
        """What a visit of each cell takes: its steps, measured or guessed, and what visits took beside their steps."""
        known = np.array(run.quickest_ms)
        ratio = np.median(known[known > 0] / self._guess_ms[known > 0]) if np.any(known > 0) else 1.0
        step_ms = np.where(known > 0, known, ratio * self._guess_ms)
        visits = max(1, sum(run.visits))
        beside_ms = max(0.0, run.elapsed_s() * 1e3 - sum(sample.T_ms for sample in run.samples)) / visits
        return np.asarray(STEPS_PER_VISIT * step_ms + beside_ms)


def knowledge(surface: Surface, table: Trace, times: Sequence[Sequence[float]]) -> Knowledge:
    """What `surface` knows of the cells in `table`, given the samples of each (empty where it was not measured)."""
    from scipy.stats import t

    counts = np.array([float(len(each)) for each in times])
    measured = np.flatnonzero(counts).tolist()
    slopes = surface.slopes(table)
    logs = [np.log(np.array(times[index])) for index in measured]
    spreads = [np.median(np.abs(each - np.median(each))) for each in logs if len(each) > 1]
    noise = max(LEAST_NOISE, MAD_TO_SIGMA * float(np.median(spreads)) if spreads else 0.0)
    residuals = surface.log_ms(table)[measured] - np.array([np.median(each) for each in logs])
    freedom = max(1, len(measured) - slopes.shape[1])
    # median of n samples: variance pi/2 s^2/n; what residuals hold beyond it is the model's
    expected = np.mean(np.pi / 2 * noise**2 / counts[measured])
    misfit = np.sqrt(max(float(residuals @ residuals) / freedom - expected, LEAST_NOISE**2))
    weights = _weight(counts, noise, float(misfit))
    information = (slopes * weights[:, None]).T @ slopes
    information += RIDGE * np.trace(information) / len(information) * np.eye(len(information))
    covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
    variance = np.maximum(np.einsum("ij,jk,ik->i", slopes, covariance, slopes), 0.0)
    half_widths = np.asarray(float(t.ppf(0.975, freedom)) * np.sqrt(variance), dtype=np.float64)
    return Knowledge(slopes, covariance, noise, float(misfit), half_widths)


def first_cells(cells: Sequence[StepShape], guess_ms: FloatArray) -> list[int]:
    """Indices of the cells to begin with: greedily the largest gain for the cost, for a polynomial of logarithms."""
    slopes = _unit_columns(_polynomial(cells))
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


def _weight(counts: FloatArray, noise: float, misfit: float) -> FloatArray:
    """w(n) = 1 / (m^2 + pi/2 s^2 / n), zero for n = 0."""
    return np.asarray(counts / (misfit**2 * counts + np.pi / 2 * noise**2))


def _unit_columns(slopes: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(slopes, axis=0)
    kept = lengths > 1e-12 * lengths.max(initial=1e-300)
    return np.asarray(slopes[:, kept] / lengths[kept])


def _floats(cells: Trace) -> dict[str, FloatArray]:
    return {name: cells.floats(name) for name in cells.columns if name != "phase"}
