"""`latfit ingest`: logs and result files of serving engines into a clean trace."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from latfit.api.request import Option
from latfit.api.requests import ReadRequest, TraceFile
from latfit.cli.options import OutputOptions, read_sources, verb
from latfit.cli.output import print_json, print_messages, say
from latfit.errors import WrongUsage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from latfit.trace import CleanTrace


@dataclass(frozen=True)
class TraceFiles(OutputOptions):
    """Where rows go."""

    out: TraceFile = Path("trace.parquet")
    dropped: Annotated[Path | None, Option("File for the dropped rows, with reasons.")] = None
    scheduler: Annotated[
        str | None, Option("Summarise a folder on a Dask cluster: its address, tcp://..., or local.", metavar="ADDRESS")
    ] = None


@verb
def ingest(request: ReadRequest, output: TraceFiles) -> None:
    """Read engine logs and tables into a clean trace.

    Dropped rows are counted by reason; --dropped keeps them.

    Example: latfit ingest server.log --out trace.parquet
    """
    from latfit.api import data_line
    from latfit.files import check_writable
    from latfit.provenance import run_facts
    from latfit.trace import check_trace_name, data_facts, reading_notes, write_trace

    out, dropped = output.out, output.dropped
    check_trace_name(out)
    if dropped is not None:
        check_trace_name(dropped, "--dropped")
        check_writable(dropped)
    check_writable(out)
    _check_apart(request.source, filter(None, (out, dropped)))
    if output.scheduler is not None:
        cluster = None if output.scheduler == "local" else output.scheduler
        request = replace(request, backend="dask", scheduler=cluster)
    read = read_sources(request, quiet=output.silent)
    data, notes = data_facts(read, {}, read.trace), reading_notes(read)
    facts = {**run_facts(0), "data": data}
    if dropped is not None:
        _write_dropped(dropped, read)
    write_trace(out, _with_path(read).with_provenance(ingest=facts))
    if output.json:
        kept = ("rows_read", "rows_used", "dropped", "marked", "formats")
        print_json({**{name: data[name] for name in kept}, "notes": notes, "out": str(out)})
        return
    say(data_line(data))
    if output.verbose:
        say(f"{read!r}.")
    print_messages(notes, kind="note")
    say(f"Wrote {out} ({', '.join(dict.fromkeys(read.formats))}). Next: latfit fit {shlex.quote(str(out))}")


def _check_apart(sources: list[str], targets: "Iterable[Path]") -> None:
    """Raises WrongUsage for a target that is one of the sources, whose dropped rows would be lost."""
    read = [Path(each) for each in sources]
    for target in targets:
        if target.exists() and any(each.exists() and each.samefile(target) for each in read):
            raise WrongUsage(f"{target} is what is read", where="--out", remedy="Write to another file.")


def _with_path(read: "CleanTrace") -> Any:
    """The clean trace, with the execution path that its format implies."""
    import numpy as np

    trace = read.trace
    if read.path is None or "path" in trace:
        return trace
    return trace.with_columns(path=np.full(len(trace), read.path, dtype=object))


def _write_dropped(target: Path, read: "CleanTrace") -> None:
    """The dropped rows with their reason, as a trace."""
    from latfit.trace import write_trace

    reasons = read.cleaned.reasons
    rows = reasons != ""
    write_trace(target, read.everything.select(rows).with_columns(reason=reasons[rows]))
