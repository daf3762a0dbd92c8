"""Simulations as tables and figures: policies, serving engines, and measured runs beside simulated ones."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.report import style
from latfit.report.fit.tables import Table
from latfit.report.format import drawable
from latfit.simulation import EngineResult, Interval, SimResult
from latfit.stats import FloatArray
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.validation import JUDGED, Validation, metrics

TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "latency", "tpot_with_first_ms": "TPOT with first"}


def validation_table(found: Validation) -> Table:
    """One row a figure: measured, simulated, how far off, and how far it may be."""
    rows = []
    for each in found.figures:
        place = "within" if each.holds else "NOT within"
        judged = "" if each.limit_pct is None else f"{place} {format_percent(each.limit_pct)}"
        error = "" if math.isnan(each.error_pct) else format_percent(each.error_pct, signed=True)
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
        title = f"{TITLES[metric]}: mean {format_percent(mean.error_pct, signed=True)}"
        style.dress(axes, title, f"{TITLES[metric]} [{name}]", "share of requests")
        axes.set_ylim(0, 1)
        style.legend(axes, "lower right")
    return figure


def _draw_shares(axes: Axes, values: FloatArray, label: str, which: int) -> None:
    """The share of requests at or below each value."""
    ordered = np.sort(values[np.isfinite(values)])
    shares = np.arange(1, len(ordered) + 1) / max(len(ordered), 1)
    colour = style.LINE_COLOURS[which]
    axes.step(ordered, shares, where="post", color=colour, label=label, linewidth=1.8, linestyle=("-", "--")[which])


SEEN = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("tpot", "p99"), ("latency", "p99"))
DONE = ("served", "in SLO", "busy", "KV", "queue", "preempted", "useful", "Jain", "note")


def engine_tables(runs: Sequence[EngineResult]) -> list[Table]:
    """What requests saw, and what the engine did; a row a run, named by what differs between them."""
    names = {
        "engine": [run.engine for run in runs],
        "order": [run.order for run in runs],
        "rate": [format_rate(run.rate_per_s) for run in runs],
    }
    shown = [name for name, column in names.items() if len(set(column)) > 1] or ["engine"]
    alike = ", ".join(column[0] for name, column in names.items() if name not in shown)
    labels = list(zip(*(names[name] for name in shown), strict=True))
    seen = [
        (*label, *(format_ms(getattr(run.summary, metric)[statistic].value) for metric, statistic in SEEN))
        for label, run in zip(labels, runs, strict=True)
    ]
    done = [(*label, *_done(run)) for label, run in zip(labels, runs, strict=True)]
    columns = tuple(f"{TITLES[f'{metric}_ms']} {statistic}" for metric, statistic in SEEN)
    classes = [
        (
            *label,
            each.name,
            *(format_ms(times[statistic]) for times in (each.ttft, each.latency) for statistic in ("mean", "p99")),
            _share(each.slo_attainment),
        )
        for label, run in zip(labels, runs, strict=True)
        for each in run.summary.by_class
    ]
    of_class = ("class", "TTFT mean", "TTFT p99", "latency mean", "latency p99", "on time")
    by_class = [Table("By class", (*shown, *of_class), classes, words=("order", "class"))] if classes else []
    return [
        Table(f"What requests saw ({alike})", (*shown, *columns), seen, words=("order",)).without_empty(),
        Table("What the engine did", (*shown, *DONE), done, words=("order", "note")).without_empty(),
        *by_class,
    ]


def _done(run: EngineResult) -> tuple[str, ...]:
    found = run.summary
    return (
        format_rate(found.throughput_per_s),
        _share(found.slo_attainment),
        _share(found.utilisation),
        _share(found.kv_usage),
        f"{found.queue:,.3g}",
        f"{found.counters['preemptions']:,}",
        _share(found.useful_share),
        "" if math.isnan(found.fairness) else f"{found.fairness:.3f}",
        "" if found.stable else "unstable",
    )


def _share(value: float) -> str:
    return "" if math.isnan(value) else format_percent(100 * value)


def engine_figure(found: Sequence[EngineResult]) -> Figure:
    """Of the first replication of each run: the distribution of TTFT, and waiting requests and KV blocks over time."""
    figure = style.new_figure((12.0, 4.2))
    ttft, waiting, cache = figure.subplots(1, 3)
    for which, result in enumerate(found[: len(style.LINE_COLOURS)]):
        label = f"{result.engine} {result.order} {format_rate(result.rate_per_s)}"
        colour = style.LINE_COLOURS[which]
        ordered = np.sort(result.first.ttft_ms)
        ttft.step(ordered / 1e3, np.arange(1, len(ordered) + 1) / len(ordered), color=colour, label=label)
        for line in result.first.timelines:
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


MOST_LABELLED = 24
WIDE = 20
"""Rates that span more than this are drawn on a logarithmic axis."""

_WORDS: Mapping[str, str] = {
    "t_cut_ms": "T_cut",
    "window_ms": "wait",
    "longest_ms": "wait at most",
    "ageing_ms": "ageing",
    "merge_below": "merge below",
}


def runs_table(runs: Sequence[SimResult]) -> Table:
    """One row a run: what the policy was, its response times with the interval of p99, and what the side path did."""
    rates = {_rate(run) for run in runs}
    sides = {list(run.share)[-1] for run in runs if len(run.share) > 1}
    side = sides.pop() if len(sides) == 1 else "side"
    rows = []
    for run in runs:
        latency, attained = run.latency, run.slo_attainment
        shares = list(run.share.values())
        rows.append(
            (
                run.policy,
                settings_text(run),
                _rate(run) if len(rates) > 1 else "",
                format_ms(latency["mean"].value),
                format_ms(latency["p50"].value),
                f"{format_ms(latency['p99'].value)}{_half_width(latency['p99'])}",
                format_percent(100 * shares[1]) if len(shares) > 1 else "",
                number(run.batch_size["p50"], 3),
                "" if attained is None else format_percent(100 * attained),
                "" if run.stable else "unstable",
            )
        )
    columns = ("policy", "settings", "rate", "mean", "p50", "p99", f"on {side}", "batch", "in SLA", "note")
    caption = f"Response times at {rates.pop()}" if len(rates) == 1 else "Response times"
    return Table(caption + _nominal(runs), columns, rows, words=("settings", "note")).without_empty()


def classes_table(runs: Sequence[SimResult]) -> Table:
    """Response times of each class of requests, a row a run and class; no row without classes."""
    several = len({run.rate_per_s for run in runs}) > 1
    rows = [
        (
            named(run),
            _rate(run) if several else "",
            each.name,
            *(format_ms(each.latency[statistic]) for statistic in ("mean", "p50", "p90", "p99")),
        )
        for run in runs
        for each in run.by_class
    ]
    columns = ("policy", "rate", "class", "mean", "p50", "p90", "p99")
    return Table("Response times by class", columns, rows, words=("class",)).without_empty()


def differences(runs: Sequence[SimResult]) -> list[str]:
    """What runs on the same load differ by, in sentences."""
    found = []
    several = len({run.rate_per_s for run in runs}) > 1
    for run in runs:
        if run.against is None or math.isnan(run.against.p99.low):
            continue
        gap = run.against.p99
        word = "above" if gap.value > 0 else "below"
        sure = "" if gap.low > 0 or gap.high < 0 else ", which may be chance"
        place = f" at {_rate(run)}" if several else ""
        found.append(
            f"p99 of {named(run, '{} {}')}{place} is {format_ms(abs(gap.value))} ±"
            f" {format_ms((gap.high - gap.low) / 2)} {word} that of {run.against.policy}{sure}."
        )
    return found


def rates_table(runs: Sequence[SimResult]) -> Table:
    """p99 by rate and policy, of each policy the best of its settings."""
    policies = list(dict.fromkeys(run.policy for run in runs))
    best = {(run.policy, run.rate_per_s): run for run in frontier(runs)}
    rates = sorted({run.rate_per_s for run in runs})
    asked = {(run.policy, run.rate_per_s) for run in runs}
    rows = []
    for rate in rates:
        cells = [format_rate(rate)]
        for policy in policies:
            run = best.get((policy, rate))
            none = "unstable" if (policy, rate) in asked else ""
            cells.append(none if run is None else number(run.latency["p99"].value, 3))
        rows.append(cells)
    return Table(f"p99 in ms by rate{_nominal(runs)}", ("rate", *policies), rows)


def settings_text(run: SimResult) -> str:
    """`T_cut 2 ms, B1 5`; what is the same for every policy, or has no effect, stays out."""
    parts = []
    for name, value in run.settings.items():
        if (
            name in ("max_batch", "rate_per_ms")
            or not value
            or value == math.inf
            or (name, value) == ("merge_below", 1)
        ):
            continue
        plain = number(value, 3) if isinstance(value, float) else str(value)
        shown = format_ms(value) if name.endswith("_ms") else plain
        parts.append(f"{_WORDS.get(name, name)} {shown}")
    return ", ".join(parts)


def runs_figure(runs: Sequence[SimResult], title: str = "") -> Figure:
    """p99 over the rate, a line a policy (with its best setting at each rate) where there are several rates; else each
    run's median and p99."""
    rates = {run.rate_per_s for run in runs if not math.isnan(run.rate_per_s)}
    inches = style.SINGLE_INCHES if len(rates) > 1 else (8.0, 1.5 + 0.5 * min(len(runs), MOST_LABELLED))
    figure = style.new_figure(inches)
    axes = figure.subplots()
    if len(rates) > 1:
        _over_rates(axes, runs, title)
    else:
        _side_by_side(axes, list(runs)[:MOST_LABELLED], title)
    return figure


