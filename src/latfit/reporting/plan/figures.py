"""Pictures of a plan: latency curves with B1 and B2, the feasible region, the T_cut trade-off, p99 against the rate."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.hardware import HardwareProfile
from latfit.planning import (
    Cutoff,
    Line,
    Plan,
    PlanRequest,
    Target,
    Threshold,
    cutoff_lines,
    latency_lines,
    rate_lines,
    spans_text,
)
from latfit.reporting import style
from latfit.reporting.fit.figures import mark_thresholds, thresholds_title
from latfit.reporting.format import drawable
from latfit.reporting.layout import Picture
from latfit.units import format_ms, format_rate

ALTS = {
    "plan-cutoff": "Percentile of the response over T_cut, by method, with the SLA and the recommended T_cut",
    "plan-rate": "Percentile of the response over the rate for every strategy on one path, with the SLA",
}
METHOD_LABELS = {
    "rigorous": "proved bound",
    "simulated": "simulation with the measured scatter",
}
METHOD_COLOURS = {"rigorous": "#009e73", "simulated": "#0072b2"}
ROOM = 3.0
"""Latencies are drawn up to so many times the SLA."""


def plan_pictures(plan: Plan, profile: HardwareProfile, request: PlanRequest) -> list[Picture]:
    """The pictures of a plan for a load, for a page; none without a load."""
    if plan.rate_per_s is None or plan.percentile is None:
        return []
    target = Target(plan.sla_ms, plan.percentile / 100, plan.tokens_per_request)
    found = {"plan-rate": rate_figure(plan, rate_lines(profile, target, request))}
    if plan.T_cut is not None:
        cutoff = cutoff_figure(plan, plan.T_cut, cutoff_lines(profile, target, request))
        found = {"plan-cutoff": cutoff, **found}
    titles = {stem: " ".join(figure.axes[0].get_title(loc="left").split()) for stem, figure in found.items()}
    return [
        Picture(stem, titles[stem], f"{ALTS[stem]}. {titles[stem]}.", style.png(figure))
        for stem, figure in found.items()
    ]


def plan_figure(plan: Plan, profile: HardwareProfile, request: PlanRequest) -> Figure:
    """The main picture: the percentile over the rate, or without a rate the latency of batches."""
    if plan.rate_per_s is None or plan.percentile is None:
        return latency_figure(plan, latency_lines(profile, plan.tokens_per_request, request.context))
    target = Target(plan.sla_ms, plan.percentile / 100, plan.tokens_per_request)
    return rate_figure(plan, rate_lines(profile, target, request))


def latency_figure(plan: Plan, lines: Sequence[Line]) -> Figure:
    """Latency over the batch on every path, with B1, B2 and the SLA."""
    figure = style.new_figure()
    axes = figure.subplots()
    style.dress(axes, thresholds_title(plan), "requests in the batch, B", "latency of a batch [ms]")
    for line, colour in zip(lines, style.LINE_COLOURS, strict=False):
        axes.plot(line.x, line.y, color=colour, linewidth=1.8, label=drawable(line.label))
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    values = np.concatenate([line.y for line in lines])
    low, high = style.padded(float(values.min()), max(float(values.max()), plan.sla_ms))
    style.log_y(axes, low, high, style.decimal_ticks)
    style.log_x(axes, 0.9, max(float(line.x[-1]) for line in lines) * 1.1, style.binary_ticks)
    _sla(axes, plan.sla_ms)
    for threshold in mark_thresholds(axes, plan):
        _interval(axes, threshold)
    style.legend(axes)
    return figure


def cutoff_figure(plan: Plan, found: Cutoff, lines: Sequence[Line]) -> Figure:
    """The percentile over T_cut by method, with the SLA and the recommended T_cut."""
    figure = style.new_figure()
    axes = figure.subplots()
    style.dress(axes, cutoff_title(plan, found), "T_cut: longest wait for the GPU [ms]", f"p{found.percentile:g} [ms]")
    for line in lines:
        axes.plot(line.x, line.y, color=METHOD_COLOURS[line.label], label=METHOD_LABELS[line.label])
    _sla(axes, plan.sla_ms)
    if found.value is not None:
        axes.axvline(
            found.value, color=style.INK, linewidth=1.1, linestyle=":", label=f"T_cut = {format_ms(found.value)}"
        )
    axes.set_ylim(0, ROOM * plan.sla_ms)
    axes.set_xlim(0, plan.sla_ms)
    style.legend(axes)
    return figure


def cutoff_title(plan: Plan, found: Cutoff) -> str:
    if found.value is None:
        return f"No T_cut keeps p{found.percentile:g} within {format_ms(plan.sla_ms)}"
    spans = spans_text(found.ranges.get(found.bound or "", ()), plan.sla_ms)
    return f"T_cut {spans} keeps p{found.percentile:g} within {format_ms(plan.sla_ms)} (by simulation)"


def rate_figure(plan: Plan, lines: Sequence[Line]) -> Figure:
    """The percentile over the rate for every strategy on one path, with the SLA and the plan's rate."""
    figure = style.new_figure()
    axes = figure.subplots()
    style.dress(axes, _sentence(plan.binding), "req/s per replica", f"p{plan.percentile:g} of responses [ms]")
    for line, colour, marker in zip(lines, style.LINE_COLOURS, style.LINE_MARKERS, strict=False):
        axes.plot(line.x, line.y, color=colour, marker=marker, markersize=4, linewidth=1.5, label=drawable(line.label))
    _sla(axes, plan.sla_ms)
    rate = plan.rate_per_s or 1.0
    axes.axvline(rate, color=style.INK, linewidth=1.1, linestyle=":", label=format_rate(rate))
    ends = [end for line in lines for end in (float(line.x[0]), float(line.x[-1]))]
    low, high = style.padded(min(*ends, rate), max(*ends, rate))
    style.log_x(axes, low, high, style.decimal_ticks)
    axes.set_ylim(0, ROOM * plan.sla_ms)
    style.legend(axes)
    return figure


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _sla(axes: Axes, sla_ms: float) -> None:
    axes.axhline(sla_ms, color=style.SLA, linewidth=1.3, linestyle="--", label=f"SLA {format_ms(sla_ms)}")


def _interval(axes: Axes, threshold: Threshold) -> None:
    if threshold.interval is None or None in threshold.interval:
        return
    low, high = threshold.interval
    assert low is not None
    assert high is not None
    axes.axvspan(low, high, color=style.INK, alpha=0.08, linewidth=0)
