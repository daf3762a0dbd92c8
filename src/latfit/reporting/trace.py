"""A picture of what a trace covers: its steps on the (B,S) plane, and their latency over time."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from latfit.files import write_bytes
from latfit.reporting import style
from latfit.reporting.fit.plot_data import measured_cells, thinned
from latfit.reporting.format import counted, drawable
from latfit.trace import Coverage, Trace, coverage_of, phases
from latfit.units import format_ms

DOT_SIZES = (9.0, 260.0)  # of a cell with no rows, and with all


def coverage_figure(trace: Trace) -> Figure:
    """Where the steps are, and when they ran if the trace has times."""
    coverage, timed = coverage_of(trace), "t_s" in trace
    figure = style.new_figure((11.0, 4.6) if timed else style.SINGLE_INCHES)
    panels = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    _draw_plane(panels[0], trace, coverage)
    if timed:
        _draw_time(panels[1], trace, coverage)
    return figure


def write_coverage(target: Path, trace: Trace) -> None:
    """The figure as PNG, whole or not at all. Raises TargetNotWritable."""
    write_bytes(target, style.png(coverage_figure(trace)))


def _rows_by_phase(trace: Trace) -> dict[str, tuple[NDArray[np.int64], str]]:
    """The rows of each phase, and its colour."""
    named = phases(trace)
    colours = style.PHASE_COLOURS
    return {name: (np.flatnonzero(named == name), colours.get(name, colours[""])) for name in dict.fromkeys(named)}


def _draw_plane(axes: Axes, trace: Trace, coverage: Coverage) -> None:
    """A dot for each cell by phase, larger with more rows; no step has S < B."""
    title = f"{counted(coverage.rows, 'step')} in {counted(coverage.cells, 'cell')}"
    style.dress(axes, title, "requests in the step, B", "tokens in the step, S")
    for phase, (rows, colour) in _rows_by_phase(trace).items():
        cells = measured_cells(*(trace.floats(name)[rows] for name in ("B", "S", "T_ms")))
        sizes = np.interp(cells.rows / max(coverage.rows, 1), (0, 1), DOT_SIZES)
        look: dict[str, Any] = {"color": colour, "alpha": 0.6, "edgecolor": "white", "linewidth": 0.4}
        axes.scatter(cells.B, cells.S, s=sizes, label=drawable(phase), **look)
    low_B, high_B = style.padded(*coverage.spans["B"], 1.3)
    low_S, high_S = style.padded(*coverage.spans["S"], 1.3)
    edge = np.geomspace(low_B, high_B, 50)
    below: dict[str, Any] = {"color": style.GRID, "zorder": 0, "label": "S < B: no such step"}
    axes.fill_between(edge, low_S, np.clip(edge, low_S, high_S), **below)
    style.log_x(axes, low_B, high_B, style.binary_ticks)
    style.log_y(axes, low_S, high_S, style.binary_ticks)
    style.legend(axes)


def _draw_time(axes: Axes, trace: Trace, coverage: Coverage) -> None:
    """Latency against the time within its run."""
    covered = format_ms((coverage.seconds or 0.0) * 1e3)
    drifting = f", {counted(len(coverage.drift), 'run')} drifting" if coverage.drift else ", no drift"
    title = f"{covered} in {counted(coverage.runs, 'run')}{drifting}"
    style.dress(axes, title, "time in the run [s]", "latency of a step [ms]")
    seconds, T_ms = trace.floats("t_s"), trace.floats("T_ms")
    for phase, (rows, colour) in _rows_by_phase(trace).items():
        shown = rows[thinned(seconds[rows], np.log(T_ms[rows]))]
        look: dict[str, Any] = {"color": colour, "alpha": 0.5, "linewidth": 0}
        axes.scatter(seconds[shown], T_ms[shown], s=6, label=drawable(phase), **look)
    style.log_y(axes, *style.padded_span(T_ms), style.decimal_ticks)
    style.legend(axes)
