"""Report pages: what a machine's paths are, how far their fits can be trusted, and what a plan decides from them; a
plan as the files of a serving engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from latfit.api.answer import Answer
from latfit.api.fits import Fit
from latfit.api.hardware import profile_of
from latfit.api.plans import plan as make_plan
from latfit.api.quantities import percent, several
from latfit.api.reading import read
from latfit.api.request import shared, verb
from latfit.api.requests import ExportRequest, PlanRequest, ReportRequest
from latfit.errors import LatfitError, WrongUsage
from latfit.exporting import Exported, Wanted, export_plan
from latfit.files import check_writable, make_folder
from latfit.hardware import HardwareProfile
from latfit.messages import Message, note
from latfit.planning import PlanRequest as NoPlan
from latfit.provenance import command_line, utc_now
from latfit.trace import Trace, read_again

Rows = tuple[dict[str, Trace], list[str]]
"""Measured steps by path, and notes on what is shown and what is missing."""


@dataclass(frozen=True, repr=False)
class Report(Answer):
    """Where a report went. html: the page, which needs nothing else.  figures: its pictures as PNG.  notes: what the
    reader should know of how it was made."""

    html: Path
    figures: list[Path]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """The document of `latfit report --json`."""
        return {"html": str(self.html), "figures": [str(figure) for figure in self.figures]}

    @property
    def verdict(self) -> str:
        return f"Wrote {self.html} and {len(self.figures)} pictures beside it."

    @property
    def details(self) -> list[str]:
        return [str(each) for each in self.figures]

    @property
    def messages(self) -> list[Message]:
        return list(map(note, self.notes))

    def _repr_html_(self) -> str:
        return f'<a href="{escape(str(self.html))}">{escape(self.verdict)}</a>'


@verb(ExportRequest)
def export(request: ExportRequest) -> Exported:
    """Write a plan down as an engine's settings, each with its reason, the plan, and when it holds, as a comment.

    plan: what `plan` or `plan_engine` returned, its file (`latfit plan --out`) or its document. `.files` holds each
    file by its name, `.save(folder)` writes them. Raises WrongUsage where the target is not known or the plan is of
    another kind, BadInput, SlaOutOfReach where the plan cannot be met, FitNotUsable where its data do not support it.
    """
    plan = request.plan
    document = plan if isinstance(plan, str | Path | Mapping) else plan.to_json()
    wanted = Wanted(request.model, tuple(several(request.shapes)), request.begins)
    return export_plan(document, request.target, wanted)


@verb(ReportRequest)
def report(request: ReportRequest) -> Report:
    """Write one self-contained HTML page, answer first, and its figures as PNG.

    paths: as for `Hardware`: {"cpu": fit, "gpu": "launch=12ms,slope=0.05ms"}, a `hardware.json`, a fit.  trace:
    files, DataFrames, or by path. Raises BadInput, FitNotUsable, TargetNotWritable, WrongUsage.
    """
    from latfit.reporting import page

    profile, plan = profile_of(request.paths), request.plan
    if plan is None and (request.sla is not None or request.sla_ms is not None):
        plan = make_plan.of(shared(PlanRequest, request, paths=profile))
    elif plan is None and (request.rate is not None or request.rate_per_s is not None):
        raise WrongUsage("a rate without an SLA", where="--rate", remedy="Give --sla 20ms as well.")
    folder = Path(request.out)
    make_folder(folder)
    check_writable(folder / page.PAGE_NAME)
    rows, notes = (
        _rows_of_the_fits(request.paths, profile) if request.trace is None else _named_rows(profile, request.trace)
    )
    made = page.ReportInput(
        profile,
        rows,
        [] if plan is None else [plan.result],
        percent(request.percentile),
        NoPlan() if plan is None else plan.request,
        command=command_line(),
        made_at=utc_now(),
        notes=notes,
    )
    written = page.write_report(folder, made)
    return Report(written.html, list(written.figures), notes)


def _rows_of_the_fits(paths: Any, profile: HardwareProfile) -> Rows:
    """The rows that each fit was made from, where they are at hand or still in their file, and a note where not."""
    fits = paths if isinstance(paths, Mapping) else dict.fromkeys(profile.paths, paths)
    rows: dict[str, Trace] = {}
    notes = []
    for name, path in profile.paths.items():
        fit = fits.get(name)
        if isinstance(fit, Fit) and fit.trace is not None:
            rows[name] = fit.trace
        elif path.nominal is not None:
            notes.append(f"{name}: nominal numbers, so there are no rows; figures that need them are left out.")
        elif not path.fit.data.source:
            notes.append(f"{name}: the fit does not say where its rows are; figures that need them are left out.")
        else:
            try:
                rows[name] = read_again(path.fit.data.to_json())
            except LatfitError as error:
                place = f"{error.where} " if error.where else ""
                notes.append(f"{name}: {place}{error.found}; figures that need its rows are left out.")
    return rows, notes


def _named_rows(profile: HardwareProfile, traces: Any) -> Rows:
    """The rows of the traces that the user named, each under its path."""
    rows: dict[str, Trace] = {}
    notes = []
    for given, source in _named(traces):
        steps = read(source).trace
        label = source if isinstance(source, str | Path) else "the table"
        for system, part in [({"path": given}, steps)] if given else steps.systems():
            name = _path_of(part, system, profile, label)
            if name in rows:
                raise WrongUsage(
                    f"path {name!r} has rows from two systems or files",
                    where=f"--trace {label}",
                    remedy="Give each path one trace, of one machine and model.",
                )
            rows[name] = part
            notes.append(f"{name}: figures show the {len(part):,} rows of {label}.")
    return rows, notes


def _named(traces: Any) -> Iterable[tuple[str | None, Any]]:
    """(path or None, source) of each trace."""
    if isinstance(traces, Mapping):
        return list(traces.items())
    return [(None, each) for each in (traces if isinstance(traces, list | tuple) else [traces])]


def _path_of(part: Trace, system: Mapping[str, str], profile: HardwareProfile, source: str | Path) -> str:
    """The profile's path that a part of a trace belongs to: its own name, or the only one there is."""
    name = system.get("path") or (str(part["path"][0]) if "path" in part else "")
    if not name and len(profile.paths) == 1:
        return next(iter(profile.paths))
    if name in profile.paths:
        return name
    known = ", ".join(profile.paths)
    raise WrongUsage(
        f"its path {name!r} is not one of the profile's ({known})" if name else "it does not say which path it is of",
        where=f"--trace {source}",
        remedy=f"Give a trace with a column `path` that holds one of: {known}.",
    )
