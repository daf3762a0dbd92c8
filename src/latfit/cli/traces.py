"""`latfit ingest` and `latfit trace`: engine logs and tables as a clean trace, and what a trace covers."""

import shlex
from dataclasses import replace
from pathlib import Path

from latfit.api.request import option
from latfit.api.requests import ReadRequest, TraceFile
from latfit.cli.options import OutputOptions, group_of_verbs, read_sources, subverb, verb
from latfit.cli.output import note, print_answer, print_json, print_messages, say, suggest
from latfit.errors import WrongUsage
from latfit.units import count_text, format_ms, format_percent

trace = group_of_verbs("Look at measured steps before fitting them.")
SHOWN_FACTS = ("rows_read", "rows_used", "dropped", "marked", "formats")


@verb
def ingest(
    request: ReadRequest,
    *,
    out: TraceFile = Path("trace.parquet"),
    dropped: Path | None = option("File for the dropped rows, with reasons."),
    scheduler: str | None = option(
        "Summarise a folder on a Dask cluster: its address, tcp://..., or local.", metavar="ADDRESS"
    ),
    output: OutputOptions,
) -> None:
    """Read engine logs and tables into a clean trace.

    Dropped rows are counted by reason; --dropped keeps them.

    Example: latfit ingest server.log --out trace.parquet
    """
    import numpy as np

    from latfit.files import check_writable
    from latfit.provenance import run_facts
    from latfit.reporting import steps
    from latfit.trace import check_trace_name, data_facts, reading_notes, write_trace

    sources = [Path(each) for each in request.source]
    for option_name, target in (("--out", out), ("--dropped", dropped)):
        if target is None:
            continue
        check_trace_name(target, option_name)
        check_writable(target)
        if target.exists() and any(each.exists() and each.samefile(target) for each in sources):
            raise WrongUsage(f"{target} is what is read", where=option_name, remedy="Write to another file.")
    if scheduler is not None:
        request = replace(request, backend="dask", scheduler=None if scheduler == "local" else scheduler)
    read = read_sources(request, quiet=output.silent)
    data, notes = data_facts(read, {}, read.trace), reading_notes(read)
    if dropped is not None:
        reasons = read.reasons
        rows = reasons != ""
        write_trace(dropped, read.everything.select(rows).with_columns(reason=reasons[rows]))
    clean = read.trace
    if read.path is not None and "path" not in clean:
        clean = clean.with_columns(path=np.full(len(clean), read.path, dtype=object))
    write_trace(out, clean.with_provenance(ingest={**run_facts(0), "data": data}))
    if output.json:
        print_json({**{name: data[name] for name in SHOWN_FACTS}, "notes": notes, "out": str(out)})
        return
    say(steps.data_line(data))
    if output.verbose:
        say(f"{read!r}.")
    print_messages(notes, kind="note")
    say(f"Wrote {out} ({', '.join(dict.fromkeys(read.formats))}).")
    suggest(f"latfit fit {shlex.quote(str(out))}")


@subverb(trace)
def show(
    request: ReadRequest,
    *,
    figure: Path | None = option("PNG file for a plot of the coverage.", names="--figure --picture"),
    output: OutputOptions,
) -> None:
    """Show what a trace covers and what it lacks.

    Batches and tokens, phases, time, gaps, drift, and what a better fit needs.

    Example: latfit trace show trace.parquet --figure coverage.png
    """
    from latfit.api.answer import PlainAnswer
    from latfit.files import check_writable, write_bytes
    from latfit.messages import note as as_note
    from latfit.reporting import fit_figures, steps, style, table
    from latfit.trace import coverage_of, data_facts, reading_notes

    if figure is not None:
        check_writable(figure)
    read = read_sources(request, quiet=output.silent)
    data, found, notes = data_facts(read, {}, read.trace), coverage_of(read.trace), reading_notes(read)
    if figure is not None:
        write_bytes(figure, style.png(fit_figures.coverage_figure(read.trace)))
    missing = ["Missing for a good fit:", *(f"  {each}" for each in found.missing)] if found.missing else []
    seconds, runs = found.seconds, count_text(found.runs, "run")
    covered = "" if seconds is None else f"Time covered: {format_ms(seconds * 1e3)} in {runs}."
    lines = [covered, steps.requests_line(read.everything.provenance), *missing]
    drift = [
        f"Drift: {run} ends {format_percent(100 * change, signed=True)} from where it began."
        for run, change in found.drift.items()
    ]
    shown = table.Shown(
        steps.data_line(data),
        lines=list(filter(None, lines)),
        messages=[*drift, *map(as_note, notes)],
        brief=[steps.coverage_table(found)],
    )
    facts = {name: data[name] for name in SHOWN_FACTS}
    print_answer(PlainAnswer({**facts, **found.to_json(), "notes": notes}, shown), output)
    if output.json:
        return
    if figure is not None:
        note(f"Drew {figure}.", quiet=output.quiet)
    each = " --each" if len(read.systems) > 1 else ""
    suggest(f"{shlex.join(['latfit', 'fit', *request.source])}{each}")
