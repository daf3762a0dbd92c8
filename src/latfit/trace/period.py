"""The period of a step: from its start to the start of the next one, where an engine goes on without a pause.

An engine's own time T of a step leaves out what the host does between two of them: it handles the output and schedules
the next step. With a gap g behind a step, the engine makes a step in its period P = T + g, and with P, not with T, the
steps of a busy stretch add up to its length. The gap is counted to the step before it and not to the one behind it: a
prefill step is often the first after a pause, so that it has a step behind it and none before.

**From moments.** A record says of step i its T_i and the moment a_i at which its end was noticed, never too early:
the end e_i <= a_i. Steps do not overlap: e_i <= e_{i+1} - T_{i+1}. The latest ends that satisfy both are, with
C_i = T_1 + ... + T_i,

    e_i = min over j >= i of (a_j - (C_j - C_i)) = C_i + min over j >= i of (a_j - C_j),

and g_i = e_{i+1} - T_{i+1} - e_i >= 0. The sum of the gaps of a stretch is what the a_i say of it, whatever they are
late by: a record that comes late makes one gap shorter and another longer, no period shorter than its T. Where the
moments lie behind these ends by more than a step's time in the median, steps overlap, and nothing is derived.

**Idle or not.** Behind step i the engine goes on where requests wait (`queued_requests`), or where the next step
decodes: its requests were there. Where the next step holds nothing but prefill, they may have come into an empty
engine, or continue a chunked prompt. Such a gap is taken for host time where it is no longer than 95 % of the gaps of
which the engine is known to go on, and for a pause otherwise. A gap that is `FAR` times that long is a pause
whatever follows (requests that were prefilled elsewhere), and a step that a counter or a record says to be missing,
empty or a dummy leaves the one before it without a period.

**From whole seconds.** A log's stamp w_i is the whole second of a_i. With the fraction of a second at both ends of a
stretch uniform and alike, E[w_last - w_first] = a_last - a_first, with a variance of 1/6 s^2. Over all stretches in
which the engine goes on, of n steps behind their first ones, the mean gap is (sum of the differences of stamps - sum of
the n steps' T) / n with a standard error of sqrt(stretches / 6) / n seconds. Each step of the run has its T and this
gap, if the error is below a twentieth of the mean T; else the stamps say too little.
"""

import numpy as np
from numpy.typing import NDArray

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.clean import LONGEST_MS, runs_in_time
from latfit.trace.serving_engine import is_record
from latfit.trace.table import Trace

Mask = NDArray[np.bool_]

COMPUTE, PERIOD = "compute", "period"
"""What T_ms may be."""
NO_PERIOD = "no_period"
"""Why a clean row is left out where periods are asked for."""
MOSTLY = 0.5
"""Share of the rows that know their period from which on it is taken where nobody says what to take."""

SURE_SHARE, FEW_SURE = 0.95, 20
"""Share of the gaps without a pause that others are held against, and from how many on."""
FAR = 20.0
SHORTEST_GAP_MS = 1.0
"""A gap within the resolution of most clocks is no pause."""
MOST_ERROR = 0.05
"""Standard error of a mean gap from whole seconds, as a share of the mean T."""
STRETCH_JUMP_S = 2.0
"""Two stamps further apart than this and the step between them are no stretch."""


def no_periods(where: str) -> BadInput:
    """The error where periods are asked for and no step has one."""
    return BadInput(
        "its steps do not say when the next one began",
        where=where,
        remedy="Take their own time (--time compute), or give a vLLM log or traces of latfit's recorder.",
    )


def with_period(trace: Trace) -> Trace:
    """The trace with a column `period_ms` where it is an engine's record of one step after another; else as it is."""
    if "period_ms" in trace or not is_record(trace.provenance):
        return trace
    if not all(name in trace for name in ("t_s", "step", "T_ms", "B", "S")):
        return trace
    found = period_ms(trace)
    return trace.with_columns(period_ms=found) if np.isfinite(found).any() else trace


