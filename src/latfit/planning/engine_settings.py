"""Settings of a serving engine from a fit, without a sweep: sequences, tokens of a step, chunk of a prefill.

Continuous batching runs steps of up to D decoding sequences (a token each) and P prefill tokens, S = D + P.

- A sequence gets a token each step, so every step must stay within the time between tokens: decode steps T(D, D) <=
  TPOT give `max_num_seqs`, the largest D. The token budget is the largest S = D + P whose steps stay within it whatever
  they hold: D sequences beside a chunk of P, a chunk alone, the whole budget as chunks of several prompts. A chunk's
  cost grows with what is cached of its prompt, so the last one counts, behind n - P tokens.
- A prompt of n tokens takes ceil(n / P) steps, each chunk behind those before it; their sum is the TTFT without
  waiting. A larger chunk P means fewer, longer steps: the first token asks for large ones, the time between tokens for
  small ones.
- So the chunks that meet TTFT are compared with those that meet TPOT; where no chunk meets both, D is lowered until one
  does, or the answer is that none does.

Latencies are taken at a percentile of steps, by the phase's factor. T must be known for prefill: a fit of decode steps
alone gives `max_num_seqs` only.

Each engine has names of its own for these numbers. One that batches step by step (vLLM, SGLang, TensorRT-LLM) takes the
limits of a step. One that batches whole requests (Triton, a TensorRT engine) takes the largest batch within the SLA,
the batch that pays off the launch, and how long to wait for it: none for greedy batching, else until the stopping batch
of the amortised rule is there on average. Triton takes the largest of its preferred sizes that waits and leaves the
others waiting, so without a delay none is preferred: all that wait go, as in greedy batching. With one every size from
the stopping batch on is.

SGLang computes prompts in steps of their own, unless told to mix them with decoding (`--enable-mixed-chunk`); a chunk
is then what a step has left beside the requests that decode, so its limit is that of the whole step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from latfit.hardware import ExecutionPath
from latfit.model import CONTEXT
from latfit.planning import wording
from latfit.planning.request import ServingTargets
from latfit.planning.result import Alternative, Cutoff, Kind, LoadPlan, Settings, StepPlan, Unknown
from latfit.planning.steps.limits import level_for
from latfit.stats import FloatArray
from latfit.trace import DECODE, MIXED, PREFILL

if TYPE_CHECKING:
    from latfit.simulation import EngineSettings

US_PER_MS = 1000

Flags = Mapping[str, Any]


def engine_flags(
    steps: StepPlan, load: LoadPlan | None, settings: Settings | Unknown, largest: int | None, sla_ms: float
) -> dict[str, Flags]:
    """Settings by engine, under the names that the engines use. largest: the largest whole batch within the SLA."""
    found: dict[str, Flags] = {}
    if isinstance(settings, Settings):
        found |= _by_step(settings, steps)
    if largest is not None:
        found |= _by_batch(steps, load, largest, sla_ms)
    return found


def _by_step(settings: Settings, plan: StepPlan) -> dict[str, Flags]:
    seqs, budget, chunk = settings.max_num_seqs, settings.max_num_batched_tokens, settings.chunk_tokens
    vllm: dict[str, Any] = {"max_num_seqs": seqs}
    sglang: dict[str, Any] = {"max_running_requests": seqs}
    trtllm: dict[str, Any] = {"max_batch_size": seqs}
    llamacpp: dict[str, Any] = {"parallel": seqs}
    if budget is not None and chunk is not None:
        vllm |= {
            "max_num_batched_tokens": budget,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": chunk,
        }
        sglang |= {"chunked_prefill_size": budget, "enable_mixed_chunk": True}
        trtllm |= {"max_num_tokens": budget, "enable_chunked_prefill": True}
        llamacpp["batch_size"] = budget
    if plan.B1_tokens.value is not None and plan.B1_tokens.value > 1:
        sglang["kt_gpu_prefill_token_threshold"] = plan.B1_tokens.value
    return {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "llamacpp": llamacpp}


def _by_batch(steps: StepPlan, load: LoadPlan | None, largest: int, sla_ms: float) -> dict[str, Flags]:
    paying = next((t.value for t in (steps.B2, steps.knee) if t.value is not None), None)
    preferred = min(paying, largest) if paying else largest
    found: dict[str, Flags] = {
        "triton": {"max_batch_size": largest, "max_queue_delay_microseconds": 0},
        "tensorrt": {"min_batch": 1, "opt_batch": preferred, "max_batch": largest},
    }
    if load is None:
        return found
    batched = next((row for row in load.alternatives if row.strategy.kind is Kind.AMORTISED), None)
    if batched is not None and (batched.chosen or (batched.margin or -1.0) >= 0):
        delayed = _waiting(batched, load, largest, sla_ms)
        found |= {"triton": delayed} if batched.chosen else {"triton_batched": delayed}
    if isinstance(load.T_cut, Cutoff) and load.T_cut.value is not None:
        found["triton"] = {**found["triton"], "default_timeout_microseconds": int(load.T_cut.value * US_PER_MS)}
    return found


def _waiting(batched: Alternative, load: LoadPlan, largest: int, sla_ms: float) -> Flags:
    """Until the amortised stopping batch is there on average, less than what the SLA leaves."""
    stop = min(batched.strategy.batch or 1, largest)
    wait_ms = (stop - 1) / load.rate_per_s * 1e3
    spare_ms = sla_ms - (batched.percentile_ms or sla_ms)
    return {
        "max_batch_size": largest,
        "max_queue_delay_microseconds": int(min(wait_ms, max(spare_ms, 0.0)) * US_PER_MS),
        "preferred_batch_size": [*range(stop, largest + 1)],
    }


def serving_flags(settings: "EngineSettings") -> dict[str, Flags]:
    """The settings that a simulated engine ran with, by engine; what is an engine's default is left out."""
    seqs, budget = settings.max_num_seqs, settings.max_num_batched_tokens
    vllm: dict[str, Any] = {"max_num_seqs": seqs, "max_num_batched_tokens": budget}
    sglang: dict[str, Any] = {"max_running_requests": seqs}
    trtllm: dict[str, Any] = {"max_batch_size": seqs, "max_num_tokens": budget}
    if settings.long_prefill_token_threshold:
        vllm["long_prefill_token_threshold"] = settings.long_prefill_token_threshold
    if settings.batching == "continuous":
        vllm |= {"enable_chunked_prefill": False, "max_model_len": budget}
        sglang |= {"chunked_prefill_size": -1, "max_prefill_tokens": budget, "context_length": budget}
        trtllm |= {"enable_chunked_prefill": False, "max_seq_len": budget}
    else:
        sglang |= {"chunked_prefill_size": budget, "enable_mixed_chunk": True}
        trtllm["enable_chunked_prefill"] = True
    if settings.order.name == "priority":
        vllm["scheduling_policy"] = "priority"
        sglang["enable_priority_scheduling"] = True
    if not settings.asynchronous:
        vllm["async_scheduling"] = False
        sglang["disable_overlap_schedule"] = True
        trtllm["disable_overlap_scheduler"] = True
    found: dict[str, Flags] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}
    if settings.batching != "continuous":  # llama.cpp adds prompts to any step that has room
        found["llamacpp"] = {"parallel": seqs, "batch_size": budget}
    return found


