"""From which batch speculative decoding stops paying.

A request that drafts k tokens, each accepted with probability a if the one before was, generates 1 + a + ... + a^k
tokens per step.
"""

import math
from collections.abc import Sequence

import numpy as np

from latfit.fitting import model_error_sd
from latfit.hardware import CERTAIN
from latfit.model import CONTEXT, FitResult, step_draws
from latfit.records import Number, Record
from latfit.stats import FloatArray
from latfit.trace import DECODE

DRAWS = 400
MAX_BATCH = 4096  # batches that are looked at


class SpeculationRow(Record, frozen=True, kw_only=True):
    B: int
    step_ms: Number
    draft_step_ms: Number
    tokens_per_s: Number
    draft_tokens_per_s: Number
    speedup: Number
    interval: tuple[Number, Number]


class SpeculationPlan(Record, frozen=True, kw_only=True):
    """What drafting is worth by batch.

    tokens_per_step: of one request. stops_at: smallest batch from which on drafting is slower; None if it pays at
    `largest_batch`. stops_interval: an end that is not a number lies beyond it.
    """

    draft_tokens: int
    acceptance: float
    acceptance_se: float
    tokens_per_step: float
    draft_ms: float
    stops_at: int | None
    stops_interval: tuple[Number, Number]
    largest_batch: int
    rows: Sequence[SpeculationRow]


def plan_speculation(
    fit: FitResult,
    with_drafts: FitResult,
    k: int,
    acceptance: tuple[float, float],
    draft_ms: float,
    context: float | None,
    seed: int = 0,
) -> SpeculationPlan | None:
    """Compare decode steps of B tokens with steps of B (1 + k) tokens that also take k times `draft_ms`.

    with_drafts: fit of steps with drafts, or `fit`. acceptance: probability and its standard error. context: cached
    tokens of a request. Returns None if no such batch was measured.
    """
    low = max(1, *(math.ceil(each.domain["B"][0]) for each in (fit, with_drafts)))
    high = min(fit.domain["B"][1], with_drafts.domain["B"][1], with_drafts.domain["S"][1] / (1 + k), fit.domain["S"][1])
    B = np.arange(low, math.floor(min(high, MAX_BATCH)) + 1, dtype=np.float64)
    if not len(B):
        return None
    rng = np.random.default_rng(seed)
    a, error = acceptance
    drawn = np.clip(rng.normal(a, error, DRAWS), 0.0, 1.0) if error > 0 else np.full(DRAWS, a)
    gain = np.power.outer(np.array([a, *drawn]), np.arange(k + 1)).sum(axis=-1)  # 1 + a + ... + a^k
    plain, drafted = (
        _times(fit, B, B, context, seed),
        _times(with_drafts, B, B * (1 + k), context, seed + (with_drafts is not fit)) + k * draft_ms,
    )
    fits = [fit] if with_drafts is fit else [fit, with_drafts]
    misfit = math.hypot(*(model_error_sd(each, DECODE) for each in fits))
    factor = np.exp(np.array([0.0, *rng.normal(0.0, misfit, DRAWS)]))
    speedup = (gain * factor)[:, None] * plain / drafted  # (1 + draws, n): the fits themselves first
    # The batch after the last one with a speed-up of one or more; infinite if the last one has it.
    last = np.where((speedup >= 1).any(axis=1), len(B) - np.argmax(speedup[:, ::-1] >= 1, axis=1), 0)
    stops = np.append(B, math.inf)[last]
    ends = np.quantile(stops[1:], CERTAIN, method="closest_observation")
    intervals = np.quantile(speedup[1:], CERTAIN, axis=0)
    powers = {2.0**i for i in range(13) if B[0] <= 2.0**i <= B[-1]}
    return SpeculationPlan(
        draft_tokens=k,
        acceptance=a,
        acceptance_se=error,
        tokens_per_step=float(gain[0]),
        draft_ms=draft_ms,
        stops_at=int(stops[0]) if math.isfinite(stops[0]) else None,
        stops_interval=(float(ends[0]), float(ends[1])),
        largest_batch=int(B[-1]),
        rows=[
            SpeculationRow(
                B=int(B[i]),
                step_ms=float(plain[0, i]),
                draft_step_ms=float(drafted[0, i]),
                tokens_per_s=1e3 / float(plain[0, i]),
                draft_tokens_per_s=1e3 * float(gain[0] / drafted[0, i]),
                speedup=float(speedup[0, i]),
                interval=(float(intervals[0, i]), float(intervals[1, i])),
            )
            for i in np.searchsorted(B, sorted({float(B[0]), float(B[-1]), *powers})).tolist()
        ],
    )


def _times(fit: FitResult, B: FloatArray, S: FloatArray, context: float | None, seed: int) -> FloatArray:
    """Return typical decode times in ms (1 + DRAWS, n): of the fit, then of its draws."""
    columns = {"B": B, "S": S, "prefill_requests": 0 * B, "prefill_tokens": 0 * B}
    if fit.reads_context:
        typical = fit.typical.get(CONTEXT, 0.0) if context is None else context
        columns |= {CONTEXT: B * typical, "prefill_context_tokens": 0 * B}
    own, drawn = fit.latency_ms(**columns), step_draws(fit, columns, DRAWS, seed)
    return np.vstack([own[None, :], np.tile(own, (DRAWS, 1)) if drawn is None else drawn])
