"""A plan for steps or for a load as key numbers and tables."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from latfit.engines import BY_KEY, engine_key
from latfit.exporting import start_line
from latfit.planning import (
    CONFIRMED,
    MEASURED,
    Cutoff,
    Plan,
    Reach,
    Settings,
    SpeculationPlan,
    Threshold,
    Unknown,
    Upgrade,
    capacity_line,
)
from latfit.reporting.table import (
    CommandLine,
    KeyNumber,
    Shown,
    State,
    Table,
    count,
    facts_table,
    make_table,
    of_share,
    signed_percent,
)
from latfit.units import count_text, format_ms, format_percent, format_rate, number

_rate_down = partial(format_rate, down=True)
NOT_KNOWN = "not known"
UNKNOWN = (NOT_KNOWN, "never", "none")
BRIEF = ("B1", "B2", "T_cut")
MEANINGS = {
    "B1": "requests from which the GPU is as fast, idle",
    "B1 at this rate": "requests from which the GPU is as fast, with wait",
    "B1 in tokens": "tokens of one prompt from which the GPU is as fast",
    "B2": "requests that reach half of the best throughput",
    "knee": "requests with the best throughput per latency, B/T²",
    "T_cut": "wait for the GPU before a request goes to the CPU",
}
VERDICTS = {"meets": "SLA met", "likely": "SLA likely met", "misses": "SLA missed"}


def plan_tables(plan: Plan) -> list[Table]:
    engine = [] if plan.settings is None else [settings_table(plan.settings), choices_table(plan.settings)]
    thresholds = [thresholds_table(plan)] if plan.both_paths else []
    return [*thresholds, _strategies(plan), _sensitivity(plan), *engine, *step_tables(plan)]


def step_tables(plan: Plan) -> list[Table]:
    sla, names = format_ms(plan.sla_ms), {row.path for row in plan.S_at_B} | {row.path for row in plan.B_at_S}
    path = f" on {names.pop()}" if len(names) == 1 else ""

    def inverse(things: str, rows: Sequence[Any], size: tuple[str, str], answer: str) -> Table:
        return make_table(
            f"{things.capitalize()} that a step may hold within {sla}{path}",
            rows,
            ("path", lambda row: "" if path else row.path),
            (*size, count),
            (f"{things} from", f"{answer}_min", count),
            ("to", lambda row: "any number" if (most := getattr(row, f"{answer}_max")) is None else count(most)),
            ("note", lambda row: "extrapolated" if row.extrapolated else ""),
            words=("note",),
        )

    doubts = make_table(
        f"Measure these points: whether they meet {sla} is not known",
        plan.steps_in_doubt,
        ("path", "path"),
        ("B", "B", count),
        ("S", "S", count),
        ("chance to meet it", "chance", of_share),
        ("95 % interval", lambda row: f"{format_ms(row.low_ms)} to {format_ms(row.high_ms)}"),
    )
    at_batch = inverse("tokens", plan.S_at_B, ("requests B", "B"), "S")
    return [at_batch, inverse("requests", plan.B_at_S, ("tokens S", "S"), "B"), doubts]


def key_numbers(plan: Plan) -> list[KeyNumber]:
    numbers = _step_numbers(plan) if plan.rate_per_s is None else _load_numbers(plan)
    if plan.both_paths:
        B1 = "B1 at this rate" if plan.B1_at_rate is not None else "B1"
        for name, meaning, threshold in (("B1", B1, plan.B1), ("B2", "B2", plan.B2)):
            if threshold.value is not None:
                numbers.append(KeyNumber(name, count(threshold.value), MEANINGS[meaning]))
    return numbers


def limits_table(plan: Plan) -> Table:
    rows = [(each.label.lower(), each.value, each.detail) for each in _step_numbers(plan)]
    return Table(f"Largest steps within {format_ms(plan.sla_ms)}", ("", " ", "  "), rows, words=("  ",))


def _step_numbers(plan: Plan) -> list[KeyNumber]:
    numbers = []
    if (decode := decode_limit(plan)) is not None:
        numbers.append(KeyNumber("Decode", count(decode), f"requests without prefill, on {plan.engines_path}"))
    step = max(plan.S_at_B, key=lambda row: row.S_max or 0, default=None)
    if step is not None and step.S_max is not None and step.S_max > step.B:
        detail = f"tokens, at B = {count(step.B)} on {step.path}" + " (extrapolated)" * step.extrapolated
        numbers.append(KeyNumber("Prefill", count(step.S_max), detail))
    if (settings := plan.settings) is not None and settings.chunk_tokens:
        both = f"{count(settings.max_num_seqs)} + {count(settings.chunk_tokens)}"
        numbers.append(KeyNumber("Mixed", both, f"requests + prefill tokens, on {settings.path}"))
    return numbers


def decode_limit(plan: Plan) -> int | None:
    """Return the largest decode batch within the SLA; None for a load."""
    largest = plan.engines.get("tensorrt", {}).get("max_batch") if plan.rate_per_s is None else None
    return largest if isinstance(largest, int) else None


def _load_numbers(plan: Plan) -> list[KeyNumber]:
    numbers = []
    if (chosen := plan.chosen) is not None and chosen.percentile_ms is not None:
        numbers.append(KeyNumber(f"{_percentile(plan)} response", format_ms(chosen.percentile_ms), chosen.name))
    if (capacity := plan.capacity) is not None:
        needed = "no number of replicas serves this load"
        if capacity.replicas is not None:
            needed = f"{count_text(capacity.replicas, 'replica')} needed"
        numbers.append(KeyNumber("Capacity per replica", capacity.shown, needed))
    if plan.T_cut is not None and plan.T_cut.value is not None:
        numbers.append(KeyNumber("T_cut", format_ms(plan.T_cut.value), f"{MEANINGS['T_cut']} (by simulation)"))
    return numbers


def other_plans_table(caption: str, plans: Mapping[str, Plan]) -> Table:
    return make_table(
        caption,
        plans.items(),
        (caption.split()[-1], lambda each: each[0]),
        ("verdict", lambda each: VERDICTS[each[1].promise]),
        ("strategy", lambda each: each[1].chosen and each[1].chosen.name),
        ("replicas", lambda each: each[1].capacity and each[1].capacity.replicas, count),
        ("capacity per replica", lambda each: each[1].capacity and each[1].capacity.shown),
        ("decode alone", lambda each: decode_limit(each[1]), count),
        ("prefill alone", lambda each: max((row.S_max or 0 for row in each[1].S_at_B), default=None), count),
        ("max_num_seqs", lambda each: each[1].settings and each[1].settings.max_num_seqs, count),
        ("max_num_batched_tokens", lambda each: each[1].settings and each[1].settings.max_num_batched_tokens, count),
        words=("verdict", "strategy"),
    )


def _strategies(plan: Plan) -> Table:
    late = float("inf")
    return make_table(
        f"Strategies for {format_rate(plan.rate_per_s or 0.0)} per replica within {format_ms(plan.sla_ms)}",
        sorted(
            plan.strategies, key=lambda row: (not row.chosen, late if row.percentile_ms is None else row.percentile_ms)
        ),
        ("strategy", "name"),
        (_percentile(plan), "percentile_ms", format_ms),
        ("headroom", "margin", lambda margin: signed_percent(100 * margin)),
        ("capacity", "sustainable_per_s", partial(format_rate, down=True, planned_per_s=plan.rate_per_s or 0.0)),
        ("replicas", "replicas", count),
        ("price an hour", "price_per_hour", number),
        ("verdict", "verdict"),
        words=("verdict",),
    )


def thresholds_table(plan: Plan, *, brief: bool = False) -> Table:
    at_rate = plan.B1_at_rate is not None
    every: list[tuple[str, str, Threshold | Cutoff | Unknown | None]] = [
        ("B1", "B1 at this rate" if at_rate else "B1", plan.B1),
        ("B1 of an idle GPU", "B1", plan.B1_idle if at_rate else None),
        ("B1 in tokens", "B1 in tokens", plan.B1_tokens),
        ("B2", "B2", plan.B2),
        ("knee", "knee", plan.knee),
        ("T_cut", "T_cut", plan.T_cut or Unknown(plan.unknown["T_cut_ms"])),
    ]
    rows = [(name, _threshold(found), MEANINGS[key], found.reason) for name, key, found in every if found is not None]
    if not plan.both_paths:
        rows = [row for row in rows if row[1] not in UNKNOWN]
    caption, columns = "Thresholds for a scheduler", ("name", "value", "meaning", "why")
    if not brief:
        return Table(caption, columns, rows, words=columns[2:])
    shown = [(name, value, why if value in UNKNOWN else text) for name, value, text, why in rows if name in BRIEF]
    return Table(caption, columns[:3], shown, words=columns[2:3])


def _threshold(found: Threshold | Cutoff | Unknown) -> str:
    if isinstance(found, Cutoff):
        return "none" if found.value is None else format_ms(found.value)
    if found.value is None:
        return "never" if isinstance(found, Threshold) and found.reach is Reach.NEVER else NOT_KNOWN
    return f"{count(found.value)}{interval_text(found)}"


def interval_text(found: Threshold | Unknown) -> str:
    """Return ` (95 %: 6 to 9)`; empty without an interval."""
    if not isinstance(found, Threshold) or found.interval is None or set(found.interval) == {found.value}:
        return ""
    return " (95 %: {} to {})".format(*("never" if end is None else count(end) for end in found.interval))


def _sensitivity(plan: Plan) -> Table:
    return make_table(
        "What a change would bring",
        plan.sensitivity,
        ("change", "change"),
        ("B1", "B1", count),
        (
            _percentile(plan),
            lambda row: "overloaded" if row.percentile_ms is None else format_ms(row.percentile_ms, 4),
        ),
        ("capacity", "sustainable_per_s", partial(format_rate, down=True)),
        ("replicas", "replicas", count),
    )


def settings_table(settings: Settings) -> Table:
    return facts_table(
        f"A serving engine on {settings.path}",
        ("concurrent sequences", settings.max_num_seqs, count),
        ("tokens per step", settings.max_num_batched_tokens, count),
        ("fewest tokens per step for the TTFT target", settings.min_num_batched_tokens, count),
        ("prefill chunk in the same step", settings.chunk_tokens, count),
        (f"TTFT of a {settings.prompt_tokens:,}-token prompt", settings.ttft_ms, format_ms),
        ("TPOT", settings.tpot_ms, format_ms),
        note=f"For {settings.reason}. Limited by {settings.binding}.",
    )


def choices_table(settings: Settings) -> Table:
    best = settings.max_num_batched_tokens
    return make_table(
        "Settings that leave room for prefill in each step (* recommended)",
        sorted(settings.choices, key=lambda row: row.max_num_seqs),
        ("max_num_seqs", lambda row: count(row.max_num_seqs) + " *" * (row.max_num_batched_tokens == best)),
        ("max_num_batched_tokens", "max_num_batched_tokens", count),
        (f"TTFT of {settings.prompt_tokens:,} tokens", "ttft_ms", format_ms),
        ("decode tokens", "decode_tokens_per_s", lambda rate: f"{count(round(rate))}/s"),
    )


def _percentile(plan: Plan) -> str:
    return "typical" if plan.percentile is None else f"p{plan.percentile:g}"


def promise(plan: Plan) -> str:
    things = "steps" if plan.rate_per_s is None else f"responses at {format_rate(plan.rate_per_s)}"
    return things if plan.percentile is None else f"{_percentile(plan)} of {things}"


STATES: dict[str, State] = {"meets": "good", "likely": "doubt", "misses": "bad"}
OF_STEPS = ("few_data", "no_prefill")  # warnings about limits of single steps


def probability_text(probability: float) -> str:
    return "97.5 % or more" if probability >= CONFIRMED else format_percent(100 * probability)


def show_plan(plan: Plan) -> Shown:
    lines = [] if plan.capacity is None else [capacity_line(plan.capacity)]
    if command := engine_line(plan):
        edge = " (limited by the measured range)" if plan.settings and plan.settings.binding == MEASURED else ""
        lines.append(CommandLine(f"{BY_KEY[_engine_key(plan)].name} on {plan.engines_path}{edge}: {command}"))
    elif plan.rate_per_s is None and _is_usable(plan):
        lines.append(f"Engine settings: {plan.unknown['settings']}.")
    tables = [limits_table(plan)] if plan.rate_per_s is None and plan.feasible else []
    if plan.both_paths:
        tables.append(thresholds_table(plan, brief=True))
    if plan.rate_per_s is None and plan.settings is not None and _is_usable(plan):
        tables.append(choices_table(plan.settings))
    others = [each for each in plan.warnings if plan.rate_per_s is not None and each.code in OF_STEPS]
    doubts = plan.doubts if plan.promise == "likely" else ()
    return Shown(
        plan.answer,
        STATES[plan.promise],
        lines,
        [*(each.text for each in others), *plan.notes],
        [*doubts, *(each.text for each in plan.warnings if each not in others)],
        tables,
        plan_tables(plan),
    )


def engine_line(plan: Plan) -> str:
    """Return the command that starts an engine with the plan's settings; empty without."""
    usable = plan.settings is not None and _is_usable(plan)
    return start_line(_engine_key(plan), plan.engines, model="MODEL") if usable else ""


