"""A plan of serving engines: the answer in lines, its tables, the front of throughput against speed, the page."""

import math
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from latfit.exporting import engine_key, start_line, vllm_flags
from latfit.planning import MOST_SLOWER, Effect, PlannedEngines, SchedulePlan, ServingPlan, Stall, Stalls, Trade
from latfit.reporting.fit.tables import KeyNumber, Table
from latfit.reporting.format import count
from latfit.reporting.plan.summary import STATES, PlanSummary
from latfit.reporting.simulation.tables import half_width
from latfit.simulation import EngineSummary, Interval
from latfit.units import count_text, format_ms, format_percent, format_rate, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from latfit.reporting.layout import Rendered
    from latfit.reporting.simulation.page import Making

HELPFUL = 3
"""Changes that are named on a terminal."""

NOTHING_PCT, NEAR = 0.5, 0.04

HELPS = 0.95
"""Of a figure, below which a change helps."""


def serving_summary(plan: ServingPlan) -> PlanSummary:
    """The plan as a command prints it by default."""
    fits = "; ".join(f"{each.name}, {each.model}, {each.error}" for each in plan.fits)
    lines = [f"Step costs: {fits or 'nominal numbers, not measured'}."]
    if plan.outcome is not None:
        lines.append(_each_replica(plan, plan.outcome))
    if plan.feasible:
        lines += [
            _margin(plan),
            *_help(plan),
            *stall_lines(plan.stalls),
            *_price(plan),
            *_scheduled(plan),
            f"Start each: {engine_command(plan)}",
        ]
    lines += _apart(plan)
    warnings = [each.text for each in plan.warnings]
    return PlanSummary(verdict(plan), STATES[plan.promise], lines, [*plan.unsupported, *warnings], plan.notes)


def verdict(plan: ServingPlan) -> str:
    """The plan in a sentence."""
    load, tried = f"{plan.load} ({plan.request})", plan.replicas.tried
    if tried is None:
        return f"Cannot be met at any number of replicas: {load}; {plan.binding}."
    if not plan.feasible:
        return f"Cannot be met: {_replicas(tried)} at {load}: {plan.outcome_text}."
    meets = "meets" if tried == 1 else "meet"
    if plan.promise == "likely":
        share = "" if plan.probability is None else f" ({min(97, round(100 * plan.probability))} %)"
        meets = f"likely {meets}{share}"
    text = f"{_replicas(tried)} {meets} the targets at {load}: {plan.outcome_text}."
    return f"Not supported by these data: {text}" if plan.unsupported else text


def _replicas(number: int) -> str:
    return count_text(number, "replica")


def _each_replica(plan: ServingPlan, found: EngineSummary) -> str:
    """What one replica does."""
    cache = f", KV cache {format_percent(100 * found.kv_usage)} used" if plan.kv_cache else ""
    # What comes, not what a finite run served from its first arrival to its last token.
    rate = plan.rate_per_s / (plan.replicas.tried or 1)
    return (
        f"Each replica: {format_rate(rate)},"
        f" {number(rate * found.output_tokens_per_s / found.throughput_per_s, 3)} output tokens/s,"
        f" {format_percent(100 * (plan.share_of_throughput_used or 0.0))} of its throughput{cache},"
        f" median batch {number(found.batch_size['p50'])}."
    )


def _margin(plan: ServingPlan) -> str:
    """Return the capacity, by how much steps may be slower, and what one replica less would do."""
    spare, slower_pct = f"Capacity {highest(plan)}", plan.steps_may_be_slower_pct or 0.0
    slower = "; no slower steps meet the targets"
    if slower_pct > 100 * (MOST_SLOWER - 1):
        slower = f"; steps may take {MOST_SLOWER:g} times as long"
    elif slower_pct >= NOTHING_PCT:
        slower = f"; steps may be {format_percent(slower_pct)} slower"
    if plan.fits:
        slower += f" (fit error {format_percent(plan.fit_error_pct)})"
    less, fewer = "", plan.replicas
    if fewer.one_fewer:
        worst = max(fewer.one_fewer, key=lambda each: each.ratio)
        told = f"{'would do, ' if worst.met else ''}{worst.outcome}"
        less = f" With {_replicas((fewer.value or 1) - 1)}: {'overloaded' if fewer.one_fewer_overloaded else told}."
    return f"{spare}{slower}.{less}"


