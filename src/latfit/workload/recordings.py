"""Read recorded requests from tables and from the results of load generators: docs/formats.md.

Requests that failed or lack a time or a length are left out and counted, unless they are the majority.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latfit import trace
from latfit.errors import BadInput, WrongUsage, located
from latfit.stats import FloatArray
from latfit.trace import Source, Trace, numbers, open_source, read_columns
from latfit.workload.arrivals import Piecewise
from latfit.workload.load_generators import FORMATS, NS, Log, Row, S
from latfit.workload.requests import MAX_TOKENS, PrefixBlocks, Requests, make_requests

_CLOCK = re.compile(r"\s*\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d{1,9})?)?")

MIN_EPOCH_MS = 1e12  # larger times count from 1970, smaller ones from boot
BLOCK_TOKENS = tuple(2**k for k in range(13, 2, -1))  # 512 in Mooncake's traces, 16 in Qwen's
MIN_BLOCK_SHARE = 0.9  # of the requests whose length fits a block size

LEFT_OUT = {
    "bad_lines": "{:,} lines cannot be read",
    "cut_lines": "{:,} lines are cut off",
    "failed": "{:,} requests failed",
    "no_output": "{:,} requests have no output",
    "no_usage": "{:,} requests have no lengths",
    "warmup": "{:,} requests were sent to warm up",
}  # what of a file is left out, in words

OPTIONAL = ("class_id", "user_id", "deadline_ms")
MOMENTS = ("first_token_s", "last_token_s")
SPANS = (("ttft_s", "latency_s", S), ("ttft_ms", "latency_ms", 1.0))
"""Columns of tables: moments of the first and the last token, or how long after the arrival, with the unit."""

Columns = Mapping[str, FloatArray]  # unchecked requests: the fields of `Row`, and OPTIONAL ones


@dataclass(frozen=True, eq=False)
class Recording:
    """Requests from a file, counts of what was left out by reason, and notes.

    first_ms, last_ms (n,): moments of the first and last token on the arrivals' clock, NaN where one is missing.
    began_s: arrival of the first request in seconds since 1970. None if unknown.
    """

    requests: Requests
    source: str
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    first_ms: FloatArray | None = None
    last_ms: FloatArray | None = None
    began_s: float | None = None


def read_requests(source: str | Path | Source) -> Recording:
    """Return requests from a file, or from standard input for `-`. Raises BadInput."""
    opened = source if isinstance(source, Source) else open_source(source)
    with located(opened.name):
        if (name := trace.request_format(opened.head)) is not None:
            return _read_log(opened, name)
        table = read_columns(opened, ())
        return recorded_in(table, opened.name, table.provenance)


def _read_log(opened: Source, name: str) -> Recording:
    log = Log()
    rows = list(FORMATS[name](opened, log))
    kept = [row for row in rows if isinstance(row, Row)]
    dropped = Counter(row for row in rows if isinstance(row, str))
    if 2 * dropped["no_usage"] > len(rows):
        remedy = """Let the server report them: --extra-inputs '{"stream_options": {"include_usage": true}}'."""
        raise BadInput(f"has no lengths of {dropped['no_usage']:,} of {len(rows):,} requests", remedy=remedy)
    found = np.array(kept, dtype=np.float64).reshape(-1, len(Row._fields))
    order = np.argsort(found[:, 0], kind="stable")
    columns = dict(zip(Row._fields, found[order].T, strict=True))
    if np.isnan(columns["first_ms"] + columns["last_ms"]).all():
        del columns["first_ms"], columns["last_ms"]
    if log.contents:
        log.contents = [log.contents[row] for row in order.tolist()]
    start_ms = np.nanmin(columns["sent_ms"], initial=np.inf)
    if log.began_s is None and MIN_EPOCH_MS < start_ms < np.inf:
        log.began_s = float(start_ms) / S
    return _recording(columns, opened.name, {**+dropped, **+log.tally}, log)


def recorded_in(table: Trace, name: str = "the table", dropped: Mapping[str, int] | None = None) -> Recording:
    """Return requests from columns of a table, under any known names. Raises BadInput."""
    dropped = dict(dropped or {})
    known = next((columns for columns in trace.TABLES if set(columns) <= set(table.columns)), None)
    if known is not None:  # production logs, in which requests without output failed
        answered = numbers(table[known[2]]) >= 1
        table = table.select(answered)
        dropped = {"no_output": n} | dropped if (n := int(np.count_nonzero(~answered))) else dropped
    groups = [(each,) for each in known] if known else (trace.TIMES, trace.PROMPTS, trace.OUTPUTS)
    names = [next((name for name in group if name in table), "") for group in groups]
    if not all(names):
        raise BadInput(
            f"no columns of request arrivals (there are {', '.join(table.columns)})",
            where=name,
            remedy=f"Give {'|'.join(trace.TIMES)} in seconds, {'|'.join(trace.PROMPTS)} and {'|'.join(trace.OUTPUTS)}.",
        )
    time_ms = moments_ms(table, names[0])
    columns = {"sent_ms": time_ms, "prompt": numbers(table[names[1]]), "output": numbers(table[names[2]])}
    columns |= {name: numbers(table[name]) for name in OPTIONAL if name in table}
    for first, last, unit in (*SPANS, (*MOMENTS, S)):
        if first in table and last in table:
            since = time_ms if first in MOMENTS else 0.0
            columns |= {
                "first_ms": numbers(table[first]) * unit - since,
                "last_ms": numbers(table[last]) * unit - since,
            }
    return _recording(columns, name, dropped, Log())


def _recording(columns: Columns, name: str, dropped: dict[str, int], log: Log) -> Recording:
    time_ms = columns["sent_ms"]
    notes = log.notes + [f"{LEFT_OUT[reason].format(count)} (left out)" for reason, count in dropped.items()]
    if not len(time_ms):
        raise BadInput("there is no request in it", where=name, remedy="Give a file with at least one.")
    usable = np.isfinite(time_ms)
    for column in (columns["prompt"], columns["output"]):
        usable &= (column >= 1) & (column <= MAX_TOKENS)
    for column in (columns[name] for name in OPTIONAL if name in columns):
        usable &= np.isfinite(column) | (column == np.inf)
    wrong = int(np.count_nonzero(~usable))
    if wrong and 2 * wrong < len(usable):
        dropped["unreadable"] = dropped.get("unreadable", 0) + wrong
        first_row = int(np.argmin(usable)) + 1
        notes.append(f"{wrong:,} of {len(usable):,} requests have no time or no length (the first is {first_row:,})")
    else:
        usable[:] = True  # the first of them is reported below
    kept = {name: column[usable] for name, column in columns.items()}
    start_ms = np.min(time_ms, where=np.isfinite(time_ms), initial=np.inf)
    optional = {name: kept[name] for name in OPTIONAL if name in kept}
    with located(name):
        requests = make_requests(kept["sent_ms"] - start_ms, kept["prompt"], kept["output"], **optional)
    if any(log.contents):
        contents = [log.contents[row] for row in np.flatnonzero(usable).tolist()]
        requests = replace(requests, prefix=_prefix(requests, contents))
        if requests.prefix is None:
            notes.append("hash_ids are not used: they fit no size of blocks")
    first, last = (requests.arrival_ms + kept[name] if name in kept else None for name in ("first_ms", "last_ms"))
    return Recording(requests, name, dropped, notes, first, last, log.began_s)


def _prefix(requests: Requests, contents: Sequence[Any]) -> PrefixBlocks | None:
    """Return the blocks of prompts, of the size that fits most lengths; None if none does. The last may be partial."""
    lists = [
        each if isinstance(each, list) and all(isinstance(n, int | str) for n in each) else [] for each in contents
    ]
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


def read_curve(source: str | Path) -> Piecewise:
    """Return a repeating Poisson process with the rates of a table (t_s, rate_per_s). Raises BadInput."""
    table = read_columns(open_source(source), ("t_s", "rate_per_s"))
    try:
        return Piecewise((table.floats("t_s") * S).tolist(), (table.floats("rate_per_s") / S).tolist(), repeats=True)
    except WrongUsage as error:
        remedy = "Give t_s from 0 on, in rising order, and a rate_per_s of 0 or more at each."
        raise BadInput(error.found, where=str(source), remedy=remedy) from None


def moments_ms(table: Trace, name: str) -> FloatArray:
    """Return ms (n,) of a column of seconds or of dates, NaN for other values."""
    column: NDArray[Any] = table[name]
    if column.dtype.kind == "O":
        clocks = np.array([_without_zone(text) for text in column.tolist()], dtype="datetime64[ns]")
        column = numbers(column) if np.isnat(clocks).all() else clocks
    if column.dtype.kind == "M":
        first = np.fmin.reduce(column) if len(column) else column
        found = np.asarray((column - first) / np.timedelta64(1, "ns")) * NS
    else:
        found = numbers(column) * S
    return np.where(np.isfinite(found), found, np.nan)


def _without_zone(text: Any) -> np.datetime64:
    clock = _CLOCK.match(text) if isinstance(text, str) else None
    try:
        return np.datetime64(clock[0].strip().replace(" ", "T") if clock else "NaT", "ns")
    except ValueError:
        return np.datetime64("NaT", "ns")
