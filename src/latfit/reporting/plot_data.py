"""What the figures of a fit draw, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latfit.fitting import predict
from latfit.model import FitResult
from latfit.stats import FloatArray
from latfit.trace import PHASES, Trace, phases

SURFACE_SIDE = 220
READINGS_SIDE = 24
MAX_READINGS = 600


class SlaLine(NamedTuple):
    """An SLA on the map."""

    label: str
    typical_ms: float  # typical latency at which the SLA is just met
    decode: int | None = None  # largest decode batch, off the line because decode steps have another noise


class Agreement(NamedTuple):
    """Rows (n,) with their prediction and phase, '' if unknown."""

    measured_ms: FloatArray
    predicted_ms: FloatArray
    phase: NDArray[np.str_]


class Cells(NamedTuple):
    """Each measured (B, S), (m,): how often, and its median latency."""

    B: FloatArray
    S: FloatArray
    median_ms: FloatArray
    rows: NDArray[np.int64]


class Surface(NamedTuple):
    """Predicted T_ms (j, i) over axes B (i,) and S (j,), NaN where S < B."""

    B: FloatArray
    S: FloatArray
    T_ms: FloatArray


@dataclass(frozen=True)
class FitView:
    """A fit to draw."""

    fit: FitResult
    trace: Trace | None = None
    lines: Sequence[SlaLine] = ()

    @cached_property
    def box(self) -> tuple[float, float, float, float]:
        """Smallest and largest measured B, smallest and largest S."""
        (B_low, B_high), (S_low, S_high) = (self.fit.domain[name] for name in ("B", "S"))
        return float(B_low), float(B_high), float(S_low), float(S_high)

    @cached_property
    def surface(self) -> Surface:
        B_low, B_high, S_low, S_high = self.box
        B = np.geomspace(max(1.0, B_low / 2), max(2 * B_high, 4.0), SURFACE_SIDE)
        S = np.geomspace(max(1.0, S_low / 2), max(2 * S_high, 4.0), SURFACE_SIDE)
        grid_B, grid_S = np.meshgrid(B, S)
        T = self.fit.latency_ms(grid_B.ravel(), grid_S.ravel()).reshape(grid_B.shape)
        return Surface(B, S, np.where(grid_S >= grid_B, T, np.nan))

    @property
    def span_ms(self) -> tuple[float, float]:
        area, (B_low, B_high, S_low, S_high) = self.surface, self.box
        inside = np.outer((S_low <= area.S) & (S_high >= area.S), (B_low <= area.B) & (B_high >= area.B))
        values = area.T_ms[inside & np.isfinite(area.T_ms)]
        return (float(values.min()), float(values.max())) if len(values) else (np.nan, np.nan)

    @cached_property
    def cells(self) -> Cells | None:
        return None if self.trace is None else gather_cells(*(self.trace.floats(name) for name in ("B", "S", "T_ms")))

    @cached_property
    def agreement(self) -> Agreement | None:
        """The rows against the fit; None if a prediction is zero."""
        trace = self.trace
        if trace is None:
            return None
        context = {name: trace.floats(name) for name in self.fit.columns if name not in ("B", "S") and name in trace}
        predicted = self.fit.latency_ms(trace.floats("B"), trace.floats("S"), **context)
        phase = phases(trace).astype(str)
        known = np.where(np.isin(phase, PHASES), phase, "")
        return Agreement(trace.floats("T_ms"), predicted, known) if np.all(predicted > 0) else None

    def readings(self) -> list[list[float | None]]:
        """Rows (B, S, predicted ms, low, high, level in percent, measured median ms, rows) of steps on the map."""
        B, S = (
            np.unique(np.round(np.geomspace(axis[0], axis[-1], READINGS_SIDE)))
            for axis in (self.surface.B, self.surface.S)
        )
        measured = {} if self.cells is None else {(b, s): own for b, s, *own in zip(*self.cells, strict=True)}
        wanted = sorted({(b, s) for b in B for s in S if s >= b} | set(list(measured)[:MAX_READINGS]))
        steps = Trace({name: np.array([step[i] for step in wanted]) for i, name in enumerate(("B", "S"))})
        found = predict(self.fit, steps)
        intervals = zip(found.T_ms, found.low, found.high, 100 * found.level, strict=True)
        rows = [
            (*step, *interval, *measured.get(step, (np.nan, np.nan)))
            for step, interval in zip(wanted, intervals, strict=True)
        ]
        return [[float(f"{value:.7g}") if np.isfinite(value) else None for value in row] for row in rows]


def gather_cells(B: FloatArray, S: FloatArray, T_ms: FloatArray) -> Cells:
    """Gather rows (n,) with equal (B, S)."""
    cells, cell, rows = np.unique(np.column_stack([B, S]), axis=0, return_inverse=True, return_counts=True)
    parts = np.split(T_ms[np.argsort(cell, kind="stable")], np.cumsum(rows)[:-1])
    return Cells(cells[:, 0], cells[:, 1], np.array([np.median(part) for part in parts]), rows)
