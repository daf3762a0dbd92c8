"""The plan in the words of serving engines: which setting takes which number, and why.

An engine that batches step by step (vLLM, SGLang, TensorRT-LLM) takes the limits of a step. One that batches whole
requests (Triton, a TensorRT engine) takes the largest batch within the SLA, the batch that pays off the launch, and how
long to wait for it: none for greedy batching, else until the stopping batch of the amortised rule is there on average.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from latfit.hardware.estimate import batch_steps, phase_of
from latfit.hardware.profile import ExecutionPath
from latfit.plan.limits import level_for
from latfit.plan.result import Cutoff, Plan, Settings
from latfit.plan.thresholds import batches_of

US_PER_MS = 1000

Flags = Mapping[str, Any]


def largest_batch(
    path: ExecutionPath, sla_ms: float, percentile: float, tokens: int, context: float | None = None
) -> int | None:
    """The most requests of so many tokens that one measured step computes within the SLA; None where none does."""
    B = batches_of(path, tokens=tokens)
    T = level_for(path, percentile, phase_of(tokens)).factor * path.fit.latency_ms(**batch_steps(B, tokens, context))
    within = np.flatnonzero(sla_ms >= T)
    return int(B[within[-1]]) if len(within) else None


def engine_flags(plan: Plan, largest: int | None) -> dict[str, Flags]:
    """Settings by engine, under the names that the engines use. largest: the largest whole batch within the SLA."""
    found: dict[str, Flags] = {}
    if isinstance(plan.settings, Settings):
        found |= _by_step(plan.settings, plan)
    if largest is not None:
        found |= _by_batch(plan, largest)
    return found


def _by_step(settings: Settings, plan: Plan) -> dict[str, Flags]:
    seqs, budget, chunk = settings.max_num_seqs, settings.max_num_batched_tokens, settings.chunk_tokens
    vllm: dict[str, Any] = {"max_num_seqs": seqs}
    sglang: dict[str, Any] = {"max_running_requests": seqs}
    trtllm: dict[str, Any] = {"max_batch_size": seqs}
    if budget is not None and chunk is not None:
        vllm |= {
            "max_num_batched_tokens": budget,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": chunk,
        }
        sglang["chunked_prefill_size"] = chunk
        trtllm["max_num_tokens"] = budget
    if plan.B1_tokens.value is not None and plan.B1_tokens.value > 1:
        sglang["kt_gpu_prefill_token_threshold"] = plan.B1_tokens.value
    return {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def _by_batch(plan: Plan, largest: int) -> dict[str, Flags]:
    paying = next((t.value for t in (plan.B2, plan.knee) if t.value is not None), None)
    preferred = min(paying, largest) if paying else largest
    triton: dict[str, Any] = {
        "max_batch_size": largest,
        "preferred_batch_size": sorted({preferred, largest}),
        "max_queue_delay_microseconds": _delay_us(plan),
    }
    if isinstance(plan.T_cut, Cutoff) and plan.T_cut.value is not None:
        triton["default_timeout_microseconds"] = int(plan.T_cut.value * US_PER_MS)
    return {"triton": triton, "tensorrt": {"min_batch": 1, "opt_batch": preferred, "max_batch": largest}}


def _delay_us(plan: Plan) -> int:
    """Until the amortised stopping batch is there on average, less than what the SLA leaves; 0 is greedy batching."""
    stop = next((rule.batch for rule in plan.rules if rule.rule == "amortised"), 1)
    chosen = next((row for row in plan.alternatives if row.chosen), None)
    if stop <= 1 or plan.rate_per_s is None or chosen is None or "amortised" not in chosen.name:
        return 0
    wait_ms = (stop - 1) / plan.rate_per_s * 1e3
    spare_ms = plan.sla_ms - (chosen.percentile_ms or plan.sla_ms)
    return int(min(wait_ms, max(spare_ms, 0.0)) * US_PER_MS)
