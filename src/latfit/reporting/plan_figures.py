"""Figures of plans."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.hardware import HardwareProfile
from latfit.planning import Line, Plan, PlanOptions, Reach, ServingPlan, Target, latency_lines, rate_lines
from latfit.reporting import style
from latfit.reporting.fit_figures import why_not_drawn
from latfit.reporting.layout import Picture, draw_picture
from latfit.reporting.table import count, drawable
from latfit.units import count_text, format_ms, format_rate

NEAR = 0.08  # of the highest speed, within which labels would cover each other
SLA_HEIGHT = 3.0  # latencies are drawn up to so many times the SLA


def plan_pictures(plan: Plan | None, profile: HardwareProfile, request: PlanOptions) -> list[Picture]:
    paths = {name: path for name, path in profile.paths.items() if not why_not_drawn(path.fit)}
    pictures = []
    if len(paths) > 1:
        lines = latency_lines(HardwareProfile(paths), plan.tokens_per_request if plan else 1)
        alt = "Latency of a batch over its requests, on every path."
        pictures.append(draw_picture("paths", alt, latency_figure(plan, lines)))
    if plan is not None and plan.rate_per_s is not None and plan.percentile is not None:
        alt = "Percentile of the response over the rate, for every strategy on one path."
        pictures.append(draw_picture("plan-rate", alt, plan_figure(plan, profile, request)))
    return pictures


def plan_figure(plan: Plan, profile: HardwareProfile, request: PlanOptions) -> Figure:
    """Draw the percentile over the rate; without a rate the latency of batches."""
    if plan.rate_per_s is None or plan.percentile is None:
        return latency_figure(plan, latency_lines(profile, plan.tokens_per_request, request.context))
    lines = rate_lines(profile, Target(plan.sla_ms, plan.percentile / 100, plan.tokens_per_request), request)
    title, label = plan.binding[:1].upper() + plan.binding[1:], f"p{plan.percentile:g} of responses [ms]"
    figure, axes = _line_figure(title, "req/s per replica", label, lines, plan.sla_ms)
    axes.axvline(plan.rate_per_s, color=style.INK, linewidth=1.1, linestyle=":", label=format_rate(plan.rate_per_s))
    rates = np.concatenate([[plan.rate_per_s], *(line.x for line in lines)])
    style.log_axis(axes, "x", *style.padded_span(rates))
    axes.set_ylim(0, SLA_HEIGHT * plan.sla_ms)
    style.legend(axes)
    return figure


def latency_figure(plan: Plan | None, lines: Sequence[Line]) -> Figure:
    title, sla = ("Latency of a batch", None) if plan is None else (_thresholds_title(plan), plan.sla_ms)
    figure, axes = _line_figure(title, "requests in the batch, B", "latency of a batch [ms]", lines, sla)
    values = np.concatenate([*(line.y for line in lines), [] if sla is None else [sla]])
    style.log_axis(axes, "y", *style.padded_span(values))
    style.log_axis(axes, "x", 0.9, max(float(line.x[-1]) for line in lines) * 1.1, 2)
    for name, threshold, dash in (("B1", plan.B1, "--"), ("B2", plan.B2, ":")) if plan is not None else ():
        if threshold.value is not None:
            label = f"{name}: {count(threshold.value)}"
            axes.axvline(threshold.value, color=style.INK, linewidth=1.1, linestyle=dash, label=label)
            low, high = threshold.interval or (None, None)
            if low is not None and high is not None:
                axes.axvspan(low, high, color=style.INK, alpha=0.08, linewidth=0)
    style.legend(axes)
    return figure


def _line_figure(title: str, x: str, y: str, lines: Sequence[Line], sla_ms: float | None) -> tuple[Figure, Axes]:
    figure = style.new_figure()
    axes = figure.subplots()
    style.dress(axes, title, x, y)
    for line, colour in zip(lines, style.LINE_COLOURS, strict=False):
        axes.plot(line.x, line.y, color=colour, linewidth=1.8, label=drawable(line.label))
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
    if sla_ms is not None:
        axes.axhline(sla_ms, color=style.SLA, linewidth=1.3, linestyle="--", label=f"SLA {format_ms(sla_ms)}")
    return figure, axes


def _thresholds_title(plan: Plan) -> str:
    if plan.B1.value is None:
        return "Latency of a batch" if plan.B1.reach is Reach.UNKNOWN else plan.B1.reason.capitalize()
    waited = "" if plan.B1_at_rate is None else ", wait included"
    return f"From B1 = {count_text(plan.B1.value, 'request')} the GPU is as fast as the CPU{waited}"


def serving_figure(plan: ServingPlan) -> Figure:
    figure = style.new_figure()
    axes = figure.subplots()
    style.dress(axes, "Throughput against speed, by max_num_seqs", "tokens/s of a user", "output tokens/s of a replica")
    speeds, totals = zip(*((each.speed_per_s, each.throughput_per_s) for each in plan.pareto), strict=True)
    best = next(each for each in plan.pareto if each.best)
    axes.plot(speeds, totals, marker="o", color=style.LINE_COLOURS[0], linewidth=1.6)
    axes.plot(best.speed_per_s, best.throughput_per_s, "D", color=style.LINE_COLOURS[1], markersize=10)
    for each in plan.pareto:
        if each.best or abs(each.speed_per_s - best.speed_per_s) > NEAR * max(speeds):
            label, place = f"{each.max_num_seqs}" + " (planned)" * each.best, (each.speed_per_s, each.throughput_per_s)
            axes.annotate(label, place, (6, 6), textcoords="offset points", fontsize=9)
    for target in plan.targets:
        if target.metric == "tpot":
            _mark_limit(axes, 1e3 / target.limit, f"TPOT {format_ms(target.limit)}", "lower left")
    axes.set_xlim(0, 1.12 * max(speeds))
    axes.set_ylim(0, 1.12 * max(totals))
    return figure


def distribution_figure(plan: ServingPlan) -> Figure:
    curves = plan.distributions_ms
    figure = style.new_figure((6.0, 2.2 * len(curves)))
    panels = figure.subplots(len(curves), squeeze=False)[:, 0]
    for axes, (metric, times), colour in zip(panels, curves.items(), style.LINE_COLOURS, strict=False):
        name, percents = metric.upper(), np.linspace(0, 100, len(times))
        p99 = float(np.interp(99, percents, times))
        limits = [each for each in plan.targets if each.metric == metric]
        style.dress(axes, f"{name}: p99 {format_ms(p99)}", f"{name} [ms]", "requests within [%]")
        axes.plot(times, percents, color=colour, linewidth=1.8)
        axes.plot(p99, 99, "o", color=colour)
        for each in limits:
            _mark_limit(axes, each.limit, each.condition, "lower right")
        axes.set_xlim(0, 1.25 * max([p99, *(each.limit for each in limits)]))
        axes.set_ylim(0, 102)
    return figure


def _mark_limit(axes: Axes, limit: float, label: str, place: style.Place) -> None:
    axes.axvline(limit, color=style.SLA, linestyle="--", linewidth=1.4, label=label)
    style.legend(axes, place)
