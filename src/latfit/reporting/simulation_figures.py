"""Figures of simulations and validations."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.reporting import style
from latfit.reporting.simulation_tables import TITLES, frontier, run_labels, settings_text
from latfit.reporting.table import drawable, signed_percent
from latfit.simulation import EngineResult, SimResult
from latfit.stats import FloatArray
from latfit.units import format_ms
from latfit.validation import JUDGED, Validation, metrics

MOST_LABELLED = 24
WIDE = 20  # rates that span more than this are drawn on a logarithmic axis
WIDE_INCHES = (12.0, 4.2)


def validation_figure(found: Validation) -> Figure:
    figure = style.new_figure(WIDE_INCHES)
    of_measured = metrics(found.measured, found.measured.first_ms, found.measured.last_ms)
    of_simulated = metrics(found.measured, found.run.first_ms, found.run.last_ms)
    for axes, metric in zip(figure.subplots(1, 3), JUDGED, strict=True):
        unit, name = (1e3, "s") if metric != "tpot_ms" else (1.0, "ms")
        for which, (label, values) in enumerate((("measured", of_measured), ("simulated", of_simulated))):
            line = ("-", "--")[which]
            _draw_shares(axes, values[metric][found.was_scored] / unit, label, style.LINE_COLOURS[which], line)
        title = f"{TITLES[metric]}: mean {signed_percent(found.metrics[metric]['mean'].error_pct)}"
        style.dress(axes, title, f"{TITLES[metric]} [{name}]", "share of requests")
        axes.set_ylim(0, 1)
        style.legend(axes, "lower right")
    return figure


def engine_figure(runs: Sequence[EngineResult]) -> Figure:
    figure = style.new_figure(WIDE_INCHES)
    if any(run.first is None for run in runs):
        return _engine_sweep(figure, runs)
    ttft, waiting, cache = figure.subplots(1, 3)
    for run, label, colour in zip(runs, run_labels(runs), style.LINE_COLOURS, strict=False):
        assert run.first is not None
        _draw_shares(ttft, run.first.ttft_ms / 1e3, label, colour)
        for line in run.first.timelines:
            seconds = (line.start_ms + (np.arange(len(line.busy)) + 0.5) * line.slice_ms) / 1e3
            waiting.plot(seconds, line.waiting, color=colour, linewidth=1.2)
            cache.plot(seconds, 100 * line.kv_usage, color=colour, linewidth=1.2)
    style.dress(ttft, "Time to first token", "TTFT [s]", "share of requests")
    style.dress(waiting, "Waiting requests", "time [s]", "requests")
    style.dress(cache, "KV blocks in use", "time [s]", "of all blocks [%]")
    ttft.set_ylim(0, 1)
    waiting.set_ylim(bottom=0)
    cache.set_ylim(0, 105)
    style.legend(ttft, "lower right")
    return figure


def _engine_sweep(figure: Figure, runs: Sequence[EngineResult]) -> Figure:
    """Draw p99s over throughput; unstable runs are hollow."""
    colour = style.LINE_COLOURS[0]
    for axes, metric in zip(figure.subplots(1, 3), ("ttft", "tpot", "latency"), strict=True):
        for label, stable in (("carried", True), ("unstable", False)):
            shown = [run.summary for run in runs if run.summary.stable == stable]
            x, y = [run.output_tokens_per_s for run in shown], [getattr(run, metric).p99 for run in shown]
            axes.plot(x, y, "o", color=colour, markerfacecolor=colour if stable else "none", label=label)
        style.dress(axes, f"{TITLES[f'{metric}_ms']} p99", "output tokens/s", "[ms]")
        axes.set_ylim(bottom=0)
    style.legend(axes)
    return figure


def _draw_shares(axes: Axes, values: FloatArray, label: str, colour: str, line: str = "-") -> None:
    ordered = np.sort(values[np.isfinite(values)])
    shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    axes.step(ordered, shares, where="post", color=colour, label=label, linewidth=1.8, linestyle=line)


def runs_figure(runs: Sequence[SimResult]) -> Figure:
    """Draw p99 over the rate, the best setting of each policy; of one rate the p99 of each run."""
    rates = sorted({run.rate_per_s for run in runs if not math.isnan(run.rate_per_s)})
    if len(rates) < 2:
        return _draw_percentiles(list(runs)[:MOST_LABELLED])
    figure, shown = style.new_figure(), frontier(runs)
    axes = figure.subplots()
    for i, policy in enumerate(dict.fromkeys(run.policy for run in runs)):
        line = [run for run in shown if run.policy == policy]
        which, p99 = i % len(style.LINE_COLOURS), [run.latency["p99"] for run in line]
        reach = np.array([(each.value - each.low, each.high - each.value) for each in p99]).reshape(-1, 2).T
        look: dict[str, Any] = {"color": style.LINE_COLOURS[which], "marker": style.LINE_MARKERS[which]}
        look |= {"linestyle": "-" if i < len(style.LINE_COLOURS) else "--", "markersize": 4, "label": drawable(policy)}
        axes.errorbar([run.rate_per_s for run in line], [each.value for each in p99], np.nan_to_num(reach), **look)
    if shown:
        style.log_axis(axes, "y", *style.padded_span(np.array([run.latency.p99 for run in shown])))
    if rates[-1] > WIDE * rates[0]:
        style.log_axis(axes, "x", *style.padded_span(np.array(rates)))
    style.dress(axes, "99th percentile of response times", "arrival rate [req/s]", "p99 [ms]")
    style.legend(axes)
    return figure


def _draw_percentiles(runs: Sequence[SimResult]) -> Figure:
    figure = style.new_figure((8.0, 1.5 + 0.5 * len(runs)))
    axes = figure.subplots()
    names = [f"{run.policy} {settings_text(run)}".strip() + " (unstable)" * (not run.stable) for run in runs]
    p50, p99 = (np.nan_to_num([getattr(run.latency, name) for run in runs]) for name in ("p50", "p99"))
    colours = [style.LINE_COLOURS[0] if run.stable else style.SLA for run in runs]
    bars = axes.barh(range(len(runs)), p99 - p50, 0.4, p50, color=colours)
    axes.bar_label(bars, [format_ms(run.latency.p99) for run in runs], padding=4, fontsize=9)
    axes.set_yticks(range(len(runs)), [drawable(name, 60) for name in names])
    axes.set_xlim(0, 1.15 * (p99.max() or 1.0))
    axes.invert_yaxis()
    style.dress(axes, "Median to 99th percentile", "response time [ms]", "")
    return figure
