"""Figures of a fit: how well it meets its rows, what it says of throughput, T(B, S) as a map (where an SLA is met, what
was measured, what is not possible), the overview of one path, and paths side by side.

Each `draw_...` fills given axes, so that the overview and the single pictures are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patheffects import withStroke

from latfit.planning import Plan, Reach, Threshold
from latfit.reporting import style
from latfit.reporting.fit.plot_data import (
    DOTS,
    Agreement,
    BatchLatency,
    Cells,
    Curve,
    Surface,
    phases_present,
    running_median,
    thinned,
)
from latfit.reporting.format import count, counted, drawable, per_second, shorthand
from latfit.stats import FloatArray
from latfit.units import format_ms, format_percent

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


BAND_PCT = 10.0

_SMALL_LEAN_PCT = 3.0

_BAND = "#dfe5ec"
_HALO = [withStroke(linewidth=3, foreground="white")]


def predicted_figure(rows: Agreement) -> Figure:
    """Measured against predicted."""
    figure = style.new_figure()
    draw_predicted(figure.subplots(), rows)
    return figure


def residual_figure(rows: Agreement) -> Figure:
    """Relative error against the prediction."""
    figure = style.new_figure()
    draw_residuals(figure.subplots(), rows)
    return figure


def throughput_figure(curves: Sequence[Curve]) -> Figure:
    """Tokens per second over the tokens of a step."""
    figure = style.new_figure()
    draw_throughput(figure.subplots(), curves)
    return figure


def predicted_title(rows: Agreement) -> str:
    median, p90 = (format_percent(rows.metrics[name]) for name in ("median_ape_pct", "p90_ape_pct"))
    return f"Median error {median}, p90 {p90} (n = {count(len(rows))})"


def residual_title(rows: Agreement) -> str:
    """Where the running medians stray farthest, or that they do not; all rows together where they are few."""
    leans = [
        (float(error), float(x), phase)
        for phase, line in _median_lines(rows).items()
        for x, error in zip(*line, strict=True)
    ]
    if not leans:
        return f"The typical prediction is {_lean(float(np.median(rows.error_pct)))}"
    error, x, phase = max(leans, key=lambda lean: abs(lean[0]))
    if abs(error) < _SMALL_LEAN_PCT:
        return f"Unbiased: running medians within {format_percent(_SMALL_LEAN_PCT)} of zero"
    return f"Largest bias: {phase or 'steps'} near {format_ms(x, 2)}, {_lean(error)}"


def _lean(error_pct: float) -> str:
    return f"{format_percent(abs(error_pct))} too {'high' if error_pct > 0 else 'low'}"


def _median_lines(rows: Agreement) -> dict[str, tuple[FloatArray, FloatArray]]:
    """The running median of the error over the prediction, by phase."""
    chosen = {phase: rows.phase == phase for phase in phases_present(rows.phase)}
    return {phase: running_median(rows.predicted_ms[at], rows.error_pct[at]) for phase, at in chosen.items()}


def throughput_title(curves: Sequence[Curve]) -> str:
    """The best fitted rate inside the measured range, and what decoding reaches of it."""
    batched = [curve for curve in curves if curve.B is not None]
    decode = next(curve for curve in curves if curve.B is None)
    decoding = _peak(decode)
    if not batched:
        return f"Decode reaches {decoding} tokens/s"
    best = max(batched, key=lambda curve: float(curve.rate.max()))
    return f"Up to {_peak(best)} tokens/s (B={best.B}); decode {decoding}"


def _peak(curve: Curve) -> str:
    """The curve's best rate in tokens/s, three significant digits."""
    return shorthand(float(f"{per_second(float(curve.rate.max())):.3g}"))


def draw_predicted(axes: Axes, rows: Agreement) -> None:
    """Measured over predicted latency with the line where they agree; the legend takes the emptier corner."""
    style.dress(axes, predicted_title(rows), "predicted latency of a step [ms]", "measured latency [ms]")
    both = np.concatenate([rows.predicted_ms, rows.measured_ms])
    low, high = style.padded(float(both.min()), float(both.max()))
    line = np.array([low, high])
    band = BAND_PCT / 100
    axes.fill_between(line, line * (1 - band), line * (1 + band), color=_BAND, linewidth=0, label=f"±{BAND_PCT:g} %")
    axes.plot(line, line, color=style.INK, linewidth=1.2, label="measured = predicted")
    _dots(axes, rows, rows.predicted_ms, rows.measured_ms, log_y=True)
    style.log_x(axes, low, high, style.decimal_ticks)
    style.log_y(axes, low, high, style.decimal_ticks)
    middle = np.sqrt(low * high)
    above = np.sum((rows.predicted_ms < middle) & (rows.measured_ms > middle))
    below = np.sum((rows.predicted_ms > middle) & (rows.measured_ms < middle))
    style.legend(axes, place="upper left" if above <= below else "lower right")


