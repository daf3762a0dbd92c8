"""Figures of a fit and of a trace."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from latfit.model import FitResult
from latfit.reporting import style
from latfit.reporting.layout import Picture, draw_picture
from latfit.reporting.plot_data import FitView, SlaLine, Surface, gather_cells
from latfit.reporting.table import count, drawable
from latfit.stats import error_metrics
from latfit.trace import Coverage, Trace, coverage_of, phases
from latfit.units import count_text, format_ms, format_percent

_MAP_COLOURS = LinearSegmentedColormap.from_list("latency", ["#f3f8fc", "#b9d6ea", "#6aa6cf", "#2f6ea3", "#173f66"])
_HATCHING = "#8fa0b2"
_MANY_CELLS = 400
_MANY_ROWS = 5_000  # above, dots are smaller
_BAND = "#dfe5ec"
BAND_PCT = 10.0


def draw_map(axes: Axes, view: FitView) -> None:
    area = view.surface
    fastest, slowest = map(format_ms, view.span_ms)
    context = view.fit.typical.get("context_tokens") if view.fit.assumed_context else None
    at = "in the measured range" if context is None else f"at a context of {context:,.0f} tokens"
    title = f"A step takes {fastest} to {slowest} {at}"
    style.dress(axes, title, "requests in the step, B", "tokens in the step, S")
    axes.grid(False)
    _draw_colours(axes, area)
    _fade_unmeasured(axes, view)
    if (cells := view.cells) is not None:
        size = 2.2 if len(cells.B) > _MANY_CELLS else 3.8
        dots: dict[str, Any] = {"color": "#10202f", "markeredgecolor": "white", "markeredgewidth": 0.4}
        axes.plot(cells.B, cells.S, "o", markersize=size, label="measured", zorder=3, clip_on=False, **dots)
    for line, dash in zip(view.lines, cycle(("-", "--", ":")), strict=False):
        _draw_sla(axes, area, line, dash)
    impossible: dict[str, Any] = {"facecolor": "#e9ebee", "edgecolor": style.FAINT, "linewidth": 0.8, "zorder": 2.5}
    floor = np.maximum(area.B, area.S[0])
    axes.fill_between(area.B, area.S[0], floor, label="S < B: no such step", **impossible)
    style.log_axis(axes, "x", float(area.B[0]), float(area.B[-1]), 2)
    style.log_axis(axes, "y", float(area.S[0]), float(area.S[-1]), 2)
    style.legend(axes, place="lower right")


def _draw_colours(axes: Axes, area: Surface) -> None:
    values = area.T_ms[np.isfinite(area.T_ms)]
    # The slowest corner would take most of the colours for itself.
    low = float(values.min())
    high = max(float(np.quantile(values, 0.995)), low * 1.01)
    shades, norm = np.geomspace(low, high, 33), LogNorm(low, high)
    mesh = axes.contourf(area.B, area.S, area.T_ms, levels=shades, norm=norm, cmap=_MAP_COLOURS, extend="both")
    levels = [level for level in style.log_ticks(low, high) if low < level < high]
    if levels:
        axes.contour(area.B, area.S, area.T_ms, levels=levels, colors="#ffffff", linewidths=0.8, alpha=0.8)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=28)
    bar.set_label("latency of a step [ms]", fontsize=9.5, color=style.INK)
    style.plain_ticks(bar.ax.yaxis, style.log_ticks(low, high))
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)


def _fade_unmeasured(axes: Axes, view: FitView) -> None:
    area, (B_low, B_high, S_low, S_high) = view.surface, view.box
    left, right, bottom, top = area.B[0], area.B[-1], area.S[0], area.S[-1]
    veil: dict[str, Any] = {"facecolor": "#ffffffa6", "edgecolor": _HATCHING, "hatch": "///", "linewidth": 0}
    axes.fill_between([left, B_low], bottom, top, label="not measured", **veil)
    axes.fill_between([B_high, right], bottom, top, **veil)
    axes.fill_between([B_low, B_high], bottom, S_low, **veil)
    axes.fill_between([B_low, B_high], S_high, top, **veil)


def _draw_sla(axes: Axes, area: Surface, line: SlaLine, dash: str) -> None:
    label = line.label
    if np.nanmin(area.T_ms) < line.typical_ms < np.nanmax(area.T_ms):
        look: dict[str, Any] = {"colors": style.SLA, "linewidths": 2.6, "linestyles": dash, "zorder": 4}
        edge = axes.contour(area.B, area.S, area.T_ms, levels=[line.typical_ms], **look)
        edge.set_path_effects([withStroke(linewidth=4.4, foreground="white")])
    else:
        label += ": all of this" if line.typical_ms >= np.nanmax(area.T_ms) else ": nowhere here"
    axes.plot([], [], color=style.SLA, linewidth=2.6, linestyle=dash, label=label)
    if line.decode is not None:
        label, diagonal = f"decode steps (S = B) up to B = {line.decode:,}", [area.B[0], line.decode]
        look = {"color": style.DECODE, "linewidth": 2.6, "markevery": [1], "markersize": 8, "zorder": 5}
        axes.plot(diagonal, diagonal, "D-", label=label, markeredgecolor="white", **look)


def draw_predicted(axes: Axes, view: FitView) -> None:
    rows = view.agreement
    assert rows is not None
    errors = error_metrics(rows.measured_ms, rows.predicted_ms)
    median, p90 = (format_percent(errors[name]) for name in ("median_ape_pct", "p90_ape_pct"))
    title = f"Fitted steps ({count(len(rows.measured_ms))}): median error {median}, p90 {p90}"
    style.dress(axes, title, "predicted latency of a step [ms]", "measured latency [ms]")
    low, high = style.padded_span(np.concatenate([rows.predicted_ms, rows.measured_ms]))
    line, band = np.array([low, high]), BAND_PCT / 100
    axes.fill_between(line, line * (1 - band), line * (1 + band), color=_BAND, linewidth=0, label=f"±{BAND_PCT:g} %")
    axes.plot(line, line, color=style.INK, linewidth=1.2, label="measured = predicted")
    names, counts = np.unique(rows.phase, return_counts=True)
    for n, phase in sorted(zip(counts, names, strict=True), reverse=True):
        at, many = rows.phase == phase, n > _MANY_ROWS
        error_pct = 100 * (rows.predicted_ms[at] / rows.measured_ms[at] - 1)
        bias = format_percent(float(np.median(error_pct)), signed=True)
        look: dict[str, Any] = {"color": style.PHASE_COLOURS[phase], "marker": style.PHASE_MARKERS[phase]}
        look |= {"markersize": 3.0 if many else 4.0, "markeredgewidth": 0 if many else 0.3, "markeredgecolor": "white"}
        label = f"{phase or 'step'} ({count(n)}), bias {bias}"
        axes.plot(rows.predicted_ms[at], rows.measured_ms[at], linestyle="none", alpha=0.5, label=label, **look)
    style.log_axis(axes, "x", low, high)
    style.log_axis(axes, "y", low, high)
    style.legend(axes, place="upper left")


MAP, PREDICTED = "latency-map", "measured-vs-predicted"
PANELS: Mapping[str, tuple[Callable[[Axes, FitView], None], str]] = {
    MAP: (draw_map, "Map of the latency of a step over requests B and tokens S."),
    PREDICTED: (draw_predicted, "Measured against predicted latency of the fitted steps, by phase."),
}


def fit_pictures(view: FitView, prefix: str = "") -> list[Picture]:
    """Return every panel that can be drawn."""
    pictures = []
    for name, (draw, alt) in PANELS.items():
        if name == PREDICTED and view.agreement is None:
            continue
        figure = style.new_figure()
        draw(figure.subplots(), view)
        picture = draw_picture(f"{prefix}{name}", alt, figure)
        pictures.append(replace(picture, readings=_readings(view, figure)) if name == MAP else picture)
    return pictures


def _readings(view: FitView, drawn: Figure) -> str:
    """Return the place of the map's axes in the figure, and the steps on them."""
    box = [float(each) for each in drawn.axes[0].get_position().bounds]
    ends = {name: [float(axis[0]), float(axis[-1])] for name, axis in (("B", view.surface.B), ("S", view.surface.S))}
    return json.dumps({"box": box, **ends, "steps": view.readings()}, separators=(",", ":"))


