"""`latfit trace`: look at measured steps before fitting them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from latfit.cli.options import (
    JsonOption,
    QuietOption,
    ReadingOptions,
    SourcesArgument,
    data_line,
    group_of_verbs,
    read_sources,
    subverb,
)
from latfit.units import format_ms

if TYPE_CHECKING:
    from latfit.trace import Coverage


trace = group_of_verbs("Look at measured steps before fitting them.")


@subverb(trace)
def show(
    source: SourcesArgument,
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw the coverage into this PNG.")] = None,
    typed: ReadingOptions = ReadingOptions(),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a trace covers and what it lacks.

    Batches and tokens, phases, time, gaps, drift, and what a good fit would want besides.
    """
    from latfit.cli.output import note, print_json, print_warnings
    from latfit.files import check_writable
    from latfit.trace import coverage_of, data_facts, reading_notes

    if picture is not None:
        check_writable(picture)
    read = read_sources(source, typed, quiet=quiet or json)
    data, found, notes = data_facts(read, {}, read.trace), coverage_of(read.trace), reading_notes(read)
    if picture is not None:
        from latfit.report import write_coverage

        write_coverage(picture, read.trace)
    if json:
        kept = ("rows_read", "rows_used", "dropped", "marked", "formats")
        print_json({**{name: data[name] for name in kept}, **found.to_json(), "notes": notes})
        return
    typer.echo(data_line(data))
    _print(found)
    print_warnings(notes)
    if picture is not None:
        note(f"Drew {picture}.", quiet=quiet)


def _print(found: "Coverage") -> None:
    from latfit.cli.output import print_table, print_warnings
    from latfit.report import coverage_table

    print_table(coverage_table(found))
    print_warnings(
        f"Drift: {run} ends {abs(change):.1%} {'slower' if change > 0 else 'faster'} than it began."
        for run, change in found.drift.items()
    )
    if found.missing:
        typer.echo("Missing for a good fit:")
    for text in found.missing:
        typer.echo(f"  - {text}")
    if found.seconds is not None:
        typer.echo(
            f"Time covered: {format_ms(found.seconds * 1e3)} in {found.runs} run{'s' if found.runs > 1 else ''}."
        )
