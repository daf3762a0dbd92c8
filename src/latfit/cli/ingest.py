"""`latfit ingest`: logs and result files of serving engines into a clean trace."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latfit.cli.options import (
    JsonOption,
    QuietOption,
    ReadingOptions,
    SourcesArgument,
    data_line,
    read_sources,
    verb,
)

if TYPE_CHECKING:
    from latfit.trace import CleanTrace


@verb
def ingest(
    source: SourcesArgument,
    out: Annotated[Path, typer.Option("--out", help="Trace to write.")] = Path("trace.parquet"),
    dropped: Annotated[
        Path | None, typer.Option("--dropped", help="Also write the dropped rows, with the reason, into this file.")
    ] = None,
    typed: ReadingOptions = ReadingOptions(),
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Read engine logs and tables into a clean trace.

    What was dropped, and why, is counted; --dropped keeps those rows.
    """
    from latfit.cli.output import note, print_json
    from latfit.files import check_writable
    from latfit.provenance import run_facts
    from latfit.trace import check_trace_name, data_facts, write_trace

    check_trace_name(out)
    if dropped is not None:
        check_trace_name(dropped, "--dropped")
    check_writable(out)
    read = read_sources(source, typed, quiet=quiet or json)
    if dropped is not None:
        check_writable(dropped)
        _write_dropped(dropped, read)
    data = data_facts(read, {}, read.trace)
    write_trace(out, _with_path(read).with_provenance(ingest={**run_facts(0), "data": data}))
    facts = _facts(read, data, out)
    if json:
        print_json(facts)
        return
    typer.echo(data_line(data))
    for remark in facts["notes"]:
        note(f"  {remark}", quiet=quiet)
    typer.echo(f"Wrote {out} ({', '.join(dict.fromkeys(read.formats))}). Next: latfit fit {out}")


def _with_path(read: "CleanTrace") -> Any:
    """The clean trace, with the execution path that its format implies."""
    import numpy as np

    trace = read.trace
    if read.path is None or "path" in trace:
        return trace
    return trace.with_columns(path=np.full(len(trace), read.path, dtype=object))


def _facts(read: "CleanTrace", data: dict[str, Any], out: Path) -> dict[str, Any]:
    from latfit.trace import reading_notes

    kept = ("rows_read", "rows_used", "dropped", "marked", "formats")
    return {**{name: data[name] for name in kept}, "notes": reading_notes(read), "out": str(out)}


def _write_dropped(target: Path, ingested: "CleanTrace") -> None:
    """The dropped rows with their reason, as a trace."""
    from latfit.trace import write_trace

    reasons = ingested.cleaned.reasons
    rows = reasons != ""
    write_trace(target, ingested.everything.select(rows).with_columns(reason=reasons[rows]))
