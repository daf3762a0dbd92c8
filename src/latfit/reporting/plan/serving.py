"""A plan of serving engines: the answer in lines, its tables, the front of throughput against speed, the page."""

import math
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from latfit.exporting import engine_key, start_line, vllm_flags
from latfit.planning import MOST_SLOWER, Effect, Reached, SchedulePlan, ServingPlan
from latfit.reporting import layout, style
from latfit.reporting.fit.tables import KeyNumber, Table
from latfit.reporting.format import count
from latfit.reporting.layout import Picture, Rendered
from latfit.reporting.plan.summary import STATES, PlanSummary
from latfit.reporting.simulation.brief import half_width
from latfit.reporting.simulation.page import Making
from latfit.simulation import Interval
from latfit.units import format_ms, format_percent, format_rate, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELPFUL = 3
"""Changes that are named on a terminal."""

NOTHING_PCT, NEAR_PCT, NEAR = 0.5, 0.05, 0.04

HELPS = 0.95
"""Of a figure, below which a change helps."""


def serving_summary(plan: ServingPlan) -> PlanSummary:
    """The plan as a command prints it by default."""
    lines = [_costs(plan)]
    if plan.summary is not None:
        lines.append(_of_each(plan))
    if plan.feasible:
        lines += [_margin(plan), *_help(plan), *_price(plan), *_scheduled(plan), f"Start each: {engine_command(plan)}"]
    lines += _apart(plan)
    warnings = [f"{each.message} {each.remedy}" for each in plan.warnings]
    return PlanSummary(verdict(plan), STATES[plan.promise], lines, [*plan.unsupported, *warnings], plan.notes)


def verdict(plan: ServingPlan) -> str:
    """The plan in a sentence."""
    load = f"{offered(plan)} ({plan.what})"
    figures = ", ".join(_beside(each) for each in plan.reached)
    if not plan.feasible:
        if plan.replicas is None:
            return f"Cannot be met at any number of replicas: {load}; {plan.binding}."
        return f"Cannot be met: {engines(plan.replicas)} at {load}: {figures}."
    text = f"{engines(plan.replicas or 1)} for {load}: {figures}."
    if plan.unsupported:
        return f"Not supported by these data: {text}"
    return text if plan.promise == "yes" else f"In doubt: {text}"


def offered(plan: ServingPlan) -> str:
    """The load in words."""
    if plan.users is None:
        return format_rate(plan.rate_per_s)
    return "1 user" if plan.users == 1 else f"{count(plan.users)} users"


