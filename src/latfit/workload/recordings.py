"""Read recorded requests from tables and from what load generators write; the format is detected from the content.

Times are counted from the first request. Requests that failed, and rows without a time or a length, are left out and
counted, unless they are the majority. Tables must be in order of arrival; results in order of completion (AIPerf,
GuideLLM) are sorted. Moments of the first and last token are kept where a file has them; those of load generators are
the client's, so they include the network. The formats: docs/formats.md.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, WrongUsage
from latfit.stats import FloatArray
from latfit.trace import (
    OUTPUTS,
    PROMPTS,
    TABLES,
    TIMES,
    Source,
    Tally,
    Trace,
    member,
    number,
    numbers,
    open_source,
    read_columns,
    records,
    request_format,
)
from latfit.workload.arrivals import Piecewise
from latfit.workload.load_generators import genai_perf_rows, inference_perf_rows
from latfit.workload.requests import MOST_TOKENS, PrefixBlocks, Requests, make_requests

_CLOCK = re.compile(r"\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?")

S, MS, NS = 1e3, 1.0, 1e-6
"""Units of time in ms."""
MIN_EPOCH_S = 1e9  # larger times count from 1970, smaller ones from boot

BLOCK_TOKENS = tuple(2**k for k in range(13, 2, -1))  # 512 in Mooncake's traces, 16 in Qwen's
MIN_BLOCK_SHARE = 0.9  # of the requests whose length fits a block size

LEFT_OUT = {
    "bad_lines": "{:,} lines cannot be read",
    "cut_lines": "{:,} lines are cut off",
    "failed": "{:,} requests failed",
    "no_output": "{:,} requests have no output",
    "no_usage": "{:,} requests tell no lengths",
    "warmup": "{:,} requests were sent to warm up",
}
"""What of a file is left out, in words."""

OPTIONAL = ("class_id", "user_id", "deadline_ms")
MOMENTS = ("first_token_s", "last_token_s")
SPANS = (("ttft_s", "latency_s", S), ("ttft_ms", "latency_ms", MS))
"""Columns of tables: moments of the first and the last token, or how long after the arrival, with the unit."""


@dataclass(frozen=True, eq=False)
class Recording:
    """Requests from a file, counts of what was left out by reason, and notes.

    first_ms, last_ms (n,): moments of the first and last token on the arrivals' clock, NaN where one is missing.
    began_s: when the first request came, in seconds since 1970. None where the file does not say.
    """

    requests: Requests
    source: str
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    first_ms: FloatArray | None = None
    last_ms: FloatArray | None = None
    began_s: float | None = None


@dataclass(frozen=True)
class _Rows:
    """Unchecked columns of a file. spans: ms from arrival to first and last token; sort: not in order of arrival."""

    time_ms: FloatArray
    prompt: FloatArray
    output: FloatArray
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    optional: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[FloatArray, FloatArray] | None = None
    sort: bool = False
    contents: Sequence[Any] = ()
    began_s: float | None = None


def read_requests(source: str | Path | Source) -> Recording:
    """Return requests from a file, or from standard input for `-`. Raises BadInput that names the file and the row."""
    opened = source if isinstance(source, Source) else open_source(source)
    return _recording(_rows(opened), opened.name)


def recorded_in(table: Trace, name: str = "the table") -> Recording:
    """Return requests from columns of a table, under any known names. Raises BadInput."""
    return _recording(_columns(table, name), name)


def _recording(rows: _Rows, name: str) -> Recording:
    """Return checked requests, with times counted from the first one."""
    time_ms, dropped, notes = rows.time_ms, dict(rows.dropped), list(rows.notes)
    notes += [f"{LEFT_OUT[reason].format(count)} (left out)" for reason, count in dropped.items()]
    if not len(time_ms):
        raise BadInput("there is no request in it", where=name, remedy="Give a file with at least one.")
    usable = np.isfinite(time_ms) & _is_length(rows.prompt) & _is_length(rows.output)
    for column in rows.optional.values():
        usable &= np.isfinite(column) | (column == np.inf)
    wrong = int(np.count_nonzero(~usable))
    if wrong and 2 * wrong < len(usable):
        dropped["unreadable"] = dropped.get("unreadable", 0) + wrong
        first_row = int(np.argmin(usable)) + 1
        notes.append(f"{wrong:,} of {len(usable):,} requests have no time or no length (the first is {first_row:,})")
    else:
        usable[:] = True  # what is wrong with the first of them is told below
    order = np.flatnonzero(usable)
    if rows.sort:
        order = order[np.argsort(time_ms[order], kind="stable")]
    finite = time_ms[np.isfinite(time_ms)]
    try:
        requests = make_requests(
            time_ms[order] - (finite.min() if len(finite) else 0.0),
            rows.prompt[order],
            rows.output[order],
            **{key: column[order] for key, column in rows.optional.items()},
        )
    except BadInput as error:
        raise BadInput(error.found, where=name, remedy=error.remedy) from None
    if any(rows.contents):
        requests = replace(requests, prefix=_prefix(requests, [rows.contents[row] for row in order.tolist()]))
        if requests.prefix is None:
            notes.append("hash_ids are not used: they fit no size of blocks")
    first, last = (None, None) if rows.spans is None else (requests.arrival_ms + span[order] for span in rows.spans)
    return Recording(requests, name, dropped, notes, first, last, rows.began_s)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, int | str) for name in value)


def _prefix(requests: Requests, contents: Sequence[Any]) -> PrefixBlocks | None:
    """Return the blocks of prompts, of the size that fits most lengths; None if none does. The last may be partial."""
    lists = [each if _are_names(each) else [] for each in contents]
    counts, prompt = np.array([len(each) for each in lists]), requests.prompt_tokens
    fits = {
        tokens: float(np.mean((counts == -(-prompt // tokens)) | (counts == prompt // tokens)))
        for tokens in BLOCK_TOKENS
    }
    tokens = max(fits, key=lambda each: fits[each])
    if fits[tokens] < MIN_BLOCK_SHARE:
        return None
    numbers: dict[Any, int] = {}
    ids = [numbers.setdefault(each, len(numbers)) for names in lists for each in names]
    return PrefixBlocks(tokens, np.concatenate([[0], np.cumsum(counts)]), np.array(ids, dtype=np.int64))


def _is_length(tokens: FloatArray) -> NDArray[np.bool_]:
    return np.asarray((tokens >= 1) & (tokens <= MOST_TOKENS))


def read_curve(source: str | Path) -> Piecewise:
    """Return a repeating Poisson process with the rates of a table (t_s, rate_per_s). Raises BadInput."""
    table = read_columns(open_source(source), ("t_s", "rate_per_s"))
    try:
        return Piecewise((table.floats("t_s") * S).tolist(), (table.floats("rate_per_s") / S).tolist(), repeats=True)
    except WrongUsage as error:
        raise BadInput(
            error.found,
            where=str(source),
            remedy="Give t_s from 0 on, in rising order, and a rate_per_s of 0 or more at each.",
        ) from None


def _rows(source: Source) -> _Rows:
    name = request_format(source.head)
    return _table(source) if name is None else READERS[name](source)


def _table(source: Source) -> _Rows:
    """Read CSV, Parquet or JSON lines with one request a row."""
    table = read_columns(source, ())
    rows = _columns(table, source.name)
    return replace(rows, dropped={**rows.dropped, **table.provenance})


def _columns(table: Trace, source: str) -> _Rows:
    """Return the columns by any of their known names."""
    for columns in TABLES:
        if set(columns) <= set(table.columns):
            return _failed_out(table, *columns)
    names = [next((name for name in group if name in table), None) for group in (TIMES, PROMPTS, OUTPUTS)]
    time, prompt, output = names[0], names[1], names[2]
    if time is None or prompt is None or output is None:
        raise BadInput(
            f"no columns of request arrivals (there are {', '.join(table.columns)})",
            where=source,
            remedy=f"Give {'|'.join(TIMES)} in seconds, {'|'.join(PROMPTS)} and {'|'.join(OUTPUTS)}.",
        )
    optional = {name: numbers(table[name]) for name in OPTIONAL if name in table}
    time_ms = moments_ms(table, time)
    lengths = numbers(table[prompt]), numbers(table[output])
    return _Rows(time_ms, *lengths, optional=optional, spans=_spans(table, time_ms))


def _spans(table: Trace, time_ms: FloatArray) -> tuple[FloatArray, FloatArray] | None:
    """Return ms (n,) from arrival to the first and to the last token, if the table has them."""
    if all(name in table for name in MOMENTS):
        first, last = (numbers(table[name]) * S - time_ms for name in MOMENTS)
        return first, last
    for ttft, latency, unit in SPANS:
        if ttft in table and latency in table:
            return numbers(table[ttft]) * unit, numbers(table[latency]) * unit
    return None


def _failed_out(table: Trace, time: str, prompt: str, output: str) -> _Rows:
    """Leave out requests without output: in production logs these failed."""
    answered = numbers(table[output]) >= 1
    kept = table.select(answered)
    dropped = {"no_output": int(np.count_nonzero(~answered))} if not answered.all() else {}
    return _Rows(moments_ms(kept, time), numbers(kept[prompt]), numbers(kept[output]), dropped)


def moments_ms(table: Trace, name: str) -> FloatArray:
    """Return ms (n,) of a column of seconds or of dates, NaN for other values."""
    found = _moments(table[name])
    return np.where(np.isfinite(found), found, np.nan)


def _moments(column: NDArray[Any]) -> FloatArray:
    if column.dtype.kind == "O":
        clocks = np.array([_without_zone(text) for text in column.tolist()], dtype="datetime64[ns]")
        column = numbers(column) if np.isnat(clocks).all() else clocks
    if column.dtype.kind == "M":
        known = column[~np.isnat(column)]
        since = np.asarray((column - (known.min() if len(known) else column[:1])) / np.timedelta64(1, "ns"))
        return np.asarray(since * NS, dtype=np.float64)
    return np.asarray(numbers(column) * S, dtype=np.float64)


def _without_zone(text: Any) -> np.datetime64:
    """Return a point in time without its zone, which all rows of a log share; NaT for what is none."""
    clock = _CLOCK.match(text) if isinstance(text, str) else None
    try:
        return np.datetime64(clock[0].strip().replace(" ", "T") if clock else "NaT", "ns")
    except ValueError:
        return np.datetime64("NaT", "ns")


def _mooncake(source: Source) -> _Rows:
    tally = Tally()
    names = ("timestamp", "input_length", "output_length")
    unit, rows, contents = MS, [], []
    for record in records(source, tally):
        rows.append([number(record, name) for name in names])
        contents.append(record.get("hash_ids"))
        # Traces with conversations (Qwen's, of Alibaba) count in seconds.
        unit = S if "chat_id" in record else unit
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return _Rows(table[:, 0] * unit, table[:, 1], table[:, 2], tally.facts(), contents=contents)


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
            number(record, "metrics", "time_to_first_token", "value"),
            number(record, "metrics", "request_latency", "value"),
        )
        for record in kept()
    ]
    return _sorted_rows(columns, NS, {**dropped, **tally.facts()})


def _vllm_bench(source: Source) -> _Rows:
    """Read a document with a list for each column; newer versions write `start_times` with --save-detailed."""
    for record in records(source, Tally()):
        names = ("start_times", "input_lens", "output_lens", "errors", "ttfts", "itls")
        starts, prompts, outputs, errors, ttfts, gaps = (record.get(name) for name in names)
        if not isinstance(starts, list):
            raise BadInput(
                "holds lengths but no start times, so when the requests came is not known",
                where=source.name,
                remedy="Run `vllm bench serve --save-result --save-detailed` of a version that writes start_times, or"
                " draw arrivals with --rate.",
            )
        if not isinstance(prompts, list) or not isinstance(outputs, list):
            break
        failed = errors if isinstance(errors, list) and len(errors) == len(starts) else [""] * len(starts)
        tokens: Iterable[Any] = [(None, None)] * len(starts)
        if isinstance(ttfts, list) and isinstance(gaps, list):
            tokens = zip(ttfts, gaps, strict=False)
        columns = [
            (number(start), number(prompt), number(output), S * number(ttft), S * (number(ttft) + _sum(between)))
            for start, prompt, output, error, (ttft, between) in zip(
                starts, prompts, outputs, failed, tokens, strict=False
            )
            if not error and output
        ]
        dropped = {"failed": len(starts) - len(columns)} if len(columns) < len(starts) else {}
        return replace(_sorted_rows(columns, S, dropped), began_s=_began_s(record))
    raise BadInput("no result of vllm bench serve in it", where=source.name, remedy="It may be cut short.")


def _began_s(record: Mapping[str, Any]) -> float | None:
    """Return when a benchmark began, from its end `date` in the client's zone, taken for this machine's."""
    try:
        ended = datetime.strptime(record["date"], "%Y%m%d-%H%M%S")
        return ended.timestamp() - float(record["duration"])
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None


def _sum(gaps: Any) -> float:
    """Return the sum of a list of numbers, NaN for what is no list."""
    return math.fsum(map(number, gaps)) if isinstance(gaps, list) else math.nan


def _guidellm(source: Source) -> _Rows:
    """Read the benchmark with the most requests of a sweep."""
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
                number(each, "time_to_first_token_ms") * MS,
                number(each, "request_latency") * S,
            )
            for each in longest
        ]
        note = f"{len(lists)} benchmarks in the file: taken is the one with the most requests ({len(longest)})"
        return _sorted_rows(columns, S, {}, (note,) if len(lists) > 1 else ())
    raise BadInput(
        "no benchmark with its requests in it",
        where=source.name,
        remedy="It may be cut short; else let GuideLLM save the requests, not only their summary.",
    )


def _first_number(record: Any, *names: str) -> float:
    found = (number(record, name) for name in names)
    return next((value for value in found if not math.isnan(value)), math.nan)


def _sorted_rows(
    rows: Sequence[tuple[float, ...]], unit: float, dropped: Mapping[str, int], notes: tuple[str, ...] = ()
) -> _Rows:
    """rows: time in a unit, prompt, output, and ms to the first and to the last token."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    sent, prompt, output, ttft, latency = table.T
    # From the first moment on, before scaling: nanoseconds since 1970 have no digits to spare.
    finite = sent[np.isfinite(sent)]
    start = finite.min() if len(finite) else 0.0
    spans = None if np.isnan(ttft + latency).all() else (ttft, latency)
    began_s = float(start * unit / S) if start * unit / S > MIN_EPOCH_S else None
    return _Rows((sent - start) * unit, prompt, output, dropped, notes, spans=spans, sort=True, began_s=began_s)


def _genai_perf(source: Source) -> _Rows:
    rows, dropped, notes = genai_perf_rows(source)
    return _sorted_rows(rows, NS, dropped, notes)


def _inference_perf(source: Source) -> _Rows:
    rows, dropped = inference_perf_rows(source)
    return _sorted_rows(rows, S, dropped)


def _summary(source: Source) -> _Rows:
    """Always raises BadInput."""
    raise BadInput(
        "holds statistics of a run, not its requests",
        where=source.name,
        remedy="Give the file beside it: profile_export.json (genai-perf), profile_export.jsonl (AIPerf) or"
        " per_request_lifecycle_metrics.json (inference-perf).",
    )


READERS: Mapping[str, Callable[[Source], _Rows]] = {
    "AIPerf": _aiperf,
    "GuideLLM": _guidellm,
    "genai-perf": _genai_perf,
    "inference-perf": _inference_perf,
    "statistics": _summary,
    "vLLM bench": _vllm_bench,
    "Mooncake": _mooncake,
}
"""By the names of `latfit.trace.request_format`; what is none of these is a table."""
