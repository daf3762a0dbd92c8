"""Steps from whatever holds them: files, globs, logs, folders; pandas, Arrow and Polars tables; columns by name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from latfit.api.request import given_in, ignored, shared, verb
from latfit.api.requests import ReadRequest, Time
from latfit.errors import BadInput, WrongUsage, located
from latfit.files import check_writable
from latfit.trace import (
    PERIOD,
    CleanOptions,
    CleanTrace,
    Reading,
    Trace,
    columns_of,
    compress,
    ingest,
    ingest_table,
    open_source,
    parse_column_map,
    read_columns,
    timed,
    typed_columns,
    write_trace,
)
from latfit.units import format_percent, parse_duration_ms

TABLE = "the table"  # what errors call a table in memory
MIN_HOST_SHARE = 0.05  # of T; below it the host's time is not reported


@verb(ReadRequest)
def read(request: ReadRequest) -> CleanTrace:
    """Clean steps from a source.

    source: a file or several, a glob, "-", a folder or an address of object storage; a pandas DataFrame, an Arrow
    table, a Polars frame or anything else that offers Arrow's C stream, a mapping of columns; a trace that was read
    before. Returns the steps (`.frame` is the DataFrame: B requests, S tokens, T_ms milliseconds, one row a step) and
    what was dropped and why. Raises BadInput, WrongUsage.
    """
    source = request.source
    if isinstance(source, CleanTrace) and not given_in(request) - {"source", "progress", "cells_time"}:
        return source
    names = [source] if isinstance(source, str | Path) else source
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str | Path) for each in names):
        return ingest_table(table_of(source), _reading(request))
    large = [name for name in names if request.cells or "://" in str(name) or Path(name).is_dir()]
    if not large:
        for name in {"backend", "skip_bad"} & given_in(request):
            ignored(f"--{name.replace('_', '-')}", "no source is a folder or summarised with --cells")
        return ingest(names, _reading(request))
    if len(names) > 1:
        raise WrongUsage("several sources cannot be summarised at once", remedy="Put them into one folder and name it.")
    return _summarise(str(large[0]), request)


def read_timed(request: Any, time: Time | None = None) -> CleanTrace:
    """Read steps with T as `time` or the request says; None: the period if most steps have one."""
    time = time or getattr(request, "time", None)
    return timed(read.of(shared(ReadRequest, request, cells_time=time or "auto")), time)


def _reading(request: ReadRequest) -> Reading:
    cleaning = CleanOptions(
        None if request.max_t is None else parse_duration_ms(request.max_t, option="--max-t"),
        tuple(request.keep),
        tuple(request.drop),
        request.allow_drops,
    )
    columns = request.map if isinstance(request.map, Mapping) else parse_column_map(request.map)
    return Reading(dict(columns), request.unit, request.format, request.where, cleaning)


def _summarise(source: str, request: ReadRequest) -> CleanTrace:
    """Return cells of a folder or a large file, kept in `cells_file` if it is named."""
    reading, target = _reading(request), request.cells_file
    if target is not None:
        check_writable(target)
    cells = compress(
        source,
        reading,
        time=None if request.cells_time == "auto" else request.cells_time,
        skip_unreadable=request.skip_bad,
        backend=request.backend,
        scheduler=request.scheduler,
        progress=request.progress,
    )
    if target is None:
        return ingest_table(cells.trace)
    write_trace(target, cells.trace)
    return ingest(target)


def table_of(source: Any) -> Trace:
    """Return the columns of a table in memory. Raises BadInput."""
    source = getattr(source, "trace", source)  # of a CleanTrace, a Profile
    if isinstance(source, Trace):
        return source
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        if any(name is not None for name in source.index.names):
            source = source.reset_index()
        names = [str(name).strip() for name in source.columns]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadInput(f"two columns are called {twice!r}", where=TABLE, remedy="Rename one of them.")
        return Trace({name: source.iloc[:, i].to_numpy() for i, name in enumerate(names)})
    if isinstance(source, Mapping):
        try:
            return Trace({str(name).strip(): np.atleast_1d(np.asarray(column)) for name, column in source.items()})
        except ValueError as error:
            raise BadInput(str(error), where=TABLE, remedy="Give columns of one length.") from None
    if any(hasattr(source, name) for name in ("to_arrow", "__arrow_c_stream__", "column_names")):
        import pyarrow as pa

        table = source.to_arrow() if hasattr(source, "to_arrow") else source
        return Trace(columns_of(table if isinstance(table, pa.Table) else pa.table(table), TABLE))
    raise BadInput(
        f"{type(source).__name__} is neither a file nor a table",
        remedy="Give a path, a pandas DataFrame, an Arrow table, a Polars frame, or a mapping of columns.",
    )


def steps_of(source: Any) -> Trace:
    """Return steps without latency, of a file or a table with columns B and S. Raises BadInput."""
    required = ("B", "S")
    if isinstance(source, str | Path):
        return read_columns(open_source(source), required)
    with located(TABLE):
        return typed_columns(table_of(source), required)


def data_line(facts: Mapping[str, Any]) -> str:
    """`Read 120,431 rows, used 118,002; dropped 1,204 cold_start, 998 zero_time; marked 31 outlier.`"""
    if facts.get("rows_read") is None:
        return "No rows were read."
    parts = [f"Read {facts['rows_read']:,} rows, used {facts['rows_used']:,}"]
    for word in ("dropped", "marked"):
        counts = ", ".join(f"{n:,} {reason}" for reason, n in facts.get(word, {}).items())
        parts += [f"{word} {counts}"] if counts else []
    return "; ".join(parts) + "."


def host_line(facts: Mapping[str, Any]) -> str:
    """`The period from one step to the next exceeds T_ms by 21 % (decode), ...`; empty below MIN_HOST_SHARE."""
    shares = {phase: each["period_ms"] / each["T_ms"] - 1.0 for phase, each in facts.get("host", {}).items()}
    longer = [f"{format_percent(100 * share)} ({phase})" for phase, share in shares.items() if share > MIN_HOST_SHARE]
    if not longer:
        return ""
    fitted = "The period was fitted" if facts.get("time") == PERIOD else "T_ms was fitted all the same"
    return (
        f"The period from one step to the next exceeds T_ms by {', '.join(longer)}: scheduling and output handling,"
        f" which the engine's own time leaves out. {fitted}."
    )
