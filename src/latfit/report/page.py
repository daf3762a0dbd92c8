"""The report: one HTML file that needs nothing else, and the pictures beside it.

`render` is pure; `write_report` stores what it gave, every file whole or not at all, the page last.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from latfit._version import __version__
from latfit.files import make_folder, write_text, write_whole
from latfit.hardware.profile import ExecutionPath, HardwareProfile
from latfit.plan.result import Plan
from latfit.report import tables
from latfit.report.gallery import Gallery, Picture, comparison, path_gallery
from latfit.report.words import file_stem
from latfit.trace.table import Trace
from latfit.units import format_ms

PAGE_NAME = "report.html"

_QUANTITY = re.compile(r"(\d) (%|ms\b|s\b|µs\b)")


@dataclass(frozen=True)
class ReportInput:
    """What a report is made from.

    traces: cleaned rows by path, for the figures that need them.  plans: one for each SLA asked for, and percentile:
    the share of steps in percent that they were asked for.  command, made_at: how and when the report was made.
    notes: what the reader should know about the making of this report.
    """

    profile: HardwareProfile
    traces: Mapping[str, Trace] = field(default_factory=dict)
    plans: Sequence[Plan] = ()
    percentile: float = 99.0
    command: str = ""
    made_at: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Rendered:
    """The page, and every picture for a file of its own; the overview of the first path comes first."""

    html: str
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Written:
    """Where a report went."""

    html: Path
    figures: Sequence[Path]


def render(report: ReportInput) -> Rendered:
    """The report as text and PNG bytes."""
    prefixes = _prefixes(list(report.profile.paths))
    galleries = {
        name: path_gallery(path, report.traces.get(name), report.plans, report.percentile, prefixes[name])
        for name, path in report.profile.paths.items()
    }
    between = comparison(report.profile, report.traces, report.plans)
    page = _template().render(
        title=_title(report),
        answers=[_answer(plan) for plan in report.plans],
        trust=tables.trust(report.profile),
        trust_sentences=[(name, tables.trust_sentence(path.fit)) for name, path in report.profile.paths.items()],
        warnings=list(_warnings(report)),
        between=between and _shown(between),
        sections=[_section(path, galleries[name]) for name, path in report.profile.paths.items()],
        making=tables.provenance(
            {"command": report.command, "made": report.made_at, "latfit": __version__}, "How this page was made"
        ),
        notes=report.notes,
    )
    overviews = [gallery.overview for gallery in galleries.values() if gallery.overview]
    singles = [picture for gallery in galleries.values() for picture in gallery.pictures]
    return Rendered(page, [*overviews, *([between] if between else []), *singles])


def write_report(folder: Path, report: ReportInput) -> Written:
    """Render into `folder`, which is made where it is missing. Raises TargetNotWritable."""
    make_folder(folder)
    rendered = render(report)
    figures = []
    for picture in rendered.pictures:
        target = folder / f"{picture.stem}.png"
        _write_png(target, picture)
        figures.append(target)
    write_text(folder / PAGE_NAME, rendered.html)
    return Written(folder / PAGE_NAME, figures)


def _write_png(target: Path, picture: Picture) -> None:
    def fill(stream: BinaryIO) -> None:
        stream.write(picture.png)

    write_whole(target, fill)


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("latfit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["prose"] = prose
    return environment.get_template("report.html")


def prose(text: str) -> Markup:
    """A sentence as HTML, escaped: commands between backticks as code, no line break inside a quantity."""
    whole = _QUANTITY.sub("\\1\u00a0\\2", text)
    parts = [escape(part) for part in whole.split("`")]
    if len(parts) % 2 == 0:
        return escape(whole)
    return Markup("").join(Markup("<code>{}</code>").format(part) if i % 2 else part for i, part in enumerate(parts))


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


def _title(report: ReportInput) -> str:
    return f"Step latency on {', '.join(report.profile.paths)}" if report.profile.paths else "Step latency"


def _answer(plan: Plan) -> dict[str, Any]:
    return {
        "sla": format_ms(plan.sla_ms),
        "promise": tables.promise(plan),
        "feasible": plan.feasible,
        "sentence": plan.answer,
        "binding": plan.binding,
        "key_numbers": tables.key_numbers(plan),
        "inverse": [table for table in (tables.tokens_at_batch(plan), tables.batch_at_tokens(plan)) if table.rows],
        "thresholds": tables.thresholds(plan),
        "tokens_per_request": plan.tokens_per_request,
    }


def _warnings(report: ReportInput) -> Iterator[dict[str, str]]:
    """Every fit's warnings with their remedy, then what the plans could not keep to."""
    several = len(report.profile.paths) > 1
    for name, path in report.profile.paths.items():
        for warning in path.fit.warnings:
            yield {"path": name if several else "", "message": warning.message, "remedy": warning.remedy}
    for note in dict.fromkeys(note for plan in report.plans for note in plan.notes):
        yield {"path": "", "message": note, "remedy": ""}


def _section(path: ExecutionPath, gallery: Gallery) -> dict[str, Any]:
    fit = path.fit
    return {
        "anchor": f"path-{file_stem(path.name)}",
        "name": path.name,
        "model": fit.model,
        "formula": fit.structure.formula,
        "status": fit.status.sentence,
        "pictures": [_shown(picture) for picture in gallery.pictures],
        "left_out": gallery.left_out,
        "parameters": tables.parameters(fit),
        "errors": tables.errors(fit),
        "rows": tables.rows_used(fit),
        "provenance": tables.provenance({**_source(path), **fit.provenance}),
    }


def _source(path: ExecutionPath) -> dict[str, Any]:
    return {f"rows {key}": path.fit.data[key] for key in ("source", "sha256") if key in path.fit.data}


def _shown(picture: Picture) -> dict[str, str]:
    encoded = base64.b64encode(picture.png).decode("ascii")
    return {"title": picture.title, "alt": picture.alt, "source": f"data:image/png;base64,{encoded}"}
