"""A plan for people: the decision in three lines, then a table for each part that has something to say."""

from collections.abc import Iterator, Sequence

from latfit.exporting import TITLES
from latfit.planning import (
    Alternative,
    Cutoff,
    Plan,
    Reach,
    Threshold,
    Unknown,
    spans_text,
)
from latfit.reporting.fit import tables
from latfit.reporting.fit.tables import KeyNumber, Table
from latfit.reporting.format import count, counted
from latfit.units import format_ms, format_percent, format_rate, number

METHOD_WORDS = {
    "rigorous": "proved bound",
    "simulated": "queue simulation, measured scatter",
    "event_simulation": "event simulation",
}
RULE_WORDS = {
    "optimal": "optimal, by a decision process",
    "greedy": "greedy: an idle machine takes all",
    "literal": "textbook: T(B) - T(B+1) > 1/rate",
    "amortised": "amortised: T(B)/B - T(B+1)/(B+1) > 1/rate",
    "total delay": "total delay: T(B) + T(1) - T(B+1) > B/rate",
}
NOT_KNOWN = "not known"
SOURCE_WORDS = {"simulated": "queue simulation"}
MOST_WINDOWS = 12
MOST_POINTS = 12
MEANINGS = {
    "B1": "batch from which the GPU is at least as fast as the CPU, without a wait",
    "B1 at this rate": "batch from which the GPU is at least as fast as the CPU, its wait at this rate included",
    "B1 in tokens": "prompt length from which the GPU is at least as fast, for one request",
    "B2": "batch that reaches half of the path's best throughput",
    "knee": "batch with the best throughput per latency, B/T²",
    "T_cut": "queueing timeout: who has waited this long for the GPU goes to the CPU",
}
ENGINES = {**TITLES, "triton_batched": "Triton, amortised batches", "tensorrt": "TensorRT"}
VERDICTS = {"meets": "SLA met", "likely": "SLA likely met", "misses": "SLA missed"}
SHOWN = 4
"""Numbers of a list; of more that follow each other the ends are."""

MANY = 3.0
"""Headroom from which it is said as a multiple."""


def plan_tables(plan: Plan) -> Iterator[Table]:
    """Every table of the plan that has rows."""
    parts = (
        *load_tables(plan),
        thresholds_table(plan),
        settings_table(plan),
        choices_table(plan),
        engines_table(plan),
        doubts_table(plan),
        tables.tokens_at_batch(plan),
        tables.batch_at_tokens(plan),
    )
    return (table for table in parts if table.rows)


def load_tables(plan: Plan) -> Iterator[Table]:
    """The tables of what the load decides, those that have rows."""
    parts = (
        alternatives_table(plan),
        checked_table(plan),
        cutoff_table(plan),
        rules_table(plan),
        capacity_table(plan),
        windows_table(plan),
        sensitivity_table(plan),
        frontier_table(plan),
    )
    return (table for table in parts if table.rows)


def verdict(plan: Plan) -> str:
    """Met, met but not proven, or not met."""
    return VERDICTS[plan.promise]


def key_numbers(plan: Plan) -> list[KeyNumber]:
    """What fits, and the thresholds for a scheduler."""
    found = tables.step_numbers(plan) if plan.rate_per_s is None else _load_numbers(plan)
    return [*found, *_threshold_numbers(plan)]


def _load_numbers(plan: Plan) -> list[KeyNumber]:
    """The response, the load that fits, T_cut."""
    found = []
    chosen, simulated = plan.chosen, plan.checked
    if chosen is not None and chosen.percentile_ms is not None:
        detail = chosen.name
        if simulated is not None:
            low, high = simulated["ci"]
            detail = f"{chosen.name}; event simulation {format_ms(low, 4)} to {format_ms(high, 4)}"
        found.append(KeyNumber(f"{_percentile(plan)} response", format_ms(chosen.percentile_ms), detail))
    if plan.capacity is not None:
        replicas = plan.capacity.replicas
        needed = (
            "no number of replicas serves this load" if replicas is None else f"{counted(replicas, 'replica')} needed"
        )
        found.append(KeyNumber("Capacity per replica", _carries(plan.capacity.sustainable_per_s), needed))
    if plan.T_cut is not None and plan.T_cut.value is not None:
        backing = f"{MEANINGS['T_cut']} (by simulation)"
        found.append(KeyNumber("T_cut", format_ms(plan.T_cut.value), backing))
    return found


def _threshold_numbers(plan: Plan) -> list[KeyNumber]:
    """Return B1 and B2 of two paths where they are known, with what they mean."""
    if not plan.both_paths:
        return []
    B1 = "B1 at this rate" if plan.B1_at_rate is not None else "B1"
    return [
        KeyNumber(name, count(found.value), MEANINGS[meaning])
        for name, meaning, found in (("B1", B1, plan.B1), ("B2", "B2", plan.B2))
        if found.value is not None
    ]


