"""A load that varies, from recorded arrivals or a rate over time, in windows."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput, WrongUsage
from latfit.planning.request import Load
from latfit.queueing import POISSON, Arrivals, dispersions
from latfit.stats import FloatArray
from latfit.trace import OUTPUTS, PROMPTS, TABLES, TIMES, Trace, numbers, open_source, read_columns, request_format
from latfit.workload import moments_ms, read_requests

WINDOWS = 60
LEAST_A_WINDOW = 30  # arrivals below which a window's rate is mostly chance
MINUTE_MS = 6e4
CERTAIN, LEAST_BURST = 3.0, 0.1  # standard errors, and a share of a Poisson stream's dispersion, that bursts exceed
RATE = "rate_per_s"
MS_PER_S = 1e3


def load_from_arrivals(arrival_ms: FloatArray, source: str, window_ms: float | None = None) -> Load:
    """Return the rates of recorded arrivals (n,) in ms. window_ms: None takes about 60 windows."""
    arrivals = np.asarray(arrival_ms, dtype=np.float64)
    span = float(arrivals[-1] - arrivals[0]) if len(arrivals) else 0.0
    if len(arrivals) < 2 or span <= 0:
        raise BadInput("fewer than two moments of arrival", where=source, remedy="Give a recording of some length.")
    if window_ms is None:
        least = span / max(len(arrivals) / LEAST_A_WINDOW, 1)
        window_ms = min(max(span / WINDOWS, least), span)
        if window_ms > 0.9 * MINUTE_MS:
            window_ms = min(math.ceil(window_ms / MINUTE_MS) * MINUTE_MS, span)
    if not 0 < window_ms <= span:
        raise WrongUsage("a window longer than the recording", where="--arrivals-window", remedy="Give a shorter one.")
    # A last window that is cut short would look idle.
    windows = max(1, int(span / window_ms + 1e-9))
    counts, edges = np.histogram(arrivals - arrivals[0], bins=windows, range=(0.0, windows * window_ms))
    rates = np.asarray(counts / window_ms, dtype=np.float64)
    return Load(rates, window_ms, source, _following(arrivals - arrivals[0], counts, edges))


def _following(arrivals: FloatArray, counts: NDArray[np.int64], edges: FloatArray) -> Arrivals:
    """Return the gaps without the windows' rates, if requests come in bursts, else a Poisson stream."""
    reached = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)])
    gaps = np.diff(np.interp(arrivals[arrivals <= edges[-1]], edges, reached))
    if not gaps.sum() > 0:  # all but one come in the last window, which is cut short
        return POISSON
    bursts = any(
        found - 1 > max(CERTAIN * math.sqrt(2 * m / len(gaps)), LEAST_BURST)
        for m, found in dispersions(gaps)
        if m < gaps.sum() / len(counts)
    )
    return Arrivals(gaps / gaps.mean(), label="arrivals as recorded, in bursts") if bursts else POISSON


def replicas_for(rate: float, each: float) -> int:
    return max(1, math.ceil(rate / each * (1 - 1e-9)))


def read_load(source: str | Path, window_ms: float | None = None, *, alike: bool = True) -> Load:
    """Read moments of requests, windows with `t_s` and `rate_per_s`, or any recording of requests.

    alike: whether recorded lengths are ignored. Raises WrongUsage for lengths otherwise, and BadInput.
    """
    opened = open_source(source)
    table = None if request_format(opened.head) else read_columns(opened, ())
    if table is not None and _time_of(table) is not None:
        return load_of(table, opened.name, window_ms, alike=alike)
    recorded = read_requests(opened)  # in another format, or refused by name
    _check_lengths(opened.name, recorded=not alike)
    load = load_from_arrivals(recorded.requests.arrival_ms, opened.name, window_ms)
    return replace(load, notes=tuple(recorded.notes))


def load_of(table: Trace, name: str, window_ms: float | None = None, *, alike: bool = True) -> Load:
    """Return the load in a table's columns, as `read_load`."""
    time = _time_of(table)
    written = any(set(columns) <= set(table.columns) for columns in TABLES)
    lengths = written or all(any(column in table for column in group) for group in (PROMPTS, OUTPUTS))
    _check_lengths(name, recorded=lengths and not alike)
    if time is None:
        raise BadInput("no column with moments of arrival", where=name, remedy="Give `t_s`, in seconds.")
    moments = moments_ms(table, time)
    if RATE in table:
        return _given_rates(moments, np.asarray(numbers(table[RATE]), dtype=np.float64), name)
    valid = np.isfinite(moments)
    load = load_from_arrivals(np.sort(moments[valid]), name, window_ms)
    if valid.all():
        return load
    first = int(np.argmin(valid)) + 1
    missing = f"{np.count_nonzero(~valid):,} of {len(valid):,} rows"
    note = f"{missing} have no moment of arrival and are left out (the first is row {first:,})"
    return replace(load, notes=(note,))


def _check_lengths(name: str, *, recorded: bool) -> None:
    if recorded:
        raise WrongUsage(
            f"{name} has the lengths of its requests, which a plan of batches does not use",
            where="--arrivals",
            remedy="To plan serving engines for these requests, give --ttft 500ms --tpot 50ms or --e2e 10s in place of"
            " --sla; to count every request as one unit of a batch, add --tokens-per-request 1.",
        )


def _time_of(table: Trace) -> str | None:
    return next((name for name in (*TIMES, *(columns[0] for columns in TABLES)) if name in table), None)


def _given_rates(starts_ms: FloatArray, rates_per_s: FloatArray, name: str) -> Load:
    steps = np.diff(starts_ms)
    if len(steps) < 1 or not np.all(steps > 0) or not np.allclose(steps, steps[0], rtol=1e-3):
        raise BadInput("windows of different lengths, or fewer than two", where=name, remedy="Give even windows.")
    if not np.all(np.isfinite(rates_per_s)) or np.any(rates_per_s < 0) or not np.any(rates_per_s > 0):
        remedy = f"Give {RATE} of 0 or more."
        raise BadInput("a rate is negative or no number, or all are zero", where=name, remedy=remedy)
    return Load(rates_per_s / MS_PER_S, float(steps[0]), name)
