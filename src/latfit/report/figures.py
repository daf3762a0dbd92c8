"""How well a fit meets its rows, and what it says of throughput.

Each `draw_...` fills given axes, so that the overview and the single pictures are the same.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from latfit.report import style
from latfit.report.points import (
    DOTS,
    Agreement,
    Curve,
    phases_present,
    running_median,
    thinned,
)
from latfit.report.words import count, counted, per_second, percent, shorthand
from latfit.stats import FloatArray
from latfit.units import format_ms

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
    return (
        f"Half of {counted(len(rows), 'step')} within {percent(rows.metrics['median_ape_pct'])},"
        f" 90 % within {percent(rows.metrics['p90_ape_pct'])}"
    )


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
        return f"No lean: running medians within {percent(_SMALL_LEAN_PCT)} of zero"
    return f"Farthest off: {phase or 'steps'} near {format_ms(x, 2)}, {_lean(error)}"


def _lean(error_pct: float) -> str:
    return f"{percent(abs(error_pct))} too {'long' if error_pct > 0 else 'short'}"


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
        "error of the prediction [%], + is too long",
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
