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
    rate_text,
    varied,
)
from latfit.simulation import EngineResult, Finding, Interval, SimResult, p99_difference
from latfit.units import format_ms, format_percent, format_rate, number
from latfit.validation import JUDGED, Validation

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
    text = f"At {rate_text(best)}, the highest rate{limit} carried here: " if several else ""
    rate = "" if several else f" at {rate_text(best)}"
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


def _p99(run: SimResult) -> Interval:
    return run.latency["p99"]


def _rates_text(runs: Sequence[SimResult]) -> str:
    least = min(runs, key=known_rate)
    return rate_text(least) if len({str(run.rate_per_s) for run in runs}) == 1 else f"even {rate_text(least)}"


def _engine_rates(runs: Sequence[EngineResult]) -> str:
    rates = sorted({run.rate_per_s for run in runs})
    return " to ".join(format_rate(rate) for rate in dict.fromkeys((rates[0], rates[-1])))
