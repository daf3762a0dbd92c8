"""Commands made from requests: their options, help and panels come from `latfit.api.requests`.

A command is a function of requests, decorated with `@verb`; its other parameters are options of the command alone.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, is_dataclass, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from latfit.api.request import Declared, Option, Request, declared, option, shared
from latfit.api.requests import ReadOptions, ReadRequest
from latfit.cli.output import note, print_answer, progress_bar
from latfit.errors import WrongUsage, silent

if TYPE_CHECKING:
    from latfit.trace import CleanTrace

Verb = Callable[..., None]
ALL = "--help-all"
SHORT = 2  # letters of an option such as -q
NAMES = 22  # columns of help for the names of options, in every panel alike
OWN = "own"  # options of a command that no request has


def verb(function: Verb) -> Verb:
    """Turn a function of requests into one of their options. Values that are not typed stay the requests' defaults.

    An option that several requests have is declared by the first and reaches all.
    """
    records = _requests_of(function)
    found: dict[str, Declared] = {}
    targets: dict[str, list[tuple[str, str]]] = {}
    shown = set()
    for group, record in records.items():
        for each in declared(record):
            if each.option is None:
                continue
            first = found.setdefault(each.option.all_names(each.name)[0], each)
            targets.setdefault(first.name, []).append((group, each.name))
            if each.name in (record.SHOWN.split() or [each.name]) and not each.option.expert:
                shown.add(first.name)
    order = [name for record in records.values() for name in record.SHOWN.split()]
    ordered = sorted(found.values(), key=lambda each: order.index(each.name) if each.name in order else len(order))
    parameters = [_parameter(each, hidden=each.name not in shown) for each in ordered]
    parameters.append(inspect.Parameter("parser", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @functools.wraps(function)
    def flat(parser: typer.Context | None = None, **known: Any) -> None:
        sources = {name: None if parser is None else parser.get_parameter_source(name) for name in known}
        typed = {
            name: known[name]
            for name, source in sources.items()
            if source is None or source.name not in ("DEFAULT", "DEFAULT_MAP")
        }
        silent.set(bool(typed.get("quiet") or typed.get("json")))
        values: dict[str, dict[str, Any]] = {group: {} for group in records}
        for name, value in typed.items():
            for group, field in targets[name]:
                values[group][field] = value
        for text in typed.get("set") or ():
            _set(records, values, text)
        given = {group: record(**values[group]) for group, record in records.items()}
        own = vars(given.pop(OWN)) if OWN in given else {}
        function(**given, **own)

    made: Any = flat
    made.__signature__ = inspect.Signature(parameters)
    made.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def _requests_of(function: Verb) -> dict[str, Any]:
    """Return a command's requests by parameter; its other parameters are one, OWN."""
    hints, names = get_type_hints(function, include_extras=True), inspect.signature(function).parameters
    own: list[Any] = []
    for name, each in names.items():
        if not is_dataclass(hints[name]):
            own.append((name, hints[name]) if each.default is each.empty else (name, hints[name], each.default))
    request = make_dataclass("Own", own, bases=(Request,), frozen=True)
    found: dict[str, Any] = {}
    for name in names:
        found |= {name: hints[name]} if is_dataclass(hints[name]) else {OWN: request}
    return found


def _set(records: dict[str, Any], values: dict[str, dict[str, Any]], text: str) -> None:
    """Enter `NAME=VALUE` into each request that has the field. Raises WrongUsage."""
    name, _, value = (part.strip() for part in text.partition("="))
    name = name.replace("-", "_")
    known = [(group, each) for group, record in records.items() for each in declared(record) if each.is_settable]
    found = [(values[group], each) for group, each in known if each.name == name]
    if not found:
        names = ", ".join(sorted({each.name for _, each in known}))
        raise WrongUsage(f"{name!r} is no parameter without an option", where="--set", remedy=f"There are: {names}.")
    for group_values, each in found:
        one = each.parse(value, "--set")
        group_values[name] = group_values.get(name, []) + one if isinstance(one, list) else one


def _parameter(each: Declared, *, hidden: bool) -> inspect.Parameter:
    option, default, kind = each.option, each.field.default, _kind(each)
    assert option is not None
    if default is MISSING:
        default = inspect.Parameter.empty
    elif default is None or get_origin(kind) is list:
        kind, default = kind | None, None
    elif kind is Path:
        default = Path(str(default))
    words: dict[str, Any] = {"help": option.help, "metavar": option.argument or option.metavar}
    if option.argument:
        info = typer.Argument(**words)
    else:
        info = typer.Option(
            *option.all_names(each.name),
            **words,
            min=option.min,
            max=option.max,
            hidden=hidden,
            rich_help_panel=each.panel or None,
        )
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _kind(each: Declared) -> Any:
    assert each.option is not None
    if each.option.kind is not None:
        return each.option.kind
    if Any in each.kinds:
        return Path
    several = next((kind for kind in each.kinds if get_origin(kind) is Sequence), None)
    if several is not None:
        return list[get_args(several)]  # type: ignore[misc]
    return str if str in each.kinds else each.kinds[0]


