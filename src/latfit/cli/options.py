"""Options that several verbs share, so that they look and behave the same everywhere. Imports stay light.

Options come in groups: a verb takes a dataclass for each, and `@takes_groups` shows the options of all. Those of every
verb that reads traces are `ReadingOptions`; beside them stand how sources are read and the words for what was read.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from latfit.cli.output import note, progress_bar
from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from latfit.trace import Ingested, Reading


def takes_groups(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose parameters of a dataclass type are groups of options, as a verb with these in their place, all by
    keyword."""
    own = inspect.signature(verb)
    hints = get_type_hints(verb, include_extras=True)
    groups = {name: group for name, group in hints.items() if isinstance(group, type) and is_dataclass(group)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=types[each.name]
            )
            for each in fields(groups[name])
        ]

    @functools.wraps(verb)
    def flat(**given: Any) -> None:
        grouped = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group) if each.name in given})
            for name, group in groups.items()
        }
        verb(**given, **grouped)

    flat.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


@dataclass(frozen=True)
class ReadingOptions:
    """The options of a verb that reads traces, as typed."""

    source_format: Annotated[
        str, typer.Option("--format", help="Format of the sources; auto looks at what is in them.", metavar="NAME")
    ] = "auto"
    column_map: Annotated[
        str | None, typer.Option("--map", help="Names of the columns in the file: B=batch,S=tokens,T_ms=latency.")
    ] = None
    unit: Annotated[str | None, typer.Option("--unit", help="Unit of the latency column: ns, us, ms, s.")] = None
    where: Annotated[
        str | None,
        typer.Option("--where", help="Use only rows for which this holds: \"hardware == 'h100' and tp == 8\"."),
    ] = None
    max_t: Annotated[
        str | None, typer.Option("--max-t", help="Drop slower steps, such as 300ms. Biases a fit; off by default.")
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", help="Keep rows that this rule would drop, such as cold_start. Repeatable."),
    ] = None
    drop: Annotated[
        list[str] | None, typer.Option("--drop", help="Drop what is only marked otherwise: outlier. Repeatable.")
    ] = None
    allow_drops: Annotated[
        bool, typer.Option("--allow-drops", help="Accept that more than half of the rows is dropped.")
    ] = False

    cells: Annotated[
        bool, typer.Option("--cells", help="Summarise into weighted cells first, in flat memory; folders always are.")
    ] = False
    backend: Annotated[str, typer.Option("--backend", help="Where cells are made: local, or dask.")] = "local"
    scheduler: Annotated[
        str | None, typer.Option("--scheduler", help="Address of a Dask cluster, tcp://...; without it workers here.")
    ] = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out unreadable files of a folder, and count them.")
    ] = False

    def reading(self) -> "Reading":
        """Parsed. Raises WrongUsage."""
        from latfit.trace import CleanOptions, Reading, parse_column_map

        max_ms = None if self.max_t is None else parse_duration_ms(self.max_t, option="--max-t")
        cleaning = CleanOptions(max_ms, tuple(self.keep or ()), tuple(self.drop or ()), self.allow_drops)
        return Reading(parse_column_map(self.column_map), self.unit, self.source_format, self.where, cleaning)


def read_sources(sources: Sequence[str], typed: ReadingOptions, *, quiet: bool) -> "Ingested":
    """The sources read and cleaned; a folder or an address of object storage as cells, which are kept in a file."""
    from latfit.trace import ingest

    large = [source for source in sources if typed.cells or "://" in source or Path(source).is_dir()]
    if not large:
        if typed.backend != "local" or typed.scheduler is not None:
            raise WrongUsage(
                "only cells are made elsewhere",
                where="--backend, --scheduler",
                remedy="Add --cells, or name a folder; a file is read here.",
            )
        return ingest(sources, typed.reading())
    if len(sources) > 1:
        raise WrongUsage("several sources cannot be summarised at once", remedy="Put them into one folder and name it.")
    target = Path(f"{Path(large[0].rstrip('/')).name.partition('.')[0] or 'trace'}.cells.parquet")
    note(_summarised(large[0], typed, target, quiet=quiet), quiet=quiet)
    return ingest(target)


def _summarised(source: str, typed: ReadingOptions, target: Path, *, quiet: bool) -> str:
    """Write the cells of a source into `target`; what was done, in a sentence."""
    from latfit.files import check_writable
    from latfit.trace import Scan, compress, write_trace

    check_writable(target)
    reading = typed.reading()
    scan = Scan(reading.column_map, reading.unit, reading.where, reading.cleaning, skip_unreadable=typed.skip_bad)
    with progress_bar("Summarising", quiet=quiet) as advance:
        found = compress(source, scan, backend=typed.backend, scheduler=typed.scheduler, progress=advance)
    write_trace(target, found.trace)
    coarser = f" {found.facts['coarser']}" if found.facts.get("coarser") else ""
    return (
        f"Summarised into {found.facts['cells']:,} cells in {target}.{coarser} Duplicates, outliers and unmarked cold"
        " starts need the order of rows and were not looked for."
    )


def data_line(facts: Mapping[str, Any]) -> str:
    """`Read 120,431 rows, used 118,002; dropped 1,204 cold_start, 998 zero_time; marked 31 outlier.`"""
    parts = [f"Read {facts['rows_read']:,} rows, used {facts['rows_used']:,}"]
    for word in ("dropped", "marked"):
        counts = ", ".join(f"{n:,} {reason}" for reason, n in facts.get(word, {}).items())
        parts += [f"{word} {counts}"] if counts else []
    return "; ".join(parts) + "."


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress on stderr.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of everything random.")]
HardwareOption = Annotated[
    Path, typer.Option("--hardware", help="The machine's profile: execution paths with their fits.")
]
PercentileOption = Annotated[
    float, typer.Option("--percentile", help="Share of steps, in percent, that must meet the SLA.")
]
LawsOnlyOption = Annotated[
    bool, typer.Option("--laws-only", help="Responses by exact laws, without scatter: nothing is run or simulated.")
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-request", min=1, help="Tokens that a request adds to a step; without it 1, which is decode."
    ),
]
SourcesArgument = Annotated[
    list[str],
    typer.Argument(
        help="Traces, engine logs or tables; several files, globs, or - for standard input.", metavar="TRACE..."
    ),
]
DEFAULT_HARDWARE = Path("hardware.json")
