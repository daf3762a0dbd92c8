"""Figures that bring several things together: the overview of one path, and the paths side by side."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.report import style
from latfit.report.figures import draw_predicted, draw_residuals, draw_throughput
from latfit.report.latency_map import SlaLine, draw_map
from latfit.report.points import Agreement, BatchLatency, Cells, Curve, Surface
from latfit.report.words import count, counted, drawable


@dataclass(frozen=True)
class Views:
    """What the four views of one path draw; rows and cells are None where no trace is at hand."""

    area: Surface
    curves: Sequence[Curve]
    rows: Agreement | None = None
    cells: Cells | None = None
    lines: Sequence[SlaLine] = ()
    finding: str | None = None


def overview_figure(views: Views, headline: str, trust: str) -> Figure:
    """The four views, or the two that need no rows, under the answer and how far to trust it."""
    whole = views.rows is not None
    height = 9.6 if whole else 5.6
    figure = style.new_figure((12.0, height), dpi=130)
    wrapped = textwrap.fill(drawable(headline, most=240), 84)
    # The blank line keeps room for the sentence on trust, which is smaller and so a text of its own.
    figure.suptitle(wrapped + "\n", x=0.012, ha="left", fontsize=17, fontweight="bold", color=style.INK)
    below = 0.98 - (0.30 * (wrapped.count("\n") + 1) + 0.06) / height
    figure.text(0.012, below, drawable(trust, most=150), va="top", fontsize=11.5, color=style.FAINT)
    grid = figure.subplots(2 if whole else 1, 2, squeeze=False)
    draw_map(grid[0, 0], views.area, views.cells, views.lines, views.finding)
    draw_throughput(grid[0, 1], views.curves)
    if views.rows is not None:
        draw_predicted(grid[1, 0], views.rows)
        draw_residuals(grid[1, 1], views.rows)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)  # type: ignore[union-attr, call-arg]
    return figure


def paths_figure(curves: Sequence[BatchLatency], tokens_per_request: int, B1: int | None) -> Figure:
    """Latency against the batch on each path, with B1 where it is known."""
    figure = style.new_figure((7.2, 4.4))
    axes = figure.subplots()
    _draw_paths(axes, curves, B1)
    each = "one token" if tokens_per_request == 1 else f"{count(tokens_per_request)} tokens"
    style.dress(
        axes, paths_title(curves, B1), f"requests in the step, B ({each} each)", "latency of a step [ms]", width=70
    )
    style.legend(axes)
    return figure


def paths_title(curves: Sequence[BatchLatency], B1: int | None) -> str:
    if B1 is not None:
        return f"From B1 = {counted(B1, 'request')} on, the GPU is at least as fast"
    return f"Latency of a step on {' and '.join(drawable(curve.path, most=20) for curve in curves)}"


def _draw_paths(axes: Axes, curves: Sequence[BatchLatency], B1: int | None) -> None:
    for index, curve in enumerate(curves):
        colour = style.LINE_COLOURS[index % len(style.LINE_COLOURS)]
        marker = style.LINE_MARKERS[index % len(style.LINE_MARKERS)]
        axes.plot(curve.B, curve.T_ms, color=colour, linewidth=1.4, linestyle=":")
        inside = np.where(curve.inside, curve.T_ms, np.nan)
        axes.plot(curve.B, inside, color=colour, linewidth=2.2, label=drawable(curve.path))
        axes.scatter(curve.measured_batch, curve.measured_ms, s=24, color=colour, marker=marker, zorder=3)
    times = np.concatenate([np.concatenate([curve.T_ms, curve.measured_ms]) for curve in curves])
    batches = np.concatenate([curve.B for curve in curves])
    style.log_x(axes, *style.padded(float(batches.min()), float(batches.max()), 1.05), style.binary_ticks)
    style.log_y(axes, *style.padded(float(times.min()), float(times.max())), style.decimal_ticks)
    if B1 is not None:
        axes.axvline(B1, color=style.SLA, linewidth=1.6, label=f"B1 = {count(B1)}")
    axes.plot([], [], color=style.FAINT, linewidth=1.4, linestyle=":", label="beyond what was measured")
