"""Options that the sub-verbs of `latfit simulate` share, and how their results are shown."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import typer

from latfit.cli.options import DEFAULT_HARDWARE, ForceOption, HardwareOption, OutputOptions, SchedulerOption, SeedOption
from latfit.cli.output import echo, note, print_json, print_table, print_warnings, progress_bar, verdict
from latfit.errors import Interrupted, WrongUsage
from latfit.units import whole_number

if TYPE_CHECKING:
    from latfit.api import Simulation
    from latfit.simulation import Progress, Running

MOST_NOTES = 3


@dataclass(frozen=True)
class MachineOptions:
    """The machine of policies."""

    panel: ClassVar[str] = "Machine"
    hardware: HardwareOption = DEFAULT_HARDWARE
    nominal: Annotated[
        list[str] | None,
        typer.Option(
            "--nominal",
            "--path",
            help="A path by nominal numbers: gpu:launch=8ms,slope=0.05ms, amx:p50=2ms, short gpu=8ms+0.05ms*256."
            " Repeatable.",
        ),
    ] = None
    service: Annotated[
        Literal["fitted", "deterministic", "exponential"],
        typer.Option("--service", hidden=True, help="Service-time distribution."),
    ] = "fitted"
    servers: Annotated[
        list[str] | None, typer.Option("--servers", hidden=True, help="Servers of a path, such as amx=2. Repeatable.")
    ] = None
    buckets: Annotated[
        str | None, typer.Option("--buckets", hidden=True, help="Batch sizes that the main path pads to: 1,2,4,8.")
    ] = None
    force: ForceOption = False

    def asked(self) -> dict[str, Any]:
        """As parameters of the library. Raises WrongUsage."""
        return {
            "hardware": self.hardware,
            "nominal": dict(_named(text) for text in self.nominal or ()),
            "service": self.service,
            "servers": dict(_count(text) for text in self.servers or ()),
            "buckets": split(self.buckets, int, "--buckets"),
            "force": self.force,
        }


@dataclass(frozen=True)
class RunOptions:
    """How long the simulation runs."""

    panel: ClassVar[str] = "Run"
    sla: Annotated[
        str | None, typer.Option("--sla", help="Latency SLA per response, such as 20ms; attainment is reported.")
    ] = None
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests per replication. Default: as many as the load needs.")
    ] = None
    replications: Annotated[
        int, typer.Option("--replications", hidden=True, help="Independent replications, at least.")
    ] = 5
    warmup: Annotated[
        float | None,
        typer.Option(
            "--warmup", hidden=True, help="Share of each replication discarded as warm-up. Default: measured."
        ),
    ] = None
    seed: SeedOption = 0


@dataclass(frozen=True)
class ResultOptions:
    """Where results go."""

    panel: ClassVar[str] = "Results"
    figure: Annotated[Path | None, typer.Option("--figure", help="Draw the runs into a PNG.")] = None
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Folder for a page with figure and tables.")
    ] = None

    def check(self) -> None:
        """Raises TargetNotWritable before a long run instead of after it."""
        from latfit.files import check_writable, make_folder

        if self.figure is not None:
            check_writable(self.figure)
        if self.report is not None:
            from latfit.reporting import PAGE_NAME

            make_folder(self.report)
            check_writable(self.report / PAGE_NAME)

    def write(self, found: "Simulation", *, silent: bool) -> None:
        """The picture and the page that were asked for."""
        if self.figure is not None:
            from latfit.files import write_bytes
            from latfit.reporting import style

            write_bytes(self.figure, style.png(found.plot()))
            note(f"Wrote {self.figure}", quiet=silent)
        if self.report is not None:
            from latfit.provenance import command_line, utc_now
            from latfit.reporting import Making, write_page

            page = found.page(Making(command_line(), utc_now()))
            note(f"Wrote {write_page(self.report, page).html}", quiet=silent)


@dataclass(frozen=True)
class SweepOptions:
    """A table of many runs."""

    panel: ClassVar[str] = "Results"
    out: Annotated[Path | None, typer.Option("--out", help="Write the runs into one Parquet file.")] = None
    resume: Annotated[
        bool, typer.Option("--resume", hidden=True, help="Keep the runs that --out contains already.")
    ] = False
    workers: Annotated[
        int | None, typer.Option("--workers", hidden=True, help="Runs at a time. Default: one per core.")
    ] = None
    backend: Annotated[
        Literal["local", "dask"], typer.Option("--backend", hidden=True, help="Where runs are made.")
    ] = "local"
    scheduler: SchedulerOption = None

    def running(self) -> "Running":
        """Raises WrongUsage."""
        from latfit.simulation import Running

        return Running(self.workers, self.backend, self.scheduler)


Found = TypeVar("Found", bound="Simulation")


def simulated(
    call: "Callable[[Progress], Found]", results: ResultOptions, output: OutputOptions, out: Path | None = None
) -> Found:
    """The simulation with a bar on the way, then its answer, picture and page."""
    results.check()
    try:
        with progress_bar("Simulating", quiet=output.silent) as advance:
            found = call(advance)
    except KeyboardInterrupt:
        if out is None:
            raise
        kept = f"--resume --out {out} goes on from there."
        raise Interrupted("interrupted; the runs so far are kept", where=str(out), remedy=kept) from None
    show(found, output)
    results.write(found, silent=output.silent)
    if out is not None:
        note(f"Wrote {out}", quiet=output.silent)
    return found


def show(found: "Simulation", output: OutputOptions) -> None:
    """The JSON; or the verdict, a table and what limits the results."""
    if output.json:
        print_json(found.to_json())
        return
    verdict(found.verdict, found.state)
    echo()
    for table in found.tables(brief=not output.verbose):
        print_table(table)
    if not output.verbose:
        print_warnings(found.cautions, most=MOST_NOTES)
        return
    for text in found.details:
        echo(text)
    print_warnings(found.notes)


def split(text: str | None, read: Callable[[str], Any], where: str) -> list[Any]:
    """Values between commas. Raises WrongUsage."""
    try:
        return [read(part.strip()) for part in (text or "").split(",") if part.strip()]
    except ValueError:
        raise WrongUsage(f"{text!r} cannot be read", where=where, remedy="Give values between commas.") from None


def _named(text: str) -> tuple[str, str]:
    """Name and numbers of `gpu:launch=8ms,slope=0.05ms` or `gpu=8ms+0.05ms*256`. Raises WrongUsage."""
    import re

    found = re.fullmatch(r"([\w-]+)[=:](.*)", text.strip())
    if not found:
        raise WrongUsage(f"{text!r} is not a path", where="--nominal", remedy="Write gpu:launch=8ms,slope=0.05ms.")
    return found[1], found[2]


def _count(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not (count := whole_number(number)):
        raise WrongUsage(f"{text!r} is not a count of a path", where="--servers", remedy="Write amx=2.")
    return name, count
