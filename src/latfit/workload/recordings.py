"""Recorded requests, read from what serving engines and load generators write; the format is told from the content.

Times are counted from the first request. Requests that failed (an error, no output) are left out and counted. Tables
must be in order of arrival; result files whose records come in order of completion (AIPerf, GuideLLM) are sorted.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace import (
    OUTPUTS,
    PROMPTS,
    TIMES,
    Source,
    Tally,
    Trace,
    has_keys,
    member,
    number,
    numbers,
    open_source,
    read_columns,
    records,
)
from latfit.workload.requests import Requests, make_requests

S, MS, NS = 1e3, 1.0, 1e-6
"""Units of time in ms."""

OPTIONAL = ("class_id", "user_id", "deadline_ms")


@dataclass(frozen=True)
class Recording:
    """Requests from a file; what was left out, by reason; what else should be known."""

    requests: Requests
    source: str
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class _Rows:
    """Unchecked columns: time in ms, lengths; whether they are in order of arrival, and optional columns."""

    time_ms: FloatArray
    prompt: FloatArray
    output: FloatArray
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    optional: Mapping[str, Any] = field(default_factory=dict)
    sort: bool = False


def read_requests(source: str | Path | Source) -> Recording:
    """Requests from a file, or from standard input for `-`. Raises BadInput that names the file and the row."""
    opened = source if isinstance(source, Source) else open_source(source)
    rows = _rows(opened)
    time_ms, optional = rows.time_ms, dict(rows.optional)
    order = np.argsort(time_ms, kind="stable") if rows.sort else np.arange(len(time_ms))
    if not len(order):
        raise BadInput("there is no request in it", where=opened.name, remedy="Give a file with at least one.")
    start = float(np.nanmin(time_ms)) if not np.all(np.isnan(time_ms)) else 0.0
    requests = make_requests(
        time_ms[order] - start,
        rows.prompt[order],
        rows.output[order],
        **{name: column[order] for name, column in optional.items()},
        where=opened.name,
    )
    return Recording(requests, opened.name, rows.dropped, rows.notes)


def _rows(source: Source) -> _Rows:
    head = source.head
    for keys, read in JSON_FORMATS:
        if has_keys(head, *keys):
            return read(source)
    return _table(source)


def _table(source: Source) -> _Rows:
    """CSV, Parquet or JSON lines with one request a row, under any of the known column names."""
    table = read_columns(source, ())
    for columns, unit in TABLES:
        if set(columns) <= set(table.columns):
            return _failed_out(table, *columns, unit)
    names = [next((name for name in group if name in table), None) for group in (TIMES, PROMPTS, OUTPUTS)]
    time, prompt, output = names[0], names[1], names[2]
    if time is None or prompt is None or output is None:
        raise BadInput(
            f"no columns of request arrivals (there are {', '.join(table.columns)})",
            where=source.name,
            remedy=f"Give {'|'.join(TIMES)} in seconds, {'|'.join(PROMPTS)} and {'|'.join(OUTPUTS)}.",
        )
    optional = {name: numbers(table[name]) for name in OPTIONAL if name in table}
    return _Rows(_moments(table, time, S), numbers(table[prompt]), numbers(table[output]), optional=optional)


def _failed_out(table: Trace, time: str, prompt: str, output: str, unit: float) -> _Rows:
    """Tables of production logs hold failures as requests without output."""
    answered = numbers(table[output]) >= 1
    kept = table.select(answered)
    dropped = {"no_output": int(np.count_nonzero(~answered))} if not answered.all() else {}
    return _Rows(_moments(kept, time, unit), numbers(kept[prompt]), numbers(kept[output]), dropped)


def _moments(table: Trace, name: str, unit: float) -> FloatArray:
    column = table[name]
    if column.dtype.kind == "O":
        try:
            column = np.array([_without_zone(text) for text in column.tolist()], dtype="datetime64[ns]")
        except (ValueError, TypeError, AttributeError):
            column = numbers(column)
    if column.dtype.kind == "M":
        known = column[~np.isnat(column)]
        since = np.asarray((column - (known.min() if len(known) else column[:1])) / np.timedelta64(1, "ns"))
        return np.asarray(since * NS, dtype=np.float64)
    return np.asarray(numbers(column) * unit, dtype=np.float64)


def _without_zone(text: str) -> np.datetime64:
    """A point in time; all rows of a log share their zone, and only differences count."""
    return np.datetime64(text.strip().removesuffix("Z").split("+")[0].replace(" ", "T"), "ns")


def _mooncake(source: Source) -> _Rows:
    tally = Tally()
    names = ("timestamp", "input_length", "output_length")
    rows = [[number(record, name) for name in names] for record in records(source, tally)]
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return _Rows(table[:, 0] * MS, table[:, 1], table[:, 2], tally.facts())


def _aiperf(source: Source) -> _Rows:
    tally = Tally()
    dropped: Counter[str] = Counter()

    def kept() -> Iterator[Mapping[str, Any]]:
        for record in records(source, tally):
            if record.get("error"):
                dropped["failed"] += 1
            elif member(record, "metadata", "benchmark_phase") not in (None, "profiling"):
                dropped["warmup"] += 1
            else:
                yield record

    columns = [
        (
            number(record, "metadata", "request_start_ns"),
            number(record, "metrics", "input_sequence_length", "value"),
            number(record, "metrics", "output_sequence_length", "value"),
        )
        for record in kept()
    ]
    return _sorted_rows(columns, NS, {**dropped, **tally.facts()})


def _vllm_bench(source: Source) -> _Rows:
    """One document with a list for each column; `start_times` is there with --save-detailed of newer versions."""
    for record in records(source, Tally()):
        starts, prompts, outputs = (record.get(name) for name in ("start_times", "input_lens", "output_lens"))
        if not isinstance(starts, list):
            raise BadInput(
                "holds lengths but no start times, so when the requests came is not known",
                where=source.name,
                remedy="Run `vllm bench serve --save-result --save-detailed` of a version that writes start_times, or"
                " draw arrivals with --rate.",
            )
        if not isinstance(prompts, list) or not isinstance(outputs, list):
            break
        errors = record.get("errors")
        failed = errors if isinstance(errors, list) and len(errors) == len(starts) else [""] * len(starts)
        columns = [
            (float(start), float(prompt), float(output))
            for start, prompt, output, error in zip(starts, prompts, outputs, failed, strict=False)
            if not error and output
        ]
        dropped = {"failed": len(starts) - len(columns)} if len(columns) < len(starts) else {}
        return _sorted_rows(columns, S, dropped)
    raise BadInput("no result of vllm bench serve in it", where=source.name, remedy="It may be cut short.")


def _guidellm(source: Source) -> _Rows:
    """The benchmark with the most requests, where a file holds a sweep of several."""
    for record in records(source, Tally()):
        benchmarks = record.get("benchmarks")
        if not isinstance(benchmarks, list):
            continue
        served = [member(each, "requests", "successful") for each in benchmarks]
        lists = [each for each in served if isinstance(each, list)]
        if not lists:
            break
        longest = max(lists, key=len)
        columns = [
            (
                _first_number(each, "request_start_time", "start_time"),
                number(each, "prompt_tokens"),
                number(each, "output_tokens"),
            )
            for each in longest
        ]
        note = f"{len(lists)} benchmarks in the file: taken is the one with the most requests ({len(longest)})"
        return _sorted_rows(columns, S, {}, (note,) if len(lists) > 1 else ())
    raise BadInput(
        "no benchmark with its requests in it",
        where=source.name,
        remedy="Let GuideLLM save the requests, not only their summary.",
    )


def _first_number(record: Any, *names: str) -> float:
    found = (number(record, name) for name in names)
    return next((value for value in found if not math.isnan(value)), math.nan)


def _sorted_rows(
    rows: list[tuple[float, float, float]], unit: float, dropped: Mapping[str, int], notes: tuple[str, ...] = ()
) -> _Rows:
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    # From the first moment on, before scaling: nanoseconds since 1970 have no digits to spare.
    start = np.nanmin(table[:, 0]) if len(table) and not np.all(np.isnan(table[:, 0])) else 0.0
    return _Rows((table[:, 0] - start) * unit, table[:, 1], table[:, 2], dropped, notes, sort=True)


TABLES = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), S),
    (("Timestamp", "Request tokens", "Response tokens"), S),
)
"""Azure, whose times are dates, and BurstGPT."""

JSON_FORMATS: tuple[tuple[tuple[str, ...], Callable[[Source], _Rows]], ...] = (
    (("metadata", "metrics", "request_start_ns"), _aiperf),
    (("benchmarks", "guidellm_version"), _guidellm),
    (("benchmarks", "generative_benchmark"), _guidellm),
    (("input_lens", "output_lens"), _vllm_bench),
    (("timestamp", "input_length", "output_length"), _mooncake),
)
"""Keys that a format's first bytes hold; what holds none of these sets is a table."""
