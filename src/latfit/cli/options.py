"""Options that several verbs share, so that they look and behave the same everywhere. Imports stay light.

There is one way to declare options: a verb takes a frozen dataclass for each group of them, with the name of its panel
in the help as a class variable `panel`, and is decorated with `@verb`. Choices are a `Literal`. The first name of an
option is shown, others are accepted. Options for experts are `hidden=True`: accepted always, shown by `--help-all`.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_type_hints

import typer
from typer.core import TyperCommand

from latfit.cli.output import note, progress_bar
from latfit.errors import WrongUsage
from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from latfit.trace import CleanTrace, Reading

Verb = Callable[..., None]
ALL = "--help-all"
SHORT = 2
"""Letters of an option such as -q."""


def verb(function: Verb) -> Verb:
    """A verb whose parameters of a dataclass type are groups of options, as a verb with these in their place, all by
    keyword; each option in the panel of its group."""
    own = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)
    groups = {name: group for name, group in hints.items() if isinstance(group, type) and is_dataclass(group)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=_in_panel(types[each.name], getattr(groups[name], "panel", None)),
            )
            for each in fields(groups[name])
        ]

    @functools.wraps(function)
    def flat(**given: Any) -> None:
        grouped = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group) if each.name in given})
            for name, group in groups.items()
        }
        function(**given, **grouped)

    flat.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def _in_panel(annotation: Any, panel: str | None) -> Any:
    """The annotation of an option with the panel that it is shown in, unless it names one itself."""
    info = annotation.__metadata__[0]
    if panel is None or info.rich_help_panel is not None:
        return annotation
    info = copy.copy(info)
    info.rich_help_panel = panel
    return Annotated[annotation.__origin__, info]


class ShownInPanels(TyperCommand):
    """A command whose help shows its options in panels, in the order of declaration, the shared ones last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ALL in args:
            ctx.meta[ALL], args = True, ["--help"]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        hidden = 0
        for given in self.get_params(ctx):
            parameter = copy.copy(given)
            if getattr(parameter, "hidden", False) and parameter.name != "help":
                hidden += 1
                parameter.hidden = ALL not in ctx.meta  # type: ignore[attr-defined]
            long = [name for name in parameter.opts if len(name) != SHORT]
            parameter.opts = [*long[:1], *(name for name in parameter.opts if len(name) == SHORT)]
            record = parameter.get_help_record(ctx)
            if record is not None:
                argument = parameter.param_type_name == "argument"
                panel = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or OutputOptions.panel
                panels.setdefault(panel, []).append(record)
        if OutputOptions.panel in panels:
            panels[OutputOptions.panel] = panels.pop(OutputOptions.panel)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)
        if hidden and ALL not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more for experts: {ctx.command_path} {ALL}")
            formatter.write("\n")


def group_of_verbs(purpose: str) -> typer.Typer:
    """A verb with verbs of its own, such as `latfit hardware show`; each is added by `@subverb(group)`."""
    found = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=purpose)
    found.callback()(lambda: None)
    return found


def subverb(group: typer.Typer) -> Callable[[Verb], Verb]:
    """Decorates a function with groups of options as one verb of a group."""

    def add(function: Verb) -> Verb:
        group.command(cls=ShownInPanels)(verb(function))
        return function

    return add


@dataclass(frozen=True)
class OutputOptions:
    """How much is said, and in which form."""

    panel: ClassVar[str] = "Output"
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All tables and details.")] = False
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress on stderr.")] = False

    @property
    def silent(self) -> bool:
        """Whether nothing goes to stderr but errors."""
        return self.quiet or self.json


SchedulerOption = Annotated[
    str | None,
    typer.Option("--scheduler", hidden=True, help="Address of a Dask cluster, tcp://...; without it workers here."),
]


@dataclass(frozen=True)
class ReadingOptions:
    """The options of a verb that reads traces, as typed."""

    panel: ClassVar[str] = "Reading"
    source_format: Annotated[
        str, typer.Option("--format", help="Format of the sources; auto looks at what is in them.", metavar="NAME")
    ] = "auto"
    column_map: Annotated[
        str | None, typer.Option("--map", help="Names of the columns in the file: B=batch,S=tokens,T_ms=latency.")
    ] = None
    unit: Annotated[
        Literal["ns", "us", "ms", "s"] | None, typer.Option("--unit", help="Unit of the latency column.")
    ] = None
    where: Annotated[
        str | None,
        typer.Option("--where", help="Use only rows for which this holds: \"hardware == 'h100' and tp == 8\"."),
    ] = None
    max_t: Annotated[
        str | None,
        typer.Option("--max-t", hidden=True, help="Drop slower steps, such as 300ms. Biases a fit; off by default."),
    ] = None
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", hidden=True, help="Keep rows that this rule would drop: cold_start. Repeatable."),
    ] = None
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", hidden=True, help="Drop what is only marked otherwise: outlier. Repeatable."),
    ] = None
    allow_drops: Annotated[
        bool, typer.Option("--allow-drops", hidden=True, help="Accept that more than half of the rows is dropped.")
    ] = False
    cells: Annotated[
        bool, typer.Option("--cells", help="Summarise into weighted cells first, in flat memory; folders always are.")
    ] = False
    backend: Annotated[
        Literal["local", "dask"], typer.Option("--backend", hidden=True, help="Where cells are made.")
    ] = "local"
    scheduler: SchedulerOption = None
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", hidden=True, help="Leave out unreadable files of a folder, and count them.")
    ] = False

    def reading(self) -> "Reading":
        """Parsed. Raises WrongUsage."""
        from latfit.trace import CleanOptions, Reading, parse_column_map

        max_ms = None if self.max_t is None else parse_duration_ms(self.max_t, option="--max-t")
        cleaning = CleanOptions(max_ms, tuple(self.keep or ()), tuple(self.drop or ()), self.allow_drops)
        return Reading(parse_column_map(self.column_map), self.unit, self.source_format, self.where, cleaning)


def read_sources(sources: Sequence[str], typed: ReadingOptions, *, quiet: bool) -> "CleanTrace":
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
        help="Traces, engine logs or tables; several files, globs, or - for standard input.", metavar="TRACE"
    ),
]
DEFAULT_HARDWARE = Path("hardware.json")
