"""A picture of what a trace covers: its steps on the (B,S) plane, and their latency in time."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.files import write_bytes
from latfit.reporting import style
from latfit.reporting.fit.plot_data import gathered, thinned
from latfit.reporting.format import counted, drawable
from latfit.stats import FloatArray
from latfit.trace import Coverage, Trace, coverage_of, phases
from latfit.units import format_ms

LARGEST_DOT = 260.0
SMALLEST_DOT = 9.0


def coverage_figure(trace: Trace) -> Figure:
    """Where the steps are, and beside it when they ran, where the trace knows."""
    found = coverage_of(trace)
    timed = "t_s" in trace
    figure = style.new_figure((11.0, 4.6) if timed else style.SINGLE_INCHES)
    columns = 2 if timed else 1
    draw_plane(figure.add_subplot(1, columns, 1), trace, found)
    if timed:
        draw_time(figure.add_subplot(1, columns, 2), trace, found)
    return figure


def write_coverage(target: Path, trace: Trace) -> None:
    """The figure as PNG, whole or not at all. Raises TargetNotWritable."""
    write_bytes(target, style.png(coverage_figure(trace)))


def draw_plane(axes: Axes, trace: Trace, found: Coverage) -> None:
    """A dot a cell by phase, as large as it has rows; S < B is no step."""
    title = f"{counted(found.rows, 'step')} in {counted(found.cells, 'cell')}"
    style.dress(axes, title, "requests in the step, B", "tokens in the step, S")
    named = phases(trace)
    most = max(found.rows, 1)
    for phase in dict.fromkeys(named.tolist()):
        rows = named == phase
        cells = gathered(trace.floats("B")[rows], trace.floats("S")[rows], trace.floats("T_ms")[rows])
        sizes = SMALLEST_DOT + (LARGEST_DOT - SMALLEST_DOT) * cells.rows / most
        axes.scatter(
            cells.B,
            cells.S,
            s=sizes,
            color=_colour(phase),
            alpha=0.6,
            edgecolor="white",
            linewidth=0.4,
            label=drawable(phase),
        )
    low_B, high_B = style.padded(*found.spans["B"], 1.3)
    low_S, high_S = style.padded(*found.spans["S"], 1.3)
    edge = np.geomspace(low_B, high_B, 50)
    axes.fill_between(
        edge, low_S, np.clip(edge, low_S, high_S), color=style.GRID, zorder=0, label="S < B: no such step"
    )
    style.log_x(axes, low_B, high_B, style.binary_ticks)
    style.log_y(axes, low_S, high_S, style.binary_ticks)
    style.legend(axes)


def draw_time(axes: Axes, trace: Trace, found: Coverage) -> None:
    """Latency against the time within its run."""
    span = format_ms((found.seconds or 0.0) * 1e3)
    drifting = f", {counted(len(found.drift), 'run')} drifting" if found.drift else ", no drift"
    style.dress(
        axes, f"{span} in {counted(found.runs, 'run')}{drifting}", "time in the run [s]", "latency of a step [ms]"
    )
    seconds, T_ms, named = trace.floats("t_s"), trace.floats("T_ms"), phases(trace)
    for phase in dict.fromkeys(named.tolist()):
        rows = np.flatnonzero(named == phase)
        shown = rows[thinned(seconds[rows], np.log(T_ms[rows]))[0]]
        axes.scatter(
            seconds[shown], T_ms[shown], s=6, color=_colour(phase), alpha=0.5, linewidth=0, label=drawable(phase)
        )
    style.log_y(axes, *style.padded(*_span(T_ms)), style.decimal_ticks)
    style.legend(axes)


def _colour(phase: str) -> str:
    return style.PHASE_COLOURS.get(phase, style.PHASE_COLOURS[""])


def _span(values: FloatArray) -> tuple[float, float]:
    return float(values.min()), float(values.max())
