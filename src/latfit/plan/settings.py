"""Limits of a serving engine from a fit, without a sweep: sequences, tokens of a step, chunk of a prefill.

Continuous batching runs steps of up to D decoding sequences (a token each) and P prefill tokens, S = D + P.

- A sequence gets a token each step, so every step must stay within the time between tokens: decode steps T(D, D) <=
  TPOT give `max_num_seqs`, the largest D; steps with prefill T(D + 1, D + P) <= TPOT give the token budget, the
  largest S = D + P at that D.
- A prompt of n tokens takes ceil(n / P) such steps, so TTFT >= ceil(n / P) T(D + 1, D + P) without waiting. A larger
  chunk P means fewer, longer steps: the first token asks for large ones, the time between tokens for small ones.
- So the chunks that meet TTFT are compared with those that meet TPOT; where no chunk meets both, D is lowered until one
  does, or the answer is that none does.

Latencies are taken at a percentile of steps, by the phase's factor. T must be known for prefill: a fit of decode steps
alone gives `max_num_seqs` only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from latfit.hardware.estimate import DECODE, spread
from latfit.hardware.profile import ExecutionPath
from latfit.plan.result import Settings, Unknown
from latfit.plan.wishes import ServingTargets
from latfit.stats import FloatArray
from latfit.units import format_ms

MIXED = "mixed"
FEWEST_CHUNK = 16
CHUNKS = 400
FINEST = 512
"""Below this many tokens every chunk is tried."""


@dataclass(frozen=True)
class _Engine:
    """Step times of a path at a percentile: factors on decode steps and on steps that hold prefill."""

    path: ExecutionPath
    decode_factor: float
    mixed_factor: float
    context: float | None

    def decode_ms(self, D: FloatArray) -> FloatArray:
        none = np.zeros_like(D)
        cached = {} if self.context is None else {"context_tokens": D * self.context, "prefill_context_tokens": none}
        steps = {"B": D, "S": D, "prefill_requests": none, "prefill_tokens": none, **cached}
        return self.decode_factor * self.path.fit.latency_ms(**steps)

    def mixed_ms(self, D: float, P: FloatArray) -> FloatArray:
        """Steps of D decoding sequences and one prefill chunk of P (n,) tokens."""
        one = np.ones_like(P)
        cached = {}
        if self.context is not None:
            cached = {"context_tokens": one * D * self.context, "prefill_context_tokens": 0 * one}
        steps = {"B": D + one, "S": D + P, "prefill_requests": one, "prefill_tokens": P, **cached}
        return self.mixed_factor * self.path.fit.latency_ms(**steps)


def engine_settings(
    path: ExecutionPath, sla_ms: float, percentile: float, serving: ServingTargets, context: float | None = None
) -> Settings | Unknown:
    """Settings for the targets; the SLA stands for a missing TPOT. Unknown, with the reason, where none meets them."""
    engine = _engine(path, percentile, context)
    tpot = serving.tpot_ms or sla_ms
    D = np.arange(1.0, max(int(path.fit.domain["B"][1]), 1) + 1)
    times = engine.decode_ms(D)
    within = np.flatnonzero(times <= tpot)
    if not len(within):
        return Unknown(
            f"no decode step on {path.label} meets {format_ms(tpot)}: the fastest takes {format_ms(float(times.min()))}"
        )
    most = int(D[within[-1]])
    if not path.fit.knows_prefill:
        return _decode_only(path, most, float(times[within[-1]]), tpot, serving)
    if most > 1 and float(path.fit.domain["S"][1]) <= most:
        return _decode_only(path, most, float(times[within[-1]]), tpot, serving)
    for decoding in _fewer(most):
        found = _with_prefill(engine, decoding, most, tpot, serving)
        if found is not None:
            return found
    wanted = "" if serving.ttft_ms is None else f" and a prompt of {serving.prompt_tokens:,} tokens within "
    wanted += "" if serving.ttft_ms is None else format_ms(serving.ttft_ms)
    return Unknown(f"no chunk on {path.label} keeps a step within {format_ms(tpot)}{wanted}, even beside one request")


def _engine(path: ExecutionPath, percentile: float, context: float | None) -> _Engine:
    decode, mixed = (spread(path, phase).highest(percentile / 100) for phase in (DECODE, MIXED))
    return _Engine(path, decode, mixed, context)


def _with_prefill(engine: _Engine, decoding: int, most: int, tpot: float, serving: ServingTargets) -> Settings | None:
    """The largest chunk beside so many decoding sequences that meets both targets; None where there is none."""
    top = float(engine.path.fit.domain["S"][1])
    P = _chunks(top - decoding)
    if not len(P):
        return None
    times = engine.mixed_ms(float(decoding - 1), P)
    ttft = np.ceil(serving.prompt_tokens / P) * times
    meets_tpot = times <= tpot
    meets_ttft = np.ones(len(P), bool) if serving.ttft_ms is None else ttft <= serving.ttft_ms
    both = np.flatnonzero(meets_tpot & meets_ttft)
    if not len(both):
        return None
    at = int(both[-1])
    budget = int(P[at]) + decoding - 1
    fewest = None if serving.ttft_ms is None else int(P[int(both[0])]) + decoding - 1
    limit = "the time between tokens" if at + 1 < len(P) and not meets_tpot[at + 1] else "what was measured"
    if at + 1 < len(P) and meets_tpot[at + 1]:
        limit = "the first token"
    binding = f"{limit}: a larger step than {budget:,} tokens is not vouched for"
    if decoding < most and serving.ttft_ms is not None:
        binding = f"the first token: beside more than {decoding:,} sequences no chunk gives it in time"
    elif decoding < most:
        binding = f"the time between tokens: beside more than {decoding:,} sequences no prefill fits into a step"
    return Settings(
        path=engine.path.label,
        max_num_seqs=decoding,
        max_num_batched_tokens=budget,
        min_num_batched_tokens=fewest,
        chunk_tokens=int(P[at]),
        prompt_tokens=serving.prompt_tokens,
        ttft_ms=float(ttft[at]),
        tpot_ms=float(times[at]),
        binding=binding,
        reason=f"every step within {format_ms(tpot)}" + _first_token(serving),
        extrapolated=False,
    )


def _decode_only(path: ExecutionPath, most: int, last_ms: float, tpot: float, serving: ServingTargets) -> Settings:
    top = int(path.fit.domain["B"][1])
    binding = "what was measured" if most == top else "the time between tokens"
    return Settings(
        path=path.label,
        max_num_seqs=most,
        max_num_batched_tokens=None,
        min_num_batched_tokens=None,
        chunk_tokens=None,
        prompt_tokens=serving.prompt_tokens,
        ttft_ms=None,
        tpot_ms=last_ms,
        binding=binding,
        reason=f"decode steps within {format_ms(tpot)}; the fit has seen no prefill, so it gives no token budget",
        extrapolated=False,
    )


def _first_token(serving: ServingTargets) -> str:
    if serving.ttft_ms is None:
        return ""
    return f", the first token of {serving.prompt_tokens:,} within {format_ms(serving.ttft_ms)}"


def _chunks(top: float) -> FloatArray:
    """Chunks to try: every one up to 512 tokens, then multiples of 16 that grow by about a hundredth."""
    if top < 1:
        return np.zeros(0)
    fine = np.arange(1.0, min(top, FINEST) + 1)
    if top <= FINEST:
        return fine
    coarse = np.unique(np.round(np.geomspace(FINEST, top, CHUNKS) / FEWEST_CHUNK) * FEWEST_CHUNK)
    return np.unique(np.concatenate([fine, coarse[(coarse > FINEST) & (coarse <= top)], [np.floor(top)]]))


def _fewer(most: int) -> Sequence[int]:
    """The most sequences, then fewer, by about an eighth each."""
    found = [most]
    while found[-1] > 1:
        found.append(max(1, min(found[-1] - 1, int(found[-1] * 0.875))))
    return found
