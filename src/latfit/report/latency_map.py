"""T(B, S) as a map: where an SLA is met, what was measured, what is not possible."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from latfit.report import style
from latfit.report.points import Cells, Surface, thinned
from latfit.units import format_ms

_MAP_COLOURS = LinearSegmentedColormap.from_list("latency", ["#f3f8fc", "#b9d6ea", "#6aa6cf", "#2f6ea3", "#173f66"])
_IMPOSSIBLE = "#e9ebee"
_HATCHING = "#8fa0b2"
_DASHES = ("-", "--", ":")
_FEW_CELLS = 400
_SHADES = 33


@dataclass(frozen=True)
class SlaLine:
    """An SLA on the map: its words, and the typical latency in ms at which it is just met."""

    label: str
    typical_ms: float


def map_figure(area: Surface, cells: Cells | None, lines: Sequence[SlaLine] = (), finding: str | None = None) -> Figure:
    """T(B, S) with the SLA and what was measured."""
    figure = style.new_figure()
    draw_map(figure.subplots(), area, cells, lines, finding)
    return figure


def map_title(area: Surface) -> str:
    fastest, slowest = area.span_ms
    return f"A step takes {format_ms(fastest)} to {format_ms(slowest)} in the measured range"


def draw_map(
    axes: Axes, area: Surface, cells: Cells | None, lines: Sequence[SlaLine] = (), finding: str | None = None
) -> None:
    """Latency over (B, S): S < B is not possible, the faded part was not measured."""
    style.dress(axes, finding or map_title(area), "requests in the step, B", "tokens in the step, S")
    axes.grid(False)
    values = area.T_ms[np.isfinite(area.T_ms)]
    # The very slowest corner would take most of the colours for itself.
    low, high = float(values.min()), float(np.quantile(values, 0.995))
    _colours(axes, area, low, max(high, low * 1.01))
    _fade_unmeasured(axes, area)
    if cells is not None:
        _measured_dots(axes, cells)
    for line, dash in zip(lines, cycle(_DASHES), strict=False):
        _sla_line(axes, area, line, dash)
    if len(lines) == 1:
        _name_good_side(axes, area, lines[0])
    _fade_label(axes)
    _impossible(axes, area)
    style.log_x(axes, float(area.B[0]), float(area.B[-1]), style.binary_ticks)
    style.log_y(axes, float(area.S[0]), float(area.S[-1]), style.binary_ticks)
    style.legend(axes, place="lower right")


def _colours(axes: Axes, area: Surface, low: float, high: float) -> None:
    """The latency in colours with its scale, and thin lines so that it can be read without them."""
    shades = np.geomspace(low, high, _SHADES)
    mesh = axes.contourf(
        area.B, area.S, area.T_ms, levels=shades, norm=LogNorm(low, high), cmap=_MAP_COLOURS, extend="both"
    )
    levels = [level for level in style.decimal_ticks(low, high, most=7) if low < level < high]
    if levels:
        axes.contour(area.B, area.S, area.T_ms, levels=levels, colors="#ffffff", linewidths=0.8, alpha=0.8)
    bar = axes.figure.colorbar(mesh, ax=axes, pad=0.02, aspect=28)
    bar.set_label("latency of a step [ms]", fontsize=9.5, color=style.INK)
    style.plain_ticks(bar.ax.yaxis, style.decimal_ticks(low, high))
    bar.ax.tick_params(labelsize=9)
    bar.outline.set_visible(False)


def _fade_unmeasured(axes: Axes, area: Surface) -> None:
    """White veil and hatching around the measured box."""
    B_low, B_high, S_low, S_high = area.box
    left, right, bottom, top = area.B[0], area.B[-1], area.S[0], area.S[-1]
    pieces = [
        ([left, B_low], bottom, top),
        ([B_high, right], bottom, top),
        ([B_low, B_high], bottom, S_low),
        ([B_low, B_high], S_high, top),
    ]
    for across, below, above in pieces:
        axes.fill_between(across, below, above, facecolor="#ffffffa6", edgecolor=_HATCHING, hatch="///", linewidth=0)
    around_B, around_S = [B_low, B_high, B_high, B_low, B_low], [S_low, S_low, S_high, S_high, S_low]
    axes.plot(around_B, around_S, color=style.FAINT, linewidth=1)


def _fade_label(axes: Axes) -> None:
    axes.fill_between([], [], facecolor="#ffffff", edgecolor=_HATCHING, hatch="///", linewidth=0, label="not measured")


def _impossible(axes: Axes, area: Surface) -> None:
    """Cover S < B, and whatever line runs into it."""
    floor = np.maximum(area.B, area.S[0])
    axes.fill_between(
        area.B,
        area.S[0],
        floor,
        facecolor=_IMPOSSIBLE,
        edgecolor=style.FAINT,
        linewidth=0.8,
        label="S < B: no such step",
        zorder=2.5,
    )


def _measured_dots(axes: Axes, cells: Cells) -> None:
    rows = np.arange(len(cells.B))
    many = len(rows) > _FEW_CELLS
    if many:
        rows, _ = thinned(np.log(cells.B), np.log(cells.S))
    axes.scatter(
        cells.B[rows],
        cells.S[rows],
        s=5.0 if many else 14.0,
        color="#10202f",
        edgecolors="white",
        linewidths=0.3 if many else 0.5,
        label="measured",
        zorder=3,
        clip_on=False,
    )


def _sla_line(axes: Axes, area: Surface, line: SlaLine, dash: str) -> None:
    if _crosses(area, line):
        edge = axes.contour(
            area.B,
            area.S,
            area.T_ms,
            levels=[line.typical_ms],
            colors=style.SLA,
            linewidths=2.6,
            linestyles=dash,
            zorder=4,
        )
        edge.set_path_effects([withStroke(linewidth=4.4, foreground="white")])
        label = line.label
    else:
        met = line.typical_ms >= float(np.nanmax(area.T_ms))
        label = f"{line.label}: {'all of this' if met else 'nowhere here'}"
    axes.plot([], [], color=style.SLA, linewidth=2.6, linestyle=dash, label=label)


def _crosses(area: Surface, line: SlaLine) -> bool:
    return bool(np.nanmin(area.T_ms) < line.typical_ms < np.nanmax(area.T_ms))


def _name_good_side(axes: Axes, area: Surface, line: SlaLine) -> None:
    """Words amid the steps that meet the SLA, so that nobody has to guess on which side of the line they are."""
    rows, columns = np.nonzero(area.measured & (area.T_ms < line.typical_ms))
    if len(rows) == 0 or not _crosses(area, line):
        return
    # The cell nearest to the centre of all of them: the centre itself may lie outside.
    nearest = np.argmin((rows - rows.mean()) ** 2 + (columns - columns.mean()) ** 2)
    axes.text(
        area.B[columns[nearest]],
        area.S[rows[nearest]],
        "SLA met",
        fontsize=10.5,
        fontweight="bold",
        color=style.SLA,
        ha="center",
        va="center",
        path_effects=[withStroke(linewidth=3, foreground="white")],
        zorder=5,
    )
