"""Simulations as tables: policies, serving engines, and measured runs beside simulated ones."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from latfit.reporting.fit.tables import Table
from latfit.simulation import EngineResult, Interval, SimResult
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.validation import Validation

FEW, FEW_CLASSES = 8, 4
"""Rows of a brief table, and runs of which it shows every class."""

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


def clocks_table(found: Validation) -> Table:
    """Means of a run as the client, the server and its engine have them, and simulated; of a watch, where there is no
    client, the bucket of the server's p99 too."""
    if found.watched:
        return _watched_table(found)
    rows = [
        (
            TITLES[each.metric],
            *(format_ms(value) for value in (each.client, each.server, each.measured, each.simulated)),
            format_percent(each.error_pct, signed=True),
            "ok" if each.holds else "differs",
        )
        for each in found.clocks
    ]
    counters = found.run.counters
    caption = f"{len(found.measured):,} requests, {counters.steps:,} steps, {counters.preemptions:,} preemptions"
    columns = ("mean", "client", "server", "engine", "simulated", "error", "verdict")
    return Table(caption, columns, rows, words=("verdict",))


def _watched_table(found: Validation) -> Table:
    rows = [
        (
            TITLES[each.metric],
            *(format_ms(value) for value in (each.server, each.measured, each.simulated)),
            format_percent(each.error_pct, signed=True),
            f"{format_ms(low)} to {format_ms(high)}" if high < math.inf else f"above {format_ms(low)}",
            format_ms(p99),
        )
        for each in found.clocks
        for (low, high), p99 in [each.quantiles["p99"]]
    ]
    server = found.server
    caption = f"Of {0 if server is None else server.requests:,} requests that ended while it was watched"
    columns = ("mean", "server", "engine", "simulated", "error", "p99, server", "simulated p99")
    return Table(caption, columns, rows)


SEEN = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("tpot", "p99"), ("latency", "p99"))
DONE = ("served", "in SLO", "busy", "KV", "queue", "preempted", "useful", "Jain", "note")


def varied(run: EngineResult) -> Mapping[str, object]:
    """The settings that a sweep varied, those apart that every run is named by."""
    return {name: value for name, value in run.labels.items() if name not in ("rate", "batching", "order")}


def _told_apart(runs: Sequence[EngineResult]) -> tuple[list[str], list[tuple[str, ...]], str]:
    """What differs between runs, its values by run, and what is alike."""
    names = {
        "engine": [run.engine for run in runs],
        "order": [run.order for run in runs],
        "rate": [format_rate(run.rate_per_s) for run in runs],
    }
    swept = dict.fromkeys(name for run in runs for name in varied(run))
    names |= {name: [str(varied(run).get(name, "")) for run in runs] for name in swept}
    shown = [name for name, column in names.items() if len(set(column)) > 1] or ["engine"]
    alike = ", ".join(
        f"{name} {column[0]}" if name in swept else column[0] for name, column in names.items() if name not in shown
    )
    return shown, list(zip(*(names[name] for name in shown), strict=True)), f" ({alike})" if alike else ""


def engine_tables(runs: Sequence[EngineResult], *, brief: bool = False) -> list[Table]:
    """What requests saw and what the engine did, a row a run, named by what differs between them; then by class.

    brief: of one run a row a metric; of several their tails.
    """
    classes = engine_classes(runs) if not brief or len(runs) <= FEW_CLASSES else []
    if brief and len(runs) == 1:
        return [_one_engine(runs[0]), *classes]
    shown, labels, alike = _told_apart(runs)
    seen = tuple(f"{TITLES[f'{metric}_ms']} {statistic}" for metric, statistic in SEEN)
    rows = [
        (*label, *(format_ms(getattr(run.summary, metric)[name].value) for metric, name in SEEN), *_done(run))
        for label, run in zip(labels, runs, strict=True)
    ]
    whole = Table("", (*shown, *seen, *DONE), rows, words=("order", "note"))

    def part(caption: str, *columns: str) -> Table:
        return replace(whole.only(*shown, *columns), caption=caption).without_empty()

    if brief:
        return [
            _thinned(part(f"Serving engines{alike}", "TTFT p99", "TPOT p99", "latency p99", "served", "note")),
            *classes,
        ]
    return [part(f"What requests saw{alike}", *seen), part("What the engine did", *DONE), *classes]


def _one_engine(run: EngineResult) -> Table:
    found = run.summary
    metrics = (("TTFT", found.ttft), ("TPOT", found.tpot), ("latency", found.latency))
    rows = [
        (title, *(format_ms(times[name].value) for name in ("mean", "p50", "p90", "p99")))
        for title, times in metrics
        if not math.isnan(times["p99"].value)
    ]
    cached = found.prefix_hit_rate
    caption = (
        f"{run.engine}, {run.order}: {format_rate(found.throughput_per_s)} served,"
        f" {number(found.output_tokens_per_s)} output tokens/s"
        f"{f', {format_percent(100 * cached)} of prompts cached' if cached > 0 else ''}{_coming_and_going(run)}"
    )
    return Table(caption, ("", "mean", "p50", "p90", "p99"), rows)


def _coming_and_going(run: EngineResult) -> str:
    """How many replicas there were, where that changed."""
    if run.first is None or run.first.scaled is None:
        return ""
    serving, first = run.first.scaled[1], run.first
    hours = f"{number(run.summary.replica_hours, 3)} replica-hours"
    return f", {serving.min():.0f} to {serving.max():.0f} replicas, {number(first.replicas, 3)} in the mean, {hours}"


def _thinned(table: Table) -> Table:
    """At most FEW of the rows, the first and the last among them."""
    count = len(table.rows)
    if count <= FEW:
        return table
    rows = [table.rows[round(i * (count - 1) / (FEW - 1))] for i in range(FEW)]
    return replace(table, rows=rows, note=f"{FEW} of {count} rows; --verbose shows all.")


def engine_classes(runs: Sequence[EngineResult]) -> list[Table]:
    """What requests of each class saw, a row a run and class; no table where there is one class."""
    shown, labels, _ = _told_apart(runs)
    rows = [
        (
            *(label if len(runs) > 1 else ()),
            each.name,
            *(format_ms(times[name]) for times in (each.ttft, each.tpot, each.latency) for name in ("p50", "p99")),
            _share(each.slo_attainment),
        )
        for label, run in zip(labels, runs, strict=True)
        for each in run.summary.by_class
    ]
    columns = ("class", "TTFT p50", "p99", "TPOT p50", "p99", "latency p50", "p99", "in SLO")
    names = (*(shown if len(runs) > 1 else ()), *columns)
    return [Table("By class", names, rows, words=("order", "class"))] if rows else []


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
        if run.against is None or math.isnan(run.against.p99.low):
            continue
        gap = run.against.p99
        word = "above" if gap.value > 0 else "below"
        sure = "" if gap.low > 0 or gap.high < 0 else ", which may be chance"
        place = f" at {rate_text(run)}" if several else ""
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


def named(run: SimResult, form: str = "{} ({})") -> str:
    """The policy with its settings, if it has any."""
    settings = settings_text(run)
    return form.format(run.policy, settings) if settings else run.policy


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
