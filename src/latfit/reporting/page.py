"""The report of a hardware profile and its plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.messages import Message
from latfit.planning import Plan, PlanOptions, levels_for, make_plan
from latfit.reporting import fit_tables, plan_tables
from latfit.reporting.fit_figures import fit_pictures, why_not_drawn
from latfit.reporting.fit_tables import describe_path, what_is_known
from latfit.reporting.layout import Making, Page, Picture, Rendered, Section, make_slider, render_page, values_around
from latfit.reporting.plan_figures import plan_pictures
from latfit.reporting.plan_tables import STATES, engine_line, probability_text
from latfit.reporting.plot_data import FitView, SlaLine
from latfit.reporting.steps import ceilings_table
from latfit.reporting.table import Bar, Card, file_stem, make_bars
from latfit.trace import Trace
from latfit.units import count_text, format_ms, format_rate

PAGE_NAME = "report.html"
SLA_FACTORS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 5.0)
"""Positions of the SLA's slider, times the plan's SLA."""
LOAD_SLA_FACTORS = (0.6, 0.8, 1.0, 1.5, 2.0)  # of a plan for a load, which takes seconds
RATE_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
LETTERS = (
    "T: latency of a step in ms, B: its requests, S: its tokens; the other letters are in the table of parameters."
)


@dataclass(frozen=True)
class ReportInput:
    """What a report is made from."""

    profile: HardwareProfile
    traces: Mapping[str, Trace] = field(default_factory=dict)  # cleaned rows by path
    plan: Plan | None = None
    percentile: float = 99.0  # of steps, that the plan was made for
    request: PlanOptions = field(default_factory=PlanOptions)  # the rest of the plan's request
    made: Making = field(default_factory=Making)
    notes: Sequence[str] = ()  # on the making of this report
    command: str = "latfit report"  # makes it again


def render(report: ReportInput) -> Rendered:
    paths, plan = report.profile.paths, report.plan
    stems = [file_stem(name) for name in paths]
    if len(set(stems)) < len(stems):
        stems = [f"{stem}-{i}" for i, stem in enumerate(stems)]
    prefixes = [""] if len(stems) == 1 else [f"{stem}-" for stem in stems]
    pictures = {
        name: fit_pictures(_view(path, report), prefix) if not why_not_drawn(path.fit) else []
        for (name, path), prefix in zip(paths.items(), prefixes, strict=True)
    }
    warnings = _warnings(report)
    by_phase = [
        replace(fit_tables.phases(path.fit), caption=f"Held-out error by phase, {name}") for name, path in paths.items()
    ]
    remarks = [warning.message for warning in warnings if not warning.needs_action]
    sections = [Section("Accuracy", "trust", by_phase, sentences=remarks)]
    nearby = {} if plan is None else plans_nearby(plan, report)
    limits = plan_pictures(plan, report.profile, report.request)
    if plan is not None or limits:
        sections.append(_limits(report, nearby, limits))
    about = what_is_known(paths.values(), report.traces) or f"on {', '.join(paths) or 'no path'}"
    page = Page(
        f"Step latency {'' if about.startswith('on ') else 'of '}{about}",
        report.made,
        _card_without_sla(report.command) if plan is None else _card(plan, report.profile),
        sliders=[
            make_slider(label, plans, plan, lambda each, at: _card(each, report.profile, at))
            for label, plans in nearby.items()
            if plan is not None
        ],
        bars=[] if plan is None else _change_bars(plan),
        target="" if plan is None else plan_tables.promise(plan),
        pictures=[picture for each in pictures.values() for picture in each[:2]],
        certainty=how_sure(report),
        warnings=[(warning.message, warning.remedy) for warning in warnings if warning.needs_action],
        sections=[*sections, *(_section(path, pictures[name][2:]) for name, path in paths.items())],
        subjects=[(name, describe_path(path, report.traces.get(name))) for name, path in paths.items()],
        notes=report.notes,
    )
    return render_page(page)


def _change_bars(plan: Plan) -> list[Bar]:
    """Return bars of the changes that leave the interval of the unchanged percentile."""
    known = [row.percentile_ms for row in plan.strategies if row.percentile_ms is not None]
    best = min(known, default=None) if plan.chosen is None else plan.chosen.percentile_ms
    low, high = (math.nan if end is None else end for end in plan.interval_ms or (None, None))
    changed = [(row.change, row.percentile_ms) for row in plan.sensitivity[1:] if row.percentile_ms is not None]
    unchanged = [(row.change, best) for row in plan.sensitivity[:1]]
    return make_bars([*unchanged, *(each for each in changed if not low <= each[1] <= high)])


def _view(path: ExecutionPath, report: ReportInput) -> FitView:
    trace, plan = report.traces.get(path.name), report.plan
    lines = [] if plan is None else [sla_line(path, plan, report.percentile)]
    return FitView(path.fit, trace if trace is not None and len(trace) else None, lines)


def sla_line(path: ExecutionPath, plan: Plan, percentile: float) -> SlaLine:
    """Return the typical latency at which the percentile of steps just meets the SLA."""
    level = levels_for(path, percentile).prefill
    share = "typical step" if level.percentile is None else f"{level.percentile:g} % of steps with prefill"
    decode = plan_tables.decode_limit(plan) if path.name == plan.engines_path else None
    return SlaLine(f"{format_ms(plan.sla_ms)} for {share}", plan.sla_ms / float(level.factors.max()), decode)


def _limits(report: ReportInput, nearby: Mapping[str, Mapping[str, Plan]], pictures: Sequence[Picture]) -> Section:
    plan, found = report.plan, []
    sentences = [] if plan is None else [*plan.notes]
    if plan is not None:
        others = (plan_tables.other_plans_table(f"Limits by {label}", plans) for label, plans in nearby.items())
        found = [*others, *plan_tables.plan_tables(plan)]
        if "settings" in plan.unknown:
            sentences.append(f"No limits for steps of an engine: {plan.unknown['settings']}.")
    tables = [*found, ceilings_table(report.profile)]
    return Section("Limits", "limits", tables, pictures, sentences)


def _card_without_sla(command: str) -> Card:
    sentence = "Name a latency limit to see which steps meet it."
    return Card("No SLA was requested", "", sentence, "open", [f"For example `{command} --sla 20ms`."])


def _card(plan: Plan, profile: HardwareProfile, at: str = "") -> Card:
    errors = [number for path in profile.paths.values() if (number := fit_tables.held_out_number(path))]
    limit = [f"What limits it: {plan.binding}."] if plan.feasible else []
    return Card(
        f"SLA {format_ms(plan.sla_ms)} for {plan_tables.promise(plan)}",
        plan_tables.VERDICTS[plan.promise],
        plan.answer,
        STATES[plan.promise],
        [*limit, *filter(None, [plan.remedy])],
        [*plan_tables.key_numbers(plan), *errors],
        engine_line(plan),
        at,
    )


def plans_nearby(plan: Plan, report: ReportInput) -> dict[str, dict[str, Plan]]:
    """Plan again at SLAs and rates around the plan's, by slider and place."""
    request = report.request

    def again(sla_ms: float, rate: float | None) -> Plan:
        percentile, tokens, wanted = report.percentile, plan.tokens_per_request, replace(request, rate=rate)
        return make_plan(report.profile, sla_ms, percentile=percentile, tokens_per_request=tokens, request=wanted)

    if request.load is not None or again(plan.sla_ms, request.rate).to_json() != plan.to_json():
        return {}
    factors = SLA_FACTORS if request.rate is None else LOAD_SLA_FACTORS
    slas = values_around(plan.sla_ms, factors)
    found = {"SLA": {format_ms(sla): plan if own else again(sla, request.rate) for own, sla in slas}}
    if request.rate is not None:
        rates = values_around(request.rate, RATE_FACTORS)
        found["rate"] = {format_rate(1e3 * rate): plan if own else again(plan.sla_ms, rate) for own, rate in rates}
    return found


