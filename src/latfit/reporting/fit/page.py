"""The report of a hardware profile and its plans. `render` is pure; `write_report` stores what it returned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.messages import Message
from latfit.planning import Plan, PlanRequest, levels_for, make_plan
from latfit.reporting.fit import tables
from latfit.reporting.fit.figures import fit_pictures, overview_figure, why_not_drawn
from latfit.reporting.fit.plot_data import FitView, SlaLine
from latfit.reporting.fit.subject import subject_of, title_of
from latfit.reporting.format import counted, file_stem
from latfit.reporting.hardware import ceilings_table
from latfit.reporting.layout import (
    Card,
    Picture,
    Rendered,
    Written,
    make_bars,
    make_slider,
    making,
    shown,
    template,
    write_rendered,
)
from latfit.reporting.plan import tables as plan_tables
from latfit.reporting.plan.figures import comparison, plan_pictures
from latfit.reporting.plan.summary import engine_line, probability_text
from latfit.reporting.style import png
from latfit.trace import Trace
from latfit.units import format_ms, format_rate

PAGE_NAME = "report.html"
SLA_FACTORS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.25, 1.6, 2.0, 3.0, 5.0)
"""Positions of the SLA's slider, times the plan's SLA."""
LOAD_SLA_FACTORS = (0.6, 0.8, 1.0, 1.5, 2.0)  # of a plan for a load, which takes seconds
RATE_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
LOOKS = {"meets": "", "likely": "doubt", "misses": "unmet"}


@dataclass(frozen=True)
class ReportInput:
    """What a report is made from.

    traces: cleaned rows by path, for the figures that need them.  plans: one for each SLA, percentile: the share of
    steps in percent that they were made for, request: the rest of the request.  command, made_at: how and when the
    report was made.  notes: what the reader should know about the making of this report.
    """

    profile: HardwareProfile
    traces: Mapping[str, Trace] = field(default_factory=dict)
    plans: Sequence[Plan] = ()
    percentile: float = 99.0
    request: PlanRequest = field(default_factory=PlanRequest)
    command: str = ""
    made_at: str = ""
    notes: Sequence[str] = ()


def render(report: ReportInput) -> Rendered:
    """The report as text and PNG bytes."""
    paths = report.profile.paths
    prefixes = _prefixes(list(paths))
    views = {name: _view(path, report) for name, path in paths.items()}
    pictures = {name: fit_pictures(view, prefixes[name]) if view else [] for name, view in views.items()}
    overviews = [_overview(view, report, prefixes[name]) for name, view in views.items() if view]
    between = comparison(report.profile, report.plans[0] if report.plans else None)
    loads = [plan_pictures(plan, report.profile, report.request) for plan in report.plans]
    warnings = _warnings(report)
    subjects = [subject_of(path, report.traces.get(name)) for name, path in paths.items()]
    page = template("report.html").render(
        title=title_of(subjects) if subjects else "Step latency",
        subjects=[(subject.path, subject.line) for subject in subjects],
        answers=[_answer(plan, report, of_load) for plan, of_load in zip(report.plans, loads, strict=True)],
        certainty=how_sure(report),
        accuracy=[
            replace(tables.phases(path.fit), caption=f"Held-out error by phase, {path.name}") for path in paths.values()
        ],
        warnings=[{"path": "", **warning.to_json()} for warning in warnings if warning.needs_action],
        remarks=[warning.message for warning in warnings if not warning.needs_action],
        between=between and shown(between),
        ceilings=ceilings_table(report.profile),
        sections=[_section(path, views[name], pictures[name]) for name, path in paths.items()],
        making=making(report.command, report.made_at),
        notes=report.notes,
    )
    singles = [picture for each in (*pictures.values(), *loads) for picture in each]
    return Rendered(page, [*overviews, *([between] if between else []), *singles])


def write_report(folder: Path, report: ReportInput) -> Written:
    """Render into `folder`, which is made where it is missing. Raises TargetNotWritable."""
    return write_rendered(folder, PAGE_NAME, render(report))


def _prefixes(names: Sequence[str]) -> dict[str, str]:
    """A file name's start for each path: none for a single path, else one of its own even where names clash."""
    if len(names) == 1:
        return {names[0]: ""}
    stems = [file_stem(name) for name in names]
    return {
        name: f"{stem}-" if stems.count(stem) == 1 else f"{stem}-{i}-"
        for i, (name, stem) in enumerate(zip(names, stems, strict=True))
    }


def _view(path: ExecutionPath, report: ReportInput) -> FitView | None:
    """What is drawn of a path; None if its fit cannot be drawn."""
    if why_not_drawn(path.fit):
        return None
    trace = report.traces.get(path.name)
    lines = [sla_line(path, plan, report.percentile) for plan in report.plans]
    return FitView(path.name, path.fit, trace if trace is not None and len(trace) else None, lines)


def sla_line(path: ExecutionPath, plan: Plan, percentile: float) -> SlaLine:
    """The typical latency at which the percentile of steps on this path just meets the SLA."""
    level = levels_for(path, percentile).prefill
    share = "typical step" if level.percentile is None else f"{level.percentile:g} % of steps"
    return SlaLine(f"{format_ms(plan.sla_ms)} for {share}", plan.sla_ms / level.factor)


def _overview(view: FitView, report: ReportInput, prefix: str) -> Picture:
    headline = report.plans[0].answer if report.plans else f"{view.name}: {view.fit.name}"
    alt = f"Overview of path {view.name}. {headline} {tables.trust_sentence(view.fit)}"
    return Picture(f"{prefix}overview", headline, alt, png(overview_figure(view, headline)))


