"""A plan of serving engines: the answer in lines, its tables and figures, the page."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from latfit.exporting import engine_key, start_line, vllm_flags
from latfit.planning import MOST_SLOWER, Effect, PlannedEngines, ServingPlan, Stall, Stalls
from latfit.reporting.format import count
from latfit.reporting.plan.summary import STATES, PlanSummary, probability_text
from latfit.reporting.simulation.tables import half_width
from latfit.reporting.table import KeyNumber, Table, facts_table, make_table
from latfit.simulation import EngineSummary, Interval, Times
from latfit.units import count_text, format_ms, format_percent, format_rate, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from latfit.reporting.layout import Card, Rendered
    from latfit.reporting.simulation.page import Making

MAX_CHANGES = 3  # that are named on a terminal
HELPS = 0.95  # of a figure, below which a change helps
NOTHING_PCT = 0.5
NEAR = 0.08  # of the highest speed
VERDICTS = {"good": "meets the targets", "doubt": "likely meets the targets", "bad": "misses the targets"}
LOOKS = {"good": "", "doubt": "doubt", "bad": "unmet"}


def serving_summary(plan: ServingPlan) -> PlanSummary:
    """The plan as a command prints it by default."""
    lines = [_fits(plan)]
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


def _fits(plan: ServingPlan) -> str:
    fits = "; ".join(f"{each.name}, {each.model}, {each.error}" for each in plan.fits)
    return f"Step costs: {fits or 'nominal numbers, not measured'}."


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
    helpful = [each for each in plan.effects if each.after < HELPS * each.before][:MAX_CHANGES]
    if not helpful:
        return []
    first, unit = helpful[0], helpful[0].unit
    changes = ", ".join(f"{each.change} {_value(unit, each.after)}" for each in helpful)
    limit = next((f" of {_value(unit, each.limit)}" for each in plan.targets if each.name == first.target), "")
    return [f"Bottleneck: {first.target} ({_value(unit, first.before)}{limit}). With {changes}."]


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


def _value(unit: str, value: float) -> str:
    return format_percent(value) if unit == "pct" else format_ms(value)


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
    counts = [each.replicas for each in found.windows]
    by = f"windows of {format_ms(1e3 * found.window_s)}, asked for {format_ms(1e3 * found.start_up_s)} ahead"
    hours = f"{number(found.replica_hours, 3)} replica-hours instead of {number(found.fixed.replica_hours, 3)}"
    saved = f" ({format_percent(100 * found.saved)} less)" if found.saved > 0 else ""
    outcomes = ", ".join(each.outcome for each in found.targets)
    return [f"A schedule of {min(counts)} to {_replicas(max(counts))} ({by}): {hours}{saved}; {outcomes}."]


def _apart(plan: ServingPlan) -> list[str]:
    """Replicas that prefill for others, beside those that do both."""
    found, together = plan.prefill_apart, plan.replicas.value
    if found is None:
        return []
    if not found.total:
        return ["Prefill apart: no number of replicas meets the targets."]
    pair = f"{count(found.prefill_replicas)} to prefill, {count(found.replicas)} to decode"
    if not found.feasible:
        return [f"Prefill apart takes {_replicas(found.total)} or more ({pair})."]
    instead = "" if together is None else f" instead of {count(together)}"
    fixed_ms, token_ms = map(format_ms, found.transfer_ms)
    outcomes = ", ".join(each.outcome for each in found.targets)
    settings = "" if found.engine == plan.engine else f" Each with {shlex.join(vllm_flags(found.engines['vllm']))}."
    return [
        f"Prefill apart: {_replicas(found.total)}{instead}, {pair}, at {fixed_ms} and {token_ms} a token for the KV"
        f" transfer: {outcomes}; capacity {_highest_rate(found)}.{settings}"
    ]


def engine_command(plan: ServingPlan) -> str:
    """The command line that starts such an engine, the one that the steps are of."""
    assert plan.engine is not None
    key, engines = engine_key(each.system for each in plan.fits), plan.engines
    if key == "llamacpp" and key in engines and plan.kv_cache:
        engines = {key: {**engines[key], "ctx_size": plan.engine.cache_tokens, "kv_unified": True}}
    return start_line(key, engines, plan.engine.order, "MODEL")


def serving_tables(plan: ServingPlan, *, brief: bool = False) -> list[Table]:
    """Latencies of requests; in full the stalls as well."""
    found = [] if plan.outcome is None else [_latencies(plan.rate_per_s, plan.outcome)]
    if not brief:
        found.append(stalls_table(plan.stalls))
    return [table for table in found if table.rows]


def _measured_times(found: EngineSummary) -> list[tuple[str, Times]]:
    named = (("TTFT", found.ttft), ("TPOT", found.tpot), ("latency", found.latency))
    return [(title, times) for title, times in named if not math.isnan(times["p99"].value)]


def _latencies(rate_per_s: float, found: EngineSummary) -> Table:
    rows = [
        (title, *(_within(times[name], format_ms) for name in ("mean", "p50", "p90", "p99")))
        for title, times in _measured_times(found)
    ]
    return Table(f"Requests at {format_rate(rate_per_s)}", ("", "mean", "p50", "p90", "p99"), rows)


def _within(found: Interval, shown: Callable[[float], str]) -> str:
    """A figure with how far its interval reaches down and up, in whole percent; one number where that is the same."""
    sides = [100 * abs(end / found.value - 1) if found.value else math.nan for end in (found.low, found.high)]
    if math.isnan(sum(sides)) or round(sides[0]) == round(sides[1]):
        return f"{shown(found.value)}{half_width(found)}"
    return f"{shown(found.value)} −{sides[0]:.0f}/+{format_percent(round(sides[1]))}"


def stalls_table(stalls: Stalls | None) -> Table:
    """The longest gap between two tokens, and the throughput, by token budget."""
    if stalls is None:
        return Table("", (), ())
    return make_table(
        f"A prompt of {stalls.prompt_tokens:,} tokens beside {count_text(stalls.decoding, 'decoding request')}",
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


def serving_figure(plan: ServingPlan) -> "Figure":
    """Tokens per second of a replica over those of a user: the front, with the planned settings."""
    from latfit.reporting import style  # brings matplotlib, which a plan in text does without

    figure = style.new_figure()
    axes = figure.subplots()
    speeds, totals = zip(*((each.speed_per_s, each.throughput_per_s) for each in plan.pareto), strict=True)
    best = next(each for each in plan.pareto if each.best)
    axes.plot(speeds, totals, marker="o", color=style.LINE_COLOURS[0], linewidth=1.6)
    axes.plot(best.speed_per_s, best.throughput_per_s, "D", color=style.LINE_COLOURS[1], markersize=10)
    for each in plan.pareto:
        place = (each.speed_per_s, each.throughput_per_s)
        apart = abs(each.speed_per_s - best.speed_per_s) > NEAR * max(speeds)
        label = f"{each.max_num_seqs}" + " (planned)" * each.best
        if each.best or apart:  # labels of neighbours would cover each other
            axes.annotate(label, place, (6, 6), textcoords="offset points", fontsize=9)
    for target in plan.targets:
        if target.metric == "tpot":
            label = f"TPOT {format_ms(target.limit)}"
            axes.axvline(1e3 / target.limit, color=style.SLA, linestyle="--", linewidth=1.4, label=label)
            style.legend(axes)
    style.dress(axes, "Throughput against speed, by max_num_seqs", "tokens/s of a user", "output tokens/s of a replica")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    return figure


def distribution_figure(plan: ServingPlan) -> "Figure":
    """The share of requests within a TTFT and a TPOT, at p50, p90 and p99 with 95 % intervals, and the limits."""
    from latfit.reporting import style

    assert plan.outcome is not None
    panels = _measured_times(plan.outcome)[:2]
    figure = style.new_figure((6.0, 2.6 * len(panels)))
    rows = figure.subplots(len(panels), squeeze=False)[:, 0]
    for axes, (title, times), colour in zip(rows, panels, style.LINE_COLOURS, strict=False):
        found = {share: times[f"p{share}"] for share in (50, 90, 99)}
        limits = [each.limit for each in plan.targets if each.metric == title.lower()]
        axes.plot([each.value for each in found.values()], list(found), color=colour, marker="o", linewidth=1.8)
        for share, each in found.items():
            axes.hlines(share, each.low, each.high, color=colour, linewidth=6, alpha=0.3)
            axes.annotate(format_ms(each.value), (each.value, share), (7, -12), textcoords="offset points", fontsize=9)
        for limit in limits:
            axes.axvline(limit, color=style.SLA, linestyle="--", linewidth=1.4, label=f"limit {format_ms(limit)}")
            style.legend(axes, "lower right")
        style.dress(axes, f"{title}: p99 {format_ms(found[99].value)}", f"{title} [ms]", "requests within [%]")
        axes.set_xlim(0, 1.25 * max(*(each.value for each in found.values()), *limits))
        axes.set_ylim(30, 104)
    return figure


def serving_page(
    plan: ServingPlan,
    made: "Making",
    measured: Sequence[Table] = (),
    figure: "Figure | None" = None,
    nearby: Mapping[str, Mapping[str, ServingPlan]] | None = None,
) -> "Rendered":
    """The plan as a page.

    measured, figure
        What an engine with its settings was measured to do, before all else.
    nearby
        Plans at other loads or limits, this one among them, by slider and place.
    """
    from latfit.reporting import layout, style

    pictures = []
    if figure is not None:
        alt = "Distributions of TTFT, TPOT and latency, measured and simulated."
        pictures.append(layout.Picture("measured", "Measured and simulated", alt, style.png(figure)))
    if plan.outcome is not None and _measured_times(plan.outcome):
        alt = "Share of requests within a TTFT and a TPOT, simulated, with 95 % intervals and the limits."
        pictures.append(layout.draw_picture("distributions", alt, distribution_figure(plan)))
    if plan.pareto:
        alt = "Output tokens per second of a replica over those of a user, by max_num_seqs."
        pictures.append(layout.draw_picture("front", alt, serving_figure(plan)))
    nearby = nearby or {}
    summary = serving_summary(plan)
    others = [_nearby_table(label, plans) for label, plans in nearby.items()]
    settings = {} if plan.engine is None else plan.engine.to_json()
    html = layout.template("serving.html").render(
        title=made.titled("A plan of serving engines"),
        answer=_card(plan),
        sliders=[layout.make_slider(label, plans, plan, _card) for label, plans in nearby.items()],
        certainty=_how_sure(plan),
        help=effect_bars(plan.effects),
        target=plan.effects[0].target if plan.effects else "",
        pictures=[layout.shown(each) for each in pictures],
        tables=[*measured, *others, *serving_tables(plan)],
        warnings=[{"path": "", "message": text, "remedy": ""} for text in (*summary.warnings, *summary.others)],
        settings=facts_table("Settings", *((name, each, str) for name, each in settings.items())),
        making=layout.making(made.command, made.made_at),
        notes=(),
    )
    return layout.Rendered(html, pictures)


def effect_bars(effects: Sequence[Effect]) -> list[tuple[str, str, float]]:
    """Return (change, what the nearest target becomes, length of its bar in percent), the unchanged plan first."""
    from latfit.reporting.layout import make_bars

    values = [("unchanged", each.before) for each in effects[:1]] + [(each.change, each.after) for each in effects]
    return make_bars(values, lambda value: _value(effects[0].unit, value))


def _nearby_table(label: str, plans: Mapping[str, ServingPlan]) -> Table:
    """What each load or limit needs."""
    return make_table(
        f"Replicas and settings by {label}",
        plans.items(),
        (label, lambda each: each[0]),
        ("replicas", lambda each: each[1].replicas.value, count),
        ("verdict", lambda each: VERDICTS[STATES[each[1].promise]]),
        ("capacity", lambda each: each[1].capacity_per_s, lambda rate: format_rate(rate, down=True, digits=3)),
        ("max_num_seqs", lambda each: each[1].engine and each[1].engine.max_num_seqs, count),
        ("max_num_batched_tokens", lambda each: each[1].engine and each[1].engine.max_num_batched_tokens, count),
        words=("verdict",),
    )


def _card(plan: ServingPlan, at: str = "") -> "Card":
    """The answer of one plan."""
    from latfit.reporting.layout import Card

    state, numbers = STATES[plan.promise], []
    if plan.feasible:
        limits = [each for each in plan.targets if each.unit == "ms"]
        capacity, _, interval = highest(plan).partition(" (")
        numbers = [
            KeyNumber("Replicas", count(plan.replicas.value), f"router {plan.route}"),
            *(KeyNumber(each.name, format_ms(each.value), f"limit {format_ms(each.limit)}") for each in limits),
            KeyNumber("Capacity", capacity, f"within the targets; {interval.rstrip(')')}"),
        ]
    command = engine_command(plan) if plan.engine is not None and plan.feasible else ""
    replica = [] if plan.outcome is None else [_each_replica(plan, plan.outcome)]
    more = [*replica, *stall_lines(plan.stalls), *_price(plan), *_scheduled(plan)] if plan.feasible else replica
    return Card(
        f"{plan.load}, {plan.request}", VERDICTS[state], verdict(plan), LOOKS[state],
        [*more, *_apart(plan)], numbers, command, at,
    )  # fmt: skip


def _how_sure(plan: ServingPlan) -> list[str]:
    """How far the answer can be trusted, in sentences."""
    found = []
    if plan.probability is not None:
        found.append(f"The targets are met with a probability of {probability_text(plan.probability)}.")
    if plan.feasible:
        found.append(_margin(plan))
    found.append(_fits(plan))
    if plan.outcome is not None:
        runs = f"{plan.outcome.requests:,} requests in {count_text(plan.outcome.replications, 'replication')}"
        found.append(f"Times are those of {runs} of a simulation, with 95 % intervals; no request was measured.")
    return found