def draw_residuals(axes: Axes, rows: Agreement) -> None:
    """Relative error over the prediction, with a running median for each phase."""
    style.dress(
        axes,
        residual_title(rows),
        "predicted latency of a step [ms]",
        "error of the prediction [%], + is too high",
    )
    low, high = _reach(rows.error_pct)
    axes.axhspan(-BAND_PCT, BAND_PCT, color=_BAND, linewidth=0)
    axes.axhline(0, color=style.INK, linewidth=1.2)
    _dots(axes, rows, rows.predicted_ms, np.clip(rows.error_pct, low, high), log_y=False)
    for phase, line in _median_lines(rows).items():
        axes.plot(*line, color=style.PHASE_COLOURS[phase], linewidth=2.4, path_effects=_HALO)
    span = style.padded(float(rows.predicted_ms.min()), float(rows.predicted_ms.max()))
    style.log_x(axes, *span, style.decimal_ticks)
    # Room above and below the dots for the legend and the note.
    axes.set_ylim(low - 0.12 * (high - low), high + 0.18 * (high - low))
    beyond = int(((rows.error_pct < low) | (rows.error_pct > high)).sum())
    edge = f"; {counted(beyond, 'step')} beyond the scale drawn at its end" if beyond else ""
    _note(axes, "lines: running median" + edge, low_right=True)
    style.legend(axes, place="upper right", columns=4)


def _note(axes: Axes, text: str, *, low_right: bool = False) -> None:
    """A faint word in the upper left or the lower right corner of the axes."""
    axes.text(
        0.99 if low_right else 0.01,
        0.02 if low_right else 0.98,
        text,
        transform=axes.transAxes,
        ha="right" if low_right else "left",
        va="bottom" if low_right else "top",
        fontsize=8.5,
        color=style.FAINT,
        path_effects=_HALO,
    )


def _reach(error_pct: FloatArray) -> tuple[float, float]:
    """Ends of the error axis: everything, unless a few rows would flatten the rest."""
    least, most = 1.5 * BAND_PCT, 2 * float(np.quantile(np.abs(error_pct), 0.98))
    return -max(least, min(-float(error_pct.min()), most)), max(least, min(float(error_pct.max()), most))


def _dots(axes: Axes, rows: Agreement, x: FloatArray, y: FloatArray, *, log_y: bool) -> None:
    """The rows by phase; where they are many, one dot a pixel, the darker the more rows it stands for."""
    present = {phase: np.flatnonzero(rows.phase == phase) for phase in phases_present(rows.phase)}
    # The largest cloud goes to the bottom.
    for phase, at in sorted(present.items(), key=lambda entry: -len(entry[1])):
        name = style.PHASE_WORDS.get(phase, phase)
        label = f"{name} ({count(len(at))})"
        colour = to_rgb(style.PHASE_COLOURS[phase])
        marker = style.PHASE_MARKERS[phase]
        if len(at) <= DOTS:
            size, alpha = (26.0, 0.75) if len(at) < 500 else (12.0, 0.45)
            axes.scatter(
                x[at],
                y[at],
                s=size,
                color=colour,
                marker=marker,
                alpha=alpha,
                linewidths=0.4,
                edgecolors="white",
                label=label,
            )
            continue
        vertical = np.log(y[at]) if log_y else y[at]
        picked, stands_for = thinned(np.log(x[at]), vertical)
        depth = np.log1p(stands_for) / np.log1p(stands_for.max())
        shades = np.column_stack([np.tile(colour, (len(picked), 1)), 0.15 + 0.7 * depth])
        axes.scatter(x[at][picked], y[at][picked], s=9, c=shades, marker=marker, linewidths=0, rasterized=True)
        axes.scatter([], [], s=26, color=colour, marker=marker, label=label)


