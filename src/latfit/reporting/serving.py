"""A plan of serving engines: lines, tables, the page."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from latfit.engines import engine_key
from latfit.exporting import start_line, vllm_flags
from latfit.planning import CONFIRMED, MOST_SLOWER, Effect, PlannedEngines, Reached, ServingPlan, Stall, Stalls
from latfit.reporting.plan_tables import STATES, probability_text
from latfit.reporting.simulation_tables import STATISTICS, times_table
from latfit.reporting.table import (
    Bar,
    Card,
    CommandLine,
    KeyNumber,
    Shown,
    Table,
    count,
    make_bars,
    make_table,
)
from latfit.simulation import EngineSummary
from latfit.units import count_text, format_ms, format_percent, format_rate, number

if TYPE_CHECKING:
    from latfit.reporting.layout import Making, Rendered

MAX_CHANGES = 3  # that are named on a terminal
HELPS = 0.95  # of a figure, below which a change helps
NOTHING_PCT = 0.5
VERDICTS = {"good": "meets the targets", "doubt": "likely meets the targets", "bad": "misses the targets"}


def show_serving(plan: ServingPlan) -> Shown:
    brief = [*serving_tables(plan, brief=True), Table("", ("", " "), plan_facts(plan), words=(" ",))]
    usable = plan.feasible and not plan.unsupported
    lines = [*plan.notes, *([CommandLine(f"Start each: {engine_command(plan)}")] if usable else [])]
    warnings = [*plan.unsupported, *(each.text for each in plan.warnings)]
    return Shown(verdict(plan), STATES[plan.promise], lines, (), warnings, brief, serving_tables(plan))


def plan_facts(plan: ServingPlan) -> list[tuple[str, str]]:
    facts: dict[str, str] = {}
    if plan.feasible:
        facts = {"capacity": capacity_text(plan), "margin": _margin(plan), **_other_counts(plan)}
    if plan.outcome is not None:
        facts["each replica"] = _load_of_replica(plan, plan.outcome)
    if plan.feasible:
        stall = "" if plan.stalls is None else stall_text(plan.stalls)
        facts |= {"bottleneck": _bottleneck(plan), "stall": stall, "cost": _cost(plan), "schedule": _schedule(plan)}
    fits = "; ".join(f"{each.name}, {each.model}, {each.error}" for each in plan.fits)
    facts |= {"prefill apart": _prefill_apart(plan), "step costs": fits or "nominal numbers, not measured"}
    return [(name, text) for name, text in facts.items() if text]


def verdict(plan: ServingPlan) -> str:
    cache = "" if plan.kv_cache else ", with an unlimited KV cache (--kv-blocks limits it)"
    load, tried = f"{plan.load} ({plan.request}){cache}", plan.replicas.tried
    if tried is None:
        return f"Cannot be met at any number of replicas: {load}; {plan.binding}."
    replicas = count_text(tried, "replica")
    if not plan.feasible:
        return f"Cannot be met: {replicas} at {load}: {plan.outcome_text}."
    meets = "meets" if tried == 1 else "meet"
    if plan.promise == "likely":
        chance = CONFIRMED if plan.probability is None else plan.probability
        share = f" ({100 * chance:.0f} %)" if chance < CONFIRMED else ""  # else a warning says what is in doubt
        meets = f"likely {meets}{share}"
    text = f"{replicas} {meets} the targets at {load}: {plan.outcome_text}."
    return f"Not supported by these data: {text}" if plan.unsupported else text


def _load_of_replica(plan: ServingPlan, outcome: EngineSummary) -> str:
    """Return what one replica serves at the offered load."""
    cache = f", KV cache {format_percent(100 * outcome.kv_usage)} used" if plan.kv_cache else ""
    rate = plan.rate_per_s / (plan.replicas.tried or 1)
    tokens_per_s = rate * outcome.output_tokens_per_s / outcome.throughput_per_s
    return (
        f"{format_rate(rate)}, {number(tokens_per_s, 3)} output tokens/s,"
        f" {format_percent(100 * (plan.share_of_throughput_used or 0.0))} of its throughput{cache},"
        f" median batch {number(outcome.batch_size['p50'])}"
    )


def _margin(plan: ServingPlan) -> str:
    slower_pct = plan.steps_may_be_slower_pct or 0.0
    slower = "no slower steps meet the targets"
    if slower_pct > 100 * (MOST_SLOWER - 1):
        slower = f"steps may take {MOST_SLOWER:g} times as long"
    elif slower_pct >= NOTHING_PCT:
        slower = f"steps may be {format_percent(slower_pct)} slower"
    return f"{slower}; fit error {format_percent(plan.fit_error_pct)}" if plan.fits else slower


def _other_counts(plan: ServingPlan) -> dict[str, str]:
    """Return what one replica less does, and one more where the planned ones only likely meet the targets."""
    fewer, found = plan.replicas, {}
    if fewer.one_fewer:
        worst = max(fewer.one_fewer, key=lambda each: each.ratio)
        outcome = f"{worst.outcome}{', not confirmed' * worst.met}"
        name = count_text((fewer.value or 1) - 1, "replica")
        found[name] = "overloaded" if fewer.one_fewer_overloaded else outcome
    more = next((each for each in plan.effects if each.change == f"{(fewer.value or 0) + 1:,} replicas"), None)
    if more is not None and plan.promise == "likely":
        found[more.change] = f"{more.target} {_value(more.unit, more.after)}"
    return found


def capacity_text(plan: ServingPlan) -> str:
    if plan.users is None or plan.carries is None:
        return _capacity_rate(plan, plan.rate_per_s)
    ends = (plan.highest_rate_per_s, plan.capacity_per_s, plan.missed_from_rate_per_s)
    low, capacity, high = (int((each or math.nan) / plan.rate_per_s * plan.users + 1e-9) for each in ends)
    return f"{capacity:,} users (95 %: {low:,} to {high:,})"


def _capacity_rate(plan: PlannedEngines, planned_per_s: float) -> str:
    low, high = plan.highest_rate_per_s or math.nan, plan.missed_from_rate_per_s
    capacity, least = (_least_rate(each, planned_per_s) for each in (plan.capacity_per_s or low, low))
    return f"{capacity} (95 %: {least.removesuffix(' req/s')} to {number(high, 3)})"


def _least_rate(per_s: float, planned_per_s: float) -> str:
    return format_rate(per_s, down=True, digits=3, planned_per_s=planned_per_s)


def _bottleneck(plan: ServingPlan) -> str:
    helpful = [each for each in plan.effects if each.after < HELPS * each.before][:MAX_CHANGES]
    if not helpful:
        return ""
    first, unit = helpful[0], helpful[0].unit
    changes = ", ".join(f"{each.change}: {_value(unit, each.after)}" for each in helpful)
    return f"{first.target} {_value(unit, first.before)}; {changes}"


def _value(unit: str, value: float) -> str:
    return format_percent(value) if unit == "pct" else format_ms(value)


def stall_text(stalls: Stalls) -> str:
    planned, knee = stalls.planned, stalls.knee
    decoding = count_text(stalls.decoding, "decoding request")
    text = f"{_gap(planned)} without a token for {decoding} during a prompt of {stalls.prompt_tokens:,} tokens (p99)"
    if knee.gap_ms > HELPS * planned.gap_ms:
        return text
    less = 100 * (knee.output_tokens_per_s / planned.output_tokens_per_s - 1)
    budget = f"--max-num-batched-tokens {knee.max_num_batched_tokens}"
    return f"{text}; {_gap(knee)} with {budget}, throughput {format_percent(less, signed=True)}"


def _gap(stall: Stall) -> str:
    if stall.interval_ms is None:
        return format_ms(stall.gap_ms)
    low, high = map(format_ms, stall.interval_ms)
    return f"{format_ms(stall.gap_ms)} (90 %: {low.removesuffix(' ms') if high.endswith(' ms') else low} to {high})"


def _cost(plan: ServingPlan) -> str:
    cost, parts = plan.cost, []
    if cost.price_per_hour is not None:
        of_tokens = number(cost.price_per_million_tokens, 3)
        parts.append(f"{number(cost.price_per_hour)} an hour, {of_tokens} a million output tokens")
    if cost.kwh_per_million_tokens is not None:
        parts.append(f"{number(cost.kwh_per_million_tokens, 3)} kWh a million output tokens")
    return "; ".join(parts)


def _schedule(plan: ServingPlan) -> str:
    schedule = plan.schedule
    if schedule is None:
        return ""
    counts = [each.replicas for each in schedule.windows]
    by = f"windows of {format_ms(1e3 * schedule.window_s)}, asked for {format_ms(1e3 * schedule.start_up_s)} ahead"
    hours = f"{number(schedule.replica_hours, 3)} replica-hours instead of {number(schedule.fixed.replica_hours, 3)}"
    saved = f" ({format_percent(100 * schedule.saved)} less)" if schedule.saved > 0 else ""
    outcomes = ", ".join(each.outcome for each in schedule.targets)
    return f"{min(counts)} to {count_text(max(counts), 'replica')} ({by}): {hours}{saved}; {outcomes}"


def _prefill_apart(plan: ServingPlan) -> str:
    apart, together = plan.prefill_apart, plan.replicas.value
    if apart is None:
        return ""
    if not apart.total:
        return "no number of replicas meets the targets"
    total = count_text(apart.total, "replica")
    pair = f"{count(apart.prefill_replicas)} to prefill, {count(apart.replicas)} to decode"
    if not apart.feasible:
        return f"{total} or more ({pair})"
    instead = "" if together is None else f" instead of {count(together)}"
    fixed_ms, token_ms = map(format_ms, apart.transfer_ms)
    outcomes = ", ".join(each.outcome for each in apart.targets)
    settings = "" if apart.engine == plan.engine else f"; each with {shlex.join(vllm_flags(apart.engines['vllm']))}"
    transfer = f"at {fixed_ms} and {token_ms} a token for the KV transfer"
    capacity = _capacity_rate(apart, plan.rate_per_s)
    return f"{total}{instead}, {pair}, {transfer}: {outcomes}; capacity {capacity}{settings}"


def engine_command(plan: ServingPlan) -> str:
    assert plan.engine is not None
    key, kv_tokens = engine_key(each.system for each in plan.fits), plan.engine.cache_tokens if plan.kv_cache else None
    return start_line(key, plan.engines, plan.engine.order, "MODEL", kv_tokens)


def serving_tables(plan: ServingPlan, *, brief: bool = False) -> list[Table]:
    """brief: intervals of p99 alone."""
    caption = f"Requests at {format_rate(plan.rate_per_s)}"
    wide = ("p99",) if brief else STATISTICS
    found = [] if plan.outcome is None else [times_table(caption, plan.outcome, wide)]
    if not brief and plan.stalls is not None:
        found.append(stalls_table(plan.stalls))
    return found


def stalls_table(stalls: Stalls) -> Table:
    return make_table(
        f"A prompt of {stalls.prompt_tokens:,} tokens joins {count_text(stalls.decoding, 'decoding request')}",
        stalls.choices,
        (
            "max_num_batched_tokens",
            lambda each: count(each.max_num_batched_tokens) if each.batching == "chunked-prefill" else each.batching,
        ),
        ("chunk", "chunk_tokens", count),
        ("longest gap", _gap),
        ("tokens/s a replica", lambda each: number(each.output_tokens_per_s, 3)),
        ("note", lambda each: ", ".join(word for word in ("planned", "knee") if getattr(each, word))),
        words=("note",),
        note="Knee: the shortest gap with at least 95 % of the highest throughput.",
    )


def serving_page(
    plan: ServingPlan, made: "Making", nearby: Mapping[str, Mapping[str, ServingPlan]] = {}, subject: str = ""
) -> "Rendered":
    """nearby: plans at other loads or limits, this one among them, by slider and place."""
    from latfit.reporting import layout
    from latfit.reporting.plan_figures import distribution_figure, serving_figure

    pictures = []
    if plan.distributions_ms:
        alt = "Share of requests within a TTFT and a TPOT, simulated, with the limits."
        pictures.append(layout.draw_picture("distributions", alt, distribution_figure(plan)))
    if plan.pareto:
        alt = "Output tokens per second of a replica over those of a user, by max_num_seqs."
        pictures.append(layout.draw_picture("front", alt, serving_figure(plan)))
    shown = show_serving(plan)
    others = [_nearby_table(label, plans) for label, plans in nearby.items()]
    assumed, warnings = (plan.notes, shown.messages) if plan.kv_cache else ((), (*shown.messages, *plan.notes))
    page = layout.Page(
        f"A plan of serving engines{subject and ': '}{subject}",
        made,
        _card(plan),
        [layout.make_slider(label, plans, plan, _card) for label, plans in nearby.items()],
        effect_bars(plan.effects, plan.targets),
        plan.effects[0].target if plan.effects else "",
        pictures,
        [*_how_sure(plan), *assumed],
        [(str(text), "") for text in warnings],
        [layout.Section("Requests", "requests", [*others, *serving_tables(plan)], open=True)],
    )
    return layout.render_page(page)


def effect_bars(effects: Sequence[Effect], targets: Sequence[Reached]) -> list[Bar]:
    """Return bars of the effects that leave the interval of their target."""
    noise = {each.name: each for each in targets}
    effects = [each for each in effects if not noise[each.target].low <= each.after <= noise[each.target].high]
    values = [("unchanged", each.before) for each in effects[:1]] + [(each.change, each.after) for each in effects]
    return make_bars(values, lambda value: _value(effects[0].unit, value))


def _nearby_table(label: str, plans: Mapping[str, ServingPlan]) -> Table:
    return make_table(
        f"Replicas and settings by {label}",
        plans.items(),
        (label, lambda each: each[0]),
        ("replicas", lambda each: each[1].replicas.value, count),
        ("verdict", lambda each: VERDICTS[STATES[each[1].promise]]),
        ("capacity", lambda each: each[1].capacity_per_s and _least_rate(each[1].capacity_per_s, each[1].rate_per_s)),
        ("max_num_seqs", lambda each: each[1].engine and each[1].engine.max_num_seqs, count),
        ("max_num_batched_tokens", lambda each: each[1].engine and each[1].engine.max_num_batched_tokens, count),
        words=("verdict",),
    )


def _card(plan: ServingPlan, at: str = "") -> Card:
    state, numbers, command = STATES[plan.promise], [], ""
    if plan.feasible:
        capacity, _, interval = capacity_text(plan).partition(" (")
        numbers = [
            KeyNumber("Replicas", count(plan.replicas.value), f"router {plan.route}"),
            *(
                KeyNumber(each.name, format_ms(each.value), f"limit {format_ms(each.limit)}")
                for each in plan.targets
                if each.unit == "ms"
            ),
            KeyNumber("Capacity", capacity, f"within the targets; {interval.rstrip(')')}"),
        ]
        command = engine_command(plan) if plan.engine is not None else ""
    asked = f"{plan.load}, {plan.request}"
    facts = [(name, text) for name, text in plan_facts(plan) if name != "capacity"]  # one of the numbers
    return Card(asked, VERDICTS[state], verdict(plan), state, [], numbers, command, at, facts)


def _how_sure(plan: ServingPlan) -> list[str]:
    found = []
    if plan.probability is not None:
        but = "" if plan.promise != "likely" or plan.probability < CONFIRMED else ", but for what the warnings say"
        found.append(f"The targets are met with a probability of {probability_text(plan.probability)}{but}.")
    if plan.outcome is not None:
        runs = f"{plan.outcome.requests:,} requests in {count_text(plan.outcome.replications, 'replication')}"
        found.append(f"Times are those of {runs} of a simulation, with 95 % intervals; no request was measured.")
    return found
