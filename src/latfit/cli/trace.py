"""`latfit trace`: look at measured steps before fitting them."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latfit.api.request import option
from latfit.api.requests import ReadRequest
from latfit.cli.ingest import SHOWN_FACTS
from latfit.cli.options import OutputOptions, group_of_verbs, read_sources, subverb
from latfit.cli.output import echo, note, print_json, print_messages, print_table, say, wrapped
from latfit.units import format_ms, format_percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from latfit.trace import Coverage

trace = group_of_verbs("Look at measured steps before fitting them.")
FEW = 3  # sentences on what is missing, without --verbose


@dataclass(frozen=True)
class Picture(OutputOptions):
    """Where the picture goes."""

    figure: Path | None = option("PNG file for a plot of the coverage.", names="--figure --picture")


@subverb(trace)
def show(request: ReadRequest, output: Picture) -> None:
    """Show what a trace covers and what it lacks.

    Batches and tokens, phases, time, gaps, drift, and what a better fit needs.

    Example: latfit trace show trace.parquet --figure coverage.png
    """
    from latfit.api import data_line
    from latfit.files import check_writable
    from latfit.trace import coverage_of, data_facts, reading_notes

    if output.figure is not None:
        check_writable(output.figure)
    read = read_sources(request, quiet=output.silent)
    data, found, notes = data_facts(read, {}, read.trace), coverage_of(read.trace), reading_notes(read)
    if output.figure is not None:
        from latfit.reporting import write_coverage

        write_coverage(output.figure, read.trace)
    if output.json:
        print_json({**{name: data[name] for name in SHOWN_FACTS}, **found.to_json(), "notes": notes})
        return
    say(data_line(data))
    _print(found, verbose=output.verbose)
    for line in _of_requests(read.everything.provenance):
        say(line)
    print_messages(notes, kind="note")
    if output.figure is not None:
        note(f"Drew {output.figure}.", quiet=output.quiet)
    each = " --each" if len(read.systems) > 1 else ""
    say(f"Next: {shlex.join(['latfit', 'fit', *request.source])}{each}")


def _of_requests(provenance: "Mapping[str, Any]") -> list[str]:
    """Exact percentiles of the requests that a recorder of the engine counted."""
    from latfit.trace import request_times, time_quantile

    parts = [
        f"{name.removesuffix('_ms').upper()} p50 {format_ms(time_quantile(counts, 0.5))},"
        f" p99 {format_ms(time_quantile(counts, 0.99))} (of {counts.total():,})"
        for name, counts in sorted(request_times(provenance).items(), reverse=True)
    ]
    return [f"Requests since the engine's start: {'; '.join(parts)}."] if parts else []


def _print(found: "Coverage", *, verbose: bool) -> None:
    from latfit.reporting import coverage_table

    print_table(coverage_table(found))
    if found.seconds is not None:
        say(f"Time covered: {format_ms(found.seconds * 1e3)} in {found.runs} run{'s' if found.runs > 1 else ''}.")
    print_messages(
        (
            f"Drift: {run} ends {format_percent(100 * change, signed=True)} from where it began."
            for run, change in found.drift.items()
        ),
        verbose=verbose,
    )
    if found.missing:
        say("Missing for a good fit:")
    for text in found.missing if verbose else found.missing[:FEW]:
        echo(wrapped(text, "    ", "  - "))
    if not verbose and len(found.missing) > FEW:
        say(f"  - and {len(found.missing) - FEW} more: --verbose shows them.")