def slas_table(plans: Sequence[Plan]) -> Table:
    """The limits at every SLA that was planned for."""
    columns = ("SLA", "verdict", "largest step, tokens", "requests at once", "tokens per step")
    rows = []
    for plan in plans:
        steps = [row.S_max for row in plan.S_at_B if row.S_max is not None]
        limits = plan.settings
        rows.append(
            (
                format_ms(plan.sla_ms),
                verdict(plan),
                count(max(steps)) if steps else "",
                "" if limits is None else count(limits.max_num_seqs),
                "" if limits is None else _optional(limits.max_num_batched_tokens),
            )
        )
    return Table("Limits at other SLAs", columns, rows, words=("verdict",))


def checked_table(plan: Plan) -> Table:
    """What the event simulation of the decision found."""
    found = plan.checked
    if found is None:
        return Table("", (), ())
    low, high = found["ci"]
    rows = [
        ("strategy", found["strategy"]),
        (f"p{plan.percentile:g}, simulated", f"{_ms(found['percentile_ms'])} ({_ms(low)} to {_ms(high)}, 95 %)"),
        (f"within {format_ms(plan.sla_ms)}", {True: "yes", False: "no"}.get(found["holds"], "not confirmed")),
        ("requests", count(found["requests"])),
    ]
    return Table(
        "The decision in the event simulation, steps scattered as measured", ("", "value"), rows, words=("value",)
    )


def alternatives_table(plan: Plan) -> Table:
    """The strategies, with their margins, what their percentile is from, and why they were selected or not."""
    rows = [
        (
            row.name,
            "" if row.percentile_ms is None else format_ms(row.percentile_ms),
            "" if row.percentile_ms is None else SOURCE_WORDS.get(row.source or "", ""),
            "" if row.margin is None else format_percent(100 * row.margin, signed=True),
            _carried(row),
            _why(row),
        )
        for row in _ordered(plan)
    ]
    columns = ("strategy", _percentile(plan), "by", "headroom", "capacity", "verdict")
    caption = f"Strategies for {_rate(plan.rate_per_s)} per replica within {format_ms(plan.sla_ms)}"
    return Table(caption, columns, rows, words=("by", "verdict")).without_empty()


def _carried(row: Alternative) -> str:
    """The highest rate within the SLA, or every range of it where there is a lowest one too."""
    if all(low == 0 for low, _ in row.feasible_per_s):
        return _carries(row.sustainable_per_s)
    return ", ".join(f"{_rate(low)} to {_carries(high)}" if low else _carries(high) for low, high in row.feasible_per_s)


def _why(row: Alternative) -> str:
    """The verdict, with the replicas and the price where they say something."""
    more = "" if row.replicas in (None, 1) else f"; needs {row.replicas} replicas"
    price = "" if row.price_per_hour is None else f", {row.price_per_hour:,.4g} an hour"
    return f"{row.verdict}{more}{price}"


def _ordered(plan: Plan) -> list[Alternative]:
    """The chosen one first, then by percentile."""
    last = float("inf")
    return sorted(
        plan.strategies, key=lambda row: (not row.chosen, last if row.percentile_ms is None else row.percentile_ms)
    )


def thresholds_table(plan: Plan, *, explained: bool = False) -> Table:
    """The thresholds that are known, with their reasons; the one with the wait at the rate first, where there is one.
    explained: with what they mean, and why the others are not known."""
    at_rate = plan.B1_at_rate is not None
    every: list[tuple[str, str, Threshold | Cutoff | Unknown | None]] = [
        ("B1", "B1 at this rate" if at_rate else "B1", plan.B1),
        ("B1 of an idle GPU", "B1", plan.B1_idle if at_rate else None),
        ("B1 in tokens", "B1 in tokens", plan.B1_tokens),
        ("B2", "B2", plan.B2),
        ("knee", "knee", plan.knee),
        ("T_cut", "T_cut", plan.T_cut or Unknown(plan.unknown["T_cut_ms"])),
    ]
    named = [(name, meaning, found) for name, meaning, found in every if found is not None]
    caption = "Thresholds for a scheduler"
    if explained:
        known = [(name, _value(found), MEANINGS[key], found.reason) for name, key, found in named if found.reason]
        missing: dict[str, list[str]] = {}
        for name, value, meaning, reason in known:
            if value == NOT_KNOWN:
                missing.setdefault(reason, []).append(f"{name} ({meaning})")
        note = " ".join(f"Not known: {', '.join(names)}; {reason}." for reason, names in missing.items())
        known = [row for row in known if row[1] != NOT_KNOWN]
        return Table(caption, ("name", "value", "meaning", "why"), known, words=("meaning", "why"), note=note)
    rows = [(name, _value(found), found.reason) for name, _, found in named if _value(found) != NOT_KNOWN]
    return Table(caption, ("name", "value", "why"), rows, words=("why",))


