"""Measured serving runs: requests with the moments of their first and last token.

A table (CSV, Parquet, JSON lines) with one request a row: arrival and lengths under any name that `simulate` reads, and
either `first_token_s` and `last_token_s` (moments on the clock of the arrivals) or `ttft_s` and `latency_s` (counted
from the arrival; also `_ms`). Rows must be in order of arrival. Or what a load generator wrote: see `logs`.

Result files of load generators as measured runs: when each request was sent, its lengths, its first and last token.

- vLLM's `bench serve --save-result --save-detailed`: `start_times`, `ttfts` and gaps `itls` in seconds.
- AIPerf's `profile_export.jsonl`: `request_start_ns`, `time_to_first_token` and `request_latency` in ms.
- GuideLLM's JSON: `request_start_time`, `time_to_first_token_ms`, `request_latency` in seconds; of several benchmarks
  the one with the most requests.

They count from when the client sent a request, so the network is in what was measured. Failed requests and warm-up are
left out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from latfit.workload import Requests, make_requests

Row = tuple[float, float, float, float, float]
"""Sent (ms on a clock of the file's own), prompt, output, time to first token (ms), latency (ms)."""


def rows_of(source: Source) -> FloatArray | None:
    """The requests (n, 5), in order of sending from moment 0 on, as in `Row`; None for a file of another kind."""
    for keys, read in FORMATS:
        if not has_keys(source.head, *keys):
            continue
        table = np.array(list(read(source)), dtype=np.float64).reshape(-1, 5)
        if not len(table):
            raise BadInput("no request with its times in it", where=source.name, remedy="It may be cut short.")
        table[:, 0] -= np.nanmin(table[:, 0])
        return table[np.argsort(table[:, 0], kind="stable")]
    return None


def _vllm_bench(source: Source) -> Iterator[Row]:
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    for record in records(source, Tally()):
        columns: list[Any] = [record.get(name) for name in names]
        missing = [name for name, column in zip(names, columns, strict=True) if not isinstance(column, list)]
        if missing:
            raise BadInput(
                f"holds no {', '.join(missing)}, so when tokens came is not known",
                where=source.name,
                remedy="Run `vllm bench serve --save-result --save-detailed` of a version that writes them.",
            )
        errors = record.get("errors") or [""] * len(columns[0] or [])
        for sent, prompt, output, ttft, gaps, error in zip(*columns, errors, strict=False):
            if not error and output:
                yield 1e3 * sent, prompt, output, 1e3 * ttft, 1e3 * (ttft + sum(gaps))


def _aiperf(source: Source) -> Iterator[Row]:
    for record in records(source, Tally()):
        if record.get("error") or member(record, "metadata", "benchmark_phase") not in (None, "profiling"):
            continue
        # Whole nanoseconds since 1970 lose digits as floats of milliseconds: microseconds here, which is enough.
        yield (
            number(record, "metadata", "request_start_ns") * 1e-6,
            number(record, "metrics", "input_sequence_length", "value"),
            number(record, "metrics", "output_sequence_length", "value"),
            number(record, "metrics", "time_to_first_token", "value"),
            number(record, "metrics", "request_latency", "value"),
        )


def _guidellm(source: Source) -> Iterator[Row]:
    found: list[list[Any]] = []
    for record in records(source, Tally()):
        for benchmark in record.get("benchmarks") or []:
            served = member(benchmark, "requests", "successful")
            found += [served] if isinstance(served, list) else []
    for each in max(found, key=len, default=[]):
        sent = number(each, "request_start_time")
        yield (
            1e3 * (sent if np.isfinite(sent) else number(each, "start_time")),
            number(each, "prompt_tokens"),
            number(each, "output_tokens"),
            number(each, "time_to_first_token_ms"),
            1e3 * number(each, "request_latency"),
        )


FORMATS: tuple[tuple[tuple[str, ...], Callable[[Source], Iterator[Row]]], ...] = (
    (("metadata", "metrics", "request_start_ns"), _aiperf),
    (("benchmarks", "guidellm_version"), _guidellm),
    (("benchmarks", "generative_benchmark"), _guidellm),
    (("input_lens", "output_lens"), _vllm_bench),
)
"""Keys that a format's first bytes hold."""


MOMENTS = (("first_token_s", "last_token_s"),)
SPANS = (("ttft_s", "latency_s"), ("ttft_ms", "latency_ms"))


@dataclass(frozen=True, eq=False)
class Measured:
    """Requests and when, on the clock of their arrivals, their first and last token appeared (ms, (n,))."""

    requests: Requests
    first_ms: FloatArray
    last_ms: FloatArray
    source: str = "requests"

    def __len__(self) -> int:
        return len(self.requests)


def read_measured(source: str | Path) -> Measured:
    """A measured run from a file. Raises BadInput that names the file, the column or the row."""
    opened = open_source(source)
    logged = rows_of(opened)
    if logged is not None:
        sent, prompt, output, ttft, latency = logged.T
        return _checked(
            make_requests(sent, prompt, output, where=opened.name), sent + ttft, sent + latency, opened.name
        )
    table = read_columns(opened, ())
    arrival_s, prompt, output = (_column(table, names, opened.name) for names in (TIMES, PROMPTS, OUTPUTS))
    first_ms, last_ms = _tokens(table, arrival_s, opened.name)
    start = float(arrival_s[0]) if len(arrival_s) else 0.0
    requests = make_requests((arrival_s - start) * 1e3, prompt, output, where=opened.name)
    return _checked(requests, first_ms - start * 1e3, last_ms - start * 1e3, opened.name)


def _tokens(table: Trace, arrival_s: FloatArray, where: str) -> tuple[FloatArray, FloatArray]:
    """Moments of the first and the last token in ms, on the clock of the file."""
    for first, last in MOMENTS:
        if first in table and last in table:
            return numbers(table[first]) * 1e3, numbers(table[last]) * 1e3
    for first, last in SPANS:
        if first in table and last in table:
            unit = 1e3 if first.endswith("_s") else 1.0
            return arrival_s * 1e3 + numbers(table[first]) * unit, arrival_s * 1e3 + numbers(table[last]) * unit
    wanted = " or ".join(", ".join(pair) for pair in (*MOMENTS, *SPANS))
    raise BadInput(
        f"nothing says when tokens came (there are {', '.join(table.columns)})",
        where=where,
        remedy=f"Give {wanted}.",
    )


def _column(table: Trace, names: Sequence[str], where: str) -> FloatArray:
    for name in names:
        if name in table:
            return numbers(table[name])
    raise BadInput(
        f"no column {' or '.join(names)} (there are {', '.join(table.columns)})",
        where=where,
        remedy="Name it so, or give a table that has it.",
    )


def _checked(requests: Requests, first_ms: FloatArray, last_ms: FloatArray, where: str) -> Measured:
    if not len(requests):
        raise BadInput("there is no request in it", where=where, remedy="Give a file with at least one.")
    wrong = ~np.isfinite(first_ms) | ~np.isfinite(last_ms) | (first_ms < requests.arrival_ms) | (last_ms < first_ms)
    if wrong.any():
        raise BadInput(
            f"request {int(np.argmax(wrong)) + 1} has a first token before its arrival, a last one before its first, or"
            f" no time ({int(wrong.sum())} such)",
            where=where,
            remedy="Leave out requests that failed; arrivals and tokens must be on one clock.",
        )
    return Measured(requests, first_ms, last_ms, where)