def highest(plan: ServingPlan) -> str:
    """Return the highest load that meets the targets, with its interval."""
    if plan.users is None or plan.carries is None:
        return _highest_rate(plan)
    ends = (plan.highest_rate_per_s, plan.capacity_per_s, plan.missed_from_rate_per_s)
    low, capacity, high = (int((each or math.nan) / plan.rate_per_s * plan.users + 1e-9) for each in ends)
    return f"{capacity:,} users (95 %: {low:,} to {high:,})"


def _highest_rate(plan: PlannedEngines) -> str:
    low, high = plan.highest_rate_per_s or math.nan, plan.missed_from_rate_per_s
    capacity, least = (format_rate(each, down=True, digits=3) for each in (plan.capacity_per_s or low, low))
    return f"{capacity} (95 %: {least.removesuffix(' req/s')} to {number(high, 3)})"


def _help(plan: ServingPlan) -> list[str]:
    helpful = [each for each in plan.effects if each.after < HELPS * each.before][:HELPFUL]
    if not helpful:
        return []
    first = helpful[0]
    told = ", ".join(f"{each.change} {_value(each, each.after)}" for each in helpful)
    limits = [f" of {_value(first, each.limit)}" for each in plan.targets if each.name == first.target]
    return [f"Bottleneck: {first.target} ({_value(first, first.before)}{''.join(limits[:1])}). With {told}."]


def stall_lines(stalls: Stalls | None) -> list[str]:
    """Return what a long prompt does to requests that decode beside it, and the knee where it is another budget."""
    if stalls is None:
        return []
    own, knee = stalls.planned, stalls.knee
    beside = count_text(stalls.decoding, "decoding request")
    prompt = f"a prompt of {stalls.prompt_tokens:,} tokens (p99)"
    told = f"Stall: {prompt} leaves {beside} without a token for up to {_gap(own)}"
    if knee is own:
        return [f"{told}."]
    less = 100 * (knee.output_tokens_per_s / own.output_tokens_per_s - 1)
    budget = f"--max-num-batched-tokens {knee.max_num_batched_tokens}"
    return [f"{told}; {_gap(knee)} with {budget}, throughput {format_percent(less, signed=True)}."]


def _gap(stall: Stall) -> str:
    if stall.interval_ms is None:
        return format_ms(stall.gap_ms)
    low, high = map(format_ms, stall.interval_ms)
    return f"{format_ms(stall.gap_ms)} (90 %: {low.removesuffix(' ms') if high.endswith(' ms') else low} to {high})"


def effect_bars(effects: Sequence[Effect]) -> list[tuple[str, str, float]]:
    """Return (change, what the nearest target becomes, length of its bar in percent), the unchanged plan first."""
    values = [("unchanged", each.before) for each in effects[:1]] + [(each.change, each.after) for each in effects]
    longest = max((value for _, value in values), default=0.0) or 1.0
    return [(change, _value(effects[0], value), 100 * value / longest) for change, value in values]


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
    """Replicas that come and go, beside a constant number."""
    found = plan.schedule
    if found is None:
        return []
    counts, fixed = [each.replicas for each in found.windows], found.fixed
    between = f"{min(counts)} to {_replicas(max(counts))}" if min(counts) < max(counts) else _replicas(counts[0])
    by = f"windows of {format_ms(1e3 * found.window_s)}, asked for {format_ms(1e3 * found.start_up_s)} ahead"
    less = f" ({format_percent(100 * found.saved)} less)" if found.saved > 0 else ""
    told = f"A schedule of {between} ({by}): {number(found.replica_hours, 3)} replica-hours"
    told += f" instead of {number(fixed.replica_hours, 3)}{less}"
    if found.price_per_million_tokens is not None:
        prices = (found.price_per_million_tokens, fixed.price_per_million_tokens)
        told += ", a million output tokens {} instead of {}".format(*(number(each, 3) for each in prices))
    told += f"; {', '.join(each.outcome for each in found.targets)}"
    if not math.isnan(found.slo_attainment):
        kept = (number(100 * each.slo_attainment, 4) for each in (found, fixed))
        told += "; {} % of requests within all limits, {} % with {}".format(*kept, _replicas(plan.replicas.value or 1))
    return [f"{told}."]


