"""How long a batch takes on a path: typical, mean and quantiles of a step.

A fit gives the typical latency T(B, S), factors on it by phase that a new step stays below with a given probability
(split conformal), and the law of the measured steps' ratios to it. The factors are promises for single steps; mean and
spread, which queues go by, are those of the law, its tail included.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from latfit.errors import WrongUsage
from latfit.hardware.profile import ExecutionPath
from latfit.model import StepRatios
from latfit.stats import FloatArray
from latfit.trace import DECODE, PREFILL


@dataclass(frozen=True)
class BatchEstimate:
    """Latency of one batch in ms. quantiles: by level in (0, 1). outside: beyond what was measured. source: where the
    numbers are from."""

    path: str
    B: int
    S: int
    phase: str
    typical_ms: float
    mean_ms: float
    quantiles: Mapping[float, float]
    outside: bool
    source: str


def typical_ms(path: ExecutionPath, B: FloatArray, tokens: float, context: float | None = None) -> FloatArray:
    """Typical latency in ms (n,) of batches of B (n,) requests of so many tokens each.

    context: cached tokens of each request; None for what was typical of the trace. One token is decode, more prefill.
    """
    steps = batch_steps(B, tokens, context)
    return path.fit.latency_ms(**steps)


def batch_steps(B: FloatArray, tokens: float, context: float | None = None) -> dict[str, FloatArray]:
    """Columns (n,) of the steps that such batches are."""
    B = np.asarray(B, dtype=np.float64)
    steps = {"B": B, "S": B * tokens}
    prefill = B if tokens > 1 else np.zeros_like(B)
    steps |= {"prefill_requests": prefill, "prefill_tokens": prefill * tokens}
    if context is not None:
        cached = B * context
        steps |= {"context_tokens": cached, "prefill_context_tokens": cached if tokens > 1 else np.zeros_like(B)}
    return steps


def step_columns(B: FloatArray, S: FloatArray, context: float | None = None) -> dict[str, FloatArray]:
    """Columns (n,) of steps of B requests and S tokens, of which one prefills where S > B; context as above."""
    steps = {"B": np.asarray(B, dtype=np.float64), "S": np.asarray(S, dtype=np.float64)}
    if context is not None:
        steps |= {"context_tokens": steps["B"] * context, "prefill_context_tokens": np.zeros_like(steps["B"])}
    return steps


def phase_of(tokens: float) -> str:
    """The phase of a step in which every request computes so many tokens."""
    return PREFILL if tokens > 1 else DECODE


def scatter(path: ExecutionPath, phase: str) -> StepRatios | None:
    """The law of a step's time over its typical one, of a phase, by its batch; None where nobody measured it."""
    return path.fit.limits.of(phase).ratios


def mean_ms(path: ExecutionPath, B: FloatArray, tokens: float, context: float | None = None) -> FloatArray:
    """Mean latency in ms (n,) of batches of B (n,) requests of so many tokens each: of the measured steps, their level
    at that size and their tail included; of a quoted median that of an exponential service."""
    typical, B = typical_ms(path, B, tokens, context), np.asarray(B, dtype=np.float64)
    if path.quote is not None:
        return np.asarray(typical * path.quote.mean_factor())
    law = scatter(path, phase_of(tokens))
    return typical if law is None else np.asarray(typical * law.levels.factors(B * tokens) * law.means(B))


def estimate(path: ExecutionPath, B: int, tokens: float = 1, context: float | None = None) -> BatchEstimate:
    """Latency of a batch of B requests of so many tokens each, on a cached context each. Raises WrongUsage."""
    if B < 1 or tokens < 1 or (context is not None and context < 0):
        raise WrongUsage(
            f"a batch of {B} requests of {tokens:g} tokens", where="batch", remedy="Give at least one of each."
        )
    steps = batch_steps(np.array([float(B)]), tokens, context)
    typical = float(path.fit.latency_ms(**steps)[0])
    phase = phase_of(tokens)
    limits = path.fit.limits
    factors = {level: limits.factor(phase, level) for level in limits.levels}
    lower = {round(1 - level, 9): limits.lower_factor(phase, level) for level in limits.levels if level > 0.5}
    seen = {name: steps[name] for name in ("B", "S", *(("context_tokens",) if context is not None else ()))}
    return BatchEstimate(
        path.name,
        B,
        round(B * tokens),
        phase,
        typical,
        float(mean_ms(path, np.array([float(B)]), tokens, context)[0]),
        {level: typical * factor for level, factor in sorted({**lower, **factors}.items()) if factor is not None},
        bool(path.fit.outside_domain(**seen)[0]),
        f"quoted: {path.quote.text}" if path.quote else "fitted",
    )