def how_sure(report: ReportInput) -> list[str]:
    """Return how far the answer can be trusted, in sentences."""
    plan, found = report.plan, []
    if plan is not None:
        if plan.feasible and plan.probability is not None:
            found.append(f"The SLA is met with a probability of {probability_text(plan.probability)}.")
        found += plan.why_in_doubt
        if plan.steps_in_doubt:
            steps = count_text(len(plan.steps_in_doubt), "step size")
            found.append(f"At {steps} near the limit the data do not show whether the SLA is met; see Limits.")
        if any(row.extrapolated for row in plan.S_at_B):
            found.append("Limits marked extrapolated lie beyond the measured steps.")
    for name, path in report.profile.paths.items():
        found.append(f"{name}: {fit_tables.trust_sentence(path.fit)}")
        if path.nominal is None and name not in report.traces:
            found.append(f"{name}: pictures of the measured steps are missing: add the steps with --trace.")
    return found


def _warnings(report: ReportInput) -> list[Message]:
    """Return the warnings of the plan, then of the fits; a plan names nominal paths itself."""
    of_fits = [
        warning.about(name)
        for name, path in report.profile.paths.items()
        if path.nominal is None or report.plan is None
        for warning in path.fit.warnings
    ]
    return list(dict.fromkeys([*(report.plan.warnings if report.plan is not None else ()), *of_fits]))


def _section(path: ExecutionPath, pictures: Sequence[Picture]) -> Section:
    fit, measured = path.fit, path.nominal is None
    source = {f"rows {key}": value for key, value in fit.data.to_json().items() if key in ("source", "sha256")}
    facts, missing = fit_tables.provenance({**source, **fit.provenance}), why_not_drawn(fit)
    status = fit.status.sentence if measured else fit_tables.trust_sentence(fit)
    drawn = f"Figures are drawn {fit.assumed_context}." if fit.assumed_context else ""
    return Section(
        f"Path {path.name}",
        f"path-{file_stem(path.name)}",
        [fit_tables.parameters(fit), *([fit_tables.errors(fit), fit_tables.rows_used(fit)] if measured else [])],
        pictures,
        [
            f"{status} The model is {fit.name}. {LETTERS}",
            *filter(None, [f"No figures: {missing}." if missing else drawn]),
        ],
        formula=fit.structure.formula,
        folded=facts if facts.rows else None,
    )