def _apart(plan: ServingPlan) -> list[str]:
    """Replicas that prefill for others, beside those that do both."""
    found, together = plan.prefill_apart, plan.replicas.value
    if found is None:
        return []
    if not found.total:
        return ["Prefill apart: no number of replicas meets the targets."]
    pair = f"{count(found.prefill_replicas)} to prefill, {count(found.replicas)} to decode"
    if not found.feasible:
        than = f", not fewer than the {_replicas(together)} above" if together else ""
        return [f"Prefill apart takes {_replicas(found.total)} or more ({pair}){than}."]
    less = ""
    if together is not None:
        saved = f" instead of {count(together)} ({format_percent(100 * (1 - found.total / together))} less)"
        less = saved if found.total < together else ", as many as above"
    fixed_ms, token_ms = map(format_ms, found.transfer_ms)
    told = f"Prefill apart: {_replicas(found.total)}{less}, {pair}, at {fixed_ms} and {token_ms} a token for the KV"
    told += f" transfer: {', '.join(each.outcome for each in found.targets)}; capacity {_highest_rate(found)}"
    if found.price_per_million_tokens is not None:
        told += f"; {number(found.price_per_million_tokens, 3)} a million output tokens"
    if found.engine == plan.engine:
        return [f"{told}. The same settings."]
    return [f"{told}. Each with {shlex.join(vllm_flags(found.engines['vllm']))}."]


def engine_command(plan: ServingPlan) -> str:
    """The command line that starts such an engine, the one that the steps are of."""
    assert plan.engine is not None
    key, engines = engine_key(each.system for each in plan.fits), plan.engines
    if key == "llamacpp" and key in engines and plan.kv_cache:
        engines = {key: {**engines[key], "ctx_size": plan.engine.cache_tokens, "kv_unified": True}}
    return start_line(key, engines, plan.engine.order, "MODEL")


def serving_tables(plan: ServingPlan, *, brief: bool = False) -> list[Table]:
    """Latencies of requests; in full the targets, changes and the front as well."""
    found = [] if plan.outcome is None else [_latencies(plan.rate_per_s, plan.outcome)]
    if brief:
        return found
    if plan.targets:
        found.append(_targets_table(plan))
    if plan.effects:
        rows = [(each.change, _value(each, each.before), _value(each, each.after)) for each in plan.effects]
        found.append(Table(f"What would change {plan.effects[0].target}", ("change", "now", "then"), rows))
    if plan.schedule is not None:
        found.append(schedule_table(plan.schedule))
    if plan.pareto:
        found.append(front_table(plan.pareto))
    if plan.stalls is not None:
        found.append(stalls_table(plan.stalls))
    return found


def schedule_table(schedule: SchedulePlan) -> Table:
    """The windows of a schedule."""
    rows = [
        (format_ms(1e3 * each.t_s), format_rate(each.rate_per_s), count(each.replicas)) for each in schedule.windows
    ]
    return Table("Schedule", ("from", "arrivals", "replicas"), rows)


def _latencies(rate_per_s: float, found: EngineSummary) -> Table:
    rows = [
        (title, *(_within(times[name], format_ms) for name in ("mean", "p50", "p90", "p99")))
        for title, times in (("TTFT", found.ttft), ("TPOT", found.tpot), ("latency", found.latency))
        if not math.isnan(times["p99"].value)
    ]
    return Table(f"Requests at {format_rate(rate_per_s)}", ("", "mean", "p50", "p90", "p99"), rows)


def _within(found: Interval, shown: Callable[[float], str]) -> str:
    """A figure with how far its interval reaches down and up, in whole percent; one number where that is the same."""
    sides = [100 * abs(end / found.value - 1) if found.value else math.nan for end in (found.low, found.high)]
    if math.isnan(sum(sides)) or round(sides[0]) == round(sides[1]):
        return f"{shown(found.value)}{half_width(found)}"
    return f"{shown(found.value)} −{sides[0]:.0f}/+{format_percent(round(sides[1]))}"