def fit_figure(name: str, fit: FitResult, trace: Trace | None) -> Figure:
    view = FitView(fit, trace)
    shown = [MAP] if view.agreement is None else [MAP, PREDICTED]
    figure = style.new_figure((6.0 * len(shown), 4.8), dpi=130)
    title = ": ".join(dict.fromkeys((name, fit.name)))
    figure.suptitle(drawable(title), x=0.012, ha="left", fontsize=13, color=style.INK)
    for axes, panel in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        PANELS[panel][0](axes, view)
    return figure


def why_not_drawn(fit: FitResult) -> str:
    """Return why the fit cannot be drawn; empty if it can."""
    if not fit.status.ok or not all(p.name in fit.parameters for p in fit.structure.parameters):
        return f"the fit is not usable ({fit.status.sentence.rstrip('.')})"
    if not np.all(np.isfinite(fit.theta)):
        return "the fit has parameters without a value"
    if not all(len(fit.domain.get(name, ())) == 2 for name in ("B", "S")):
        return "the fit does not say which B and S it was made from"
    others = [name for name in fit.columns if name not in ("B", "S") and name in fit.domain]
    if others and not (fit.reads_context and fit.typical):
        return f"the model also needs {', '.join(others)}, and the fit does not say what is typical of them"
    return ""


DOT_SIZES = (9.0, 260.0)  # of a cell with no rows, and with all


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
    style.log_axis(axes, "x", low_B, high_B, 2)
    style.log_axis(axes, "y", low_S, high_S, 2)
    style.legend(axes)


def _draw_time(axes: Axes, trace: Trace, coverage: Coverage) -> None:
    covered = format_ms((coverage.seconds or 0.0) * 1e3)
    drifting = f", {count_text(len(coverage.drift), 'run')} drifting" if coverage.drift else ", no drift"
    title = f"{covered} in {count_text(coverage.runs, 'run')}{drifting}"
    style.dress(axes, title, "time in the run [s]", "latency of a step [ms]")
    seconds, T_ms = trace.floats("t_s"), trace.floats("T_ms")
    for rows, look in _rows_by_phase(trace):
        axes.plot(seconds[rows], T_ms[rows], "o", markersize=2.5, markeredgewidth=0, **look)
    style.log_axis(axes, "y", *style.padded_span(T_ms))
    style.legend(axes)