def _answer(plan: Plan, report: ReportInput, pictures: Sequence[Picture]) -> dict[str, Any]:
    """The plan as the template takes it: its card, what sliders move it to, its tables."""
    nearby = plans_nearby(plan, report)
    found = (
        plan_tables.thresholds_table(plan),
        *(plan_tables.other_plans_table(f"Limits by {label}", plans) for label, plans in nearby.items()),
        *(plan_tables.load_tables(plan) if plan.rate_per_s is not None else []),
        *plan_tables.step_tables(plan),
        plan_tables.settings_table(plan),
    )
    return {
        "card": _card(plan, report.profile),
        "sliders": [
            make_slider(label, plans, plan, lambda each, at: _card(each, report.profile, at))
            for label, plans in nearby.items()
        ],
        "help": make_bars((row.change, row.percentile_ms) for row in plan.sensitivity),
        "target": plan_tables.promise(plan),
        "pictures": [shown(picture) for picture in pictures],
        "tables": [table for table in found if table.rows],
        "no_engines": plan.unknown.get("settings", ""),
        "notes": plan.notes,
    }


def _card(plan: Plan, profile: HardwareProfile, at: str = "") -> Card:
    """The answer of one plan."""
    errors = [number for path in profile.paths.values() if (number := tables.held_out_number(path))]
    limit = [f"What limits it: {plan.binding}."] if plan.feasible else []
    return Card(
        f"SLA {format_ms(plan.sla_ms)} for {plan_tables.promise(plan)}",
        plan_tables.VERDICTS[plan.promise],
        plan.answer,
        LOOKS[plan.promise],
        [*limit, *filter(None, [plan.remedy])],
        [*plan_tables.key_numbers(plan), *errors],
        engine_line(plan),
        at,
    )


def plans_nearby(plan: Plan, report: ReportInput) -> dict[str, dict[str, Plan]]:
    """Plan again at SLAs, and at rates, around the plan's, by slider and place; empty if the request is not known."""
    request = report.request

    def again(sla_ms: float, rate: float | None) -> Plan:
        wanted = replace(request, rate=rate)
        tokens = plan.tokens_per_request
        return make_plan(
            report.profile, sla_ms, percentile=report.percentile, tokens_per_request=tokens, request=wanted
        )

    if request.load is not None or again(plan.sla_ms, request.rate).to_json() != plan.to_json():
        return {}
    factors = SLA_FACTORS if request.rate is None else LOAD_SLA_FACTORS
    slas = {factor: float(f"{factor * plan.sla_ms:.3g}") for factor in factors}
    found = {"SLA": {format_ms(sla): plan if factor == 1 else again(sla, request.rate) for factor, sla in slas.items()}}
    if request.rate is not None:
        rates = {factor: float(f"{factor * request.rate:.3g}") for factor in RATE_FACTORS}
        found["rate"] = {
            format_rate(1e3 * rate): plan if factor == 1 else again(plan.sla_ms, rate) for factor, rate in rates.items()
        }
    return found


def how_sure(report: ReportInput) -> list[str]:
    """How far the answer can be trusted, in sentences."""
    found = []
    for plan in report.plans:
        if plan.feasible and plan.probability is not None:
            found.append(f"The SLA is met with a probability of {probability_text(plan.probability)}.")
        found += plan.why_in_doubt
        if plan.steps_in_doubt:
            steps = counted(len(plan.steps_in_doubt), "step size")
            found.append(f"At {steps} near the limit the data do not show whether the SLA is met; see Limits.")
        if any(row.extrapolated for row in plan.S_at_B):
            found.append("Limits marked extrapolated lie beyond the measured steps.")
    for name, path in report.profile.paths.items():
        found.append(f"{name}: {tables.trust_sentence(path.fit)} {tables.error_sentence(path.fit)}".strip())
        if path.nominal is None and path.name not in report.traces:
            found.append(f"{name}: pictures of the measured steps are missing: add the steps with --trace.")
    return found


def _warnings(report: ReportInput) -> list[Message]:
    """Those of the plans, the most important first, then every fit's; plans say themselves which paths are nominal."""
    of_fits = [
        warning.about(name)
        for name, path in report.profile.paths.items()
        if path.nominal is None or not report.plans
        for warning in path.fit.warnings
    ]
    return list(dict.fromkeys([*(warning for plan in report.plans for warning in plan.warnings), *of_fits]))


def _section(path: ExecutionPath, view: FitView | None, pictures: Sequence[Picture]) -> dict[str, Any]:
    """A path as the template takes it."""
    fit, measured = path.fit, path.nominal is None
    source = {f"rows {key}": value for key, value in fit.data.to_json().items() if key in ("source", "sha256")}
    facts = tables.provenance({**source, **fit.provenance})
    assumed = f"Figures are drawn {fit.assumed_context}." if view is not None and fit.assumed_context else ""
    missing = "" if view is not None else f"No figures: {why_not_drawn(fit)}."
    return {
        "anchor": f"path-{file_stem(path.name)}",
        "name": path.name,
        "model": fit.name,
        "formula": fit.structure.formula,
        "status": fit.status.sentence if measured else tables.trust_sentence(fit),
        "pictures": list(map(shown, pictures)),
        "notes": [each for each in (assumed, missing) if each],
        "tables": [tables.parameters(fit), *([tables.errors(fit), tables.rows_used(fit)] if measured else [])],
        "provenance": facts if facts.rows else None,
    }
