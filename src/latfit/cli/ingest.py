"""`latfit ingest`: logs and result files of serving engines into a clean trace."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from latfit.api.request import option
from latfit.api.requests import ReadRequest, TraceFile
from latfit.cli.options import OutputOptions, read_sources, verb
from latfit.cli.output import print_json, print_messages, say
from latfit.errors import WrongUsage

if TYPE_CHECKING:
    from latfit.trace import CleanTrace, Trace

SHOWN_FACTS = ("rows_read", "rows_used", "dropped", "marked", "formats")


@dataclass(frozen=True)
class TraceFiles(OutputOptions):
    """Where rows go."""

    out: TraceFile = Path("trace.parquet")
    dropped: Path | None = option("File for the dropped rows, with reasons.")
    scheduler: str | None = option(
        "Summarise a folder on a Dask cluster: its address, tcp://..., or local.", metavar="ADDRESS"
    )


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
    sources = [Path(each) for each in request.source]
    for option_name, target in (("--out", out), ("--dropped", dropped)):
        if target is None:
            continue
        check_trace_name(target, option_name)
        check_writable(target)
        if target.exists() and any(each.exists() and each.samefile(target) for each in sources):
            raise WrongUsage(f"{target} is what is read", where=option_name, remedy="Write to another file.")
    if output.scheduler is not None:
        cluster = None if output.scheduler == "local" else output.scheduler
        request = replace(request, backend="dask", scheduler=cluster)
    read = read_sources(request, quiet=output.silent)
    data, notes = data_facts(read, {}, read.trace), reading_notes(read)
    if dropped is not None:
        reasons = read.cleaned.reasons
        rows = reasons != ""
        write_trace(dropped, read.everything.select(rows).with_columns(reason=reasons[rows]))
    write_trace(out, _with_path(read).with_provenance(ingest={**run_facts(0), "data": data}))
    if output.json:
        print_json({**{name: data[name] for name in SHOWN_FACTS}, "notes": notes, "out": str(out)})
        return
    say(data_line(data))
    if output.verbose:
        say(f"{read!r}.")
    print_messages(notes, kind="note")
    say(f"Wrote {out} ({', '.join(dict.fromkeys(read.formats))}). Next: latfit fit {shlex.quote(str(out))}")


def _with_path(read: "CleanTrace") -> "Trace":
    """Return the clean trace, with the execution path that its format implies."""
    import numpy as np

    if read.path is None or "path" in read.trace:
        return read.trace
    return read.trace.with_columns(path=np.full(len(read.trace), read.path, dtype=object))
