"""What the figures draw, as plain arrays: rows against predictions, measured cells, the surface, the curves.

Nothing here is a statistic of the fit: errors come from `latfit.stats`, and medians only gather rows into dots that
an eye can follow.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latfit.fitting import predict
from latfit.hardware import ExecutionPath
from latfit.model import FitResult
from latfit.stats import FloatArray, error_metrics
from latfit.trace import PHASES, Trace, phases

DOTS = 5_000
"""More rows than this are drawn as density."""

_PIXELS = 160
_SURFACE_SIDE = 220
_TOKEN_BINS = 14
_READINGS_SIDE = 24
_MOST_READINGS = 600


@dataclass(frozen=True)
class Agreement:
    """Rows (n,) with prediction and phase ('' where unknown), and `stats.error_metrics` over them."""

    measured_ms: FloatArray
    predicted_ms: FloatArray
    phase: NDArray[np.object_]
    metrics: Mapping[str, float]

    @property
    def error_pct(self) -> FloatArray:
        """Prediction minus measurement over measurement: what MAPE averages the size of."""
        return (self.predicted_ms - self.measured_ms) / self.measured_ms * 100

    def __len__(self) -> int:
        return len(self.measured_ms)


@dataclass(frozen=True)
class Cells:
    """Each (B, S) that was measured (m,): how often, and the median of its latencies."""

    B: FloatArray
    S: FloatArray
    median_ms: FloatArray
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Surface:
    """Predicted latency T_ms (j, i) over axes B (i,) and S (j,), NaN where S < B; box: what was measured."""

    B: FloatArray
    S: FloatArray
    T_ms: FloatArray
    box: tuple[float, float, float, float]

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Whether a point (j, i) lies in the measured box."""
        B_low, B_high, S_low, S_high = self.box
        return np.outer(_within(self.S, S_low, S_high), _within(self.B, B_low, B_high))

    @property
    def span_ms(self) -> tuple[float, float]:
        """Fastest and slowest predicted step inside the measured box."""
        values = self.T_ms[self.measured & np.isfinite(self.T_ms)]
        return (float(values.min()), float(values.max())) if len(values) else (float("nan"), float("nan"))


@dataclass(frozen=True)
class Curve:
    """Fitted tokens/ms over S (n,) at B requests (None: decode, S = B), and measured medians (m,)."""

    B: int | None
    S: FloatArray
    rate: FloatArray
    measured_tokens: FloatArray
    measured_rate: FloatArray


@dataclass(frozen=True)
class BatchLatency:
    """Fitted latency over B (n,) on a path, which of it was measured, and measured medians (m,)."""

    path: str
    B: FloatArray
    T_ms: FloatArray
    inside: NDArray[np.bool_]
    measured_batch: FloatArray
    measured_ms: FloatArray


def agreement(fit: FitResult, trace: Trace) -> Agreement:
    """The rows of a cleaned trace against the fit."""
    context = {name: trace.floats(name) for name in fit.columns if name not in ("B", "S") and name in trace}
    measured = trace.floats("T_ms")
    predicted = fit.latency_ms(trace.floats("B"), trace.floats("S"), **context)
    return Agreement(measured, predicted, _phases(trace), error_metrics(measured, predicted))


def _phases(trace: Trace) -> NDArray[np.object_]:
    """One of `PHASES`, or '' where it is another or not known."""
    known = phases(trace)
    return np.where(np.isin(known.astype(str), PHASES), known, "").astype(object)


def _within(values: FloatArray, low: float, high: float) -> NDArray[np.bool_]:
    return np.asarray((values >= low) & (values <= high))


def phases_present(phase: NDArray[np.object_]) -> list[str]:
    return [name for name in (*PHASES, "") if np.any(phase == name)]