FEWEST_CHUNK = 16
CHUNKS = 400
FINEST = 512
"""Below this many tokens every chunk is tried."""


@dataclass(frozen=True)
class _Engine:
    """Step times of a path at a percentile: factors of each phase on the typical latency.

    context: cached tokens of a decoding sequence, None for the trace's.  prompt: tokens of a prompt.
    """

    path: ExecutionPath
    factors: Mapping[str, float]
    context: float | None
    prompt: float

    def decode_ms(self, D: FloatArray) -> FloatArray:
        """Steps of D (n,) decoding sequences."""
        none = np.zeros_like(D)
        cached = {} if self.context is None else {"context_tokens": D * self.context, "prefill_context_tokens": none}
        steps = {"B": D, "S": D, "prefill_requests": none, "prefill_tokens": none, **cached}
        return self.factors[DECODE] * self.path.fit.latency_ms(**steps)

    def full_ms(self, D: float, P: FloatArray) -> list[FloatArray]:
        """Steps that a budget of D + P tokens and chunks of P (n,) allow, each kind at its slowest (n,): D decoding
        sequences beside a prompt's last chunk, behind all that is cached of it; such a chunk alone; the whole budget as
        last chunks of several prompts."""
        history = np.maximum(self.prompt - P, 0.0)
        chunk = np.minimum(P, self.prompt)
        several = np.minimum(np.ceil((D + P) / chunk), D + 1)
        return [
            self._prefill_ms(D, P, history, np.ones_like(P)),
            self._prefill_ms(0.0, P, history, np.ones_like(P)),
            self._prefill_ms(0.0, D + P, several * history, several),
        ]

    def first_token_ms(self, D: float, P: FloatArray) -> FloatArray:
        """A whole prompt in chunks of P (n,) beside D decoding sequences, without waiting, each chunk behind those
        before it. Where the cost of the cached tokens is convex this is at most too much."""
        chunk, one = np.minimum(P, self.prompt), np.ones_like(P)
        first = self._prefill_ms(D, chunk, np.zeros_like(P), one)
        last = self._prefill_ms(D, chunk, self.prompt - chunk, one)
        return np.asarray(np.ceil(self.prompt / P) * (first + last) / 2)

    def _prefill_ms(self, D: float, P: FloatArray, history: FloatArray, prompts: FloatArray) -> FloatArray:
        """Steps of D decoding sequences and P (n,) tokens of prompts (n,) behind cached ones (n,) of theirs."""
        steps = {"B": D + prompts, "S": D + P, "prefill_requests": prompts, "prefill_tokens": P}
        if self.path.fit.reads_context:
            each = self.path.fit.typical.get(CONTEXT, 0.0) if self.context is None else self.context
            steps |= {"context_tokens": D * each + history, "prefill_context_tokens": history}
        return self.factors[MIXED if D else PREFILL] * self.path.fit.latency_ms(**steps)


