"""A load that varies, from a file: recorded moments of arrival, or a rate over time."""

from pathlib import Path

import numpy as np

from latfit.errors import BadInput
from latfit.plan.load import load_from_arrivals
from latfit.plan.wishes import Load
from latfit.stats import FloatArray
from latfit.trace.readers.arrivals import TABLES, TIMES
from latfit.trace.readers.delimited import numbers
from latfit.trace.readers.source import open_source
from latfit.trace.readers.tabular import read_columns
from latfit.trace.table import Trace
from latfit.workload.recorded import read_requests

RATE = "rate_per_s"
MS_PER_S = 1e3
WRITTEN_TIMES = tuple(columns[0] for columns in TABLES)
"""Columns of production logs: points in time, or seconds."""


def read_load(source: str | Path, window_ms: float | None = None) -> Load:
    """The load in a table: a row a request with its moment (`t_s`, `arrived_at`, in seconds), or a row a window with
    `t_s` and `rate_per_s`, windows of the same length; or any other recording that the simulator reads.

    Raises BadInput, WrongUsage.
    """
    opened = open_source(source)
    table = read_columns(opened, ())
    time = next((name for name in (*TIMES, *WRITTEN_TIMES) if name in table), None)
    if time is None:
        # Not a table of moments: one of the other ways in which requests are recorded, or refused by name.
        return load_from_arrivals(read_requests(opened).requests.arrival_ms, opened.name, window_ms)
    moments = _moments(table, time, opened.name)
    if RATE in table:
        return _given(moments, np.asarray(numbers(table[RATE]), dtype=np.float64), opened.name)
    return load_from_arrivals(np.sort(moments), opened.name, window_ms)


def _given(starts_ms: FloatArray, rates_per_s: FloatArray, name: str) -> Load:
    steps = np.diff(starts_ms)
    if len(steps) < 1 or not np.all(steps > 0) or not np.allclose(steps, steps[0], rtol=1e-3):
        raise BadInput("windows of different lengths, or fewer than two", where=name, remedy="Give even windows.")
    if not np.all(np.isfinite(rates_per_s)) or np.any(rates_per_s < 0) or not np.any(rates_per_s > 0):
        raise BadInput(
            "a rate is negative or no number, or all are zero", where=name, remedy=f"Give {RATE} of 0 or more."
        )
    return Load(rates_per_s / MS_PER_S, float(steps[0]), name)


def _moments(table: Trace, column: str, name: str) -> FloatArray:
    """Moments in ms, from the first."""
    values = table[column]
    if values.dtype.kind == "O":
        try:
            values = np.array([str(text).strip()[:29].replace(" ", "T") for text in values.tolist()], "datetime64[ns]")
        except ValueError:
            values = numbers(values)
    if values.dtype.kind == "M":
        seconds = (values - values.min()) / np.timedelta64(1, "s")
    else:
        seconds = np.asarray(numbers(values), dtype=np.float64)
    if not len(seconds) or not np.all(np.isfinite(seconds)):
        row = "" if not len(seconds) else f" (row {int(np.argmax(~np.isfinite(seconds))) + 1})"
        raise BadInput(f"a moment is missing or no number{row}", where=name, remedy="Correct or leave out the row.")
    return np.asarray((seconds - seconds.min()) * MS_PER_S, dtype=np.float64)
