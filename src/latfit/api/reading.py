"""Read steps and requests from files, logs and tables; make the load that a simulation serves."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latfit import trace, workload
from latfit.api.quantities import duration
from latfit.api.request import given_in, ignored, shared, verb
from latfit.api.requests import Clock, ReadRequest
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


def read_timed(request: Any, time: Clock | None = None) -> trace.CleanTrace:
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


def recording_of(source: Any) -> workload.Recording:
    """Return recorded requests of a file or table. Raises BadInput."""
    if isinstance(source, workload.Recording):
        return source
    if isinstance(source, workload.Requests):
        return workload.Recording(source, "requests")
    return workload.read_requests(source) if isinstance(source, str | Path) else workload.recorded_in(table_of(source))


def make_load(request: Any, offered: Sequence[float]) -> workload.Load:
    """Return a request's load, at the first of the rates (per ms). Raises WrongUsage, BadInput."""
    curve, lengths = getattr(request, "load_curve", None), getattr(request, "lengths", None)
    if request.arrivals is not None:
        recording = recording_of(request.arrivals)
        return workload.RecordedLoad(recording.requests, tuple(recording.notes))
    more: dict[str, Any] = {}
    if request.classes:
        more["classes"] = tuple(
            workload.parse_class(each) if isinstance(each, str) else each for each in request.classes
        )
    if isinstance(lengths, str) and (":" in lengths or not (Path(lengths).suffix or Path(lengths).exists())):
        more["lengths"] = workload.parse_lengths(lengths)
    elif (source := getattr(request, "prompt_lengths", None) if lengths is None else lengths) is not None:
        recorded = recording_of(source).requests
        more["lengths"] = workload.Resampled(recorded.prompt_tokens, recorded.output_tokens)
    elif hasattr(request, "lengths"):
        where = "--rate" if request.users is None else "--users"
        raise WrongUsage("requests have no lengths", where=where, remedy="Give --lengths 512:128, or a file.")
    if request.users is not None:
        return workload.ClosedLoad(request.users, duration(request.think, "--think", zero=True), **more)
    if curve is not None:
        return workload.OpenLoad(workload.read_curve(curve), **more)
    if not offered:
        raise WrongUsage("no load is given", where="--rate", remedy="Give --rate 500/s, --arrivals FILE or --users 20.")
    return workload.OpenLoad(workload.parse_arrival_process(request.arrival_process, offered[0]), **more)


def request_tokens(load: workload.Load | None, by_prompt: bool, tokens_per_request: int | None) -> tuple[float, float]:
    """Return tokens of a mean request and of the longest, 0 if all are alike. Raises WrongUsage."""
    prompts = None
    if isinstance(load, workload.RecordedLoad):
        prompts = load.requests.prompt_tokens if by_prompt else None
    elif load is not None and isinstance(load.lengths, workload.Resampled):
        prompts = load.lengths.prompt_tokens
    if by_prompt and prompts is None:
        raise WrongUsage("no prompt lengths are known", where="--set by_prompt", remedy="Give --arrivals FILE.")
    if prompts is None:
        return float(tokens_per_request or 1), 0.0
    if tokens_per_request is not None:
        raise WrongUsage("prompt lengths are given as well", where="--tokens-per-request", remedy="Give one of both.")
    return float(prompts.mean()), float(prompts.max())
