"""Read steps from files, globs, logs, folders, and pandas, Arrow and Polars tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latfit import trace
from latfit.api.request import given_in, ignored, shared, verb
from latfit.api.requests import ReadRequest, Time
from latfit.errors import BadInput, WrongUsage, located
from latfit.files import check_writable
from latfit.units import parse_duration_ms

TABLE = "the table"  # what errors call a table in memory


@verb(ReadRequest)
def read(request: ReadRequest) -> trace.CleanTrace:
    """Read and clean steps.

    source: a file or several, a glob, "-", a folder or an address of object storage; a DataFrame of pandas or Polars,
    an Arrow table, a mapping of columns; a trace. Raises BadInput, WrongUsage.
    """
    source = request.source
    if isinstance(source, trace.CleanTrace) and not given_in(request) - {"source", "progress", "cells_time"}:
        return source
    names = [source] if isinstance(source, str | Path) else source
    if not isinstance(names, list | tuple) or not names or not all(isinstance(each, str | Path) for each in names):
        return trace.ingest_table(table_of(source), _reading(request))
    large = [name for name in names if request.cells or "://" in str(name) or Path(name).is_dir()]
    if not large:
        for name in {"backend", "skip_bad"} & given_in(request):
            ignored(f"--{name.replace('_', '-')}", "no source is a folder or summarised with --cells")
        return trace.ingest(names, _reading(request))
    if len(names) > 1:
        raise WrongUsage("several sources cannot be summarised at once", remedy="Put them into one folder and name it.")
    return _summarise(str(large[0]), request)


def read_timed(request: Any, time: Time | None = None) -> trace.CleanTrace:
    """Read steps with T as `time` or the request says; None: the period if known."""
    time = time or getattr(request, "time", None)
    return trace.timed(read.of(shared(ReadRequest, request, cells_time=time or "auto")), time)


def _reading(request: ReadRequest) -> trace.Reading:
    cleaning = trace.CleanOptions(
        None if request.max_t is None else parse_duration_ms(request.max_t, option="--set max_t"),
        tuple(request.keep),
        tuple(request.drop),
        request.allow_drops,
    )
    columns = request.map if isinstance(request.map, Mapping) else trace.parse_column_map(request.map)
    return trace.Reading(dict(columns), request.unit, request.format, request.where, cleaning)


def _summarise(source: str, request: ReadRequest) -> trace.CleanTrace:
    reading, target = _reading(request), request.cells_file
    if target is not None:
        check_writable(target)
    cells = trace.compress(
        source,
        reading,
        time=None if request.cells_time == "auto" else request.cells_time,
        skip_unreadable=request.skip_bad,
        backend=request.backend,
        scheduler=request.scheduler,
        progress=request.progress,
    )
    if target is None:
        return trace.ingest_table(cells)
    trace.write_trace(target, cells)
    return trace.ingest(target)


def table_of(source: Any) -> trace.Trace:
    source = getattr(source, "trace", source)  # of a CleanTrace, a Profile
    if isinstance(source, trace.Trace):
        return source
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        if any(name is not None for name in source.index.names):
            source = source.reset_index()
        names = [str(name).strip() for name in source.columns]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadInput(f"two columns are called {twice!r}", where=TABLE, remedy="Rename one of them.")
        return trace.Trace({name: source.iloc[:, i].to_numpy() for i, name in enumerate(names)})
    if isinstance(source, Mapping):
        try:
            return trace.Trace(
                {str(name).strip(): np.atleast_1d(np.asarray(column)) for name, column in source.items()}
            )
        except ValueError as error:
            raise BadInput(str(error), where=TABLE, remedy="Give columns of one length.") from None
    if any(hasattr(source, name) for name in ("to_arrow", "__arrow_c_stream__", "column_names")):
        import pyarrow as pa

        table = source.to_arrow() if hasattr(source, "to_arrow") else source
        return trace.Trace(trace.columns_of(table if isinstance(table, pa.Table) else pa.table(table), TABLE))
    raise BadInput(
        f"{type(source).__name__} is neither a file nor a table",
        remedy="Give a path, a pandas DataFrame, an Arrow table, a Polars frame, or a mapping of columns.",
    )


def columns_in(source: Any, required: Sequence[str]) -> trace.Trace:
    """Return columns of a file or table. Raises BadInput."""
    if isinstance(source, str | Path):
        return trace.read_columns(trace.open_source(source), required)
    with located(TABLE):
        return trace.typed_columns(table_of(source), required)
