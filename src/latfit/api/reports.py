"""`report`: pages of machines and plans; `export`: files of a serving engine."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from latfit import reporting
from latfit.api.answer import Answer
from latfit.api.fits import Fit
from latfit.api.hardware import profile_of
from latfit.api.plans import plan as make_plan
from latfit.api.quantities import percent, several
from latfit.api.reading import read
from latfit.api.request import shared, typed, verb
from latfit.api.requests import ExportRequest, PlanRequest, ReportRequest
from latfit.errors import LatfitError, refuse
from latfit.exporting import Exported, Wanted, export_plan
from latfit.files import check_writable, make_folder
from latfit.hardware import HardwareProfile
from latfit.messages import note
from latfit.planning import PlanOptions
from latfit.provenance import command_line, utc_now
from latfit.trace import Trace, read_again
from latfit.units import count_text

Rows = tuple[dict[str, Trace], list[str]]  # measured steps by path, and notes on what is shown and what is missing


@dataclass(frozen=True, repr=False)
class Report(Answer):
    """Where a report went."""

    html: Path
    figures: list[Path]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"html": str(self.html), "figures": [str(figure) for figure in self.figures]}

    @cached_property
    def _shown(self) -> "reporting.table.Shown":
        verdict = f"Wrote {self.html} and {count_text(len(self.figures), 'picture')} next to it."
        return reporting.table.Shown(
            verdict, details=list(map(str, self.figures)), messages=list(map(note, self.notes))
        )

    def _repr_html_(self) -> str:
        return f'<a href="{escape(str(self.html))}">{escape(self.verdict)}</a>'


@verb(ExportRequest)
def export(request: ExportRequest) -> Exported:
    """Write a plan as an engine's settings, each with its reason as a comment.

    `.files` holds each file by its name, `.save(folder)` writes them. Raises WrongUsage, BadInput, SlaOutOfReach,
    FitNotUsable.
    """
    plan = request.plan
    document = plan if isinstance(plan, str | Path | Mapping) else plan.to_json()
    wanted = Wanted(request.model, tuple(several(request.shapes)), request.begins)
    return export_plan(document, request.target, wanted)


@verb(ReportRequest)
def report(request: ReportRequest) -> Report:
    """Write one self-contained HTML page, answer first, and its figures as PNG.

    Raises BadInput, FitNotUsable, TargetNotWritable, WrongUsage.
    """
    profile, plan = profile_of(request.paths), request.plan
    if plan is None and request.sla is not None:
        plan = make_plan.of(shared(PlanRequest, request, paths=profile))
    refuse(plan is None and request.rate is not None, "a rate without an SLA", "--rate", "Give --sla 20ms as well.")
    fits, trace = request.paths, request.trace
    rows, notes = _rows_of_fits(fits, profile) if trace is None else _named_rows(profile, trace)
    folder = Path(request.out)
    make_folder(folder)
    check_writable(folder / reporting.page.PAGE_NAME)
    making = reporting.layout.Making(command_line(), utc_now())
    result, asked = (None, PlanOptions()) if plan is None else (plan.result, plan.request)
    again = shlex.join(["latfit", "report", *typed(request, "paths", "out")])
    made = reporting.page.ReportInput(profile, rows, result, percent(request.percentile), asked, making, notes, again)
    html, *figures = reporting.layout.write_page(folder, reporting.page.render(made), reporting.page.PAGE_NAME)
    return Report(html, figures, notes)


def _rows_of_fits(paths: Any, profile: HardwareProfile) -> Rows:
    """Return the rows of each fit, and a note for each path without."""
    fits = paths if isinstance(paths, Mapping) else {}
    rows: dict[str, Trace] = {}
    notes = []
    for name, path in profile.paths.items():
        fit, missing = fits.get(name), ""
        if isinstance(fit, Fit) and fit.trace is not None:
            rows[name] = fit.trace
        elif path.nominal is not None or not path.fit.data.source:
            missing = "nominal numbers" if path.nominal else "the fit does not say where its rows are"
        else:
            try:
                rows[name] = read_again(path.fit.data.to_json())
            except LatfitError as error:
                missing = " ".join(filter(None, [error.where, error.found]))
        if missing:
            notes.append(f"{name}: {missing}; figures that need rows are left out.")
    return rows, notes


def _named_rows(profile: HardwareProfile, traces: Any) -> Rows:
    rows: dict[str, Trace] = {}
    notes = []
    known = ", ".join(profile.paths)
    named = traces.items() if isinstance(traces, Mapping) else [(None, each) for each in several(traces)]
    for given, source in named:
        steps = read(source).trace
        label = source if isinstance(source, str | Path) else "the table"
        for system, part in [({"path": given}, steps)] if given else steps.systems():
            name = system.get("path") or (str(part["path"][0]) if "path" in part else "")
            if not name and len(profile.paths) == 1:
                name = known
            remedy = f"Give each path one trace, with a column `path` that holds one of: {known}."
            where = f"--trace {label}"
            refuse(not name, "it does not say which path its steps ran on", where, remedy)
            refuse(name not in profile.paths, f"path {name!r} is not one of the profile's", where, remedy)
            refuse(name in rows, f"path {name!r} has rows from two systems or files", where, remedy)
            rows[name] = part
            notes.append(f"{name}: figures show the {len(part):,} rows of {label}.")
    return rows, notes