def _is_usable(plan: Plan) -> bool:
    return plan.feasible and not plan.unsupported


def _engine_key(plan: Plan) -> str:
    return engine_key(each.system for each in plan.fits if each.path == plan.engines_path)


def upgrade_table(upgrade: Upgrade) -> Table:
    return make_table(
        f"Steps at this load, {upgrade.source}",
        upgrade.changes,
        ("step", "step"),
        ("B", "B", count),
        ("S", "S", count),
        ("before", "before_ms", format_ms),
        ("change", "change_ms", _signed_ms),
        ("95 % interval", "interval_ms", lambda ends: " to ".join(map(_signed_ms, ends))),
        (f"at B = {upgrade.changes[0].smallest_batch:,}", "fixed_ms", _signed_ms),
        ("beyond it", "growing_ms", _signed_ms),
        words=("step",),
    )


def _signed_ms(value_ms: float) -> str:
    return f"{'-' if value_ms < 0 else '+'}{format_ms(abs(value_ms))}"


def show_speculation(found: SpeculationPlan) -> Shown:
    drafts, largest = count_text(found.draft_tokens, "draft token"), f"{found.largest_batch:,}"
    ends = [f"{end:,.0f}" if math.isfinite(end) else f"beyond {largest}" for end in found.stops_interval]
    open_end = found.stops_at is None and math.isfinite(found.stops_interval[0])
    if found.stops_at is not None:
        verdict = f"{drafts} a step stop paying from {found.stops_at:,} requests on (95 %: {ends[0]} to {ends[1]})."
    elif open_end:
        verdict = f"{drafts} a step likely pay up to {largest} requests, with 95 % only below {ends[0]}."
    else:
        verdict = f"{drafts} a step pay up to the largest measured batch, {largest} requests."
    low, high = found.rows[0].interval
    reach = 1.96 * found.acceptance_se
    shares = [format_percent(100 * min(max(found.acceptance + side, 0.0), 1.0)) for side in (-reach, reach)]
    error = f" (95 %: {shares[0]} to {shares[1]})" if reach else " (given)"
    cost = f", {format_ms(found.draft_ms)} to draft a token"
    if not found.draft_ms:
        cost = ". The steps are taken to include drafting: give --draft-cost if they do not"
    tokens = f"{number(found.tokens_per_step)} tokens per request and step{cost}."
    table = make_table(
        "",
        found.rows,
        ("B", "B", count),
        ("step", "step_ms", format_ms),
        ("draft step", "draft_step_ms", format_ms),
        ("tokens/s", "tokens_per_s", number),
        ("draft tokens/s", "draft_tokens_per_s", number),
        ("speed-up", "speedup", "{:.2f}".format),
        ("95 % interval", lambda each: f"{each.interval[0]:.2f} to {each.interval[1]:.2f}"),
    )
    state: State = "bad" if high < 1 else "doubt" if low <= 1 or open_end else "good"
    lines = [f"Acceptance {format_percent(100 * found.acceptance)}{error}, {tokens}"]
    return Shown(verdict, state, lines, brief=[table])
