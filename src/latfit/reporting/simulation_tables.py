"""Tables of simulations and validations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from latfit.reporting.table import Column, Table, make_table, of_share, signed_percent
from latfit.simulation import EngineResult, EngineSummary, Interval, SimResult, Times
from latfit.units import count_text, format_ms, format_percent, format_rate, number
from latfit.validation import JUDGED, Bucket, Figure, Ledger, PromisedFigure, Validation

FEW, FEW_CLASSES = 8, 4  # rows of a brief table, and runs of which it shows every class
MAX_RUNS = 24  # one a row
STATISTICS = ("mean", "p50", "p90", "p99")

TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "latency", "tpot_with_first_ms": "TPOT with first"}


def _run_caption(found: Validation) -> str:
    return f"{found.requests:,} requests, {found.engine.steps:,} steps"


def validation_table(found: Validation) -> Table:
    def verdict(row: tuple[str, Figure]) -> str | None:
        figure = row[1]
        within = "within" if figure.holds else "NOT within"
        return None if figure.limit_pct is None else f"{within} {figure.limit_pct:g} %"

    return make_table(
        _run_caption(found),
        [(f"{TITLES[metric]} {name}", each) for metric, row in found.metrics.items() for name, each in row.items()],
        ("", lambda row: row[0]),
        ("measured", lambda row: format_ms(row[1].measured, 4)),
        ("simulated", lambda row: format_ms(row[1].simulated, 4)),
        ("error", lambda row: "" if math.isnan(row[1].error_pct) else signed_percent(row[1].error_pct)),
        ("verdict", verdict),
        words=("verdict",),
    )


def brief_validation_table(found: Validation) -> Table:
    rows = []
    for metric in JUDGED:
        figures = found.metrics[metric]
        if math.isnan(figures["mean"].measured):  # TPOT of requests with one output token
            continue
        means = map(format_ms, (figures["mean"].measured, figures["mean"].simulated))
        errors = (f"{figures[name].error_pct:+.1f} %" for name in ("mean", "p90", "p99"))
        verdict = "ok" if all(each.holds for each in figures.values()) else "differs"
        rows.append((TITLES[metric], *means, *errors, verdict))
    columns = ("", "measured mean", "simulated mean", "error: mean", "p90", "p99", "verdict")
    return Table(_run_caption(found), columns, rows, words=("verdict",))


def clocks_table(found: Validation) -> Table:
    watched, caption = found.watched, _run_caption(found)
    if watched:
        caption = f"Of {found.server.requests if found.server else 0:,} requests that ended while it was watched"

    def ends(bucket: Bucket) -> str:
        low, high = format_ms(bucket.above), format_ms(bucket.up_to)
        return f"{low} to {high}" if bucket.up_to < math.inf else f"above {low}"

    return make_table(
        caption,
        found.clocks.items(),
        ("mean", lambda row: TITLES[row[0]]),
        ("client", lambda row: None if watched else row[1].client, format_ms),
        ("server", lambda row: row[1].server, format_ms),
        ("engine", lambda row: row[1].engine, format_ms),
        ("simulated", lambda row: row[1].simulated, format_ms),
        ("error", lambda row: row[1].error_pct, signed_percent),
        ("p99, server", lambda row: row[1].quantiles["p99"] if watched else None, ends),
        ("simulated p99", lambda row: row[1].quantiles["p99"].simulated if watched else None, format_ms),
        ("verdict", lambda row: None if watched else "ok" if row[1].holds else "differs"),
        words=("verdict",),
    )


def _share(value: float) -> str:
    return "" if math.isnan(value) else of_share(value)


TAILS: Sequence[Column] = (
    ("TTFT p99", "ttft.p99", format_ms),
    ("TPOT p99", "tpot.p99", format_ms),
    ("latency p99", "latency.p99", format_ms),
    ("served", "throughput_per_s", format_rate),
)
WORK: Sequence[Column] = (
    ("in SLO", "slo_attainment", _share),
    ("busy", "utilisation", _share),
    ("KV", "kv_usage", _share),
    ("queue", "queue", "{:,.3g}".format),
    ("preempted", "preemptions", "{:,}".format),
    ("useful", "useful_share", _share),
    ("Jain", "fairness", lambda value: "" if math.isnan(value) else f"{value:.3f}"),
)


def run_labels(runs: Sequence[EngineResult]) -> list[str]:
    """Return what distinguishes each run from the others."""
    facts = []
    for run in runs:
        settings = (
            f"{name} {value}" for name, value in run.labels.items() if name not in ("rate", "batching", "order")
        )
        facts.append((run.engine, run.order, format_rate(run.rate_per_s), *settings))
    differing = [i for i, values in enumerate(zip(*facts, strict=False)) if len(set(values)) > 1]
    return [", ".join(each[i] for i in differing) or each[0] for each in facts]


def best_engine(runs: Sequence[EngineResult]) -> tuple[EngineResult | None, int]:
    """Return the stable run with the lowest p99 at the highest rate, and the number of runs there."""
    stable = [run for run in runs if run.summary.stable]
    highest = max((run.rate_per_s for run in stable), default=0.0)
    there = [run for run in stable if not run.rate_per_s < highest]  # a load of one request has no rate
    return min(there, key=lambda run: run.summary.latency.p99, default=None), len(there)


def engine_tables(runs: Sequence[EngineResult], *, brief: bool = False) -> list[Table]:
    labels = run_labels(runs)
    note: Column = ("note", "stable", lambda stable: "" if stable else "unstable")
    columns = [*TAILS, note] if brief else [*TAILS, *WORK, note]
    table = make_table("Serving engines", [run.summary for run in runs], *columns, words=("note",))
    rows = [(label, *row) for label, row in zip(labels, table.rows, strict=True)]
    table = replace(table, columns=("run", *table.columns), rows=rows)
    tables = [_one_engine(runs[0])] if len(runs) == 1 else []
    if not brief or len(runs) > 1:
        tables.append(_thin_rows(table) if brief else table)
    if not brief or len(runs) <= FEW_CLASSES:
        names = labels if len(runs) > 1 else [""]
        tables.append(
            classes_table(
                [(name, each) for name, run in zip(names, runs, strict=True) for each in run.summary.by_class]
            )
        )
    return [each for each in tables if each.rows]


def _one_engine(run: EngineResult) -> Table:
    summary, first = run.summary, run.first
    caption = f"{run.engine}, {run.order}: {format_rate(summary.throughput_per_s)} served"
    caption += f", {number(summary.output_tokens_per_s)} output tokens/s"
    if summary.prefix_hit_rate > 0:
        caption += f", {of_share(summary.prefix_hit_rate)} of prompts cached"
    if first is not None and first.scaled is not None:
        serving, hours = first.scaled[1], number(summary.replica_hours, 3)
        replicas = f"{serving.min():.0f} to {serving.max():.0f} replicas, {number(first.replicas, 3)} on average"
        caption += f", {replicas}, {hours} replica-hours"
    return times_table(caption, summary)


def measured_times(summary: EngineSummary) -> list[tuple[str, Times]]:
    times = (("TTFT", summary.ttft), ("TPOT", summary.tpot), ("latency", summary.latency))
    return [(title, each) for title, each in times if not math.isnan(each.p99)]


def times_table(caption: str, summary: EngineSummary, wide: Sequence[str] = ()) -> Table:
    """wide: statistics shown with half the width of their interval."""
    rows = [
        (title, *(format_ms(times[name].value) + half_width(times[name]) * (name in wide) for name in STATISTICS))
        for title, times in measured_times(summary)
    ]
    return Table(caption, ("", *STATISTICS), rows)


def _thin_rows(table: Table) -> Table:
    """Return at most FEW rows."""
    count = len(table.rows)
    if count <= FEW:
        return table
    rows = [table.rows[round(i * (count - 1) / (FEW - 1))] for i in range(FEW)]
    return replace(table, rows=rows, note=f"{FEW} of {count} rows; --verbose shows all.")


def classes_table(classes: Sequence[tuple[str, Any]]) -> Table:
    rows = []
    for label, each in classes:
        times = [getattr(each, metric, None) for metric in ("ttft", "tpot", "latency")]
        cells = [format_ms(time[name]) if time else "" for time in times for name in ("p50", "p99")]
        rows.append((label, each.name, *cells, _share(getattr(each, "slo_attainment", math.nan))))
    seen = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "latency p50", "latency p99")
    return Table("By class", ("run", "class", *seen, "in SLO"), rows, words=("class",)).without_empty()


def policy_tables(runs: Sequence[SimResult], *, brief: bool = False) -> list[Table]:
    if brief:
        return [runs_table(runs, brief=True)]
    classes = [(f"{named(run)}, {rate_text(run)}", each) for run in runs for each in run.by_class]
    shown = rates_table(runs) if len(runs) > MAX_RUNS else runs_table(runs)
    return [table for table in (shown, classes_table(classes)) if table.rows]


def runs_table(runs: Sequence[SimResult], *, brief: bool = False) -> Table:
    rates = {rate_text(run) for run in runs}
    sides = {list(run.share)[-1] for run in runs if len(run.share) > 1}
    side = sides.pop() if len(sides) == 1 else "side"
    shown, note = runs, ""
    if brief and len(runs) > FEW:
        if len(rates) > 1 and len({run.policy for run in runs}) <= FEW:
            return _thin_rows(rates_table(runs))
        shown = sorted(runs, key=lambda run: (not run.stable, run.latency.p99))[:FEW]
        note = f"The {FEW} lowest p99 of {len(runs)} runs; --verbose shows all."
    several = len(rates) > 1
    return make_table(
        ("Response times" if several else f"Response times at {rates.pop()}") + _nominal(runs),
        shown,
        ("policy", "policy"),
        ("settings", settings_text),
        ("rate", lambda run: rate_text(run) if several else None),
        ("mean", lambda run: None if brief else run.latency.mean, format_ms),
        ("p50", "latency.p50", format_ms),
        ("p99", lambda run: f"{format_ms(run.latency.p99)}{half_width(run.latency['p99'])}"),
        (f"on {side}", lambda run: list(run.share.values())[1] if len(run.share) > 1 else None, of_share),
        ("batch", lambda run: None if brief else number(run.batch_size["p50"], 3)),
        ("in SLA", "slo_attainment", of_share),
        ("note", lambda run: "" if run.stable else "unstable"),
        words=("settings", "note"),
        note=note,
    )


def rates_table(runs: Sequence[SimResult]) -> Table:
    best = {(run.policy, run.rate_per_s): run.latency.p99 for run in frontier(runs)}
    simulated = {(run.policy, run.rate_per_s) for run in runs}
    policies = list(dict.fromkeys(run.policy for run in runs))

    def cell(policy: str, rate: float) -> str:
        if (policy, rate) in best:
            return number(best[policy, rate], 3)
        return "unstable" if (policy, rate) in simulated else ""

    rates = sorted({run.rate_per_s for run in runs})
    rows = [(format_rate(rate), *(cell(policy, rate) for policy in policies)) for rate in rates]
    return Table(f"p99 in ms by rate{_nominal(runs)}", ("rate", *policies), rows)


SETTING_WORDS: Mapping[str, str] = {
    "t_cut_ms": "T_cut",
    "window_ms": "wait",
    "longest_ms": "wait at most",
    "ageing_ms": "ageing",
    "merge_below": "merge below",
}


def settings_text(run: SimResult) -> str:
    """Return `T_cut 2 ms, B1 5`."""
    parts = []
    for name, value in run.settings.items():
        without_effect = not value or value == math.inf or (name, value) == ("merge_below", 1)
        if name not in ("max_batch", "rate_per_ms") and not without_effect:
            plain = number(value, 3) if isinstance(value, float) else str(value)
            parts.append(f"{SETTING_WORDS.get(name, name)} {format_ms(value) if name.endswith('_ms') else plain}")
    return ", ".join(parts)


def frontier(runs: Sequence[SimResult]) -> list[SimResult]:
    """Return the stable run with the lowest p99 of each policy and rate."""
    best: dict[tuple[str, str], SimResult] = {}
    for run in runs:
        # As text: the rate of closed loops is NaN, which is not equal to itself.
        key = (run.policy, str(run.rate_per_s))
        if run.stable and not math.isnan(run.latency.p99):
            best[key] = min(best.get(key, run), run, key=lambda each: each.latency.p99)
    return sorted(best.values(), key=lambda run: (run.policy, known_rate(run)))


def best_policies(runs: Sequence[SimResult], sla_ms: float) -> list[SimResult]:
    """Return the best run of each policy at the highest rate carried, lowest p99 first."""
    stable = frontier(runs)
    within = [run for run in stable if run.latency.p99 <= sla_ms] or stable
    highest = max(map(known_rate, within), default=0.0)
    return sorted((run for run in within if known_rate(run) == highest), key=lambda run: run.latency.p99)


def named(run: SimResult) -> str:
    settings = settings_text(run)
    return f"{run.policy} ({settings})" if settings else run.policy


def _nominal(runs: Sequence[SimResult]) -> str:
    names = list(dict.fromkeys(name for run in runs for name in run.nominal))
    return f" (times of {' and '.join(names)} are nominal, not measured)" if names else ""


def rate_text(run: SimResult) -> str:
    if math.isnan(run.throughput_per_s):
        return "one request" if run.requests == 1 else f"{run.requests:,} requests at once"
    if math.isnan(run.rate_per_s):
        return f"{format_rate(run.throughput_per_s)} (closed loop)"
    return format_rate(run.rate_per_s)


def half_width(found: Interval) -> str:
    """Return ` ± 0.6 %`, empty without an interval."""
    if not found.value or math.isnan(found.high - found.low):
        return ""
    return f" ± {format_percent(50 * (found.high - found.low) / found.value)}"


def known_rate(run: SimResult) -> float:
    return 0.0 if math.isnan(run.rate_per_s) else run.rate_per_s


SHOWN_ENTRIES = 8  # newest runs on a terminal

NOMINAL_PCT = 95.0  # coverage that the intervals of plans state


def with_interval(value: float | None, ends: tuple[float, float] | None) -> str:
    """Return `36 ms (32 ms to 40 ms)`; infinite: not answered."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else "no answer"
    if ends is None:
        return format_ms(value)
    upper = f"to {format_ms(ends[1])}" if math.isfinite(ends[1]) else "or more"
    return f"{format_ms(value)} ({format_ms(ends[0])} {upper})"


