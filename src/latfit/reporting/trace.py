"""The figure of what a trace covers: its steps over B and S, and their latency over time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from latfit.files import write_bytes
from latfit.reporting import style
from latfit.reporting.fit.plot_data import gather_cells
from latfit.reporting.format import drawable
from latfit.trace import Coverage, Trace, coverage_of, phases
from latfit.units import count_text, format_ms

DOT_SIZES = (9.0, 260.0)  # of a cell with no rows, and with all


def write_coverage(target: Path, trace: Trace) -> None:
    write_bytes(target, style.png(coverage_figure(trace)))


def coverage_figure(trace: Trace) -> Figure:
    coverage, timed = coverage_of(trace), "t_s" in trace
    figure = style.new_figure((11.0, 4.6) if timed else style.SINGLE_INCHES)
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    _draw_plane(panels[0], trace, coverage)
    if timed:
        _draw_time(panels[1], trace, coverage)
    return figure


def _rows_by_phase(trace: Trace) -> Iterator[tuple[NDArray[np.int64], dict[str, Any]]]:
    named = phases(trace)
    for name in dict.fromkeys(named):
        colour = style.PHASE_COLOURS.get(name, style.PHASE_COLOURS[""])
        yield np.flatnonzero(named == name), {"color": colour, "alpha": 0.6, "label": drawable(name)}


def _draw_plane(axes: Axes, trace: Trace, coverage: Coverage) -> None:
    """Draw a dot for each cell by phase, larger with more rows."""
    title = f"{count_text(coverage.rows, 'step')} in {count_text(coverage.cells, 'cell')}"
    style.dress(axes, title, "requests in the step, B", "tokens in the step, S")
    for rows, look in _rows_by_phase(trace):
        cells = gather_cells(*(trace.floats(name)[rows] for name in ("B", "S", "T_ms")))
        sizes = np.interp(cells.rows / max(coverage.rows, 1), (0, 1), DOT_SIZES)
        axes.scatter(cells.B, cells.S, s=sizes, edgecolor="white", linewidth=0.4, **look)
    (low_B, high_B), (low_S, high_S) = (style.padded_span(trace.floats(name), 1.3) for name in ("B", "S"))
    edge = np.geomspace(low_B, high_B, 50)
    below: dict[str, Any] = {"color": style.GRID, "zorder": 0, "label": "S < B: no such step"}
    axes.fill_between(edge, low_S, np.clip(edge, low_S, high_S), **below)
    style.log_x(axes, low_B, high_B, 2)
    style.log_y(axes, low_S, high_S, 2)
    style.legend(axes)


def _draw_time(axes: Axes, trace: Trace, coverage: Coverage) -> None:
    covered = format_ms((coverage.seconds or 0.0) * 1e3)
    drifting = f", {count_text(len(coverage.drift), 'run')} drifting" if coverage.drift else ", no drift"
    title = f"{covered} in {count_text(coverage.runs, 'run')}{drifting}"
    style.dress(axes, title, "time in the run [s]", "latency of a step [ms]")
    seconds, T_ms = trace.floats("t_s"), trace.floats("T_ms")
    for rows, look in _rows_by_phase(trace):
        axes.plot(seconds[rows], T_ms[rows], "o", markersize=2.5, markeredgewidth=0, **look)
    style.log_y(axes, *style.padded_span(T_ms))
    style.legend(axes)
