"""The report of a hardware profile and its plans. `render` is pure; `write_report` stores what it gave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latfit.hardware import ExecutionPath, HardwareProfile
from latfit.messages import Message as LatfitWarning
from latfit.planning import Plan, PlanRequest, make_plan
from latfit.reporting.fit import tables
from latfit.reporting.fit.checks import check_tables
from latfit.reporting.fit.correction import correction_tables
from latfit.reporting.fit.gallery import Gallery, comparison, path_gallery
from latfit.reporting.fit.subject import subject_of, title_of
from latfit.reporting.format import file_stem
from latfit.reporting.hardware import ceilings_table
from latfit.reporting.layout import Picture, Rendered, Written, making, shown, template, write_rendered
from latfit.reporting.plan import tables as plan_tables
from latfit.reporting.plan.figures import plan_pictures
from latfit.reporting.plan.summary import engine_line
from latfit.trace import Trace
from latfit.units import format_ms

PAGE_NAME = "report.html"
SLA_FACTORS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0)
"""Positions of the SLA's slider, times the plan's SLA."""


@dataclass(frozen=True)
class ReportInput:
    """What a report is made from.

    traces: cleaned rows by path, for the figures that need them.  plans: one for each SLA asked for, percentile: the
    share of steps in percent that they were asked for, request: what else.  command, made_at: how and when the report
    was made.  notes: what the reader should know about the making of this report.
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
    prefixes = _prefixes(list(report.profile.paths))
    galleries = {
        name: path_gallery(path, report.traces.get(name), report.plans, report.percentile, prefixes[name])
        for name, path in report.profile.paths.items()
    }
    between = comparison(report.profile, report.traces, report.plans)
    loads = [plan_pictures(plan, report.profile, report.request) for plan in report.plans]
    warnings = _warnings(report)
    subjects = [subject_of(path, report.traces.get(name)) for name, path in report.profile.paths.items()]
    page = template("report.html").render(
        title=title_of(subjects) if subjects else "Step latency",
        subjects=[(subject.path, subject.line) for subject in subjects],
        answers=[_answer(plan, report, shown) for plan, shown in zip(report.plans, loads, strict=True)],
        trust=tables.trust(report.profile),
        trust_sentences=[(name, tables.trust_sentence(path.fit)) for name, path in report.profile.paths.items()],
        warnings=[{"path": "", **warning.to_json()} for warning in warnings if warning.needs_action],
        remarks=[warning.message for warning in warnings if not warning.needs_action],
        ceilings=_with_rows(ceilings_table(report.profile)),
        between=between and shown(between),
        sections=[
            _section(path, galleries[name], report.traces.get(name)) for name, path in report.profile.paths.items()
        ],
        making=making(report.command, report.made_at),
        notes=report.notes,
    )
    overviews = [gallery.overview for gallery in galleries.values() if gallery.overview]
    singles = [picture for gallery in galleries.values() for picture in gallery.pictures]
    of_loads = [picture for pictures in loads for picture in pictures]
    return Rendered(page, [*overviews, *([between] if between else []), *singles, *of_loads])


def write_report(folder: Path, report: ReportInput) -> Written:
    """Render into `folder`, which is made where it is missing. Raises TargetNotWritable."""
    return write_rendered(folder, PAGE_NAME, render(report))


def _prefixes(names: Sequence[str]) -> dict[str, str]:
    """A file name's start for each path: none for a single path, else one of its own even where names clash."""
    if len(names) == 1:
        return {names[0]: ""}
    stems: dict[str, str] = {}
    for name in names:
        stem = file_stem(name)
        while f"{stem}-" in stems.values():
            stem += "_"
        stems[name] = f"{stem}-"
    return stems


