"""Options that several verbs share, so that they look and behave the same everywhere. Imports stay light.

There is one way to declare options: a verb takes a frozen dataclass for each group of them, with the name of its panel
in the help as a class variable `panel`, and is decorated with `@verb`. Choices are a `Literal`. The first name of an
option is shown, others are accepted. Options for experts are `hidden=True`: accepted always, shown by `--help-all`.

An option that would do nothing is refused, in one place: `@only_with` names the library's verbs, which know what their
parameters need (`latfit.api.quantities.Needs`). What was typed is known from
the parser, so that an option is refused at its default value too.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from latfit.cli.output import note, progress_bar
from latfit.errors import WrongUsage, silent
from latfit.units import MOST_SEED

if TYPE_CHECKING:
    from latfit.api import Needs, ReadOptions
    from latfit.trace import CleanTrace

Verb = Callable[..., None]
ALL = "--help-all"
SHORT = 2
"""Letters of an option such as -q."""

NAMES = 22
"""Columns of help for the names of options, in every panel alike."""


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
        given = {name: _as_texts(value) for name, value in given.items()}
        silent.set(bool(given.get("quiet") or given.get("json")))
        grouped = {
            name: group(**{each.name: given.pop(each.name) for each in fields(group) if each.name in given})
            for name, group in groups.items()
        }
        function(**given, **grouped)

    flat.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def only_with(*library: str) -> Callable[[Verb], Verb]:
    """Decorates a verb, below `@verb`, with what its options need, as the library's verbs say."""

    def add(function: Verb) -> Verb:
        function.needs = lambda: [each for name in library for each in _needs_of(name)]  # type: ignore[attr-defined]
        return function

    return add


def _needs_of(library: str) -> "Sequence[Needs]":
    found: Any = import_module("latfit.api")
    for name in library.split("."):
        found = getattr(found, name)
    return tuple(found.needs)


def _in_panel(annotation: Any, panel: str | None) -> Any:
    """The annotation of an option with the panel that it is shown in, unless it names one itself."""
    info, kind = annotation.__metadata__[0], _with_choices(annotation.__origin__)
    if panel is not None and info.rich_help_panel is None:
        info = copy.copy(info)
        info.rich_help_panel = panel
    return Annotated[kind, info]


def _with_choices(kind: Any) -> Any:
    """`list[Literal[...]] | None` as a list of an enumeration: Typer reads choices of a list from no other type."""
    several = next((each for each in (kind, *get_args(kind)) if get_origin(each) is list), None)
    choices = get_args(several)[0] if several else None
    if get_origin(choices) is not Literal:
        return kind
    return list[StrEnum("Choice", [(name, name) for name in get_args(choices)])] | None  # type: ignore[misc]


def _as_texts(value: Any) -> Any:
    """A list of choices as the texts they are."""
    return [each.value if isinstance(each, StrEnum) else each for each in value] if isinstance(value, list) else value


IN_LIBRARY = {"request_class": "classes", "column_map": "map", "source_format": "format"}
"""Options whose parameter has another name in the library."""


def _refuse_idle_output(typed: Collection[str]) -> None:
    if {"json", "verbose"} <= set(typed):
        raise WrongUsage("has no effect: JSON holds everything", where="--verbose", remedy="Leave --verbose out.")


class ShownInPanels(TyperCommand):
    """A command whose help shows its options in panels, in the order of declaration, the shared ones last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ALL in args:
            ctx.meta[ALL], args = True, ["--help"]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        typed = {name for name in ctx.params if ctx.get_parameter_source(name).name not in ("DEFAULT", "DEFAULT_MAP")}
        names = {IN_LIBRARY.get(name, name) for name in typed}
        values = {name: _as_texts(value) for name, value in ctx.params.items()}
        values |= {theirs: values[ours] for ours, theirs in IN_LIBRARY.items() if ours in values}
        _refuse_idle_output(names)
        needs = getattr(self.callback, "needs", None)
        if needs is not None and typed:
            import_module("latfit.api").refuse_idle(needs(), names, values)
        return super().invoke(ctx)

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
                panels.setdefault(panel, []).append(
                    _plain(*record) if not argument else (record[0].split()[0], record[1])
                )
        if OutputOptions.panel in panels:
            panels[OutputOptions.panel] = panels.pop(OutputOptions.panel)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl([(name.ljust(NAMES), told) for name, told in records], col_max=NAMES)
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


KINDS = {"path": "FILE", "str": "TEXT", "text": "TEXT", "int": "N", "integer": "N", "float": "X"}


def _plain(name: str, told: str) -> tuple[str, str]:
    """A line of help in the words of a command line, whatever a version of Typer calls types and ranges."""
    option, space, kind = name.rpartition(" ")
    if kind.upper() == "RANGE" or kind.lower() == "range>":
        option, space, kind = option.rpartition(" ")
    kind = re.sub(r"^(?:<list\[|<|\[)|[>\]]+$", "", kind)
    kind = KINDS.get(kind.lower(), kind) if space else ""
    return (f"{option} {kind}" if space else name), re.sub(r"; [a-z<>=0-9]*x[<>=0-9]*(?=\])|  \[x>=\d+\]", "", told)


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

    def keywords(self) -> "ReadOptions":
        """As the library takes them."""
        return {
            "map": self.column_map,
            "unit": self.unit,
            "format": self.source_format,
            "where": self.where,
            "keep": tuple(self.keep or ()),
            "drop": tuple(self.drop or ()),
            "max_t": self.max_t,
            "allow_drops": self.allow_drops,
            "cells": self.cells,
            "backend": self.backend,
            "scheduler": self.scheduler,
            "skip_bad": self.skip_bad,
        }


def read_sources(
    sources: Sequence[str],
    typed: ReadingOptions,
    *,
    quiet: bool,
    time: Literal["compute", "period", "auto"] = "compute",
) -> "CleanTrace":
    """The sources read and cleaned; a folder or an address of object storage as cells, which are kept in a file. time:
    what T is in cells."""
    from latfit.api import read

    kept = Path(f"{Path(sources[0].rstrip('/')).name.partition('.')[0] or 'trace'}.cells.parquet")
    with progress_bar("Reading", quiet=quiet) as advance:
        options = typed.keywords()
        options["cells_file"], options["progress"], options["cells_time"] = kept, advance, time
        found = read(list(sources), **options)
    cells = found.trace.provenance.get("cells", {})
    if found.sources[0].path == kept and sources[0] != str(kept):
        coarser = f" {cells['coarser']}" if cells.get("coarser") else ""
        note(
            f"Summarised into {len(found):,} cells in {kept}.{coarser} Duplicates, outliers and unmarked cold starts"
            " were not looked for: they need the order of rows.",
            quiet=quiet,
        )
    return found


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
ForceOption = Annotated[
    bool, typer.Option("--force", hidden=True, help="Go on where a fit is not of the machine or the model at hand.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress on stderr.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=MOST_SEED, help="Seed of everything random.")]
HardwareOption = Annotated[
    Path, typer.Option("--hardware", help="The machine's profile: execution paths with their fits.")
]
PercentileOption = Annotated[
    float, typer.Option("--percentile", help="Percentile that must meet the SLA: of steps, or of responses.")
]
LawsOnlyOption = Annotated[
    bool, typer.Option("--laws-only", help="Response times in closed form, without scatter: nothing is simulated.")
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
