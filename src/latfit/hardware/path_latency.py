"""How long a batch of equal requests takes on a path: typical, mean, quantiles and range."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from latfit.errors import refuse
from latfit.hardware.profile import ExecutionPath
from latfit.model import StepNoise, step_draws
from latfit.stats import FloatArray
from latfit.trace import DECODE, PREFILL

CERTAIN = (0.025, 0.975)


@dataclass(frozen=True)
class BatchEstimate:
    """Latency of one batch in ms. quantiles: by level in (0, 1). outside: beyond the measured range."""

    path: str
    B: int
    S: int
    phase: str
    typical_ms: float
    mean_ms: float
    quantiles: Mapping[float, float]
    outside: bool
    source: str


@dataclass(frozen=True, eq=False)
class PathLatency:
    """Batches of requests of `tokens` each, on `context` cached tokens each (None: the trace's typical ones).

    One token is decode, more prefill. Arrays are (n,), times in ms.
    """

    path: ExecutionPath
    tokens: float = 1
    context: float | None = None

    @property
    def label(self) -> str:
        return self.path.label

    @property
    def phase(self) -> str:
        return phase_of(self.tokens)

    @cached_property
    def noise(self) -> StepNoise | None:
        return self.path.fit.limits.of(self.phase).ratios

    @cached_property
    def _drawn_curves(self) -> FloatArray | None:
        """Typical times (draws, batches) for the fit's parameter draws; None without."""
        return step_draws(self.path.fit, self.steps(self.batches))

    @cached_property
    def batches(self) -> FloatArray:
        """1, 2, 3, ... up to the largest measured batch of such requests, in requests and in tokens."""
        fit = self.path.fit
        return np.arange(1.0, max(min(fit.largest_batch, int(fit.domain["S"][1] // self.tokens)), 1) + 1)

    @property
    def outside(self) -> str:
        if self.path.nominal is not None:
            return ""
        steps = self.steps(self.batches[[0, -1]])
        asked = ("B", "S", *(("context_tokens",) if self.context is not None else ()))
        far = self.path.fit.farthest(**{name: steps[name] for name in asked})
        what = "decode steps" if self.tokens <= 1 else f"batches of {self.tokens:,.0f} tokens a request"
        return f"{self.label}: {what} lie outside the measured range, {far}." if far else ""

    def steps(self, B: FloatArray) -> dict[str, FloatArray]:
        B = np.asarray(B, dtype=np.float64)
        prefill = B if self.phase == PREFILL else np.zeros_like(B)
        steps = {"B": B, "S": B * self.tokens, "prefill_requests": prefill, "prefill_tokens": prefill * self.tokens}
        if self.context is not None:
            steps |= {"context_tokens": B * self.context, "prefill_context_tokens": prefill * self.context}
        return steps

    def typical_ms(self, B: FloatArray) -> FloatArray:
        return self.path.fit.latency_ms(**self.steps(B))

    def noisy_ms(self, B: FloatArray) -> FloatArray:
        """Return the times (n,) that the noise multiplies, at the level of the measured steps of that size."""
        typical, B = self.typical_ms(B), np.asarray(B, dtype=np.float64)
        if self.path.nominal is not None:
            return np.asarray(typical * self.path.nominal.mean_factor())
        noise = self.noise
        return typical if noise is None else np.asarray(typical * noise.levels.factors(B * self.tokens))

    def mean_ms(self, B: FloatArray) -> FloatArray:
        T, B = self.noisy_ms(B), np.asarray(B, dtype=np.float64)
        return T if self.noise is None else self.noise.mean_ms(T, B)

    def drawn_ms(self, count: int, rng: np.random.Generator) -> tuple[FloatArray, StepNoise | None]:
        """Return `noisy_ms` of the first `count` batches and the noise of a machine that the data allow."""
        B, curves, noise = self.batches[:count], self._drawn_curves, self.noise
        if curves is not None:
            curve = curves[int(rng.integers(len(curves))), :count]
        else:
            curve = self.noisy_ms(B) if noise is None else self.typical_ms(B)
        if noise is None:
            return curve, None
        drawn = noise.drawn(rng)
        return np.asarray(curve * noise.levels.drawn_factors(B * self.tokens, rng)), drawn

    def range_ms(self, B: FloatArray) -> FloatArray:
        """Return typical latency (3, n) and its 95 % range over the draws; all alike without draws."""
        T, drawn = self.typical_ms(B), step_draws(self.path.fit, self.steps(B))
        return np.stack([T, T, T]) if drawn is None else np.stack([T, *np.quantile(drawn, CERTAIN, axis=0)])

    def largest_within(self, sla_ms: float, factors: FloatArray) -> int | None:
        """Return the most requests that one measured step computes within the SLA, times the factors of `batches`."""
        within = np.flatnonzero(sla_ms >= factors * self.typical_ms(self.batches))
        return int(self.batches[within[-1]]) if len(within) else None

    def estimate(self, B: int) -> BatchEstimate:
        wrong = B < 1 or self.tokens < 1 or (self.context or 0) < 0
        refuse(wrong, f"a batch of {B} requests of {self.tokens:g} tokens", "batch", "Give at least one of each.")
        one = np.array([float(B)])
        steps, limits = self.steps(one), self.path.fit.limits
        typical = float(self.typical_ms(one)[0])
        factors = {round(1 - p, 9): limits.factors(self.phase, p, one, "lower") for p in limits.levels if p > 0.5}
        factors |= {level: limits.factors(self.phase, level, one) for level in limits.levels}
        seen = {name: steps[name] for name in ("B", "S", *(("context_tokens",) if self.context is not None else ()))}
        return BatchEstimate(
            self.path.name,
            B,
            round(B * self.tokens),
            self.phase,
            typical,
            float(self.mean_ms(one)[0]),
            {level: typical * float(each[0]) for level, each in sorted(factors.items()) if each is not None},
            bool(self.path.fit.outside_domain(**seen)[0]),
            f"nominal: {self.path.nominal.text}" if self.path.nominal else "fitted",
        )


def phase_of(tokens: float) -> str:
    """Return the phase of a step in which every request computes so many tokens."""
    return PREFILL if tokens > 1 else DECODE


def step_columns(B: FloatArray, S: FloatArray, context: float | None = None) -> dict[str, FloatArray]:
    """Return columns (n,) of steps of B requests and S tokens; one prefills where S > B."""
    steps = {"B": np.asarray(B, dtype=np.float64), "S": np.asarray(S, dtype=np.float64)}
    if context is not None:
        steps |= {"context_tokens": steps["B"] * context, "prefill_context_tokens": np.zeros_like(steps["B"])}
    return steps