def draw_throughput(axes: Axes, curves: Sequence[Curve]) -> None:
    """Lines are the fit inside the measured range, markers are measured medians."""
    style.dress(axes, throughput_title(curves), "tokens in the step, S", "throughput [tokens/s]")
    rates = per_second(1.0) * np.concatenate([np.concatenate([curve.rate, curve.measured_rate]) for curve in curves])
    tokens = np.concatenate([np.concatenate([curve.S, curve.measured_tokens]) for curve in curves])
    batched = iter(zip(style.LINE_COLOURS, style.LINE_MARKERS, strict=True))
    for curve in curves:
        colour, marker = ("#333333", "x") if curve.B is None else next(batched)
        name, dash = ("decode, S = B", "--") if curve.B is None else (f"B = {curve.B}", "-")
        fitted, measured = per_second(1.0) * curve.rate, per_second(1.0) * curve.measured_rate
        axes.plot(curve.S, fitted, color=colour, linewidth=2, label=name, linestyle=dash)
        axes.scatter(curve.measured_tokens, measured, s=24, color=colour, marker=marker, zorder=3)
    style.log_x(axes, *style.padded(float(tokens.min()), float(tokens.max())), style.binary_ticks)
    style.log_y(axes, *style.padded(float(rates.min()), float(rates.max()), 1.3), style.decimal_ticks)
    note = (
        "lines: fit, markers: measured medians" if any(len(curve.measured_tokens) for curve in curves) else "lines: fit"
    )
    _note(axes, note)
    style.legend(axes, place="lower right")


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
    bold = FontProperties(size=17, weight="bold")
    wrapped = style.filled(figure, drawable(headline, most=240), 0.976, bold)
    below_it = style.filled(figure, drawable(trust, most=240), 0.976, FontProperties(size=11.5))
    # Blank lines keep room for the sentence on trust, which is smaller and so a text of its own.
    figure.suptitle(
        wrapped + "\n" * (below_it.count("\n") + 1), x=0.012, ha="left", fontproperties=bold, color=style.INK
    )
    below = 0.98 - (0.30 * (wrapped.count("\n") + 1) + 0.06) / height
    figure.text(0.012, below, below_it, va="top", fontsize=11.5, color=style.FAINT)
    grid = figure.subplots(2 if whole else 1, 2, squeeze=False)
    draw_map(grid[0, 0], views.area, views.cells, views.lines, views.finding)
    draw_throughput(grid[0, 1], views.curves)
    if views.rows is not None:
        draw_predicted(grid[1, 0], views.rows)
        draw_residuals(grid[1, 1], views.rows)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)  # type: ignore[union-attr, call-arg]
    return figure


def paths_figure(curves: Sequence[BatchLatency], tokens_per_request: int, plan: Plan | None) -> Figure:
    """Latency against the batch on each path, with the SLA and the thresholds of a plan."""
    figure = style.new_figure((7.2, 4.4))
    axes = figure.subplots()
    _draw_paths(axes, curves)
    if plan is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, plan.sla_ms / 1.15), max(high, 1.15 * plan.sla_ms))
        axes.axhline(plan.sla_ms, color=style.SLA, linewidth=1.3, label=f"SLA {format_ms(plan.sla_ms)}")
        mark_thresholds(axes, plan)
    each = "one token" if tokens_per_request == 1 else f"{count(tokens_per_request)} tokens"
    title = paths_title(curves, plan)
    style.dress(axes, title, f"requests in the step, B ({each} each)", "latency of a step [ms]", width=70)
    style.legend(axes)
    return figure


def paths_title(curves: Sequence[BatchLatency], plan: Plan | None) -> str:
    if plan is not None and plan.both_paths:
        return thresholds_title(plan)
    return f"Latency of a step on {' and '.join(drawable(curve.path, most=20) for curve in curves)}"


def thresholds_title(plan: Plan) -> str:
    """From where on the GPU is worth it."""
    if plan.B1.value is None:
        return "Latency of a batch" if plan.B1.reach is Reach.UNKNOWN else plan.B1.reason.capitalize()
    waited = "" if plan.B1_at_rate is None else ", wait included"
    return f"From B1 = {counted(plan.B1.value, 'request')} the GPU is as fast as the CPU{waited}"


def mark_thresholds(axes: Axes, plan: Plan) -> list[Threshold]:
    """Upright lines at B1, as the plan counts it, at B1 without a wait where that is another, and at B2."""
    waits = plan.B1_at_rate is not None
    wanted = [("B1", plan.B1, "--"), ("B2", plan.B2, ":")]
    if waits:
        wanted = [("B1 with the wait at this rate", *wanted[0][1:]), ("without it", plan.B1_idle, "-."), wanted[1]]
    known = [(name, found, found.value, dash) for name, found, dash in wanted if found.value is not None]
    for name, _, value, dash in known:
        axes.axvline(value, color=style.INK, linewidth=1.1, linestyle=dash, label=f"{name}: {count(value)}")
    return [found for _, found, _, _ in known]


def _draw_paths(axes: Axes, curves: Sequence[BatchLatency]) -> None:
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
    axes.plot([], [], color=style.FAINT, linewidth=1.4, linestyle=":", label="extrapolated")