def _value(found: Threshold | Cutoff | Unknown) -> str:
    if isinstance(found, Cutoff):
        return "none" if found.value is None else format_ms(found.value)
    if found.value is None:
        return "never" if isinstance(found, Threshold) and found.reach is Reach.NEVER else NOT_KNOWN
    return f"{count(found.value)}{interval_text(found)}"


def interval_text(quantity: Threshold | Unknown) -> str:
    """` (95 %: 6 to 9)` where the fits' draws give an interval that is wider than the value itself."""
    if not isinstance(quantity, Threshold) or quantity.interval is None:
        return ""
    low, high = quantity.interval
    if low == high == quantity.value:
        return ""
    return f" (95 %: {'never' if low is None else count(low)} to {'never' if high is None else count(high)})"


def cutoff_table(plan: Plan) -> Table:
    """The percentile at the recommended T_cut by every method, and what each would admit."""
    found = plan.T_cut
    if found is None:
        return Table("", (), ())
    rows = []
    for method, value in found.bounds_ms.items():
        spans = found.ranges.get(method)
        admits = "" if spans is None else spans_text(spans, plan.sla_ms)
        rows.append(
            (METHOD_WORDS.get(method, method), "none" if value is None else _ms(value), admits, _holds(method, found))
        )
    caption = f"p{found.percentile:g} at T_cut = {format_ms(found.shown_ms)}, by method"
    return Table(
        caption,
        ("method", f"p{found.percentile:g}", "T_cut it admits", "holds"),
        rows,
        ("T_cut it admits", "holds"),
        f"Limited by {found.binding}.",
    )


def _holds(method: str, found: Cutoff) -> str:
    if method == found.bound:
        return "yes, decides"
    return "yes" if method in found.holds else "no"


def rules_table(plan: Plan) -> Table:
    """Batching rules at the plan's rate and how far each is from the optimum."""
    rules = plan.rules
    rows = [
        (
            RULE_WORDS.get(row.rule, row.rule),
            count(row.batch),
            _ms(row.mean_ms),
            "unknown" if row.excess is None else format_percent(100 * row.excess),
        )
        for row in rules
    ]
    path = rules[0].path if rules else ""
    caption = f"Batching rules on {path} alone at {_rate(plan.rate_per_s)}, by the mean response"
    return Table(caption, ("rule", "stops at B", "mean", "above the optimum"), rows)


def capacity_table(plan: Plan) -> Table:
    """The load that fits with the selected strategy."""
    found = plan.capacity
    if found is None:
        return Table("", (), ())
    rows = [
        ("rate per replica", _rate(found.rate_per_s)),
        (f"capacity within the SLA, {found.system}", _carries(found.sustainable_per_s)),
        ("the same at the slow end of the 95 % interval", _carries(found.promised_per_s)),
        ("headroom", _headroom(found.headroom)),
        (
            "utilisation ρ: load over the stability limit",
            _percent(found.utilisation),
        ),
        ("requests within the SLA (goodput)", _rate(found.goodput_per_s)),
        ("replicas for the whole rate", "" if found.replicas is None else count(found.replicas)),
        ("price an hour", "" if found.price_per_hour is None else f"{found.price_per_hour:,.4g}"),
        ("price of a million requests", "" if found.price_per_million is None else f"{found.price_per_million:,.4g}"),
    ]
    return Table("Capacity", ("", "value"), [row for row in rows if row[1]])


def windows_table(plan: Plan) -> Table:
    """A load that varies: what its windows need, the busiest ones where there are many."""
    if plan.capacity is None or plan.capacity.load is None:
        return Table("", (), ())
    load = plan.capacity.load
    schedule = sorted(load["schedule"], key=lambda row: -float(row["rate_per_s"]))[:MOST_WINDOWS]
    shown = sorted(schedule, key=lambda row: float(row["start_s"]))
    rows = [(format_ms(row["start_s"] * 1e3), _rate(row["rate_per_s"]), count(row["replicas"])) for row in shown]
    held, following = load["replica_hours_held"], load["replica_hours_following"]
    backlog = load["backlog_if_sized_for_the_mean"]
    caption = (
        f"Load of {load['source']}: {_rate(load['mean_per_s'])} on average, {_rate(load['peak_per_s'])} at the peak; "
        f"{counted(load['replicas_peak'], 'replica')} throughout take {held:,.3g} replica hours, following the load "
        f"{following:,.3g}; "
        f"sized for the mean ({load['replicas_mean_rate']}) a backlog of {backlog['peak']:,.0f} requests would build up"
    )
    return Table(caption, ("window from", "rate", "replicas"), rows)


