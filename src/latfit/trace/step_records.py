"""What an engine's records of consecutive steps imply: the period of each step, and tokens computed again.

The period runs from the start of a step to the start of the next, so that the periods of a busy stretch add up to its
length.
"""

from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.stats import FloatArray
from latfit.trace.clean import MAX_MS, runs_in_time
from latfit.trace.metadata import facts_of
from latfit.trace.serving_engine import draft_tokens
from latfit.trace.table import MIXED, PREFILL, Mask, Trace

COMPUTE, PERIOD = "compute", "period"  # what T_ms may be
NO_PERIOD = "no_period"  # why a clean row is left out if periods are fitted
MIN_PERIOD_SHARE = 0.5  # of the rows; from here on the period is the default

GAP_QUANTILE, MIN_GAPS = 0.95, 20  # a longer gap than this quantile of sure ones may be a pause
MAX_GAP_RATIO = 20.0  # to that quantile; a longer gap is a pause in any case
MIN_PAUSE_MS = 1.0  # the resolution of most clocks
MAX_GAP_ERROR = 0.05  # standard error of a mean gap from whole seconds, relative to the mean T
MAX_STAMP_STEP_S = 2.0  # between stamps of one stretch, besides the step's own time


def no_periods() -> BadInput:
    remedy = "Take their own time (--time compute), or give a vLLM log or traces of latfit's recorder."
    return BadInput("its steps do not say when the next one began", remedy=remedy)


def with_records(trace: Trace) -> Trace:
    if not facts_of(trace.provenance).is_record:
        return trace
    trace = with_recompute(trace)
    if "period_ms" in trace or not all(name in trace for name in ("t_s", "step", "T_ms", "B", "S")):
        return trace
    found = period_ms(trace)
    return trace.with_columns(period_ms=found) if np.isfinite(found).any() else trace


def period_ms(trace: Trace) -> FloatArray:
    """Return the period of each step in ms (n,); NaN if no step follows at once, or the times do not show it.

    t_s is the start in seconds; if all are whole seconds, the stamp of the end. Before a step of nothing but prefill
    the engine may have paused: such a gap is host time only if it is as short as 95 % of the sure ones.
    """
    found = np.full(len(trace), np.nan)
    B, S = trace.floats("B"), trace.floats("S")
    real = B > 0
    for name in [name for name in ("dummy", "idle") if name in trace]:
        real &= ~np.asarray(trace[name], dtype=bool)
    decodes = real & (trace.floats("prefill_requests") < B if "prefill_requests" in trace else S == B)
    waiting = trace.floats_or_nan("queued_requests") > 0
    t, T = trace.floats("t_s"), trace.floats("T_ms")
    known = (np.abs(t) < MAX_MS) & (T >= 0) & (T < MAX_MS)
    whole_seconds = bool(np.all(t[known] == np.rint(t[known])))
    step = trace.floats("step") if "step" in trace else None
    for rows in runs_in_time(trace):
        rows = rows[known[rows]]
        if step is not None:
            rows = rows[np.argsort(step[rows], kind="stable")]
        if len(rows) < 2:
            continue
        first, second = rows[:-1], rows[1:]
        follows = real[first] & real[second]
        if step is not None:
            follows &= step[second] == step[first] + 1
        sure = follows & (decodes[second] | waiting[first])
        if whole_seconds:
            found[rows] = T[rows] + _mean_gap(t[rows], T[rows], sure)
        else:
            found[first] = T[first] + _gaps(1e3 * t[rows] + T[rows], T[rows], follows, sure)
    return found


def _gaps(noticed: FloatArray, T: FloatArray, follows: Mask, sure: Mask) -> FloatArray:
    """Return the gap in ms behind each step but the last (n-1,), NaN for a pause. noticed: ms of seen ends."""
    spent = np.cumsum(T)
    ends = spent + np.minimum.accumulate((noticed - spent)[::-1])[::-1]
    if np.median(noticed - ends) > np.median(T):  # steps overlap
        return np.full(len(T) - 1, np.nan)
    gaps = np.maximum(ends[1:] - T[1:] - ends[:-1], 0.0)
    enough = np.count_nonzero(sure) >= MIN_GAPS
    usual = max(float(np.quantile(gaps[sure], GAP_QUANTILE)) if enough else 0.0, MIN_PAUSE_MS)
    longest = np.where(sure, MAX_GAP_RATIO * usual if enough else np.inf, usual)
    return np.where(follows & (gaps <= longest), gaps, np.nan)


def _mean_gap(stamps: FloatArray, T: FloatArray, sure: Mask) -> float:
    """Return the mean gap in ms from stamps in whole seconds; NaN if they are too coarse."""
    together = sure & (np.diff(stamps) <= MAX_STAMP_STEP_S + 1e-3 * T[1:])
    n = int(np.count_nonzero(together))
    if n == 0:
        return float("nan")
    stretches = 1 + int(np.count_nonzero(np.diff(np.flatnonzero(together)) > 1))
    busy_ms = float(np.sum(T[1:][together]))
    gap = (1e3 * float(np.sum(np.diff(stamps)[together])) - busy_ms) / n
    error = 1e3 * (stretches / 6) ** 0.5 / n
    return max(gap, 0.0) if error < MAX_GAP_ERROR * busy_ms / n else float("nan")


def with_recompute(trace: Trace) -> Trace:
    """Count tokens computed again after preemption, which vLLM counts as generation, as prefill.

    D requests that decode with k drafts compute at most D (1 + k) tokens. In a step with more, one request computes the
    rest again: `recomputed_tokens`.
    """
    needed = ("B", "S", "prefill_requests", "prefill_tokens")
    lacks = not len(trace) or not all(name in trace for name in (*needed, "step"))
    if lacks or "recomputed_tokens" in trace:
        return trace
    B, S, n, P = (trace.floats(name) for name in needed)
    D, G = B - n, S - P
    k = draft_tokens(trace)
    with np.errstate(invalid="ignore"):
        found = (D >= 1) & (D * (1 + k) < G)
    if not found.any():
        return trace
    drafts = (D - 1) * k
    if "draft_tokens" in trace:
        drafts = np.minimum(np.nan_to_num(trace.floats("draft_tokens")), drafts)
    again = np.where(found, G - (D - 1) - drafts, 0.0)
    columns: dict[str, Any] = {
        "prefill_requests": (n + found).astype(trace["prefill_requests"].dtype),
        "prefill_tokens": (P + again).astype(trace["prefill_tokens"].dtype),
        "recomputed_tokens": again.astype(np.int64),
    }
    if "phase" in trace:
        phase = np.array(trace["phase"], dtype=object)
        phase[found] = np.where(D[found] > 1, MIXED, PREFILL)
        columns["phase"] = phase
    return trace.with_columns(**columns)