def frontier(runs: Sequence[SimResult]) -> list[SimResult]:
    """Of each policy and rate the stable run with the least p99."""
    best: dict[tuple[str, str], SimResult] = {}
    for run in runs:
        if not run.stable or math.isnan(run.latency["p99"].value):
            continue
        # As text: of closed loops the rate is NaN, which is not equal to itself.
        key = (run.policy, str(run.rate_per_s))
        if key not in best or run.latency["p99"].value < best[key].latency["p99"].value:
            best[key] = run
    return sorted(best.values(), key=lambda run: (run.policy, _or_zero(run.rate_per_s)))


def _over_rates(axes: Any, runs: Sequence[SimResult], title: str) -> None:
    policies = list(dict.fromkeys(run.policy for run in runs))
    shown = frontier(runs)
    for i, policy in enumerate(policies):
        line = [run for run in shown if run.policy == policy]
        colour = style.LINE_COLOURS[i % len(style.LINE_COLOURS)]
        marker = style.LINE_MARKERS[i % len(style.LINE_MARKERS)]
        x, y = [run.rate_per_s for run in line], [run.latency["p99"].value for run in line]
        dashes = "-" if i < len(style.LINE_COLOURS) else "--"
        axes.plot(x, y, dashes, color=colour, marker=marker, markersize=4, linewidth=1.6, label=drawable(policy))
        for run in line:
            p99 = run.latency["p99"]
            if math.isfinite(p99.high - p99.low):
                axes.plot([run.rate_per_s] * 2, [p99.low, p99.high], color=colour, linewidth=1.0)
    tails = [run.latency["p99"].value for run in shown]
    if tails:
        style.log_y(axes, *style.padded(min(tails), max(tails)), style.decimal_ticks)
    rates = sorted({run.rate_per_s for run in runs})
    if rates[-1] > WIDE * rates[0]:
        style.log_x(axes, *style.padded(rates[0], rates[-1]), style.decimal_ticks)
    style.dress(axes, title or "99th percentile of response times", "arrival rate [req/s]", "p99 [ms]")
    style.legend(axes)