def sensitivity_table(plan: Plan) -> Table:
    """What a faster path or a doubled rate changes."""
    rows = [
        (
            row.change,
            "" if row.B1 is None else count(row.B1),
            "overloaded" if row.percentile_ms is None else _ms(row.percentile_ms),
            _carries(row.sustainable_per_s),
            "" if row.replicas is None else count(row.replicas),
        )
        for row in plan.sensitivity
    ]
    columns = ("change", "B1", _percentile(plan), "capacity", "replicas")
    return Table("What a change would bring", columns, rows).without_empty()


def frontier_table(plan: Plan) -> Table:
    """Operating points that none beats in every respect, of the best cost first where there is an objective."""
    points = [point for point in plan.frontier if point.best]
    ordered = sorted(points, key=lambda point: point.percentile_ms if point.cost is None else point.cost)
    rows = [
        (
            point.name,
            _rate(point.rate_per_s),
            format_ms(point.percentile_ms),
            format_ms(point.mean_ms),
            _rate(point.goodput_per_s),
            "" if point.cost is None else number(point.cost),
        )
        for point in (ordered[:MOST_POINTS] if len(ordered) > 1 else ())
    ]
    columns = ("operating point", "rate", _percentile(plan), "mean", "goodput", "objective")
    caption = f"Frontier: no other point has a lower {_percentile(plan)} and a lower mean"
    return Table(caption, columns, rows).without_empty()


def settings_table(plan: Plan) -> Table:
    """Limits of a step-by-step engine, or why there are none."""
    found = plan.settings
    if found is None:
        return Table("", (), ())
    rows = [
        ("concurrent sequences", count(found.max_num_seqs)),
        ("tokens per step", _optional(found.max_num_batched_tokens)),
        ("fewest tokens per step for the TTFT target", _optional(found.min_num_batched_tokens)),
        ("prefill chunk beside them", _optional(found.chunk_tokens)),
        (f"TTFT of a {found.prompt_tokens:,}-token prompt", "" if found.ttft_ms is None else format_ms(found.ttft_ms)),
        ("TPOT", format_ms(found.tpot_ms)),
    ]
    note = f"For {found.reason}. Limited by {found.binding}."
    return Table(f"A serving engine on {found.path}", ("limit", "value"), [row for row in rows if row[1]], note=note)


def choices_table(plan: Plan) -> Table:
    """The trade-off between sequences and the first token; a star marks the recommended row."""
    found = plan.settings
    if found is None:
        return Table("", (), ())
    rows = [
        (
            f"{count(row.max_num_seqs)}{' *' if row.max_num_batched_tokens == found.max_num_batched_tokens else ''}",
            count(row.max_num_batched_tokens),
            format_ms(row.ttft_ms),
            f"{count(round(row.decode_tokens_per_s))}/s",
        )
        for row in found.choices
    ]
    columns = ("max_num_seqs", "max_num_batched_tokens", f"TTFT of {found.prompt_tokens:,} tokens", "decode tokens")
    return Table("More sequences, or a shorter TTFT (* recommended)", columns, rows)


def engines_table(plan: Plan) -> Table:
    """The same under the engines' own names."""
    rows = [
        (ENGINES.get(engine, engine), ", ".join(f"{name}={_flag(value)}" for name, value in flags.items()))
        for engine, flags in plan.engines.items()
    ]
    return Table("The same under each engine's names", ("engine", "settings"), rows, words=("settings",))


def doubts_table(plan: Plan) -> Table:
    """Steps to measure, since the fit cannot tell whether they meet the SLA."""
    rows = [
        (
            d.path,
            count(d.B),
            count(d.S),
            format_percent(100 * d.chance),
            f"{format_ms(d.low_ms)} to {format_ms(d.high_ms)}",
        )
        for d in plan.steps_in_doubt
    ]
    columns = ("path", "B", "S", "chance to meet it", "95 % interval")
    return Table(f"Measure these points: {format_ms(plan.sla_ms)} is in doubt there", columns, rows)


def _percentile(plan: Plan) -> str:
    return "typical" if plan.percentile is None else f"p{plan.percentile:g}"


def _percent(share: float | None) -> str:
    return "" if share is None else format_percent(100 * share)


def _headroom(share: float | None) -> str:
    if share is None:
        return ""
    return format_percent(100 * share, signed=True) if share < MANY else f"{share + 1:,.3g} times the rate"


def _flag(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list) and len(value) > SHOWN and value == [*range(value[0], value[-1] + 1)]:
        return f"[{value[0]}, {value[1]}, ... {value[-1]}]"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value)


def _optional(value: int | None) -> str:
    return "" if value is None else count(value)


def _ms(value: float | None) -> str:
    return "" if value is None else format_ms(value, 4)


def _carries(per_s: float | None) -> str:
    return "" if per_s is None else format_rate(per_s, down=True)


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else format_rate(per_s)
