"""Sentences of a plan. Durations in ms, rates in requests/s."""

import math
from collections.abc import Sequence

from latfit.messages import Message, message
from latfit.model import Pauses, StepNoise
from latfit.planning.result import Alternative, Capacity, Interval, Plan, Reach
from latfit.planning.verdict import CONFIRMED, Verdict
from latfit.units import count_text, format_ms, format_percent, format_rate

LEAST_HEADROOM = 1e-3
NEARLY = 0.955  # of the stability limit, from which stability ends a load: queues are simulated up to 0.97 of it
DECIDES = 0.25  # of the mean square of a step's time, from which the slowest 1 % decide how long requests wait
MIN_PAUSES = 5  # independent; redraws of fewer do not cover how long the next one may be
MIN_PAUSES_AS_MEASURED = 20  # where a plan has no redraws, which lengthen the longest measured one
SMALLEST_SHARE = 1e-3  # of the SLA: the shortest T_cut that is tried


def percentile(value: float | None) -> str:
    return "typical" if value is None else f"p{value:g}"


def faster(winner: str, reach: Reach, stretches: Sequence[tuple[int, int]], what: str, top: int) -> str:
    """Say from which batch (or prompt length) a path is the faster one."""
    if reach is Reach.NEVER:
        return f"never: {winner} is faster at every measured {what}, 1 to {top:,}"
    if reach is Reach.ALWAYS:
        return f"always: {winner} is at least as fast at every measured {what}, 1 to {top:,}"
    if len(stretches) == 1 and stretches[0][1] == top:
        return f"{winner} is at least as fast from {stretches[0][0]:,} to {top:,}, the largest measured"
    spans = ", ".join(f"{low:,} to {high:,}" for low, high in stretches)
    plural = "batches" if what == "batch" else "prompts of"
    return f"{winner} is at least as fast only for {plural} {spans}"


def binding(row: Alternative) -> str:
    """Say what ends the growth of a strategy's load: the SLA, or stability."""
    if row.sustainable_per_s is None:
        return "the SLA: even an idle machine misses it"
    limit = row.rate_limit_per_s
    least = next((low for low, high in row.feasible_per_s if high == row.sustainable_per_s), 0.0)
    below = (
        f"; the SLA is missed below {format_rate(least)} too, where batches are too small to be fast" if least else ""
    )
    if limit is not None and row.sustainable_per_s >= NEARLY * limit:
        return f"stability-bound (stability limit {format_rate(limit)}){below}"
    end = "" if limit is None else f" (stability limit {format_rate(limit)})"
    return f"SLA-bound{end}{below}"


def load_binding(row: Alternative) -> str:
    """Say the capacity of a strategy, and what ends it."""
    if row.sustainable_per_s is None:
        return binding(row)
    return f"capacity {format_rate(row.sustainable_per_s, down=True)} per replica, {binding(row)}"


def capacity_line(found: Capacity) -> str:
    """Return `1 replica needed. Capacity 2,655 req/s per replica, SLA-bound (stability limit 3,400 req/s).`"""
    price = "" if found.price_per_hour is None else f", {found.price_per_hour:,.4g} an hour"
    if found.replicas is None:
        needed = "No number of replicas serves this load"
    else:
        needed = f"{'1 replica' if found.replicas == 1 else f'{found.replicas:,} replicas'} needed"
    carried = format_rate(found.sustainable_per_s or 0.0, down=True)
    least = carried if found.promised_per_s is None else format_rate(found.promised_per_s, down=True)
    sure = "" if least == carried else f" (97.5 % sure of {least})"
    return f"{needed}{price}. Capacity {carried} per replica{sure}, {found.binding}."