def _side_by_side(axes: Any, runs: Sequence[SimResult], title: str) -> None:
    for i, run in enumerate(runs):
        p50, p90, p99 = (run.latency[name].value for name in ("p50", "p90", "p99"))
        colour = style.LINE_COLOURS[0] if run.stable else style.SLA
        axes.plot([p50, p99], [i, i], color=colour, linewidth=2)
        axes.plot([p50], [i], "o", color=colour, markersize=6)
        axes.plot([p90], [i], "|", color=colour, markersize=9, markeredgewidth=2)
        axes.plot([p99], [i], "|", color=colour, markersize=16, markeredgewidth=2.5)
        axes.annotate(
            format_ms(p99),
            (_or_zero(p99), i),
            xytext=(6, 4),
            textcoords="offset points",
            fontsize=9,
            color=style.INK,
        )
    marked = [_label(run) + ("" if run.stable else " (unstable)") for run in runs]
    axes.set_yticks(range(len(runs)), marked)
    axes.set_xlim(0, 1.15 * max(_or_zero(run.latency["p99"].value) or 1.0 for run in runs))
    axes.set_ylim(len(runs) - 0.5, -0.5)
    style.dress(axes, title or "Median (dot), 90th and 99th percentile (bars)", "response time [ms]", "")


def _label(run: SimResult) -> str:
    """Policy and settings, these on a line of their own where both are long."""
    policy, settings = drawable(run.policy), drawable(settings_text(run))
    return f"{policy}\n{settings}" if len(policy) + len(settings) > 20 else " ".join(filter(None, (policy, settings)))


def named(run: SimResult, form: str = "{} ({})") -> str:
    """The policy with its settings, if it has any."""
    settings = settings_text(run)
    return form.format(run.policy, settings) if settings else run.policy


def _nominal(runs: Sequence[SimResult]) -> str:
    """What the caption says of paths with nominal times."""
    names = list(dict.fromkeys(name for run in runs for name in run.nominal))
    return f" (times of {' and '.join(names)} are nominal, not measured)" if names else ""


def _rate(run: SimResult) -> str:
    rate = run.rate_per_s
    return f"{format_rate(run.throughput_per_s)} (closed)" if math.isnan(rate) else format_rate(rate)


def _half_width(p99: Interval) -> str:
    if not p99.value or math.isnan(p99.high - p99.low):
        return ""
    return f" ± {format_percent(50 * (p99.high - p99.low) / p99.value)}"


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