def promised(row: tuple[Any, PromisedFigure]) -> str:
    return f"{row[1].name} {format_ms(row[1].limit_ms)}"


PROMISES: Sequence[Column] = (
    ("planned", lambda row: with_interval(row[1].planned_ms, row[1].planned_interval_ms)),
    ("measured", lambda row: with_interval(row[1].measured_ms, row[1].interval_ms)),
)
"""Columns of a run and a promised figure."""


def ledger_table(ledger: Ledger, *, brief: bool = False) -> Table:
    entries = ledger.entries[-SHOWN_ENTRIES:] if brief else ledger.entries
    return make_table(
        "",
        [(entry, each) for entry in entries for each in entry.figures],
        ("added", lambda row: row[0].added[:10]),
        ("run", lambda row: None if brief else Path(row[0].run).name),
        ("promise", promised),
        *PROMISES,
        ("error", lambda row: row[1].error_pct, lambda error: format_percent(error, signed=True)),
        ("verdict", lambda row: "another load" if not row[0].comparable else "kept" if row[1].kept else "broken"),
        words=("run", "promise", "verdict"),
    )


def ledger_lines(ledger: Ledger) -> list[str]:
    found, coverage = [], ledger.coverage_pct
    if coverage is not None:
        share, (low, high) = coverage
        found.append(
            f"Stated intervals cover {format_percent(share)} of the testable percentiles (95 %:"
            f" {format_percent(low)} to {format_percent(high)}), {format_percent(NOMINAL_PCT)} stated."
        )
    if other := len(ledger.entries) - len(ledger.counted):
        found.append(f"Not counted, because of another load than planned: {count_text(other, 'run')}.")
    if failed := sum(entry.failed for entry in ledger.counted):
        found.append(f"{count_text(failed, 'request')} without an answer count as slower than any limit.")
    return found