class ShownInPanels(TyperCommand):
    """A command whose help shows its options in panels."""

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
                panel = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or OutputOptions.PANEL
                panels.setdefault(panel, []).append(
                    _plain(*record) if not argument else (record[0].split()[0], record[1])
                )
        if OutputOptions.PANEL in panels:
            panels[OutputOptions.PANEL] = panels.pop(OutputOptions.PANEL)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl([(name.ljust(NAMES), text) for name, text in records], col_max=NAMES)
        if hidden and ALL not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more for experts: {ctx.command_path} {ALL}")
            formatter.write("\n")


def group_of_verbs(purpose: str) -> typer.Typer:
    found = typer.Typer(no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=purpose)
    found.callback()(lambda: None)
    return found


def subverb(group: typer.Typer, name: str | None = None) -> Callable[[Verb], Verb]:
    """Decorate a function of requests as a verb of a group."""

    def add(function: Verb) -> Verb:
        group.command(name, cls=ShownInPanels)(verb(function))
        return function

    return add


KINDS = {"path": "FILE", "str": "TEXT", "text": "TEXT", "int": "N", "integer": "N", "float": "X"}


def _plain(name: str, text: str) -> tuple[str, str]:
    """Return a line of help that no version of Typer changes."""
    option, space, kind = name.rpartition(" ")
    if kind.upper() == "RANGE" or kind.lower() == "range>":
        option, space, kind = option.rpartition(" ")
    kind = re.sub(r"^(?:<list\[|<|\[)|[>\]]+$", "", kind)
    kind = KINDS.get(kind.lower(), kind) if space else ""
    return (f"{option} {kind}" if space else name), re.sub(r"; [a-z<>=0-9]*x[<>=0-9]*(?=\])|  \[x>=\d+\]", "", text)


Quiet = Annotated[bool, Option("No notes and no progress on stderr.", "--quiet -q")]


@dataclass(frozen=True)
class OutputOptions(Request):
    PANEL = "Output"
    verbose: bool = option("All tables and details.", False, names="--verbose -v")
    json: bool = option("Print one JSON object on stdout and nothing else.", False)
    quiet: Quiet = False
    set: Sequence[str] = option(
        "Set a parameter of the library that has no option. Repeatable.", (), metavar="NAME=VALUE", expert=True
    )

    @property
    def silent(self) -> bool:
        return self.quiet or self.json


def read_sources(request: ReadOptions, *, quiet: bool, time: str = "compute") -> "CleanTrace":
    """Read the sources of a request; a folder becomes cells in a file."""
    from latfit.api import read

    asked = shared(ReadRequest, request, cells_time=time)
    stem = Path(asked.source[0].rstrip("/")).name.partition(".")[0] or "trace"
    kept = asked.cells_file or Path(f"{stem}.cells.parquet")
    with progress_bar("Reading", quiet=quiet) as advance:
        found = read.of(replace(asked, cells_file=kept, progress=advance))
    cells = found.trace.provenance.get("cells", {})
    if found.sources[0].path == kept and asked.source[0] != str(kept):
        coarser = f" {cells['coarser']}" if cells.get("coarser") else ""
        note(
            f"Summarised into {len(found):,} cells in {kept}.{coarser} Duplicates, outliers and unmarked cold starts"
            " were not looked for: they need the order of rows.",
            quiet=quiet,
        )
    return found


def check_files(out: Path | None = None, figure: Path | None = None, report: Path | None = None) -> None:
    """Raise TargetNotWritable before any work is done."""
    from latfit.files import check_writable, make_folder

    for target in filter(None, (out, figure)):
        check_writable(target)
    if report is not None:
        from latfit.reporting import layout

        make_folder(report)
        check_writable(report / layout.PAGE_NAME)


def answer(
    name: str,
    request: Any,
    output: OutputOptions,
    *,
    busy: str = "",
    out: Path | None = None,
    figure: Path | None = None,
    report: Path | None = None,
) -> Any:
    """Call a verb of the library; print its answer, and write it into files."""
    import latfit.api

    check_files(out, figure, report)
    with progress_bar(busy, quiet=output.silent or not busy) as advance:
        if busy and hasattr(request, "progress"):
            request = replace(request, progress=advance)
        found = getattr(latfit.api, name).of(request)
    print_answer(found, output)
    if out is not None:
        found.save(out)
    if figure is not None:
        from latfit.files import write_bytes
        from latfit.reporting import style

        write_bytes(figure, style.png(found.plot()))
    if report is not None:
        from latfit.provenance import command_line, utc_now
        from latfit.reporting import layout

        report = layout.write_page(report, found.page(layout.Making(command_line(), utc_now())))[0]
    for written in filter(None, (out, figure, report)):
        note(f"Wrote {written}.", quiet=output.silent)
    return found