def period_ms(trace: Trace) -> FloatArray:
    """The period of each step in ms (n,), NaN where no step follows at once, or nothing says when.

    trace: columns t_s (start, in seconds; of whole seconds: the stamp of the end), T_ms, B, S; and step,
    queued_requests, prefill_requests, dummy, idle, run, replica where they are known.
    """
    found = np.full(len(trace), np.nan)
    goes_on, follows = _goes_on(trace)
    t, T = trace.floats("t_s"), trace.floats("T_ms")
    known = (np.abs(t) < LONGEST_MS) & (T >= 0) & (T < LONGEST_MS)
    stamped = bool(np.all(t[known] == np.rint(t[known])))
    step = trace.floats("step") if "step" in trace else None
    for rows in runs_in_time(trace):
        rows = rows[known[rows]]
        if step is not None:
            rows = rows[np.argsort(step[rows], kind="stable")]
        if len(rows) < 2:
            continue
        now, then = rows[:-1], rows[1:]
        next_ = follows[now] & follows[then]
        if step is not None:
            next_ &= step[then] == step[now] + 1
        sure = next_ & (goes_on[then] | _waiting(trace, now))
        if stamped:
            found[rows] = T[rows] + _mean_gap(t[rows], T[rows], sure)
        else:
            found[now] = T[now] + _gaps(1e3 * t[rows] + T[rows], T[rows], next_, sure)
    return found


def _goes_on(trace: Trace) -> tuple[Mask, Mask]:
    """Of each row (n,): whether it holds requests that decode, and whether it is a step with requests at all."""
    B, S = trace.floats("B"), trace.floats("S")
    decodes = trace.floats("prefill_requests") < B if "prefill_requests" in trace else S == B
    real = B > 0
    for name in ("dummy", "idle"):
        if name in trace:
            real &= ~np.asarray(trace[name], dtype=bool)
    return decodes & real, real


def _waiting(trace: Trace, rows: NDArray[np.intp]) -> Mask:
    if "queued_requests" not in trace:
        return np.zeros(len(rows), dtype=bool)
    return np.asarray(trace.floats("queued_requests")[rows] > 0)


def _gaps(noticed: FloatArray, T: FloatArray, follows: Mask, sure: Mask) -> FloatArray:
    """The gap in ms (n-1,) behind each step but the last, NaN where there was a pause. noticed: moments of ends."""
    spent = np.cumsum(T)
    ends = spent + np.minimum.accumulate((noticed - spent)[::-1])[::-1]
    if np.median(noticed - ends) > np.median(T):
        return np.full(len(T) - 1, np.nan)
    gaps = np.maximum(ends[1:] - T[1:] - ends[:-1], 0.0)
    several = np.count_nonzero(sure) >= FEW_SURE
    usual = max(float(np.quantile(gaps[sure], SURE_SHARE)) if several else 0.0, SHORTEST_GAP_MS)
    longest = np.where(sure, FAR * usual if several else np.inf, usual)
    return np.where(follows & (gaps <= longest), gaps, np.nan)


def _mean_gap(stamps: FloatArray, T: FloatArray, sure: Mask) -> float:
    """The mean gap in ms of the stretches in which an engine goes on; NaN where whole seconds say too little."""
    together = sure & (np.diff(stamps) <= STRETCH_JUMP_S + 1e-3 * T[1:])
    n = int(np.count_nonzero(together))
    if n == 0:
        return float("nan")
    stretches = 1 + int(np.count_nonzero(np.diff(np.flatnonzero(together)) > 1))
    busy_ms = float(np.sum(T[1:][together]))
    gap = (1e3 * float(np.sum(np.diff(stamps)[together])) - busy_ms) / n
    error = 1e3 * (stretches / 6) ** 0.5 / n
    return max(gap, 0.0) if error < MOST_ERROR * busy_ms / n else float("nan")