def load_answer(plan: Plan, replicas: int, *, laws_only: bool) -> str:
    """Return the decision in a sentence."""
    sla_ms, unit = plan.sla_ms, count_text(plan.tokens_per_request, "token")
    row, each = plan.chosen, f"{format_rate(plan.rate_per_s or 0.0)} of {unit} each"
    each += f" on each of {replicas} replicas" if replicas > 1 else ""
    cannot = f"{each} cannot be served within {format_ms(sla_ms)} at p{plan.percentile:g} of responses"
    if row is None or row.percentile_ms is None or row.margin is None:
        return f"{cannot}: {least(plan.strategies)}."
    if plan.promise == "misses":
        return f"{cannot}: {plan.binding}."
    by = " (for steps that take their mean time, without noise)" if laws_only else interval_text(plan.interval_ms)
    spare = format_percent(100 * row.margin) if row.margin >= LEAST_HEADROOM else "0 %"
    return (
        f"Serve {each} with {row.name}: p{plan.percentile:g} response {format_ms(row.percentile_ms)}{by}, {spare}"
        f" headroom to the {format_ms(sla_ms)} SLA.{likely(plan.promise, plan.probability)}"
    )


def likely(promise: Verdict, probability: float | None) -> str:
    """Return ` Likely met (81 %).` of a plan that is not confirmed, without a number if the interval is open."""
    if promise != "likely":
        return ""
    known = probability is not None and probability < CONFIRMED
    return f" Likely met{f' ({format_percent(100 * (probability or 0.0))})' if known else ', not confirmed'}."


def interval_text(interval: Interval | None) -> str:
    """Return ` (95 %: 11.2 to 12.4 ms)`; empty without one."""
    if interval is None or interval[0] is None:
        return ""
    high = "no upper end" if interval[1] is None else format_ms(interval[1])
    return f" (95 %: {format_ms(interval[0])} to {high})"


def least(rows: Sequence[Alternative]) -> str:
    """Name the best strategy that there is."""
    able = [row for row in rows if row.percentile_ms is not None and math.isfinite(row.percentile_ms)]
    if not able:
        return "every strategy is overloaded"
    best = min(able, key=lambda row: row.percentile_ms or 0.0)
    return f"the best, {best.name}, needs {format_ms(best.percentile_ms or 0.0)}"


def remedy(rows: Sequence[Alternative], shown: Alternative, rate_per_s: float) -> str:
    """Say what would make a load feasible."""
    if shown.sustainable_per_s is None:
        return f"No rate meets it: {least(rows)}. Relax the SLA, or make the step faster; replicas do not help."
    above = next(((low, high) for low, high in shown.feasible_per_s if rate_per_s < low), None)
    if above is not None:
        return (
            f"{shown.name} meets it from {format_rate(above[0])} to {format_rate(above[1], down=True)} per replica,"
            " where batches fill: send the load to fewer machines, or relax the SLA."
        )
    count = shown.replicas or 1
    most = (
        f"One replica carries at most {format_rate(shown.sustainable_per_s, down=True)} within the SLA ({shown.name})"
    )
    return f"{most}; this rate needs {count}: --replicas {count}."


def few_pauses(label: str, noise: StepNoise, T: float, fewest: int = MIN_PAUSES) -> str:
    """Say why pauses that decide how long requests wait are too few; empty if they are not."""
    pauses = noise.pauses
    if pauses is None or pauses.independent >= fewest or noise.slow_share(T) <= DECIDES:
        return ""
    count = f"{pauses.independent:,.0f} measured pauses" if pauses.independent >= 1.5 else "one measured pause"
    return f"{count} of {label} cannot show how long pauses last; {fewest} or more can"


def unclear_pauses(label: str, pauses: Pauses | None) -> list[Message]:
    """Return which kind of pause the data do not show; the more harmful one is planned for."""
    if pauses is None or (pauses.length_is_known and pauses.rate_is_known):
        return []
    questions = [
        *([] if pauses.length_is_known else ["last a fixed time or grow with the step"]),
        *([] if pauses.rate_is_known else ["come per step or per second"]),
    ]
    longest, said = float(pauses.ms.max()), " and whether they ".join(questions)
    return [message("unclear_pauses", path=label, pauses=pauses.independent, longest=longest, open=said)]


def spans_text(spans: Sequence[tuple[float, float]], sla_ms: float) -> str:
    """Return ranges of T_cut in words; one that starts where the search does has no lower end."""
    start = 1.001 * SMALLEST_SHARE * sla_ms
    said = [f"{format_ms(a)} to {format_ms(b)}" if a > start else f"up to {format_ms(b)}" for a, b in spans]
    return ", ".join(said) or "none"