def _targets_table(plan: ServingPlan) -> Table:
    rows = []
    fewer = plan.replicas
    for each in plan.targets:
        interval = Interval(each.value, each.low, each.high)
        shown = format_percent if each.unit == "pct" else format_ms
        less = next((other for other in fewer.one_fewer if other.name == each.name), None)
        rows.append(
            (
                each.name,
                _within(interval, shown),
                shown(each.limit),
                "met" if each.met else "missed",
                "" if less is None else "overloaded" if fewer.one_fewer_overloaded else shown(less.value),
            )
        )
    columns = ("target", "reached", "limit", "", "with one replica less")
    return Table("Targets", columns, rows).without_empty()


def front_table(front: Sequence[Trade]) -> Table:
    """The settings of which no other is better in throughput and in speed."""
    rows = [
        (
            count(each.max_num_seqs),
            count(each.max_num_batched_tokens),
            number(each.speed_per_s, 3),
            number(each.throughput_per_s, 3),
            "planned" if each.best else "",
        )
        for each in front
    ]
    columns = ("max_num_seqs", "max_num_batched_tokens", "tokens/s a user", "tokens/s a replica", "note")
    note = "Of a replica that always has enough to do; others than these and the planned ones give less of both."
    return Table("Throughput against speed", columns, rows, words=("note",), note=note)


def stalls_table(stalls: Stalls) -> Table:
    """The longest gap between two tokens, and the throughput, by token budget."""
    rows = [
        (
            count(each.max_num_batched_tokens) if each.batching == "chunked-prefill" else each.batching,
            count(each.chunk_tokens),
            _gap(each),
            number(each.output_tokens_per_s, 3),
            ", ".join(word for word, true in (("planned", each.planned), ("knee", each.knee)) if true),
        )
        for each in stalls.choices
    ]
    columns = ("max_num_batched_tokens", "chunk", "longest gap", "tokens/s a replica", "note")
    note = "Knee: the shortest gap with at least 95 % of the highest throughput."
    title = f"A prompt of {stalls.prompt_tokens:,} tokens beside {count_text(stalls.decoding, 'decoding request')}"
    return Table(title, columns, rows, words=("note",), note=note)


def stalls_figure(stalls: Stalls) -> "Figure":
    """The longest gap over the token budget, with the throughput that each costs or gains."""
    from latfit.reporting import style

    figure = style.new_figure((7.0, 4.6))
    axes = figure.subplots()
    for each in stalls.choices:
        low, high = each.interval_ms or (each.gap_ms, each.gap_ms)
        place, reach = (each.max_num_batched_tokens, each.gap_ms), [[each.gap_ms - low], [high - each.gap_ms]]
        colour = style.LINE_COLOURS[int(each.planned)]
        axes.errorbar(*place, yerr=reach, fmt="D" if each.planned else "o", color=colour, capsize=4)
        words = [word for word, true in (("planned", each.planned), ("knee", each.knee)) if true]
        label = "\n".join([f"{number(each.output_tokens_per_s, 3)} tokens/s", *words])
        axes.annotate(label, place, (8, 0), textcoords="offset points", va="center", fontsize=8.5)
    title = f"Longest gap between tokens by a prompt of {stalls.prompt_tokens:,} tokens"
    style.dress(axes, title, "max_num_batched_tokens", "longest gap [ms]")
    budgets = [each.max_num_batched_tokens for each in stalls.choices]
    style.log_x(axes, 0.8 * min(budgets), 1.6 * max(budgets), style.binary_ticks)
    axes.set_ylim(bottom=0)
    return figure


