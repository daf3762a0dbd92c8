"""Simulated serving engines, and measured ones beside them: tables and figures."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from latfit.report import style
from latfit.report.tables import Table
from latfit.sim.engine.serve import EngineRun
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


Run = Mapping[str, Any]


def engine_tables(runs: Sequence[Run]) -> list[Table]:
    """What requests saw, and what the engine did; a row a run, named by what differs between them."""
    names = {
        "engine": [run["engine"] for run in runs],
        "order": [run["order"] for run in runs],
        "rate": [f"{run['rate_per_s']:,.4g}/s" for run in runs],
    }
    shown = [name for name, column in names.items() if len(set(column)) > 1] or ["engine"]
    alike = ", ".join(column[0] for name, column in names.items() if name not in shown)
    labels = list(zip(*(names[name] for name in shown), strict=True))
    seen = [(*label, *(format_ms(_known(run[m][s])) for m, s in SEEN)) for label, run in zip(labels, runs, strict=True)]
    done = [(*label, *_done(run)) for label, run in zip(labels, runs, strict=True)]
    columns = tuple(f"{TITLES[metric]} {statistic}" for metric, statistic in SEEN)
    classes = [
        (
            *label,
            each["class"],
            *(format_ms(_known(each[m][s])) for m in ("ttft_ms", "latency_ms") for s in ("mean", "p99")),
            _share(each["slo_attainment"]),
        )
        for label, run in zip(labels, runs, strict=True)
        for each in run["by_class"]
    ]
    of_class = ("class", "TTFT mean", "TTFT p99", "latency mean", "latency p99", "on time")
    by_class = [Table("By class", (*shown, *of_class), classes, words=("order", "class"))] if classes else []
    return [
        Table(f"What requests saw ({alike})", (*shown, *columns), seen, words=("order",)).without_empty(),
        Table("What the engine did", (*shown, *DONE), done, words=("order", "note")).without_empty(),
        *by_class,
    ]


SEEN = (("ttft_ms", "mean"), ("ttft_ms", "p99"), ("tpot_ms", "mean"), ("tpot_ms", "p99"), ("latency_ms", "p99"))
DONE = ("served", "in SLO", "busy", "KV", "queue", "preempted", "useful", "Jain", "note")


def _done(run: Run) -> tuple[str, ...]:
    fairness = _known(run["fairness"])
    return (
        f"{run['throughput_per_s']:,.3g}/s",
        _share(run["slo_attainment"]),
        _share(run["utilisation"]["engine"]),
        _share(run["kv_usage"]),
        f"{run['queue']:,.3g}",
        f"{run['preemptions']:,}",
        _share(run["useful_share"]),
        "" if math.isnan(fairness) else f"{fairness:.3f}",
        "" if run["stable"] else "unstable",
    )


def _names(run: Run) -> tuple[str, str, str]:
    return run["engine"], run["order"], f"{run['rate_per_s']:,.4g}/s"


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _share(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{100 * value:.0f} %"


def engine_figure(found: Sequence[tuple[Run, EngineRun]]) -> Figure:
    """Of the first replication of each run: the distribution of TTFT, and waiting requests and KV blocks over time."""
    figure = style.new_figure((12.0, 4.2))
    ttft, waiting, cache = figure.subplots(1, 3)
    for which, (entry, run) in enumerate(found[: len(style.LINE_COLOURS)]):
        label = " ".join(_names(entry))
        colour = style.LINE_COLOURS[which]
        ordered = np.sort(run.ttft_ms)
        ttft.step(ordered / 1e3, np.arange(1, len(ordered) + 1) / len(ordered), color=colour, label=label)
        for line in run.timelines:
            seconds = (line.start_ms + (np.arange(len(line.busy)) + 0.5) * line.slice_ms) / 1e3
            waiting.plot(seconds, line.waiting, color=colour, linewidth=1.2)
            cache.plot(seconds, 100 * line.kv_usage, color=colour, linewidth=1.2)
    style.dress(ttft, "Time to first token", "s", "share of requests")
    style.dress(waiting, "Waiting requests", "s", "requests")
    style.dress(cache, "KV blocks in use", "s", "%")
    ttft.set_ylim(0, 1)
    waiting.set_ylim(bottom=0)
    cache.set_ylim(0, 105)
    style.legend(ttft, "lower right")
    return figure