def _answer(plan: Plan, report: ReportInput, pictures: Sequence[Picture]) -> dict[str, Any]:
    """The plan as the template takes it; where it was made for a load, with what that decides."""
    load = {"tables": list(plan_tables.load_tables(plan)), "pictures": [shown(picture) for picture in pictures]}
    steps = (tables.tokens_at_batch(plan), tables.batch_at_tokens(plan), plan_tables.doubts_table(plan))
    engines = (plan_tables.settings_table(plan), plan_tables.engines_table(plan))
    at_slas = plans_at_slas(plan, report)
    return {
        **_card(plan, report.profile),
        "at_slas": [_card(each, report.profile) for each in at_slas],
        "asked_at": SLA_FACTORS.index(1.0),
        "other_slas": _with_rows(plan_tables.slas_table(at_slas)),
        "load": None if plan.rate_per_s is None else load,
        "steps": [table for table in steps if table.rows],
        "thresholds": plan_tables.thresholds_table(plan, explained=True),
        "engines": [table for table in engines if table.rows],
        "no_engines": plan.unknown.get("settings", ""),
        "notes": plan.notes,
    }


def _card(plan: Plan, profile: HardwareProfile) -> dict[str, Any]:
    """The answer at one SLA."""
    errors = [number for path in profile.paths.values() if (number := tables.held_out_number(path))]
    return {
        "sla": format_ms(plan.sla_ms),
        "promise": tables.promise(plan),
        "verdict": plan_tables.verdict(plan),
        "state": {"meets": "", "likely": "doubt", "misses": "unmet"}[plan.promise],
        "sentence": plan.answer,
        "why_in_doubt": plan.why_in_doubt if plan.promise == "likely" else (),
        "limit": plan.binding if plan.feasible else "",
        "remedy": plan.remedy,
        "key_numbers": [*plan_tables.key_numbers(plan), *errors],
        "command": engine_line(plan),
    }


def plans_at_slas(plan: Plan, report: ReportInput) -> list[Plan]:
    """Plan again at SLAs around the plan's; empty for a load (seconds each) or if the request is not known."""
    if plan.rate_per_s is not None:
        return []

    def at(sla_ms: float) -> Plan:
        return make_plan(
            report.profile,
            sla_ms,
            percentile=report.percentile,
            tokens_per_request=plan.tokens_per_request,
            request=report.request,
        )

    if at(plan.sla_ms).to_json() != plan.to_json():
        return []
    return [plan if factor == 1 else at(float(f"{factor * plan.sla_ms:.3g}")) for factor in SLA_FACTORS]


def _with_rows(table: tables.Table) -> tables.Table | None:
    return table if table.rows else None


def _warnings(report: ReportInput) -> list[LatfitWarning]:
    """Those of the plans, which name the most important ones first, then every fit's; of nominal paths a plan says
    itself what they are."""
    of_fits = [
        warning.about(name)
        for name, path in report.profile.paths.items()
        if path.nominal is None or not report.plans
        for warning in path.fit.warnings
    ]
    return list(dict.fromkeys([*(warning for plan in report.plans for warning in plan.warnings), *of_fits]))


def _section(path: ExecutionPath, gallery: Gallery, trace: Trace | None) -> dict[str, Any]:
    """A path as the template takes it; of one that was not measured there is nothing to check."""
    fit, measured = path.fit, path.nominal is None
    facts = tables.provenance({**_source(path), **fit.provenance})
    return {
        "anchor": f"path-{file_stem(path.name)}",
        "name": path.name,
        "model": fit.name,
        "formula": fit.structure.formula,
        "symbols": tables.symbols(fit.structure.formula),
        "status": fit.status.sentence if measured else tables.trust_sentence(fit),
        "pictures": [shown(picture) for picture in gallery.pictures if picture not in gallery.shown_first],
        "shown_first": [shown(picture) for picture in gallery.shown_first],
        "assumed": f"Figures are drawn {fit.assumed_context}." if gallery.pictures and fit.assumed_context else "",
        "left_out": gallery.left_out if measured else (),
        "parameters": tables.parameters(fit),
        "errors": tables.errors(fit) if measured else None,
        "correction": correction_tables(fit, trace),
        "checks": [*check_tables(fit), tables.rows_used(fit)] if measured else [],
        "provenance": _with_rows(facts),
    }


def _source(path: ExecutionPath) -> dict[str, Any]:
    facts = path.fit.data.to_json()
    return {f"rows {key}": facts[key] for key in ("source", "sha256") if key in facts}