def serving_figure(plan: ServingPlan) -> "Figure":
    """Tokens per second of a replica over those of a user: the front, with the planned settings."""
    from latfit.reporting import style  # brings matplotlib, which a plan in text does without

    figure = style.new_figure((7.0, 4.6))
    axes = figure.subplots()
    speeds = [each.speed_per_s for each in plan.pareto]
    totals = [each.throughput_per_s for each in plan.pareto]
    axes.plot(speeds, totals, marker="o", color=style.LINE_COLOURS[0], linewidth=1.6)
    best = next(each for each in plan.pareto if each.best)
    axes.plot([best.speed_per_s], [best.throughput_per_s], "D", color=style.LINE_COLOURS[1], markersize=10)
    for each in plan.pareto:
        beside = abs(each.speed_per_s - best.speed_per_s) < NEAR * max(speeds)
        if beside and not each.best:
            continue  # two labels would cover each other
        label = f"{each.max_num_seqs}" + (" (planned)" if each.best else "")
        axes.annotate(
            label, (each.speed_per_s, each.throughput_per_s), (5, 5), textcoords="offset points", fontsize=8.5
        )
    for target in plan.targets:
        if target.metric == "tpot":
            axes.axvline(1e3 / target.limit, color=style.SLA, linestyle="--", linewidth=1.4)
            place = (1e3 / target.limit, 0.02)
            axes.annotate(
                f"TPOT {format_ms(target.limit)}", place, (4, 2), xycoords=("data", "axes fraction"),
                textcoords="offset points", fontsize=9, color=style.SLA,
            )  # fmt: skip
    style.dress(axes, "Throughput against speed, by max_num_seqs", "tokens/s of a user", "output tokens/s of a replica")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return figure


def serving_page(
    plan: ServingPlan, made: "Making", measured: Sequence[Table] = (), figure: "Figure | None" = None
) -> "Rendered":
    """The plan as a page. measured, figure: what an engine with its settings was measured to do, before all else."""
    from latfit.reporting import layout, style

    told = serving_summary(plan)
    pictures = []
    if plan.pareto:
        alt = "Output tokens per second of a replica over those of a user, by max_num_seqs."
        pictures = [layout.Picture("front", "Throughput against speed", alt, style.png(serving_figure(plan)))]
    if plan.stalls is not None:
        alt = "Longest gap between two tokens by token budget, with 90 % intervals and output tokens per second."
        pictures.append(layout.Picture("stalls", "Stalls by long prompts", alt, style.png(stalls_figure(plan.stalls))))
    if figure is not None:
        alt = "Distributions of TTFT, TPOT and latency, measured and simulated."
        pictures.insert(0, layout.Picture("measured", "Measured and simulated", alt, style.png(figure)))
    words = {"good": "meets the targets", "doubt": "likely meets the targets", "bad": "misses the targets"}
    looks = {"good": "", "doubt": "doubt", "bad": "unmet"}
    answer = {
        "asked": f"{plan.load}, {plan.request}",
        "verdict": words[told.state],
        "sentence": told.verdict,
        "state": looks[told.state],
        "beside": told.lines,
        "numbers": _numbers(plan),
        "command": engine_command(plan) if plan.engine is not None and plan.feasible else "",
        "help": effect_bars(plan.effects),
        "target": plan.effects[0].target if plan.effects else "",
    }
    settings = {} if plan.engine is None else plan.engine.to_json()
    rows = [(name, "" if value is None else str(value)) for name, value in settings.items()]
    html = layout.template("simulated.html").render(
        title=made.titled("A plan of serving engines"),
        answer=answer,
        heading="Latency of requests, and what would change it",
        broad=False,
        tables=[*measured, *serving_tables(plan)],
        findings=[],
        warnings=[{"path": "", "message": text, "remedy": ""} for text in (*told.warnings, *told.others)],
        machine=Table("Settings of a replica", ("setting", "value"), rows),
        pictures=[layout.shown(each) for each in pictures],
        making=layout.making(made.command, made.made_at),
        notes=(),
    )
    return layout.Rendered(html, pictures)


def _numbers(plan: ServingPlan) -> list[KeyNumber]:
    if not plan.feasible:
        return []
    found = [KeyNumber("Replicas", count(plan.replicas.value), f"router {plan.route}")]
    found += [
        KeyNumber(each.name, format_ms(each.value), f"limit {format_ms(each.limit)}")
        for each in plan.targets
        if each.unit == "ms"
    ]
    found.append(KeyNumber("Capacity", highest(plan), "within the targets"))
    return found