def engines(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{count(replicas)} replicas"


def _beside(each: Reached) -> str:
    if each.unit == "pct":
        digits = 4 if abs(each.value - each.limit) > NEAR_PCT else 7
        return f"{100 - each.value:.{digits}g} % of requests meet all limits, {100 - each.limit:.4g} % asked"
    value, limit = format_ms(each.value), format_ms(each.limit)
    return f"{each.name} {value if value != limit else format_ms(each.value, 5)} of {limit}"


def _costs(plan: ServingPlan) -> str:
    """How good the step costs are."""
    told = []
    for each in plan.fits:
        phases = ", ".join(f"{name} {format_percent(error)}" for name, error in each.by_phase.items())
        off = (
            "error on unseen steps unknown"
            if each.error_pct is None
            else (f"{format_percent(each.error_pct)} off on unseen steps" + (f" ({phases})" if phases else ""))
        )
        told.append(f"{each.name}, {each.model}, {off}")
    return f"Step costs: {'; '.join(told)}." if told else "Step costs: nominal numbers, not measured."


def _of_each(plan: ServingPlan) -> str:
    """What one replica does."""
    found = plan.summary
    assert found is not None
    share = plan.replicas or 1
    cache = f", KV cache {format_percent(100 * found.kv_usage)} used" if plan.request.kv else ""
    # What comes, not what a finite run served from its first arrival to its last token.
    rate = plan.rate_per_s / share
    return (
        f"Each replica: {format_rate(rate)},"
        f" {number(rate * found.output_tokens_per_s / found.throughput_per_s, 3)} output tokens/s,"
        f" {format_percent(100 * plan.used)} of its throughput{cache},"
        f" median batch {number(found.batch_size['p50'])}."
    )


def _margin(plan: ServingPlan) -> str:
    """What there is to spare, and what one engine less would do."""
    spare = f"Holds up to {highest(plan)}"
    bears = 100 * (plan.bears - 1)
    slower = f", or with steps {format_percent(bears)} slower" if bears >= NOTHING_PCT else ", but with no slower steps"
    if plan.bears > MOST_SLOWER:
        slower = f", or with steps {MOST_SLOWER:g} times as long"
    if not plan.bears_the_fit:
        slower += ": the fit may be off by more"
    less = ""
    if plan.fewer:
        worst = max(plan.fewer, key=lambda each: each.ratio)
        enough = "would do, " if plan.fewer_carry and worst.met else ""
        told = enough + _beside(worst) if plan.fewer_carry else "overloaded"
        less = f" {engines((plan.replicas or 1) - 1).capitalize()}: {told}."
    return f"{spare}{slower}.{less}"


def highest(plan: ServingPlan) -> str:
    """The most that the engines keep the targets at, for certain and at most."""
    if plan.users is None:
        return _highest_rate(plan.rate_per_s, plan.carries, plan.carries_at_most)
    return f"{int(plan.carries * plan.users):,} users (missed from {int(plan.carries_at_most * plan.users):,})"


def _highest_rate(rate_per_s: float, carries: float, at_most: float) -> str:
    """Up to which rate and from which on, by ratios of a rate."""
    return f"{format_rate(_down(carries * rate_per_s), down=True)} (missed from {number(at_most * rate_per_s, 3)})"


def _down(value: float) -> float:
    """To three digits, of which the search knows two."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.floor(value / unit + 1e-9) * unit


def _help(plan: ServingPlan) -> list[str]:
    helpful = [each for each in plan.effects if each.after < HELPS * each.before][:HELPFUL]
    if not helpful:
        return []
    first = helpful[0]
    told = ", ".join(f"{each.change} {_value(each, each.after)}" for each in helpful)
    return [f"Binding: {first.name}, {_value(first, first.before)} now; with {told}."]


def _value(each: Effect, value: float) -> str:
    return format_percent(value) if each.unit == "pct" else format_ms(value)


def _price(plan: ServingPlan) -> list[str]:
    found = plan.cost
    told = []
    if found.price_per_hour is not None:
        of_tokens = number(found.price_per_million_tokens, 3)
        told.append(f"{number(found.price_per_hour)} an hour, {of_tokens} a million output tokens")
    if found.kwh_per_million_tokens is not None:
        told.append(f"{number(found.kwh_per_million_tokens, 3)} kWh a million output tokens")
    return [f"Cost: {'; '.join(told)}."] if told else []


def _scheduled(plan: ServingPlan) -> list[str]:
    """Engines that come and go, beside the number that is always there."""
    found = plan.schedule
    if found is None:
        return []
    counts, fixed = [each.replicas for each in found.windows], engines(plan.replicas or 1)
    between = f"{min(counts)} to {engines(max(counts))}" if min(counts) < max(counts) else engines(counts[0])
    by = f"windows of {format_ms(1e3 * found.window_s)}, asked for {format_ms(1e3 * found.start_up_s)} ahead"
    less = f" ({format_percent(100 * found.saved)} less)" if found.saved > 0 else ""
    told = f"A schedule of {between} ({by}): {number(found.hours, 3)} replica-hours"
    told += f" instead of {number(found.fixed_hours, 3)}{less}"
    if found.price_per_million_tokens is not None:
        prices = (found.price_per_million_tokens, found.fixed_price_per_million_tokens)
        told += ", a million output tokens {} instead of {}".format(*(number(each, 3) for each in prices))
    told += f"; {', '.join(_beside(each) for each in found.reached)}"
    if not math.isnan(found.kept):
        kept = (number(100 * each, 4) for each in (found.kept, found.fixed_kept))
        told += "; {} % of requests within all limits, {} % with {}".format(*kept, fixed)
    return [f"{told}."]


def _apart(plan: ServingPlan) -> list[str]:
    """Engines that prefill for others, beside those that do both."""
    found, together = plan.apart, plan.replicas if plan.feasible else None
    if found is None:
        return []
    if not found.feasible and not found.total:
        return ["Prefill apart: no number of replicas keeps the targets."]
    pair = f"{count(found.prefill)} to prefill, {count(found.decode)} to decode"
    if not found.feasible:
        than = f", not fewer than the {engines(together)} above" if together else ""
        return [f"Prefill apart takes {engines(found.total)} or more ({pair}){than}."]
    less = ""
    if together is not None:
        saved = f" instead of {count(together)} ({format_percent(100 * (1 - found.total / together))} less)"
        less = saved if found.total < together else ", as many as above"
    reached = ", ".join(_beside(each) for each in found.reached)
    told = f"Prefill apart: {engines(found.total)}{less}, {pair}, at {found.transfer_text} for the KV transfer:"
    told += f" {reached}; holds up to {_highest_rate(plan.rate_per_s, found.carries, found.carries_at_most)}"
    if found.price_per_million_tokens is not None:
        told += f"; {number(found.price_per_million_tokens, 3)} a million output tokens"
    if found.settings == plan.settings and plan.feasible:
        return [f"{told}. The same settings."]
    flags = shlex.join(vllm_flags(found.engines["vllm"]))
    return [f"{told}. Each with {flags}."]


def engine_command(plan: ServingPlan) -> str:
    """The command line that starts such an engine, the one that the steps are of."""
    key, engines = engine_key(each.system for each in plan.fits), plan.engines
    if key == "llamacpp" and key in engines and plan.request.kv:
        tokens = plan.settings.kv_blocks * plan.settings.block_size
        engines = {key: {**engines[key], "ctx_size": tokens, "kv_unified": True}}
    return start_line(key, engines, plan.settings.order.name, "MODEL")


def serving_tables(plan: ServingPlan, *, brief: bool = False) -> list[Table]:
    """Latencies of requests; in full the targets, changes and the front as well."""
    found = [] if plan.summary is None else [_latencies(plan)]
    if brief:
        return found
    if plan.reached:
        found.append(_targets_table(plan))
    if plan.effects:
        rows = [(each.change, _value(each, each.before), _value(each, each.after)) for each in plan.effects]
        found.append(Table(f"What would change {plan.effects[0].name}", ("change", "now", "then"), rows))
    if plan.schedule is not None:
        found.append(schedule_table(plan.schedule))
    if plan.front:
        found.append(front_table(plan))
    return found


def schedule_table(schedule: SchedulePlan) -> Table:
    """The windows of a schedule."""
    rows = [
        (format_ms(1e3 * each.t_s), format_rate(each.rate_per_s), count(each.replicas)) for each in schedule.windows
    ]
    return Table("Schedule", ("from", "arrivals", "replicas"), rows)


def _latencies(plan: ServingPlan) -> Table:
    found = plan.summary
    assert found is not None
    rows = [
        (title, *(_within(times[name], format_ms) for name in ("mean", "p50", "p90", "p99")))
        for title, times in (("TTFT", found.ttft), ("TPOT", found.tpot), ("latency", found.latency))
        if not math.isnan(times["p99"].value)
    ]
    return Table(f"Requests at {format_rate(plan.rate_per_s)}", ("", "mean", "p50", "p90", "p99"), rows)


def _within(found: Interval, shown: Callable[[float], str]) -> str:
    """A figure with how far its interval reaches down and up, in whole percent; one number where that is the same."""
    sides = [100 * abs(end / found.value - 1) if found.value else math.nan for end in (found.low, found.high)]
    if math.isnan(sum(sides)) or round(sides[0]) == round(sides[1]):
        return f"{shown(found.value)}{half_width(found)}"
    return f"{shown(found.value)} −{sides[0]:.0f}/+{format_percent(round(sides[1]))}"


def _targets_table(plan: ServingPlan) -> Table:
    rows = []
    for each in plan.reached:
        interval = Interval(each.value, each.low, each.high)
        shown = format_percent if each.unit == "pct" else format_ms
        less = next((other for other in plan.fewer if other.name == each.name), None)
        rows.append(
            (
                each.name,
                _within(interval, shown),
                shown(each.limit),
                "met" if each.met else "missed",
                "" if less is None else shown(less.value) if plan.fewer_carry else "overloaded",
            )
        )
    columns = ("target", "reached", "limit", "", "with one replica less")
    return Table("Targets", columns, rows).without_empty()


def front_table(plan: ServingPlan) -> Table:
    """The settings of which no other is better in throughput and in speed."""
    rows = [
        (
            count(each.max_num_seqs),
            count(each.max_num_batched_tokens),
            number(each.speed_per_s, 3),
            number(each.throughput_per_s, 3),
            "planned" if each.best else "",
        )
        for each in plan.front
    ]
    columns = ("max_num_seqs", "max_num_batched_tokens", "tokens/s a user", "tokens/s a replica", "note")
    note = "Of a replica that always has enough to do; others than these and the planned ones give less of both."
    return Table("Throughput against speed", columns, rows, words=("note",), note=note)


def serving_figure(plan: ServingPlan) -> "Figure":
    """Tokens per second of a replica over those of a user: the front, with the planned settings."""
    figure = style.new_figure((7.0, 4.6))
    axes = figure.subplots()
    speeds = [each.speed_per_s for each in plan.front]
    totals = [each.throughput_per_s for each in plan.front]
    axes.plot(speeds, totals, marker="o", color=style.LINE_COLOURS[0], linewidth=1.6)
    best = next(each for each in plan.front if each.best)
    axes.plot([best.speed_per_s], [best.throughput_per_s], "D", color=style.LINE_COLOURS[1], markersize=10)
    for each in plan.front:
        beside = abs(each.speed_per_s - best.speed_per_s) < NEAR * max(speeds)
        if beside and not each.best:
            continue  # two labels would cover each other
        label = f"{each.max_num_seqs}" + (" (planned)" if each.best else "")
        axes.annotate(
            label, (each.speed_per_s, each.throughput_per_s), (5, 5), textcoords="offset points", fontsize=8.5
        )
    for target in plan.request.targets.targets:
        if target.metric == "tpot" and math.isfinite(target.limit_ms):
            axes.axvline(1e3 / target.limit_ms, color=style.SLA, linestyle="--", linewidth=1.4)
            place = (1e3 / target.limit_ms, 0.02)
            axes.annotate(
                f"TPOT {format_ms(target.limit_ms)}", place, (4, 2), xycoords=("data", "axes fraction"),
                textcoords="offset points", fontsize=9, color=style.SLA,
            )  # fmt: skip
    style.dress(axes, "Throughput against speed, by max_num_seqs", "tokens/s of a user", "output tokens/s of a replica")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return figure


def serving_page(plan: ServingPlan, made: Making) -> Rendered:
    """The plan as a page."""
    told = serving_summary(plan)
    pictures: Sequence[Picture] = []
    if plan.front:
        alt = "Output tokens per second of a replica over those of a user, by max_num_seqs."
        pictures = [Picture("front", "Throughput against speed", alt, style.png(serving_figure(plan)))]
    words = {"good": "can be met", "doubt": "in doubt", "bad": "cannot be met"}
    looks = {"good": "", "doubt": "doubt", "bad": "unmet"}
    answer = {
        "asked": f"{offered(plan)}, {plan.what}",
        "verdict": words[told.state],
        "sentence": told.verdict,
        "state": looks[told.state],
        "beside": told.lines,
        "numbers": _numbers(plan),
    }
    rows = [(name, "" if value is None else str(value)) for name, value in plan.engine.items()] if plan.feasible else []
    html = layout.template("simulated.html").render(
        title=made.titled("A plan of serving engines"),
        answer=answer,
        heading="Latency of requests, and what would change it",
        broad=False,
        tables=serving_tables(plan),
        findings=[],
        warnings=[{"path": "", "message": text, "remedy": ""} for text in (*told.warnings, *told.others)],
        machine=Table("Settings of a replica", ("setting", "value"), rows),
        pictures=[layout.shown(each) for each in pictures],
        making=layout.making(made.command, made.made_at),
        notes=(),
    )
    return Rendered(html, pictures)


def _numbers(plan: ServingPlan) -> list[KeyNumber]:
    if not plan.feasible:
        return []
    found = [KeyNumber("Replicas", count(plan.replicas or 1), f"router {plan.request.route}")]
    found += [
        KeyNumber(each.name, format_ms(each.value), f"limit {format_ms(each.limit)}")
        for each in plan.reached
        if each.unit == "ms"
    ]
    found.append(KeyNumber("Holds up to", highest(plan), "within the targets"))
    return found
