"""How long a batch takes on a path: typical, mean and quantiles of a step.

A fit gives the typical latency T(B, S), and factors on it by phase (split conformal): 90 % of new steps stay below
the factor of 0.9 times T. Those factors are a quantile function of the ratio observed/typical at a few levels; its
mean and its spread are integrated from straight lines between them, the ends going on as they are. So the mean is a
little low where the tail beyond the last level is heavy.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from latfit.errors import WrongUsage
from latfit.hardware.profile import ExecutionPath
from latfit.model.result import FitResult
from latfit.stats import FloatArray

DECODE, PREFILL = "decode", "prefill"


@dataclass(frozen=True)
class Spread:
    """Factors on the typical latency of a phase: by level, on average, and their coefficient of variation.

    known: whether the fit has intervals at all; without, the mean is taken as the typical step and cv is NaN.
    """

    phase: str
    quantiles: Mapping[float, float]
    mean_factor: float
    cv: float
    known: bool

    def factor(self, level: float) -> float | None:
        """Upper factor at a level in (0, 1), between known levels on a straight line; None beyond the last."""
        if not self.quantiles or not min(self.quantiles) <= level <= max(self.quantiles) + 1e-12:
            return None
        levels = sorted(self.quantiles)
        return float(np.interp(level, levels, [self.quantiles[known] for known in levels]))

    def highest(self, level: float) -> float:
        """The factor at the highest known level that is not above `level`; 1 where none is known."""
        known = [p for p in self.quantiles if p <= level + 1e-12]
        return self.quantiles[max(known)] if known else 1.0


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
    return PREFILL if tokens > 1 else DECODE


def limits_of(fit: FitResult, phase: str) -> Mapping[str, Any]:
    """The fit's limits for single steps of a phase, of all steps where it has none for that phase."""
    limits: Mapping[str, Any] = fit.intervals.get("by_phase", {}).get(phase, fit.intervals)
    return limits


def spread(path: ExecutionPath, phase: str) -> Spread:
    """The factors of a phase, of all steps where the fit has none for it."""
    source = limits_of(path.fit, phase)
    upper = {float(k): float(v) for k, v in source.get("ratio_quantiles", {}).items() if v is not None}
    lower = {1 - float(k): float(v) for k, v in source.get("lower_quantiles", {}).items() if v is not None}
    known = {**{round(k, 9): v for k, v in lower.items()}, **upper}
    if not upper:
        return Spread(phase, {}, 1.0, math.nan, False)
    levels = np.array(sorted(known))
    # Two estimates of a quantile may cross by rounding; a quantile function does not fall.
    values = np.maximum.accumulate(np.array([known[level] for level in levels]))
    p = np.concatenate([[0.0], levels, [1.0]])
    v = np.concatenate([values[:1], values, values[-1:]])
    width, low, high = np.diff(p), v[:-1], v[1:]
    mean = float(width @ (low + high)) / 2
    second = float(width @ (low**2 + low * high + high**2)) / 3
    cv = math.sqrt(max(second - mean**2, 0.0)) / mean
    return Spread(phase, dict(zip(levels.tolist(), values.tolist(), strict=True)), mean, cv, True)


def mean_service_ms(path: ExecutionPath, tokens: float, context: float | None = None) -> float:
    """Mean ms of one request alone: typical times the spread's mean; for a quoted median that of an exponential."""
    typical = float(typical_ms(path, np.ones(1), tokens, context)[0])
    return typical * (path.quote.mean_factor() if path.quote else spread(path, phase_of(tokens)).mean_factor)


def estimate(path: ExecutionPath, B: int, tokens: float = 1, context: float | None = None) -> BatchEstimate:
    """Latency of a batch of B requests of so many tokens each, on a cached context each. Raises WrongUsage."""
    if B < 1 or tokens < 1 or (context is not None and context < 0):
        raise WrongUsage(
            f"a batch of {B} requests of {tokens:g} tokens", where="batch", remedy="Give at least one of each."
        )
    steps = batch_steps(np.array([float(B)]), tokens, context)
    typical = float(path.fit.latency_ms(**steps)[0])
    factors = spread(path, phase_of(tokens))
    mean = typical * (path.quote.mean_factor() if path.quote else factors.mean_factor)
    seen = {name: steps[name] for name in ("B", "S", *(("context_tokens",) if context is not None else ()))}
    return BatchEstimate(
        path.name,
        B,
        round(B * tokens),
        factors.phase,
        typical,
        mean,
        {level: typical * factor for level, factor in factors.quantiles.items()},
        bool(path.fit.outside_domain(**seen)[0]),
        f"quoted: {path.quote.text}" if path.quote else "fitted",
    )
