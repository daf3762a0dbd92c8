"""`latfit report`: one page and its pictures from a hardware profile."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    PercentileOption,
    QuietOption,
    TokensOption,
)
from latfit.errors import LatfitError, WrongUsage
from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from latfit.hardware.profile import HardwareProfile
    from latfit.report.page import Written
    from latfit.trace.table import Trace

DEFAULT_FOLDER = Path("reports")


def report(
    hardware: HardwareOption = DEFAULT_HARDWARE,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="Measured steps to draw; without it those the fits were made from. Repeatable."),
    ] = None,
    sla: Annotated[str | None, typer.Option("--sla", help="Latency that a step must meet, such as 20ms.")] = None,
    percentile: PercentileOption = 99.0,
    tokens_per_request: TokensOption = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its pictures.")] = DEFAULT_FOLDER,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write one self-contained HTML page, answer first, and its figures as PNG."""
    from latfit.cli.output import print_json

    written = write_report(
        hardware,
        folder=out,
        sla=sla,
        traces=trace or (),
        percentile=percentile,
        tokens_per_request=1 if tokens_per_request is None else tokens_per_request,
        quiet=quiet or json,
    )
    if json:
        print_json({"html": str(written.html), "figures": [str(figure) for figure in written.figures]})
    else:
        typer.echo(f"Report: {written.html} (and {len(written.figures)} pictures beside it)")


def write_report(
    hardware: Path,
    *,
    folder: Path,
    sla: str | None = None,
    traces: Sequence[Path] = (),
    percentile: float = 99.0,
    tokens_per_request: int = 1,
    quiet: bool = False,
) -> "Written":
    """Make the report of a hardware profile in `folder`. Raises BadInput, WrongUsage, TargetNotWritable."""
    from latfit.cli.output import note
    from latfit.files import check_writable, make_folder
    from latfit.hardware.profile import read_hardware
    from latfit.plan.decide import make_plan
    from latfit.provenance import command_line, utc_now
    from latfit.report import page

    sla_ms = None if sla is None else parse_duration_ms(sla, option="--sla")
    profile = read_hardware(hardware)
    plans = []
    if sla_ms is not None:
        plans.append(make_plan(profile, sla_ms, percentile=percentile, tokens_per_request=tokens_per_request))
    make_folder(folder)
    check_writable(folder / page.PAGE_NAME)
    rows, notes = _named_rows(profile, traces) if traces else _rows_of_the_fits(profile)
    for text in notes:
        note(text, quiet=quiet)
    found = page.ReportInput(profile, rows, plans, percentile, command=command_line(), made_at=utc_now(), notes=notes)
    return page.write_report(folder, found)


def _rows_of_the_fits(profile: "HardwareProfile") -> tuple[dict[str, "Trace"], list[str]]:
    """The rows that each fit was made from, where they are still there, and a note where they are not."""
    from latfit.trace.ingest import read_again

    rows, notes = {}, []
    for name, path in profile.paths.items():
        if not path.fit.data.get("source"):
            notes.append(f"{name}: the fit does not say where its rows are; figures that need them are left out.")
            continue
        try:
            rows[name] = read_again(path.fit.data)
        except LatfitError as error:
            place = f"{error.where} " if error.where else ""
            notes.append(f"{name}: {place}{error.found}; figures that need its rows are left out.")
    return rows, notes


def _named_rows(profile: "HardwareProfile", traces: Sequence[Path]) -> tuple[dict[str, "Trace"], list[str]]:
    """The rows of the traces that the user named, each under its path."""
    from latfit.trace.ingest import ingest

    rows: dict[str, Trace] = {}
    notes = []
    for source in traces:
        trace = ingest(source).trace
        for system, part in trace.systems():
            name = _path_of(part, system, profile, source)
            if name in rows:
                raise WrongUsage(
                    f"path {name!r} has rows from two systems or files",
                    where=f"--trace {source}",
                    remedy="Give each path one trace, of one machine and model.",
                )
            rows[name] = part
            notes.append(f"{name}: figures show the {len(part):,} rows of {source}.")
    return rows, notes


def _path_of(part: "Trace", system: dict[str, str], profile: "HardwareProfile", source: Path) -> str:
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