def thinned(x: FloatArray, y: FloatArray) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One row for each occupied pixel of a square grid over (x, y), with how many rows it stands for.

    Unlike a random sample it keeps every outlier, and the count keeps the density.
    """
    pixel = _pixel(x) * _PIXELS + _pixel(y)
    _, rows, counts = np.unique(pixel, return_index=True, return_counts=True)
    return rows, counts


def _pixel(values: FloatArray) -> NDArray[np.int64]:
    low, high = float(values.min()), float(values.max())
    if high <= low:
        return np.zeros(len(values), dtype=np.int64)
    return np.minimum(((values - low) / (high - low) * _PIXELS).astype(np.int64), _PIXELS - 1)


def running_median(x: FloatArray, y: FloatArray, fewest: int = 8, bins: int = 10) -> tuple[FloatArray, FloatArray]:
    """Medians of x > 0 and y in bins of equal width in log x; bins with under `fewest` rows are left out."""
    if len(x) == 0:
        return np.empty(0), np.empty(0)
    edges = np.geomspace(float(x.min()), float(x.max()), bins + 1)[1:-1]
    number = np.digitize(x, edges)
    parts = [np.flatnonzero(number == i) for i in range(bins)]
    parts = [part for part in parts if len(part) >= fewest]
    return (
        np.array([np.median(x[part]) for part in parts]),
        np.array([np.median(y[part]) for part in parts]),
    )


def measured_cells(trace: Trace) -> Cells:
    """The distinct (B, S) of a trace."""
    return gathered(trace.floats("B"), trace.floats("S"), trace.floats("T_ms"))


def gathered(B: FloatArray, S: FloatArray, T_ms: FloatArray) -> Cells:
    """Rows (n,) with equal (B, S) gathered under the median of their latency."""
    order = np.lexsort((T_ms, S, B))
    B, S, T_ms = B[order], S[order], T_ms[order]
    changes = (np.diff(B) != 0) | (np.diff(S) != 0)
    first = np.concatenate([[0], np.flatnonzero(changes) + 1])[: len(B)]
    rows = np.diff(np.append(first, len(B)))
    median = (T_ms[first + (rows - 1) // 2] + T_ms[first + rows // 2]) / 2
    return Cells(B[first], S[first], median, rows)


def surface(fit: FitResult) -> Surface:
    """T(B, S) over the measured box and a factor of two around it; needs the domain of the fit."""
    (B_low, B_high), (S_low, S_high) = (map(float, fit.domain[name]) for name in ("B", "S"))
    B = np.geomspace(max(1.0, B_low / 2), max(2 * B_high, 4.0), _SURFACE_SIDE)
    S = np.geomspace(max(1.0, S_low / 2), max(2 * S_high, 4.0), _SURFACE_SIDE)
    grid_B, grid_S = np.meshgrid(B, S)
    T = fit.latency_ms(grid_B.ravel(), grid_S.ravel()).reshape(grid_B.shape)
    return Surface(B, S, np.where(grid_S >= grid_B, T, np.nan), (B_low, B_high, S_low, S_high))


def throughput_curves(fit: FitResult, cells: Cells | None, most: int = 4) -> list[Curve]:
    """Tokens per ms for decode and for up to `most` batches, each inside the measured range of S."""
    S_low, S_high = map(float, fit.domain["S"])
    curves = []
    for B in _shown_batches(fit, cells, most):
        S = np.geomspace(max(float(B), S_low), max(S_high, float(B)), 200)
        measured = _rates(cells, None if cells is None else cells.B == B)
        curves.append(Curve(B, S, S / fit.latency_ms(np.full_like(S, B), S), *measured))
    B_low, B_high = map(float, fit.domain["B"])
    S = np.geomspace(max(B_low, 1.0), max(B_high, 1.0), 200)
    decode = _rates(cells, None if cells is None else cells.S == cells.B)
    curves.append(Curve(None, S, S / fit.latency_ms(S, S), *decode))
    return curves


def _shown_batches(fit: FitResult, cells: Cells | None, most: int) -> list[int]:
    """Batches to draw: spread over those measured with several S, or over the domain without rows."""
    low, high = map(float, fit.domain["B"])
    if cells is None:
        return sorted({round(B) for B in np.geomspace(max(low, 1), max(high, 1), most)})
    batches, distinct = np.unique(cells.B[cells.S > cells.B], return_counts=True)
    whole = batches == np.round(batches)
    rich = batches[whole & (distinct >= max(3, distinct.max() / 4))] if len(batches) else batches
    if len(rich) <= most:
        return [int(B) for B in rich]
    wanted = np.geomspace(rich[0], rich[-1], most)
    return sorted({int(rich[np.argmin(np.abs(np.log(rich / B)))]) for B in wanted})


def _rates(cells: Cells | None, chosen: NDArray[np.bool_] | None) -> tuple[FloatArray, FloatArray]:
    """Measured tokens per ms over S in the chosen cells; many distinct S are gathered into bins."""
    if cells is None or chosen is None:
        return np.empty(0), np.empty(0)
    S, T_ms = cells.S[chosen], cells.median_ms[chosen]
    if len(S) <= 2 * _TOKEN_BINS:
        return S, S / T_ms
    return running_median(S, S / T_ms, fewest=1, bins=_TOKEN_BINS)


def batch_latency(
    paths: Sequence[ExecutionPath], cells: Mapping[str, Cells], tokens_per_request: int
) -> list[BatchLatency]:
    """Latency against B on each path, with so many tokens a request, up to the largest batch of any path."""
    top = max(float(path.fit.domain["B"][1]) for path in paths)
    curves = []
    for path in paths:
        B = np.geomspace(1.0, max(top, 2.0), 300)
        S = B * tokens_per_request
        T = path.fit.latency_ms(B, S)
        found = cells.get(path.name)
        measured = (np.empty(0), np.empty(0))
        if found is not None:
            match = np.equal(found.S, found.B * tokens_per_request)
            measured = (found.B[match], found.median_ms[match])
        curves.append(BatchLatency(path.name, B, T, ~path.fit.outside_domain(B, S), *measured))
    return curves


def step_readings(fit: FitResult, area: Surface, cells: Cells | None) -> list[list[float | None]]:
    """Rows (B, S, predicted ms, low, high, level in percent, measured median ms, rows) of steps on the map.

    Integer steps on a grid of the map's axes, and the measured cells; None: no interval, not measured.
    """
    B, S = (np.unique(np.round(np.geomspace(axis[0], axis[-1], _READINGS_SIDE))) for axis in (area.B, area.S))
    measured = {} if cells is None else dict(zip(zip(cells.B, cells.S, strict=True), _evidence(cells), strict=True))
    wanted = sorted({(b, s) for b in B for s in S if s >= b} | set(list(measured)[:_MOST_READINGS]))
    columns = {name: np.array([step[i] for step in wanted]) for i, name in enumerate(("B", "S"))}
    found = predict(fit, Trace(columns))
    return [
        [*(_rounded(value) for value in (b, s, T, low, high, 100 * level)), *measured.get((b, s), (None, None))]
        for (b, s), T, low, high, level in zip(wanted, found.T_ms, found.low, found.high, found.level, strict=True)
    ]


def _evidence(cells: Cells) -> list[tuple[float | None, float | None]]:
    return [(_rounded(T), _rounded(n)) for T, n in zip(cells.median_ms, cells.rows, strict=True)]


def _rounded(value: float) -> float | None:
    return float(f"{value:.7g}") if np.isfinite(value) else None
