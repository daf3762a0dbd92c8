"""Simulated serving engines, and measured ones beside them: tables and figures."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.report import style
from latfit.report.tables import Table
from latfit.stats import FloatArray
from latfit.units import format_ms
from latfit.validation.compare import JUDGED, Validation, metrics

TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "latency", "tpot_with_first_ms": "TPOT with first"}


def validation_table(found: Validation) -> Table:
    """One row a figure: measured, simulated, how far off, and how far it may be."""
    rows = []
    for each in found.figures:
        judged = "" if each.limit_pct is None else f"{'within' if each.holds else 'NOT within'} {each.limit_pct:g} %"
        error = "" if math.isnan(each.error_pct) else f"{each.error_pct:+.2f} %"
        rows.append(
            (
                f"{TITLES[each.metric]} {each.statistic}",
                format_ms(each.measured, 4),
                format_ms(each.simulated, 4),
                error,
                judged,
            )
        )
    counters = found.run.counters
    caption = f"{len(found.measured):,} requests, {counters.steps:,} steps, {counters.preemptions:,} preemptions"
    return Table(caption, ("", "measured", "simulated", "error", "verdict"), rows, words=("verdict",))


def validation_figure(found: Validation) -> Figure:
    """The distribution of each metric over requests, measured and simulated."""
    figure = style.new_figure((12.0, 4.2))
    of_measured = metrics(found.measured, found.measured.first_ms, found.measured.last_ms)
    of_simulated = metrics(found.measured, found.run.first_ms, found.run.last_ms)
    for axes, metric in zip(figure.subplots(1, 3), JUDGED, strict=True):
        unit, name = (1e3, "s") if metric != "tpot_ms" else (1.0, "ms")
        for which, (label, values) in enumerate((("measured", of_measured), ("simulated", of_simulated))):
            _draw_shares(axes, values[metric][found.scored] / unit, label, which)
        mean = next(each for each in found.figures if (each.metric, each.statistic) == (metric, "mean"))
        style.dress(axes, f"{TITLES[metric]}: mean {mean.error_pct:+.1f} %", name, "share of requests")
        axes.set_ylim(0, 1)
        style.legend(axes, "lower right")
    return figure


def _draw_shares(axes: Axes, values: FloatArray, label: str, which: int) -> None:
    """The share of requests at or below each value."""
    ordered = np.sort(values[np.isfinite(values)])
    shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    colour = style.LINE_COLOURS[which]
    axes.step(ordered, shares, where="post", color=colour, label=label, linewidth=1.8, linestyle=("-", "--")[which])
