"""What a simulation answers in a sentence."""

import math
import re
from collections.abc import Iterable, Sequence

from latfit.live import Compared
from latfit.reporting import simulation_tables as tables
from latfit.reporting.simulation_tables import half_width, measured_times, named, rate_text
from latfit.reporting.table import KeyNumber, Table, Verdict, make_table, of_share
from latfit.simulation import UNLIMITED, EngineResult, SimResult, Times, p99_difference
from latfit.units import format_ms, format_rate, number

ATTAINED = 0.99  # share of requests that has to meet the SLOs for a run to be good
_NUMBERS = re.compile(r"\d[\d,.]*")


def policies_verdict(runs: Sequence[SimResult], sla_ms: float = math.inf) -> Verdict:
    """Name the policy with the lowest p99 at the highest rate carried."""
    ranked = tables.best_policies(runs, sla_ms)
    if not ranked:
        slowest = min(runs, key=lambda run: run.rate_per_s)
        return Verdict(f"Unstable: no policy carries {rate_text(slowest)}.", "bad")
    best, p99 = ranked[0], ranked[0].latency["p99"]
    within = p99.value <= sla_ms
    sure = best.trusted["p99"] and math.isfinite(p99.high) and p99.high <= sla_ms
    text = f"p99 {format_ms(p99.value)}{half_width(p99)} at {rate_text(best)}"
    if len({str(run.rate_per_s) for run in runs}) > 1:
        text += ", the highest rate carried"
    others = [run for run in runs if run is not best and run.stable and str(run.rate_per_s) == str(best.rate_per_s)]
    rival = ranked[1] if len(ranked) > 1 else min(others, key=lambda run: run.latency.p99, default=None)
    if rival is not None:
        gap, name = p99_difference(best, rival), rival.policy if rival.policy != best.policy else named(rival)
        known = gap is not None and not math.isnan(gap.low)
        if gap is None or not known:
            text += f", {name} {format_ms(rival.latency.p99)}"
        else:
            text += f", {format_ms(gap.value)} ± {format_ms((gap.high - gap.low) / 2)} below {name}"
            text += " (not significant)" * (gap.low <= 0)
        sure = sure and known and gap is not None and gap.low > 0
    if math.isfinite(sla_ms) and best.slo_attainment is not None:
        met = of_share(best.slo_attainment)
        text += f"; {'within' if within else 'above'} the {format_ms(sla_ms)} SLA, which {met} of responses meet"
    start = named(best) if rival is None else f"{named(best)} is best"
    return Verdict(f"{start}: {text}.", "bad" if not within else "good" if sure else "doubt")


def engines_verdict(runs: Sequence[EngineResult]) -> Verdict:
    """Describe the engine with the lowest p99."""
    best, rivals = tables.best_engine(runs)
    if best is None:
        rates = sorted({run.rate_per_s for run in runs})
        shown = " to ".join(format_rate(rate) for rate in dict.fromkeys((rates[0], rates[-1])))
        horizon = "latencies reflect the simulated horizon only"
        return Verdict(f"Unstable at {shown} (ρ ≥ 1): {horizon}. {_limited(runs[0])}", "bad")
    summary, rate = best.summary, format_rate(best.rate_per_s)
    tails = ", ".join(f"{title} {format_ms(times.p99)}" for title, times in measured_times(summary))
    label = next(label for label, run in zip(tables.run_labels(runs), runs, strict=True) if run is best)
    who = f"{label} has the lowest p99 latency; " if rivals > 1 else ""
    load = f" at {rate}" if math.isfinite(best.rate_per_s) else ""
    start = f"{best.users:,} users are served {rate}" if best.users else f"Stable{load}"
    text = f"{start}: {who}p99 {tails}. {_limited(best)}"
    if math.isnan(summary.slo_attainment):
        return Verdict(text, "good")
    met = f" SLOs met by {of_share(summary.slo_attainment)} of requests."
    return Verdict(text + met, "good" if summary.slo_attainment >= ATTAINED else "doubt")


def p99_numbers(named_times: Iterable[tuple[str, Times]]) -> list[KeyNumber]:
    found = []
    for title, times in named_times:
        p99, detail = times["p99"], f"mean {format_ms(times.mean)}"
        if not math.isnan(p99.high - p99.low):
            detail = f"{format_ms(p99.low, 4)} to {format_ms(p99.high, 4)} (95 %); {detail}"
        found.append(KeyNumber(f"{title} p99", format_ms(p99.value), detail))
    return found


def _limited(run: EngineResult) -> str:
    summary = run.summary
    busy = of_share(summary.utilisation)
    if run.bottleneck is not None:
        return f"Limited by {run.bottleneck}; engine {busy} busy."
    batch = f"median batch {number(summary.batch_size['p50'])} of {run.settings.max_num_seqs:,}"
    cache = f", KV cache {of_share(summary.kv_usage)} used" if run.settings.kv_blocks < UNLIMITED else ""
    return f"Engine {busy} busy, {batch}{cache}."


def replay_table(runs: Sequence[Compared], *, brief: bool = False) -> Table:
    """brief: without the delays of the client and the load of others."""

    def predicted(run: Compared, name: str) -> str:
        low, high = run.predicted["range_ms"][name]
        return f"{number(low, 3)} to {format_ms(high)}"

    return make_table(
        "predicted: the range of 95 of 100 such runs; up to 10 % off counts as predicted",
        runs,
        ("policy", "policy"),
        ("load", "load", of_share),
        ("mean", lambda run: run.measured["latency_ms"]["mean"], format_ms),
        ("predicted", lambda run: predicted(run, "mean")),
        ("p99", lambda run: run.measured["latency_ms"]["p99"], format_ms),
        ("predicted ", lambda run: predicted(run, "p99")),
        ("sent late by", lambda run: None if brief else run.late_p99_ms, format_ms),
        ("used by others", lambda run: None if brief else run.others_share, of_share),
        ("", lambda run: {True: "as predicted", False: "differs", None: "disturbed"}[run.agrees]),
        words=("",),
    )


def distinct(notes: Iterable[str]) -> list[str]:
    """Return the first of notes that differ in their numbers only."""
    first: dict[str, str] = {}
    for note in notes:
        first.setdefault(_NUMBERS.sub("#", note), note)
    return list(first.values())


def would_carry(runs: Sequence[EngineResult]) -> str:
    """Return what would serve a load that overloads every run."""
    best = max(runs, key=lambda run: run.summary.throughput_per_s)
    if best.routing.scaling is not None:
        return "Ask for more replicas, or sooner; or lower the rate."
    more = "Lower the rate, or give more --replicas, --kv-blocks or --max-num-seqs."
    if best.prefill_replicas or not best.rate_per_s > 0:
        return more
    each = best.summary.throughput_per_s / best.routing.replicas
    needed = math.floor(best.rate_per_s / each) + 1
    return f"--replicas {needed} would carry it, at {format_rate(each, down=True)} each. {more}"
