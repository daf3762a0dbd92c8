"""How verbs read traces: the options they share, given by `@reads_traces`, and the words for what was read."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from latfit.units import parse_duration_ms

if TYPE_CHECKING:
    from latfit.trace.ingest import Ingested, Reading


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

    def reading(self) -> "Reading":
        """Parsed. Raises WrongUsage."""
        from latfit.trace.clean import CleanOptions
        from latfit.trace.ingest import Reading, parse_column_map

        max_ms = None if self.max_t is None else parse_duration_ms(self.max_t, option="--max-t")
        cleaning = CleanOptions(max_ms, tuple(self.keep or ()), tuple(self.drop or ()), self.allow_drops)
        return Reading(parse_column_map(self.column_map), self.unit, self.source_format, self.where, cleaning)


def reads_traces(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb with a parameter `typed: ReadingOptions`, as a verb with those options in its place."""
    hints = get_type_hints(ReadingOptions, include_extras=True)
    shared = [
        inspect.Parameter(
            option.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option.default, annotation=hints[option.name]
        )
        for option in fields(ReadingOptions)
    ]
    names = {option.name for option in shared}
    own = inspect.signature(verb)
    parameters = [
        p for parameter in own.parameters.values() for p in (shared if parameter.name == "typed" else [parameter])
    ]
    signature = own.replace(parameters=parameters)

    @functools.wraps(verb)
    def with_options(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs).arguments
        typed = ReadingOptions(**{name: given.pop(name) for name in names & set(given)})
        verb(**given, typed=typed)

    with_options.__signature__ = signature  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def data_line(facts: Mapping[str, Any]) -> str:
    """`Read 120,431 rows, used 118,002; dropped 1,204 cold_start, 998 zero_time; marked 31 outlier.`"""
    parts = [f"Read {facts['rows_read']:,} rows, used {facts['rows_used']:,}"]
    for word in ("dropped", "marked"):
        counts = ", ".join(f"{n:,} {reason}" for reason, n in facts.get(word, {}).items())
        parts += [f"{word} {counts}"] if counts else []
    return "; ".join(parts) + "."


def write_dropped(target: Path, ingested: "Ingested") -> int:
    """The dropped rows with their reason, as a trace; how many they are."""
    from latfit.trace.store import write_trace

    reasons = ingested.cleaned.reasons
    rows = reasons != ""
    write_trace(target, ingested.everything.select(rows).with_columns(reason=reasons[rows]))
    return int(rows.sum())
