"""Simulations as tables: policies, serving engines, and measured runs beside simulated ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from latfit.reporting.fit.tables import Table
from latfit.simulation import ClassOutcome, EngineResult, Interval, SimResult
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.validation import JUDGED, Validation

FEW, FEW_CLASSES = 8, 4  # rows of a brief table, and runs of which it shows every class

TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "latency_ms": "latency", "tpot_with_first_ms": "TPOT with first"}


def _run_caption(found: Validation) -> str:
    counters = found.run.counters
    return f"{len(found.measured):,} requests, {counters.steps:,} steps, {counters.preemptions:,} preemptions"


def validation_table(found: Validation) -> Table:
    """Show a row a figure: measured, simulated, how far off, and how far it may be."""
    rows = [
        (
            f"{TITLES[each.metric]} {each.statistic}",
            format_ms(each.measured, 4),
            format_ms(each.simulated, 4),
            "" if math.isnan(each.error_pct) else format_percent(each.error_pct, signed=True),
            ""
            if each.limit_pct is None
            else f"{'within' if each.holds else 'NOT within'} {format_percent(each.limit_pct)}",
        )
        for each in found.figures
    ]
    columns = ("", "measured", "simulated", "error", "verdict")
    return Table(_run_caption(found), columns, rows, words=("verdict",))


def brief_validation_table(found: Validation) -> Table:
    """Show mean, p90 and p99 of each judged metric: measured, and how far off the simulation is."""
    rows = []
    for metric in JUDGED:
        figures = {each.statistic: each for each in found.figures if each.metric == metric}
        rows.append(
            (
                TITLES[metric],
                *(format_ms(each) for each in (figures["mean"].measured, figures["mean"].simulated)),
                *(f"{figures[name].error_pct:+.1f} %" for name in ("mean", "p90", "p99")),
                "ok" if all(each.holds for each in figures.values()) else "differs",
            )
        )
    columns = ("", "measured mean", "simulated mean", "error: mean", "p90", "p99", "verdict")
    return Table(_run_caption(found).rpartition(", ")[0], columns, rows, words=("verdict",))


def clocks_table(found: Validation) -> Table:
    """Show means of a run by the clocks of client, server and engine, and simulated.

    A watched server has no client, but the bucket of its p99.
    """
    rows = []
    for each in found.clocks:
        error = format_percent(each.error_pct, signed=True)
        if found.watched:
            (low, high), p99 = each.quantiles["p99"]
            bucket = f"{format_ms(low)} to {format_ms(high)}" if high < math.inf else f"above {format_ms(low)}"
            times, last = [each.server, each.measured, each.simulated], [bucket, format_ms(p99)]
        else:
            times = [each.client, each.server, each.measured, each.simulated]
            last = ["ok" if each.holds else "differs"]
        rows.append((TITLES[each.metric], *map(format_ms, times), error, *last))
    if not found.watched:
        columns = ("mean", "client", "server", "engine", "simulated", "error", "verdict")
        return Table(_run_caption(found), columns, rows, words=("verdict",))
    caption = f"Of {found.server.requests if found.server else 0:,} requests that ended while it was watched"
    return Table(caption, ("mean", "server", "engine", "simulated", "error", "p99, server", "simulated p99"), rows)


SEEN = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("tpot", "p99"), ("latency", "p99"))
DONE = ("served", "in SLO", "busy", "KV", "queue", "preempted", "useful", "Jain", "note")


def varied(run: EngineResult) -> Mapping[str, object]:
    """The settings that a sweep varied, those apart that every run is named by."""
    return {name: value for name, value in run.labels.items() if name not in ("rate", "batching", "order")}


def _names(runs: Sequence[EngineResult]) -> tuple[list[str], list[tuple[str, ...]], str]:
    """Return what differs between runs, its values by run, and what is equal."""
    names = {
        "engine": [run.engine for run in runs],
        "order": [run.order for run in runs],
        "rate": [format_rate(run.rate_per_s) for run in runs],
    }
    swept = dict.fromkeys(name for run in runs for name in varied(run))
    names |= {name: [str(varied(run).get(name, "")) for run in runs] for name in swept}
    shown = [name for name, column in names.items() if len(set(column)) > 1] or ["engine"]
    equal = [f"{name} {names[name][0]}" if name in swept else names[name][0] for name in names if name not in shown]
    return shown, list(zip(*(names[name] for name in shown), strict=True)), f" ({', '.join(equal)})" if equal else ""


def best_engine(runs: Sequence[EngineResult]) -> tuple[EngineResult | None, int]:
    """Return the stable run with the lowest p99 at the highest rate, and the number of runs at that rate."""
    stable = [run for run in runs if run.summary.stable]
    highest = max((run.rate_per_s for run in stable), default=0.0)
    there = [run for run in stable if not run.rate_per_s < highest]  # a load of one request has no rate
    return min(there, key=lambda run: run.summary.latency["p99"].value, default=None), len(there)


def engine_tables(runs: Sequence[EngineResult], *, brief: bool = False) -> list[Table]:
    """Show a row a run, named by what differs: what requests saw, what the engine did; then by class.

    brief: of one run a row a metric; of several their tails.
    """
    shown, labels, equal = _names(runs)
    label_columns = shown if len(runs) > 1 else []
    classes = [
        (*(label if len(runs) > 1 else ()), each.name, *_class_row(each))
        for label, run in zip(labels, runs, strict=True)
        for each in run.summary.by_class
        if not brief or len(runs) <= FEW_CLASSES
    ]
    columns = (*label_columns, "class", "TTFT p50", "p99", "TPOT p50", "p99", "latency p50", "p99", "in SLO")
    last = [Table("By class", columns, classes, words=("order", "class"))] if classes else []
    if brief and len(runs) == 1:
        return [_one_engine(runs[0]), *last]
    seen = tuple(f"{TITLES[f'{metric}_ms']} {statistic}" for metric, statistic in SEEN)
    rows = [
        (*label, *(format_ms(getattr(run.summary, metric)[name].value) for metric, name in SEEN), *_done(run))
        for label, run in zip(labels, runs, strict=True)
    ]
    whole = Table("", (*shown, *seen, *DONE), rows, words=("order", "note"))

    def part(caption: str, *columns: str) -> Table:
        return replace(whole.only(*shown, *columns), caption=caption).without_empty()

    if brief:
        tails = ("TTFT p99", "TPOT p99", "latency p99", "served", "note")
        return [_thinned(part(f"Serving engines{equal}", *tails)), *last]
    return [part(f"What requests saw{equal}", *seen), part("What the engine did", *DONE), *last]


def _class_row(each: ClassOutcome) -> tuple[str, ...]:
    times = [times[name] for times in (each.ttft, each.tpot, each.latency) for name in ("p50", "p99")]
    return (*map(format_ms, times), _share(each.slo_attainment))


def _one_engine(run: EngineResult) -> Table:
    found = run.summary
    metrics = (("TTFT", found.ttft), ("TPOT", found.tpot), ("latency", found.latency))
    rows = [
        (title, *(format_ms(times[name].value) for name in ("mean", "p50", "p90", "p99")))
        for title, times in metrics
        if not math.isnan(times["p99"].value)
    ]
    cached, first = found.prefix_hit_rate, run.first
    caption = (
        f"{run.engine}, {run.order}: {format_rate(found.throughput_per_s)} served,"
        f" {number(found.output_tokens_per_s)} output tokens/s"
        f"{f', {format_percent(100 * cached)} of prompts cached' if cached > 0 else ''}"
    )
    if first is not None and first.scaled is not None:
        serving, hours = first.scaled[1], f"{number(found.replica_hours, 3)} replica-hours"
        mean = f"{number(first.replicas, 3)} in the mean"
        caption += f", {serving.min():.0f} to {serving.max():.0f} replicas, {mean}, {hours}"
    return Table(caption, ("", "mean", "p50", "p90", "p99"), rows)


def _thinned(table: Table) -> Table:
    """At most FEW of the rows, the first and the last among them."""
    count = len(table.rows)
    if count <= FEW:
        return table
    rows = [table.rows[round(i * (count - 1) / (FEW - 1))] for i in range(FEW)]
    return replace(table, rows=rows, note=f"{FEW} of {count} rows; --verbose shows all.")


def _done(run: EngineResult) -> tuple[str, ...]:
    found = run.summary
    return (
        format_rate(found.throughput_per_s),
        _share(found.slo_attainment),
        _share(found.utilisation),
        _share(found.kv_usage),
        f"{found.queue:,.3g}",
        f"{found.preemptions:,}",
        _share(found.useful_share),
        "" if math.isnan(found.fairness) else f"{found.fairness:.3f}",
        "" if found.stable else "unstable",
    )


def _share(value: float) -> str:
    return "" if math.isnan(value) else format_percent(100 * value)


_WORDS: Mapping[str, str] = {
    "t_cut_ms": "T_cut",
    "window_ms": "wait",
    "longest_ms": "wait at most",
    "ageing_ms": "ageing",
    "merge_below": "merge below",
}


def runs_table(runs: Sequence[SimResult], *, brief: bool = False) -> Table:
    """One row a run: what the policy was, its response times with the interval of p99, and what the side path did.

    brief: of many runs p99 by rate and policy, or the best ones.
    """
    rates = {rate_text(run) for run in runs}
    sides = {list(run.share)[-1] for run in runs if len(run.share) > 1}
    side = sides.pop() if len(sides) == 1 else "side"
    shown, note = runs, ""
    if brief and len(runs) > FEW:
        if len(rates) > 1 and len({run.policy for run in runs}) <= FEW:
            return _thinned(rates_table(runs))
        shown = sorted(runs, key=lambda run: (not run.stable, run.latency["p99"].value))[:FEW]
        note = f"The {FEW} lowest p99 of {len(runs)} runs; --verbose shows all."
    rows = []
    for run in shown:
        latency, attained = run.latency, run.slo_attainment
        shares = list(run.share.values())
        rows.append(
            (
                run.policy,
                settings_text(run),
                rate_text(run) if len(rates) > 1 else "",
                format_ms(latency["mean"].value),
                format_ms(latency["p50"].value),
                f"{format_ms(latency['p99'].value)}{half_width(latency['p99'])}",
                format_percent(100 * shares[1]) if len(shares) > 1 else "",
                number(run.batch_size["p50"], 3),
                "" if attained is None else format_percent(100 * attained),
                "" if run.stable else "unstable",
            )
        )
    columns = ("policy", "settings", "rate", "mean", "p50", "p99", f"on {side}", "batch", "in SLA", "note")
    caption = f"Response times at {rates.pop()}" if len(rates) == 1 else "Response times"
    table = Table(caption + _nominal(runs), columns, rows, words=("settings", "note"), note=note)
    return (
        table.only(*(name for name in columns if name not in ("mean", "batch"))) if brief else table
    ).without_empty()


def classes_table(runs: Sequence[SimResult]) -> Table:
    """Response times of each class of requests, a row a run and class; no row without classes."""
    several = len({run.rate_per_s for run in runs}) > 1
    rows = [
        (
            named(run),
            rate_text(run) if several else "",
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
        gap = run.vs_baseline
        if not gap or math.isnan(gap.ci[0]):
            continue
        low, high = gap.ci
        word = "above" if gap.p99_ms > 0 else "below"
        sure = "" if low > 0 or high < 0 else ", which may be chance"
        place = f" at {rate_text(run)}" if several else ""
        found.append(
            f"p99 of {run.policy} {settings_text(run)}".rstrip()
            + f"{place} is {format_ms(abs(gap.p99_ms))} ± {format_ms((high - low) / 2)} {word} that of"
            + f" {gap.policy}{sure}."
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
    return sorted(best.values(), key=lambda run: (run.policy, known_rate(run)))


def best_policies(runs: Sequence[SimResult], sla_ms: float) -> list[SimResult]:
    """Return the best run of each policy at the highest rate carried, within the SLA if any is; lowest p99 first."""
    stable = frontier(runs)
    within = [run for run in stable if run.latency["p99"].value <= sla_ms] or stable
    highest = max((known_rate(run) for run in within), default=0.0)
    there = [run for run in within if known_rate(run) == highest]
    return sorted(there, key=lambda run: run.latency["p99"].value)


def named(run: SimResult) -> str:
    """Return the policy with its settings, if it has any."""
    settings = settings_text(run)
    return f"{run.policy} ({settings})" if settings else run.policy


def _nominal(runs: Sequence[SimResult]) -> str:
    """What the caption says of paths with nominal times."""
    names = list(dict.fromkeys(name for run in runs for name in run.nominal))
    return f" (times of {' and '.join(names)} are nominal, not measured)" if names else ""


def rate_text(run: SimResult) -> str:
    """Return the rate, or what stands for it in a closed loop and in a load of one moment."""
    if math.isnan(run.throughput_per_s):
        return "one request" if run.requests == 1 else f"{run.requests:,} requests at once"
    if math.isnan(run.rate_per_s):
        return f"{format_rate(run.throughput_per_s)} (closed loop)"
    return format_rate(run.rate_per_s)


def half_width(found: Interval) -> str:
    """Return ` ± 0.6 %`, or nothing if there is no interval."""
    if not found.value or math.isnan(found.high - found.low):
        return ""
    return f" ± {format_percent(50 * (found.high - found.low) / found.value)}"


def known_rate(run: SimResult) -> float:
    """Return the rate per second, 0 for a closed loop."""
    return 0.0 if math.isnan(run.rate_per_s) else run.rate_per_s
