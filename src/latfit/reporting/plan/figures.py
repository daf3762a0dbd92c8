"""Pictures of a plan: latency of batches with B1 and B2, the percentile over T_cut, and over the rate."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.hardware import HardwareProfile
from latfit.planning import Cutoff, Line, Plan, PlanRequest, Reach, Target, cutoff_lines, latency_lines, rate_lines
from latfit.reporting import style
from latfit.reporting.fit.figures import why_not_drawn
from latfit.reporting.format import count, counted, drawable
from latfit.reporting.layout import Picture, draw_picture
from latfit.units import format_ms, format_rate

METHODS = {"rigorous": "proved bound", "simulated": "simulation with the measured scatter"}
SLA_HEIGHT = 3.0  # latencies are drawn up to so many times the SLA


def comparison(profile: HardwareProfile, plan: Plan | None) -> Picture | None:
    """Latency of batches on every path that can be drawn; None if there is one path."""
    drawable_paths = {name: path for name, path in profile.paths.items() if not why_not_drawn(path.fit)}
    if len(drawable_paths) < 2:
        return None
    figure = latency_figure(
        plan, latency_lines(HardwareProfile(drawable_paths), plan.tokens_per_request if plan else 1)
    )
    return draw_picture("paths", "Latency of a batch over its requests, on every path.", figure)


def plan_pictures(plan: Plan, profile: HardwareProfile, request: PlanRequest) -> list[Picture]:
    """The pictures of a plan for a load; none without a load."""
    if plan.rate_per_s is None or plan.percentile is None:
        return []
    target = Target(plan.sla_ms, plan.percentile / 100, plan.tokens_per_request)
    rate = rate_figure(plan, rate_lines(profile, target, request))
    found = [
        draw_picture("plan-rate", "Percentile of the response over the rate, for every strategy on one path.", rate)
    ]
    if plan.T_cut is not None:
        cutoff = cutoff_figure(plan, plan.T_cut, cutoff_lines(profile, target, request))
        found.insert(0, draw_picture("plan-cutoff", "Percentile of the response over T_cut, by method.", cutoff))
    return found


def plan_figure(plan: Plan, profile: HardwareProfile, request: PlanRequest) -> Figure:
    """The percentile over the rate, or without a rate the latency of batches."""
    if plan.rate_per_s is None or plan.percentile is None:
        return latency_figure(plan, latency_lines(profile, plan.tokens_per_request, request.context))
    target = Target(plan.sla_ms, plan.percentile / 100, plan.tokens_per_request)
    return rate_figure(plan, rate_lines(profile, target, request))


def _line_figure(title: str, x: str, y: str, lines: Sequence[Line], sla_ms: float | None) -> tuple[Figure, Axes]:
    """Curves with the range of each that has one, and the SLA."""
    figure = style.new_figure()
    axes = figure.subplots()
    style.dress(axes, title, x, y)
    for line, colour in zip(lines, style.LINE_COLOURS, strict=False):
        axes.plot(line.x, line.y, color=colour, linewidth=1.8, label=METHODS.get(line.label, drawable(line.label)))
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    if sla_ms is not None:
        axes.axhline(sla_ms, color=style.SLA, linewidth=1.3, linestyle="--", label=f"SLA {format_ms(sla_ms)}")
    return figure, axes


def latency_figure(plan: Plan | None, lines: Sequence[Line]) -> Figure:
    """Latency over the batch on every path, with B1, B2 and the SLA of a plan."""
    title, sla = ("Latency of a batch", None) if plan is None else (_thresholds_title(plan), plan.sla_ms)
    figure, axes = _line_figure(title, "requests in the batch, B", "latency of a batch [ms]", lines, sla)
    values = np.concatenate([*(line.y for line in lines), [] if sla is None else [sla]])
    style.log_y(axes, *style.padded_span(values), style.decimal_ticks)
    style.log_x(axes, 0.9, max(float(line.x[-1]) for line in lines) * 1.1, style.binary_ticks)
    if plan is not None:
        _mark_thresholds(axes, plan)
    style.legend(axes)
    return figure


def _thresholds_title(plan: Plan) -> str:
    """From which batch on the GPU is as fast as the CPU."""
    if plan.B1.value is None:
        return "Latency of a batch" if plan.B1.reach is Reach.UNKNOWN else plan.B1.reason.capitalize()
    waited = "" if plan.B1_at_rate is None else ", wait included"
    return f"From B1 = {counted(plan.B1.value, 'request')} the GPU is as fast as the CPU{waited}"


def _mark_thresholds(axes: Axes, plan: Plan) -> None:
    """Upright lines at B1, with and without the wait at the rate, and at B2, with their intervals."""
    waits = plan.B1_at_rate is not None
    of_B1 = "B1 with the wait at this rate" if waits else "B1"
    marks = [(of_B1, plan.B1, "--"), ("without it", plan.B1_idle if waits else None, "-."), ("B2", plan.B2, ":")]
    for name, found, dash in marks:
        if found is None or found.value is None:
            continue
        axes.axvline(found.value, color=style.INK, linewidth=1.1, linestyle=dash, label=f"{name}: {count(found.value)}")
        low, high = found.interval or (None, None)
        if low is not None and high is not None:
            axes.axvspan(low, high, color=style.INK, alpha=0.08, linewidth=0)


def cutoff_figure(plan: Plan, found: Cutoff, lines: Sequence[Line]) -> Figure:
    """The percentile over T_cut by method, with the SLA and the recommended T_cut."""
    at = "No T_cut" if found.value is None else f"T_cut = {format_ms(found.value)}"
    title = f"{at} keeps p{found.percentile:g} within {format_ms(plan.sla_ms)}"
    x, y = "T_cut: longest wait for the GPU [ms]", f"p{found.percentile:g} [ms]"
    figure, axes = _line_figure(title, x, y, lines, plan.sla_ms)
    if found.value is not None:
        axes.axvline(found.value, color=style.INK, linewidth=1.1, linestyle=":", label=at)
    axes.set_ylim(0, SLA_HEIGHT * plan.sla_ms)
    axes.set_xlim(0, plan.sla_ms)
    style.legend(axes)
    return figure


def rate_figure(plan: Plan, lines: Sequence[Line]) -> Figure:
    """The percentile over the rate for every strategy on one path, with the SLA and the plan's rate."""
    title, rate = plan.binding[:1].upper() + plan.binding[1:], plan.rate_per_s or 1.0
    figure, axes = _line_figure(
        title, "req/s per replica", f"p{plan.percentile:g} of responses [ms]", lines, plan.sla_ms
    )
    axes.axvline(rate, color=style.INK, linewidth=1.1, linestyle=":", label=format_rate(rate))
    style.log_x(axes, *style.padded_span(np.concatenate([[rate], *(line.x for line in lines)])), style.decimal_ticks)
    axes.set_ylim(0, SLA_HEIGHT * plan.sla_ms)
    style.legend(axes)
    return figure
