"""What a simulation answers on one screen: a sentence with its state, and a table of a few rows."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from latfit.live import Compared
from latfit.reporting.fit.tables import Table
from latfit.reporting.simulation.tables import (
    best_engine,
    best_policies,
    half_width,
    named,
    rate_text,
    varied,
)
from latfit.simulation import EngineResult, SimResult, p99_difference
from latfit.units import format_ms, format_percent, format_rate, number

_NUMBERS = re.compile(r"\d[\d,.]*")

State = Literal["good", "doubt", "bad"]


class Verdict(NamedTuple):
    """The answer in a sentence, and how sure or how good it is."""

    text: str
    state: State


def policies_verdict(runs: Sequence[SimResult], sla_ms: float = math.inf) -> Verdict:
    """Name the policy with the lowest p99, by how much, and whether it is within the SLA.

    Of several rates the highest that any policy carries counts.
    """
    ranked = best_policies(runs, sla_ms)
    several = len({str(run.rate_per_s) for run in runs}) > 1
    if not ranked:
        slowest = min(runs, key=lambda run: run.rate_per_s)
        return Verdict(f"Unstable: no policy carries {'even ' if several else ''}{rate_text(slowest)}.", "bad")
    best, p99 = ranked[0], ranked[0].latency["p99"]
    within, limited = p99.value <= sla_ms, math.isfinite(sla_ms)
    state: State = "good" if best.trusted["p99"] and math.isfinite(p99.high) and p99.high <= sla_ms else "doubt"
    limit = f" within the {format_ms(sla_ms)} SLA" if within and limited else ""
    start = f"At {rate_text(best)}, the highest rate{limit} carried here: " if several else ""
    text = f"p99 {format_ms(p99.value)}{half_width(p99)}{'' if several else f' at {rate_text(best)}'}"
    others = [run for run in runs if run is not best and run.stable and str(run.rate_per_s) == str(best.rate_per_s)]
    second = ranked[1] if len(ranked) > 1 else min(others, key=lambda run: run.latency["p99"].value, default=None)
    if second is None:
        text = f"{start}{named(best)} has {text}"
    else:
        gap, sure = _gap(best, second)
        text = f"{start}{named(best)} is best: {text}, {gap}"
        state = state if sure else "doubt"
    if limited and best.slo_attainment is not None:
        met = format_percent(100 * best.slo_attainment)
        text += f"; {'within' if within else 'above'} the {format_ms(sla_ms)} SLA, which {met} of responses meet"
    return Verdict(f"{text}.", state if within else "bad")


def _gap(best: SimResult, second: SimResult) -> tuple[str, bool]:
    """Return by how much the best is better, and whether that is significant."""
    gap = p99_difference(best, second)
    name = second.policy if second.policy != best.policy else named(second)
    if gap is None or math.isnan(gap.low):
        return f"{name} {format_ms(second.latency['p99'].value)}", False
    text = f"{format_ms(gap.value)} ± {format_ms((gap.high - gap.low) / 2)} below {name}"
    return (text, True) if gap.low > 0 else (f"{text} (not significant)", False)


ATTAINED = 0.99  # share of requests that has to meet the SLOs for a run to be good


def engines_verdict(runs: Sequence[EngineResult]) -> Verdict:
    """Say whether the engine is stable, its tails, and what limits it; of several the one with the lowest p99."""
    best, rivals = best_engine(runs)
    if best is None:
        rates = sorted({run.rate_per_s for run in runs})
        shown = " to ".join(format_rate(rate) for rate in dict.fromkeys((rates[0], rates[-1])))
        horizon = "latencies reflect the simulated horizon only"
        return Verdict(f"Unstable at {shown} (ρ ≥ 1): {horizon}. {_limited(runs[0])}", "bad")
    found = best.summary
    tails = ", ".join(
        f"{title} {format_ms(times['p99'].value)}"
        for title, times in (("TTFT", found.ttft), ("TPOT", found.tpot), ("latency", found.latency))
        if not math.isnan(times["p99"].value)
    )
    names = [best.engine] if len({each.engine for each in runs}) > 1 else []
    names += [best.order] if len({each.order for each in runs}) > 1 else []
    names += [f"{name} {value}" for name, value in varied(best).items()]
    who = f"{', '.join(names) or best.engine} has the lowest p99 latency; " if rivals > 1 else ""
    rate = format_rate(best.rate_per_s)
    load = f" at {rate}" if math.isfinite(best.rate_per_s) else ""
    start = f"{best.users:,} users are served {rate}" if best.users else f"Stable{load}"
    text = f"{start}: {who}p99 {tails}. {_limited(best)}"
    if math.isnan(found.slo_attainment):
        return Verdict(text, "good")
    met = f" SLOs met by {format_percent(100 * found.slo_attainment)} of requests."
    return Verdict(text + met, "good" if found.slo_attainment >= ATTAINED else "doubt")


def _limited(run: EngineResult) -> str:
    found = run.summary
    busy = format_percent(100 * found.utilisation)
    if run.bottleneck is None:
        batch = f" (batches of {number(found.batch_size['p50'])}, {run.settings.max_num_seqs:,} at most)"
        return f"No limit reached: engine {busy} busy{batch}, KV cache {format_percent(100 * found.kv_usage)} used."
    return f"Limited by {run.bottleneck} (engine {busy} busy)."


def replay_table(runs: Sequence[Compared]) -> Table:
    """Show mean and p99 of each run as measured, and the range in which the prediction has such runs."""
    rows = []
    for run in runs:
        row = [run.policy, format_percent(100 * run.load)]
        for name in ("mean", "p99"):
            low, high = run.predicted["range_ms"][name]
            row += [format_ms(run.measured["latency_ms"][name]), f"{number(low, 3)} to {format_ms(high)}"]
        rows.append((*row, {True: "as predicted", False: "differs", None: "disturbed"}[run.agrees]))
    columns = ("policy", "load", "mean", "predicted", "p99", "predicted ", "")
    caption = "predicted: the range of 95 of 100 such runs; up to 10 % off counts as predicted"
    return Table(caption, columns, rows, words=("",))


def replay_details(runs: Sequence[Compared]) -> Table:
    """Show measured/predicted median, batches and use of the paths; how late requests were sent; what others used."""
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
        rows.append((*row, format_ms(run.late_p99_ms), format_percent(100 * run.others_share)))
    columns = ("policy", "load", "p50", "batch", *(f"{path} busy" for path in paths), "late", "others")
    return Table("measured/predicted; late: 99 of 100 were sent by no more; others: of the cores", columns, rows)


def distinct(notes: Iterable[str]) -> list[str]:
    """Return the first of notes that differ in their numbers only."""
    found: dict[str, str] = {}
    for note in notes:
        found.setdefault(_NUMBERS.sub("#", note), note)
    return list(found.values())
