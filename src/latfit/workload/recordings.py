"""Read recorded requests from tables and from the results of load generators; the content shows the format.

Times are counted from the first request. Requests that failed, and rows without a time or a length, are left out and
counted, unless they are the majority. Tables must be in order of arrival; results of load generators are sorted. Their
moments of the first and last token are the client's, so they include the network. The formats: docs/formats.md.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    numbers,
    open_source,
    read_columns,
    request_format,
)
from latfit.workload.arrivals import Piecewise
from latfit.workload.load_generators import MS, NS, S, rows_of
from latfit.workload.requests import MAX_TOKENS, PrefixBlocks, Requests, make_requests

_CLOCK = re.compile(r"\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?")

MIN_EPOCH_S = 1e9  # larger times count from 1970, smaller ones from boot

BLOCK_TOKENS = tuple(2**k for k in range(13, 2, -1))  # 512 in Mooncake's traces, 16 in Qwen's
MIN_BLOCK_SHARE = 0.9  # of the requests whose length fits a block size

LEFT_OUT = {
    "bad_lines": "{:,} lines cannot be read",
    "cut_lines": "{:,} lines are cut off",
    "failed": "{:,} requests failed",
    "no_output": "{:,} requests have no output",
    "no_usage": "{:,} requests have no lengths",
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
        usable[:] = True  # the first of them is reported below
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
    return np.asarray((tokens >= 1) & (tokens <= MAX_TOKENS))


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
    return _table(source) if name is None else _generated(source, name)


def _generated(source: Source, name: str) -> _Rows:
    """Read the result of a load generator, or a log of requests in JSON."""
    tally = Tally()
    found, rows, dropped = rows_of(source, name, tally)
    sent, prompt, output, first_ms, last_ms = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    # From the first moment on, before scaling: nanoseconds since 1970 have no digits to spare.
    finite = sent[np.isfinite(sent)]
    start = float(finite.min()) if len(finite) else 0.0
    start_s = start * found.unit_ms / S
    return _Rows(
        (sent - start) * found.unit_ms,
        prompt,
        output,
        {**dropped, **tally.facts()},
        found.notes,
        spans=None if np.isnan(first_ms + last_ms).all() else (first_ms, last_ms),
        sort=True,
        contents=found.contents,
        began_s=start_s if found.began_s is None and start_s > MIN_EPOCH_S else found.began_s,
    )


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
