"""What a fit to some cells knows of all cells, and what one more visit would teach it.

Let x be a cell, ln T(x; theta) the model, and J(x) its slopes in theta. A cell that was sampled n times has a median
known up to noise of variance (pi/2) s^2 / n, and the model misses it by something of variance m^2 that no repetition
removes, so it is fitted with weight w(n) = 1 / (m^2 + (pi/2) s^2 / n), and the information about theta is M = sum of
w(n) J J'. The prediction at x then has variance J' M^-1 J; with m^2 and s^2 estimated from n cells and p parameters,
its 95 % interval is t(n - p) times the root of that.

What is asked for is the sum of that variance over the cells, sum_x o(x) J(x)' M^-1 J(x) = tr(A M^-1) with A = sum of
o J J': V-optimality (also called I-optimality; Atkinson, Donev & Tobias 2007, sections 10 and 17). The importance o(x)
is one, and (width / precision)^2 for a cell whose interval is within the precision already. k more samples of a cell
raise its weight by d = w(n + k) - w(n), and by Sherman & Morrison

    tr(A M^-1) - tr(A (M + d J J')^-1) = d J' M^-1 A M^-1 J / (1 + d J' M^-1 J).

Because w saturates at 1 / m^2, no cell is repeated for ever, and the more a model misses the more cells are seen.

Many parameters cannot be below zero, and a fit leaves at zero those that it has no use for. Such a bound helps: its
parameter's error is cut off on one side. The intervals do not rely on that, and count all parameters.

s is the robust spread within cells. m^2 is where the residuals r are as large as they should be, sum w(n) r^2 = n - p
(Paule & Mandel 1982).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from latfit.model.terms import LatencyModel
from latfit.stats import MAD_TO_SIGMA, FloatArray
from latfit.trace.cell_rows import WEIGHT
from latfit.trace.table import Trace

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
    interval of every cell's prediction (cells,), and how much each cell's prediction is asked for (cells,)."""

    slopes: FloatArray
    covariance: FloatArray
    noise: float
    misfit: float
    half_widths: FloatArray
    importance: FloatArray

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
    misfit = _misfit(surface.log_ms(table)[measured] - medians, counts[measured], noise, freedom)
    information = (slopes * weight(counts, noise, misfit)[:, None]).T @ slopes
    information += RIDGE * np.trace(information) / len(information) * np.eye(len(information))
    covariance = np.asarray(np.linalg.inv(information), dtype=np.float64)
    variance = np.maximum(np.einsum("ij,jk,ik->i", slopes, covariance, slopes), 0.0)
    half_widths = np.asarray(float(t.ppf(0.975, freedom)) * np.sqrt(variance), dtype=np.float64)
    importance = np.minimum(1.0, (half_widths / precision) ** 2)
    return Knowledge(slopes, covariance, noise, misfit, half_widths, importance)


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
