"""Measured serving runs: requests with the moments of their first and last token.

A table (CSV, Parquet, JSON lines) with one request a row: arrival and lengths under any name that `simulate` reads, and
either `first_token_s` and `last_token_s` (moments on the clock of the arrivals) or `ttft_s` and `latency_s` (counted
from the arrival; also `_ms`). Rows must be in order of arrival. Or what a load generator wrote: see `logs`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.readers.arrivals import OUTPUTS, PROMPTS, TIMES
from latfit.trace.readers.delimited import numbers
from latfit.trace.readers.source import open_source
from latfit.trace.readers.tabular import read_columns
from latfit.trace.table import Trace
from latfit.validation.logs import rows_of
from latfit.workload.requests import Requests, make_requests

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