def prices_tokens(path: ExecutionPath) -> bool:
    """Whether the path knows what tokens beyond one a request cost: nominal numbers may not name it."""
    return path.nominal is None or path.nominal.per_token_ms > 0


def engine_settings(
    path: ExecutionPath, sla_ms: float, percentile: float, serving: ServingTargets, context: float | None = None
) -> Settings | Unknown:
    """Settings for the targets; the SLA stands for a missing TPOT. Unknown, with the reason, where none meets them."""
    if not prices_tokens(path):
        return Unknown(wording.no_price_of_tokens(path.label))
    phases = (DECODE, PREFILL, MIXED)
    factors = {phase: level_for(path, percentile, phase).factor for phase in phases}
    engine = _Engine(path, factors, context, float(serving.prompt_tokens))
    tpot = serving.tpot_ms or sla_ms
    D = np.arange(1.0, path.fit.largest_batch + 1)
    times = engine.decode_ms(D)
    within = np.flatnonzero(times <= tpot)
    if not len(within):
        level, fastest = level_for(path, percentile, DECODE), float(times.min())
        return Unknown(wording.no_decode_step(path.label, tpot, level.percentile, fastest, fastest / level.factor))
    most = int(D[within[-1]])
    if not path.fit.knows_prefill:
        return _decode_only(path, most, float(times[within[-1]]), tpot, serving)
    if most > 1 and float(path.fit.domain["S"][1]) <= most:
        return _decode_only(path, most, float(times[within[-1]]), tpot, serving)
    for decoding in _fewer(most):
        found = _with_prefill(engine, decoding, most, tpot, serving)
        if found is not None and found.max_num_seqs == 1 < most:
            return Unknown(wording.only_one_decodes(path.label, tpot, most))
        if found is not None:
            return found
    return Unknown(wording.no_chunk(path.label, tpot, serving.prompt_tokens, serving.ttft_ms))


def _with_prefill(engine: _Engine, decoding: int, most: int, tpot: float, serving: ServingTargets) -> Settings | None:
    """The largest chunk beside so many decoding sequences that meets both targets; None where there is none."""
    top = float(engine.path.fit.domain["S"][1])
    P = _chunks(top - decoding)
    if not len(P):
        return None
    kinds = engine.full_ms(float(decoding - 1), P)
    # What no chunk cures is no reason to choose one: it is told instead.
    curable = [kind for kind in kinds if kind.min() <= tpot]
    if not curable or kinds[0].min() > tpot:
        return None
    times = np.asarray(np.max(curable, axis=0))
    ttft = engine.first_token_ms(float(decoding - 1), P)
    meets_tpot = times <= tpot
    meets_ttft = np.ones(len(P), bool) if serving.ttft_ms is None else ttft <= serving.ttft_ms
    both = np.flatnonzero(meets_tpot & meets_ttft)
    if not len(both):
        return None
    at = int(both[-1])
    budget = int(P[at]) + decoding - 1
    fewest = None if serving.ttft_ms is None else int(P[int(both[0])]) + decoding - 1
    limit = wording.MEASURED_LIMIT
    if at + 1 < len(P):
        limit = wording.TTFT_LIMIT if meets_tpot[at + 1] else wording.TPOT_LIMIT
    binding = wording.larger_steps(limit, budget)
    if decoding < most:
        binding = wording.more_sequences(decoding, for_ttft=serving.ttft_ms is not None)
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
        reason=wording.steps_within(tpot, serving.prompt_tokens, serving.ttft_ms, _uncured(kinds, tpot)),
        extrapolated=False,
    )


def _uncured(kinds: Sequence[FloatArray], tpot: float) -> float | None:
    """The slowest of the steps that miss the time between tokens whatever the chunk; None where all can meet it."""
    return max((float(kind.min()) for kind in kinds[1:] if kind.min() > tpot), default=None)


def _decode_only(path: ExecutionPath, most: int, last_ms: float, tpot: float, serving: ServingTargets) -> Settings:
    top = path.fit.largest_batch
    binding = wording.MEASURED_LIMIT if most == top else wording.TPOT_LIMIT
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
        reason=wording.decode_only(tpot),
        extrapolated=False,
    )


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
