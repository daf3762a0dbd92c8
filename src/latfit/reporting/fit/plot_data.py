"""What the figures of a fit draw, as arrays: the latency surface, measured cells, rows against predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from latfit.fitting import predict
from latfit.model import FitResult
from latfit.stats import FloatArray
from latfit.trace import PHASES, Trace, phases

SURFACE_SIDE = 220
READINGS_SIDE = 24
MAX_READINGS = 600
PIXELS = 160
MAX_CURVES = 4


@dataclass(frozen=True)
class SlaLine:
    """An SLA on the map: its words, and the typical latency in ms at which it is just met."""

    label: str
    typical_ms: float


@dataclass(frozen=True)
class Agreement:
    """Rows (n,) with their prediction and phase; the phase is '' where it is not known."""

    measured_ms: FloatArray
    predicted_ms: FloatArray
    phase: NDArray[np.str_]

    @property
    def error_pct(self) -> FloatArray:
        """Prediction minus measurement, in percent of the measurement."""
        return (self.predicted_ms - self.measured_ms) / self.measured_ms * 100

    @property
    def by_phase(self) -> dict[str, NDArray[np.int64]]:
        """The rows of each phase, the most frequent phase first."""
        rows = {name: np.flatnonzero(self.phase == name) for name in (*PHASES, "")}
        return dict(sorted(((name, at) for name, at in rows.items() if len(at)), key=lambda each: -len(each[1])))


@dataclass(frozen=True)
class Cells:
    """Each (B, S) that was measured (m,): how often, and the median of its latencies."""

    B: FloatArray
    S: FloatArray
    median_ms: FloatArray
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Surface:
    """Predicted latency T_ms (j, i) over axes B (i,) and S (j,), NaN where S < B."""

    B: FloatArray
    S: FloatArray
    T_ms: FloatArray


@dataclass(frozen=True)
class FitView:
    """A fit to draw, with its rows if there are any, and the SLAs on its map."""

    fit: FitResult
    trace: Trace | None = None
    lines: Sequence[SlaLine] = ()

    @cached_property
    def box(self) -> tuple[float, float, float, float]:
        """The measured range: smallest and largest B, smallest and largest S."""
        (B_low, B_high), (S_low, S_high) = (self.fit.domain[name] for name in ("B", "S"))
        return float(B_low), float(B_high), float(S_low), float(S_high)

    @cached_property
    def surface(self) -> Surface:
        """T(B, S) over the measured box and a factor of two around it."""
        B_low, B_high, S_low, S_high = self.box
        B = np.geomspace(max(1.0, B_low / 2), max(2 * B_high, 4.0), SURFACE_SIDE)
        S = np.geomspace(max(1.0, S_low / 2), max(2 * S_high, 4.0), SURFACE_SIDE)
        grid_B, grid_S = np.meshgrid(B, S)
        T = self.fit.latency_ms(grid_B.ravel(), grid_S.ravel()).reshape(grid_B.shape)
        return Surface(B, S, np.where(grid_S >= grid_B, T, np.nan))

    @property
    def span_ms(self) -> tuple[float, float]:
        """Fastest and slowest predicted step inside the measured box."""
        area, (B_low, B_high, S_low, S_high) = self.surface, self.box
        inside = np.outer((S_low <= area.S) & (S_high >= area.S), (B_low <= area.B) & (B_high >= area.B))
        values = area.T_ms[inside & np.isfinite(area.T_ms)]
        return (float(values.min()), float(values.max())) if len(values) else (np.nan, np.nan)

    @cached_property
    def cells(self) -> Cells | None:
        return None if self.trace is None else gather_cells(*(self.trace.floats(name) for name in ("B", "S", "T_ms")))

    @cached_property
    def agreement(self) -> Agreement | None:
        """The rows against the fit; None without rows, or if the fit predicts a latency of zero for some."""
        trace = self.trace
        if trace is None:
            return None
        context = {name: trace.floats(name) for name in self.fit.columns if name not in ("B", "S") and name in trace}
        predicted = self.fit.latency_ms(trace.floats("B"), trace.floats("S"), **context)
        phase = phases(trace).astype(str)
        known = np.where(np.isin(phase, PHASES), phase, "")
        return Agreement(trace.floats("T_ms"), predicted, known) if np.all(predicted > 0) else None

    @cached_property
    def curves(self) -> dict[int | None, tuple[FloatArray, FloatArray]]:
        """Tokens of a step and tokens/s for a few batches and for decode (None: S = B), inside the measured range."""
        B_low, B_high, S_low, S_high = self.box
        batches = {round(B) for B in np.geomspace(max(B_low, 1), max(B_high, 1), MAX_CURVES)}
        curves: dict[int | None, tuple[FloatArray, FloatArray]] = {}
        for B in (*sorted(batches), None):
            low, high = (max(B_low, 1), max(B_high, 1)) if B is None else (max(B, S_low), max(B, S_high))
            S = np.geomspace(low, high, 200)
            curves[B] = S, 1e3 * S / self.fit.latency_ms(S if B is None else np.full_like(S, B), S)
        return curves

    def readings(self) -> list[list[float | None]]:
        """Rows (B, S, predicted ms, low, high, level in percent, measured median ms, rows) of steps on the map.

        Integer steps on a grid of the map's axes, and the measured cells; None: no interval, not measured.
        """
        B, S = (
            np.unique(np.round(np.geomspace(axis[0], axis[-1], READINGS_SIDE)))
            for axis in (self.surface.B, self.surface.S)
        )
        measured: dict[tuple[float, float], tuple[float, float]] = {}
        if (cells := self.cells) is not None:
            columns = zip(cells.B, cells.S, cells.median_ms, cells.rows, strict=True)
            measured = {(b, s): (median, rows) for b, s, median, rows in columns}
        wanted = sorted({(b, s) for b in B for s in S if s >= b} | set(list(measured)[:MAX_READINGS]))
        steps = Trace({name: np.array([step[i] for step in wanted]) for i, name in enumerate(("B", "S"))})
        found = predict(self.fit, steps)
        intervals = zip(found.T_ms, found.low, found.high, 100 * found.level, strict=True)
        return [
            [_rounded(value) for value in (*step, *interval, *measured.get(step, (np.nan, np.nan)))]
            for step, interval in zip(wanted, intervals, strict=True)
        ]


def _rounded(value: float) -> float | None:
    return float(f"{value:.7g}") if np.isfinite(value) else None


def gather_cells(B: FloatArray, S: FloatArray, T_ms: FloatArray) -> Cells:
    """Rows (n,) with equal (B, S) gathered under the median of their latency."""
    cells, cell, rows = np.unique(np.column_stack([B, S]), axis=0, return_inverse=True, return_counts=True)
    parts = np.split(T_ms[np.argsort(cell, kind="stable")], np.cumsum(rows)[:-1])
    return Cells(cells[:, 0], cells[:, 1], np.array([np.median(part) for part in parts]), rows)


def thin_rows(x: FloatArray, y: FloatArray) -> NDArray[np.int64]:
    """One row for each occupied pixel of a square grid over (x, y): unlike a random sample, outliers stay."""

    def pixel(values: FloatArray) -> NDArray[np.int64]:
        low, high = float(values.min()), float(values.max())
        return np.minimum(((values - low) / ((high - low) or 1.0) * PIXELS).astype(np.int64), PIXELS - 1)

    rows: NDArray[np.int64] = np.unique(pixel(x) * PIXELS + pixel(y), return_index=True)[1]
    return rows
