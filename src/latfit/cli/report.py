"""`latfit report`: one page and its pictures from a hardware profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import (
    DEFAULT_HARDWARE,
    HardwareOption,
    JsonOption,
    LawsOnlyOption,
    PercentileOption,
    QuietOption,
    TokensOption,
    verb,
)
from latfit.errors import LatfitError, WrongUsage
from latfit.units import parse_duration_ms, parse_rate_per_ms

if TYPE_CHECKING:
    from latfit.hardware import HardwareProfile
    from latfit.planning import Plan, Wishes
    from latfit.report import Written
    from latfit.trace import Trace


DEFAULT_FOLDER = Path("reports")


@dataclass(frozen=True)
class Asked:
    """What the report is to plan for, as typed; nothing without an SLA."""

    sla: Annotated[str | None, typer.Option("--sla", help="Latency that a step must meet, such as 20ms.")] = None
    percentile: PercentileOption = 99.0
    rate: Annotated[
        str | None, typer.Option("--rate", help="With --sla: requests that arrive, such as 500/s; plans for responses.")
    ] = None
    laws_only: LawsOnlyOption = False
    tokens_per_request: TokensOption = None

    def plans(self, profile: "HardwareProfile", wishes: "Wishes") -> "list[Plan]":
        """The plan of a profile. Raises BadInput, WrongUsage."""
        from latfit.planning import make_plan

        if self.sla is None:
            if self.rate is not None:
                raise WrongUsage("a rate without a limit to keep", where="--rate", remedy="Give --sla 20ms as well.")
            return []
        plan = make_plan(
            profile,
            parse_duration_ms(self.sla, option="--sla"),
            percentile=self.percentile,
            tokens_per_request=self.tokens_per_request or 1,
            wishes=wishes,
        )
        return [plan]


@verb
def report(
    hardware: HardwareOption = DEFAULT_HARDWARE,
    trace: Annotated[
        list[Path] | None,
        typer.Option("--trace", help="Measured steps to draw; without it those the fits were made from. Repeatable."),
    ] = None,
    asked: Asked = Asked(),
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its pictures.")] = DEFAULT_FOLDER,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write one self-contained HTML page, answer first, and its figures as PNG."""
    from latfit.cli.output import print_json

    written = write_report(hardware, folder=out, asked=asked, traces=trace or (), quiet=quiet or json)
    if json:
        print_json({"html": str(written.html), "figures": [str(figure) for figure in written.figures]})
    else:
        typer.echo(f"Report: {written.html} (and {len(written.figures)} pictures beside it)")


def write_report(
    hardware: Path,
    *,
    folder: Path,
    asked: Asked = Asked(),
    traces: Sequence[Path] = (),
    quiet: bool = False,
) -> "Written":
    """Make the report of a hardware profile in `folder`. Raises BadInput, WrongUsage, TargetNotWritable."""
    from latfit.cli.output import note
    from latfit.files import check_writable, make_folder
    from latfit.hardware import read_hardware
    from latfit.planning import Wishes
    from latfit.provenance import command_line, utc_now
    from latfit.report import page

    rate = None if asked.rate is None else parse_rate_per_ms(asked.rate, option="--rate")
    profile, wishes = read_hardware(hardware), Wishes(rate=rate, laws_only=asked.laws_only)
    plans = asked.plans(profile, wishes)
    make_folder(folder)
    check_writable(folder / page.PAGE_NAME)
    rows, notes = _named_rows(profile, traces) if traces else _rows_of_the_fits(profile)
    for text in notes:
        note(text, quiet=quiet)
    found = page.ReportInput(
        profile, rows, plans, asked.percentile, wishes, command=command_line(), made_at=utc_now(), notes=notes
    )
    return page.write_report(folder, found)


def _rows_of_the_fits(profile: "HardwareProfile") -> tuple[dict[str, "Trace"], list[str]]:
    """The rows that each fit was made from, where they are still there, and a note where they are not."""
    from latfit.trace import read_again

    rows, notes = {}, []
    for name, path in profile.paths.items():
        if path.nominal is not None:
            notes.append(f"{name}: nominal numbers, so there are no rows; figures that need them are left out.")
            continue
        if not path.fit.data.source:
            notes.append(f"{name}: the fit does not say where its rows are; figures that need them are left out.")
            continue
        try:
            rows[name] = read_again(path.fit.data.to_json())
        except LatfitError as error:
            place = f"{error.where} " if error.where else ""
            notes.append(f"{name}: {place}{error.found}; figures that need its rows are left out.")
    return rows, notes


def _named_rows(profile: "HardwareProfile", traces: Sequence[Path]) -> tuple[dict[str, "Trace"], list[str]]:
    """The rows of the traces that the user named, each under its path."""
    from latfit.trace import ingest

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
