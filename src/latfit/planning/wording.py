"""Sentences of a plan. Durations in ms, rates in requests/s."""

import math
from collections.abc import Sequence

from latfit.messages import Message, message
from latfit.model import Pauses, StepNoise
from latfit.planning.result import Alternative, Capacity, Interval, Plan, Reach
from latfit.planning.verdict import CONFIRMED, MOST_IDLE, Verdict
from latfit.units import count_text, format_ms, format_percent, format_rate

LEAST_HEADROOM = 1e-3
NEARLY = 0.955  # of the stability limit, from which stability ends a load: queues are simulated up to 0.97 of it
DECIDES = 0.25  # of the mean square of a step's time, from which the slowest 1 % decide how long requests wait
MIN_PAUSES = 5  # independent; redraws of fewer do not cover how long the next one may be
MIN_PAUSES_AS_MEASURED = 20  # where a plan has no redraws, which lengthen the longest measured one
SMALLEST_SHARE = 1e-3  # of the SLA: the shortest T_cut that is tried


def describe_wins(winner: str, reach: Reach, stretches: Sequence[tuple[int, int]], what: str, top: int) -> str:
    if reach is Reach.NEVER:
        return f"never: {winner} is faster at every measured {what}, 1 to {top:,}"
    if reach is Reach.ALWAYS:
        return f"always: {winner} is at least as fast at every measured {what}, 1 to {top:,}"
    if len(stretches) == 1 and stretches[0][1] == top:
        return f"{winner} is at least as fast from {stretches[0][0]:,} to {top:,}, the largest measured"
    spans = ", ".join(f"{low:,} to {high:,}" for low, high in stretches)
    return f"{winner} is at least as fast only for {'batches' if what == 'batch' else 'prompts of'} {spans}"


def describe_limit(row: Alternative, floor_ms: float) -> str:
    """Say what limits the load of a strategy. floor_ms: response of a request alone at the percentile."""
    limit = row.rate_limit_per_s or math.inf
    if row.sustainable_per_s is None:
        return f"the SLA: even an idle machine misses it ({format_ms(floor_ms)})"
    if row.replicas is None and row.sustainable_per_s * MOST_IDLE < limit:
        return f"the SLA leaves no room for other requests: one alone takes {format_ms(floor_ms, 4)}"
    kind = "stability-bound" if row.sustainable_per_s >= NEARLY * limit else "SLA-bound"
    least = next((low for low, high in row.feasible_per_s if high == row.sustainable_per_s), 0.0)
    below = f"; the SLA is missed below {format_rate(least)} too, where batches are too small to be fast"
    return f"{kind} (stability limit {format_rate(limit)}){below if least else ''}"


def capacity_line(capacity: Capacity) -> str:
    """Return `1 replica needed. Capacity 2,655 req/s per replica, SLA-bound (stability limit 3,400 req/s).`"""
    price = "" if capacity.price_per_hour is None else f", {capacity.price_per_hour:,.4g} an hour"
    needed = "No number of replicas serves this load"
    if capacity.replicas is not None:
        needed = f"{count_text(capacity.replicas, 'replica')} needed"
    rate = least = capacity.shown
    if capacity.promised_per_s is not None:
        least = format_rate(capacity.promised_per_s, down=True, planned_per_s=capacity.rate_per_s)
    sure = "" if least == rate else f" (97.5 % sure of {least})"
    return f"{needed}{price}. Capacity {rate} per replica{sure}, {capacity.binding}."


def load_answer(plan: Plan, replicas: int, *, laws_only: bool) -> str:
    sla_ms, unit, row = plan.sla_ms, count_text(plan.tokens_per_request, "token"), plan.chosen
    load = f"{format_rate(plan.rate_per_s or 0.0)} of {unit} each"
    load += f" on each of {replicas} replicas" if replicas > 1 else ""
    cannot = f"{load} cannot be served within {format_ms(sla_ms)} at p{plan.percentile:g} of responses"
    if row is None or row.percentile_ms is None or row.margin is None:
        return f"{cannot}: {name_fastest(plan.strategies)}."
    if plan.promise == "misses":
        return f"{cannot}: {plan.binding}."
    by = " (for steps that take their mean time, without noise)" if laws_only else interval_text(plan.interval_ms)
    spare = format_percent(100 * row.margin) if row.margin >= LEAST_HEADROOM else "0 %"
    return (
        f"Serve {load} with {row.name}: p{plan.percentile:g} response {format_ms(row.percentile_ms)}{by}, {spare}"
        f" headroom to the {format_ms(sla_ms)} SLA.{likely_text(plan.promise, plan.probability)}"
    )


def likely_text(promise: Verdict, probability: float | None) -> str:
    """Return ` Likely met (81 %).` of a plan that is not confirmed."""
    if promise != "likely":
        return ""
    if probability is None or probability >= CONFIRMED:
        return " Likely met, not confirmed."
    return f" Likely met ({format_percent(100 * probability)})."


def interval_text(interval: Interval | None) -> str:
    """Return ` (95 %: 11.2 to 12.4 ms)`; empty without one."""
    if interval is None or interval[0] is None:
        return ""
    high = "no upper end" if interval[1] is None else format_ms(interval[1])
    return f" (95 %: {format_ms(interval[0])} to {high})"


def name_fastest(rows: Sequence[Alternative]) -> str:
    times = {row.name: row.percentile_ms for row in rows if row.percentile_ms is not None}
    if not times:
        return "every strategy is overloaded"
    best = min(times, key=lambda name: times[name])
    return f"the best, {best}, needs {format_ms(times[best])}"


def suggest_remedy(shown: Alternative, rate_per_s: float, replicas: int) -> str:
    """Say what would make a load feasible that so many replicas do not carry."""
    above = next(((low, high) for low, high in shown.feasible_per_s if rate_per_s < low), None)
    if above is not None:
        return (
            f"{shown.name} meets it from {format_rate(above[0])} to {format_rate(above[1], down=True)} per replica,"
            " where batches fill: send the load to fewer machines, or relax the SLA."
        )
    if shown.replicas is None:
        return "Relax the SLA, or make the step faster; replicas do not help."
    return f"Give --replicas {max(shown.replicas, replicas + 1)}, or relax the SLA."


def few_pauses(label: str, noise: StepNoise, T: float, fewest: int = MIN_PAUSES) -> str:
    """Say why pauses that decide how long requests wait are too few; empty if they are not."""
    pauses = noise.pauses
    if pauses is None or pauses.independent >= fewest or noise.slow_share(T) <= DECIDES:
        return ""
    count = count_text(max(round(pauses.independent), 1), "measured pause")
    return f"{count} of {label}, too few to show how long pauses last; {fewest} or more can"


def unclear_pauses(label: str, pauses: Pauses | None) -> list[Message]:
    if pauses is None or (pauses.length_is_known and pauses.rate_is_known):
        return []
    count = count_text(max(round(pauses.independent), 1), "measured pause")
    return [message("unclear_pauses", path=label, pauses=count, longest=float(pauses.ms.max()))]


def spans_text(spans: Sequence[tuple[float, float]], sla_ms: float) -> str:
    start = 1.001 * SMALLEST_SHARE * sla_ms
    return ", ".join(f"{format_ms(a)} to {format_ms(b)}" if a > start else f"up to {format_ms(b)}" for a, b in spans)
