"""What a simulation answers, on one screen: a sentence with its state, and a table of a few rows in 80 columns."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from latfit.live import Compared
from latfit.reporting.fit.tables import Table
from latfit.reporting.simulation.tables import (
    TITLES,
    frontier,
    half_width,
    known_rate,
    named,
    rates_table,
    settings_text,
    varied,
)
from latfit.simulation import EngineResult, Finding, Interval, SimResult, Times, p99_difference
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.validation import JUDGED, Validation

MOST_ROWS = 8
_NUMBERS = re.compile(r"\d[\d,.]*")


class Verdict(NamedTuple):
    """The answer in a sentence, and how sure or how good it is."""

    text: str
    state: Literal["good", "doubt", "bad"]


def policies_verdict(runs: Sequence[SimResult], sla_ms: float = math.inf) -> Verdict:
    """Which policy has the lowest p99, by how much, and whether it is within the SLA; of several rates at the highest
    that any policy carries."""
    stable = frontier(runs)
    if not stable:
        return Verdict(f"Unstable: no policy carries {_rates_text(runs)}.", "bad")
    within = [run for run in stable if run.latency["p99"].value <= sla_ms]
    highest = max(known_rate(run) for run in within or stable)
    ranked = sorted((run for run in within or stable if known_rate(run) == highest), key=lambda run: _p99(run).value)
    best, second = ranked[0], _second(runs, ranked)
    several = len({str(run.rate_per_s) for run in runs}) > 1
    limit = f" within the {format_ms(sla_ms)} SLA" if within and math.isfinite(sla_ms) else ""
    text = f"At {_rate_text(best)}, the highest rate{limit} carried here: " if several else ""
    rate = "" if several else f" at {_rate_text(best)}"
    p99 = f"p99 {format_ms(_p99(best).value)}{half_width(_p99(best))}"
    state = _state(best, sla_ms)
    if second is None:
        text += f"{named(best)} has {p99}{rate}"
    else:
        compared, sure = _compared(best, second)
        text += f"{named(best)} is best: {p99}{rate}, {compared}"
        if not sure and state == "good":
            state = "doubt"
    return Verdict(text + _against_sla(best, sla_ms) + ".", state)


def _second(runs: Sequence[SimResult], ranked: Sequence[SimResult]) -> SimResult | None:
    """The next best at the rate of the best: another policy, else other settings of the same one."""
    if len(ranked) > 1:
        return ranked[1]
    best = ranked[0]
    others = [run for run in runs if run is not best and run.stable and str(run.rate_per_s) == str(best.rate_per_s)]
    return min(others, key=lambda run: _p99(run).value, default=None)


def _compared(best: SimResult, second: SimResult) -> tuple[str, bool]:
    """By how much, and whether that is more than chance."""
    gap = p99_difference(best, second)
    name = second.policy if second.policy != best.policy else named(second)
    if gap is None or math.isnan(gap.low):
        return f"{name} {format_ms(_p99(second).value)}", False
    half = (gap.high - gap.low) / 2
    text = f"{format_ms(gap.value)} ± {format_ms(half)} below {name}"
    return (text, True) if gap.low > 0 else (f"{text} (not significant)", False)


def _state(run: SimResult, sla_ms: float) -> Literal["good", "doubt", "bad"]:
    p99 = _p99(run)
    if p99.value > sla_ms:
        return "bad"
    return "good" if p99.trusted and math.isfinite(p99.high) and p99.high <= sla_ms else "doubt"


def _against_sla(run: SimResult, sla_ms: float) -> str:
    if not math.isfinite(sla_ms) or run.slo_attainment is None:
        return ""
    place = "within" if _p99(run).value <= sla_ms else "above"
    return f"; {place} the {format_ms(sla_ms)} SLA, which {format_percent(100 * run.slo_attainment)} of responses meet"


def brief_runs_table(runs: Sequence[SimResult]) -> Table:
    """Of few runs a row each; of many p99 by rate and policy, or the best ones."""
    rates = sorted({run.rate_per_s for run in runs})
    policies = {run.policy for run in runs}
    if len(runs) > MOST_ROWS and len(rates) > 1 and len(policies) <= MOST_ROWS:
        table = rates_table(runs)
        rows = _spread(table.rows)
        note = f"{len(rows)} of {len(table.rows)} rates; --verbose shows all." if len(rows) < len(table.rows) else ""
        return Table(table.caption, table.columns, rows, note=note)
    shown = list(runs)
    note = ""
    if len(runs) > MOST_ROWS:
        shown = sorted(runs, key=lambda run: (not run.stable, _p99(run).value))[:MOST_ROWS]
        note = f"The {MOST_ROWS} lowest p99 of {len(runs)} runs; --verbose shows all."
    sides = {list(run.share)[-1] for run in runs if len(run.share) > 1}
    side = sides.pop() if len(sides) == 1 else "side"
    rows = [
        (
            run.policy,
            settings_text(run),
            _rate_text(run) if len(rates) > 1 else "",
            format_ms(run.latency["p50"].value),
            f"{format_ms(_p99(run).value)}{half_width(_p99(run))}",
            format_percent(100 * list(run.share.values())[1]) if len(run.share) > 1 else "",
            "" if run.slo_attainment is None else format_percent(100 * run.slo_attainment),
            "" if run.stable else "unstable",
        )
        for run in shown
    ]
    columns = ("policy", "settings", "rate", "p50", "p99", f"on {side}", "in SLA", "note")
    names = list(dict.fromkeys(name for run in runs for name in run.nominal))
    nominal = f" ({' and '.join(names)}: nominal times, not measured)" if names else ""
    caption = "Response times" + (f" at {_rate_text(runs[0])}" if len(rates) == 1 else "") + nominal
    return Table(caption, columns, rows, words=("settings", "note"), note=note).without_empty()


def brief_findings_table(findings: Sequence[Finding]) -> Table:
    """The claims of a study and what came out, a row each."""
    return Table(
        "Claims of the literature",
        ("claim", "on this machine"),
        [(each.claim, each.found) for each in findings],
        ("on this machine",),
    )


def engines_verdict(runs: Sequence[EngineResult]) -> Verdict:
    """Whether the engine is stable, its tails, and what limits it; of several the one with the lowest p99 latency."""
    stable = [run for run in runs if run.summary.stable]
    if not stable:
        horizon = "latencies reflect the simulated horizon only"
        return Verdict(f"Unstable at {_engine_rates(runs)} (ρ ≥ 1): {horizon}. {_limited(runs[0])}", "bad")
    highest = max(run.rate_per_s for run in stable)
    at_highest = [run for run in stable if not run.rate_per_s < highest]  # a load of one request has no rate
    best = min(at_highest, key=lambda run: run.summary.latency["p99"].value)
    found = best.summary
    tails = ", ".join(
        f"{title} {format_ms(times['p99'].value)}"
        for title, times in (("TTFT", found.ttft), ("TPOT", found.tpot), ("latency", found.latency))
        if not math.isnan(times["p99"].value)
    )
    who = f"{engine_name(best, runs)} has the lowest p99 latency; " if len(at_highest) > 1 else ""
    load = f" at {format_rate(highest)}" if math.isfinite(highest) else ""
    start = f"{best.users:,} users are served {format_rate(highest)}" if best.users else f"Stable{load}"
    text = f"{start}: {who}p99 {tails}. {_limited(best)}"
    if math.isnan(found.slo_attainment):
        return Verdict(text, "good")
    met = f" SLOs met by {format_percent(100 * found.slo_attainment)} of requests."
    return Verdict(text + met, "good" if found.slo_attainment >= ATTAINED else "doubt")


ATTAINED = 0.99
"""Share of requests that has to meet the SLOs for a run to be good."""


def engine_name(run: EngineResult, runs: Sequence[EngineResult]) -> str:
    """By what differs between the runs."""
    names = [run.engine] if len({each.engine for each in runs}) > 1 else []
    names += [run.order] if len({each.order for each in runs}) > 1 else []
    names += [f"{name} {value}" for name, value in varied(run).items()]
    return ", ".join(names) or run.engine


def brief_engine_table(runs: Sequence[EngineResult]) -> Table:
    """Of one run a row a metric; of several a row each with their tails."""
    if len(runs) == 1:
        return _one_engine(runs[0])
    several = len({run.rate_per_s for run in runs}) > 1
    rows = [
        (
            engine_name(run, runs),
            format_rate(run.rate_per_s) if several else "",
            *(_pair(times) for times in (run.summary.ttft, run.summary.tpot, run.summary.latency)),
            number(run.summary.throughput_per_s),
            "" if run.summary.stable else "unstable",
        )
        for run in runs
    ]
    columns = ("engine", "rate", "TTFT p50, p99", "TPOT p50, p99", "latency p50, p99", "req/s", "note")
    note = f"{MOST_ROWS} of {len(rows)} runs; --verbose shows all." if len(rows) > MOST_ROWS else ""
    return Table("Serving engines", columns, _spread(rows), words=("note",), note=note).without_empty()


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


def _limited(run: EngineResult) -> str:
    found = run.summary
    busy = format_percent(100 * found.utilisation)
    if run.bottleneck is None:
        batch = f" (batches of {number(found.batch_size['p50'])}, {run.settings.max_num_seqs:,} at most)"
        return f"No limit reached: engine {busy} busy{batch}, KV cache {format_percent(100 * found.kv_usage)} used."
    return f"Limited by {run.bottleneck} (engine {busy} busy)."


def brief_validation_table(found: Validation) -> Table:
    """Mean, p90 and p99 of each judged metric: measured, and how far off the simulation is."""
    rows = []
    for metric in JUDGED:
        of_metric = {each.statistic: each for each in found.figures if each.metric == metric}
        rows.append(
            (
                TITLES[metric],
                format_ms(of_metric["mean"].measured),
                format_ms(of_metric["mean"].simulated),
                *(f"{of_metric[name].error_pct:+.1f} %" for name in ("mean", "p90", "p99")),
                "ok" if all(each.holds for each in of_metric.values()) else "differs",
            )
        )
    columns = ("", "measured mean", "simulated mean", "error: mean", "p90", "p99", "verdict")
    caption = f"{len(found.measured):,} requests, {found.run.counters.steps:,} steps"
    return Table(caption, columns, rows, words=("verdict",))


def replay_table(runs: Sequence[Compared]) -> Table:
    """Each run: mean and p99 as measured, and the range in which the prediction has such runs."""
    rows = []
    for run in runs:
        row = [run.policy, format_percent(100 * run.load)]
        for name in ("mean", "p99"):
            low, high = run.range_ms[name]
            row += [format_ms(run.measured["latency_ms"][name]), f"{number(low, 3)} to {format_ms(high)}"]
        rows.append((*row, {True: "as predicted", False: "differs", None: "disturbed"}[run.agrees]))
    columns = ("policy", "load", "mean", "predicted", "p99", "predicted ", "")
    return Table(
        "predicted: the range of 95 of 100 such runs; up to 10 % off counts as predicted", columns, rows, words=("",)
    )


def replay_details(runs: Sequence[Compared]) -> Table:
    """Each run, measured/predicted: median, its batches, use of the paths; how late requests were sent; what others
    used."""
    paths = list(dict.fromkeys(path for run in runs for path in run.measured["utilisation"]))
    rows = []
    for run in runs:
        found, said = run.measured, run.predicted
        row = [run.policy, format_percent(100 * run.load)]
        row.append(f"{number(found['latency_ms']['p50'], 3)}/{format_ms(said['latency_ms']['p50'])}")
        row.append(f"{number(found['batch_size']['p50'])}/{number(said['batch_size']['p50'])}")
        for path in paths:
            busy = [100 * each["utilisation"][path] for each in (found, said) if path in each["utilisation"]]
            row.append(f"{busy[0]:.0f}/{format_percent(busy[1])}" if busy else "")
        rows.append((*row, format_ms(run.late_ms), format_percent(100 * run.others)))
    columns = ("policy", "load", "p50", "batch", *(f"{path} busy" for path in paths), "late", "others")
    return Table("measured/predicted; late: 99 of 100 were sent by no more; others: of the cores", columns, rows)


def distinct(notes: Iterable[str]) -> list[str]:
    """Of notes that differ in their numbers only, the first."""
    found: dict[str, str] = {}
    for note in notes:
        found.setdefault(_NUMBERS.sub("#", note), note)
    return list(found.values())


def _pair(times: Times) -> str:
    return ", ".join(format_ms(times[name].value) for name in ("p50", "p99"))


def _spread(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """At most MOST_ROWS of the rows, the first and the last among them."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (MOST_ROWS - 1))] for i in range(MOST_ROWS)]


def _p99(run: SimResult) -> Interval:
    return run.latency["p99"]


def _rate_text(run: SimResult) -> str:
    if math.isnan(run.throughput_per_s):
        return "one request" if run.requests == 1 else f"{run.requests:,} requests at once"
    if math.isnan(run.rate_per_s):
        return f"{format_rate(run.throughput_per_s)} (closed loop)"
    return format_rate(run.rate_per_s)


def _rates_text(runs: Sequence[SimResult]) -> str:
    least = min(runs, key=known_rate)
    return _rate_text(least) if len({str(run.rate_per_s) for run in runs}) == 1 else f"even {_rate_text(least)}"


def _engine_rates(runs: Sequence[EngineResult]) -> str:
    rates = sorted({run.rate_per_s for run in runs})
    return " to ".join(format_rate(rate) for rate in dict.fromkeys((rates[0], rates[-1])))
