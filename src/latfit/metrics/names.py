"""What serving engines call what they publish, in one table: for each quantity the names that versions have, the first
of which counts that a text holds.

- vLLM: https://docs.vllm.ai/en/stable/usage/metrics and earlier pages of it. Before 0.9 the KV and the prefix cache are
  called gpu_..., and time_per_output_token_seconds are distances of tokens.
- SGLang with --enable-metrics: https://docs.sglang.io/docs/references/production_metrics. Its plain token counters rise
  when requests end, `realtime_tokens_total` as steps are made; forward passes are counted by CUDA graph.
- TensorRT-LLM (`trtllm-serve` with return_perf_metrics; `/prometheus/metrics`): tokens are counted when requests end.
- Triton: requests and executions of any model, and the gauges of its TensorRT-LLM backend.
- llama.cpp's server with --metrics: tools/server/README.md of its repository. A prompt's tokens are counted when it is
  computed, generated ones when requests end, but calls of llama_decode and the slots that were busy in them as they are
  made; these as a mean since the start, of six digits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Name:
    """A name without the engine's prefix; only samples with these labels count; a value is so many units of ours."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    unit: float = 1.0


Names = Mapping[str, tuple[Name | str, ...]]


@dataclass(frozen=True)
class Engine:
    """What one engine publishes. prefixes: of its names.  gauges, counters, histograms: by our names, see `state`.
    facts: gauges that tell its settings, by the names of a recorder's provenance.  means: counters that are published
    as a mean since the start and what it is divided by.  live: whether what steps hold is counted as they are made, and
    not when requests end."""

    name: str
    prefixes: tuple[str, ...]
    gauges: Names
    counters: Names
    histograms: Names = field(default_factory=dict)
    facts: Names = field(default_factory=dict)
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    live: bool = True


_TIMES: Names = {
    "ttft": ("time_to_first_token_seconds",),
    "latency": ("e2e_request_latency_seconds",),
    "queue": ("request_queue_time_seconds", "queue_time_seconds"),
    "prefill": ("request_prefill_time_seconds",),
    "inference": ("request_inference_time_seconds",),
}


SLOT_STEPS = "slot_steps"
"""Requests of all steps so far, each in every one that it took part in."""


def _labelled(name: str, label: str, value: str) -> Name:
    return Name(name, {label: value})


VLLM = Engine(
    "vLLM",
    ("vllm:", "vllm_", "ray_vllm_"),
    gauges={
        "running": ("num_requests_running",),
        "waiting": ("num_requests_waiting",),
        "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    },
    counters={
        "prompt_tokens": ("prompt_tokens_total",),
        "prefill_tokens": (_labelled("prompt_tokens_by_source_total", "source", "local_compute"),),
        "generation_tokens": ("generation_tokens_total",),
        "finished": ("request_success_total",),
        "preemptions": ("num_preemptions_total",),
        "prefix_queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
        "prefix_hits": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
        "draft_tokens": ("spec_decode_num_draft_tokens_total",),
        "accepted_tokens": ("spec_decode_num_accepted_tokens_total",),
    },
    histograms={
        **_TIMES,
        "tpot": ("request_time_per_output_token_seconds",),
        "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "step_tokens": ("iteration_tokens_total",),
        "prompt_lengths": ("request_prompt_tokens",),
        "output_lengths": ("request_generation_tokens",),
    },
)

SGLANG = Engine(
    "SGLang",
    ("sglang:", "sglang_"),
    gauges={
        "running": ("num_running_reqs",),
        "waiting": ("num_queue_reqs",),
        "kv_usage": ("token_usage",),
    },
    counters={
        "prompt_tokens": ("prompt_tokens_total",),
        "prefill_tokens": (_labelled("realtime_tokens_total", "mode", "prefill_compute"),),
        "decode_tokens": (_labelled("realtime_tokens_total", "mode", "decode"),),
        "generation_tokens": ("generation_tokens_total",),
        "steps": ("cuda_graph_passes_total",),
        "finished": ("num_requests_total",),
        "preemptions": ("num_retracted_requests_total",),
        "prefix_queries": ("prompt_tokens_total",),
        "prefix_hits": ("cached_tokens_total",),
    },
    histograms={
        **_TIMES,
        "itl": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "prompt_lengths": ("prompt_tokens_histogram",),
        "output_lengths": ("generation_tokens_histogram",),
    },
    facts={"kv_capacity_tokens": ("max_total_num_tokens",), "block_size": ("page_size",)},
)

TRTLLM = Engine(
    "TensorRT-LLM",
    ("trtllm_", "trtllm:"),
    gauges={
        "running": ("num_requests_running",),
        "waiting": ("num_requests_waiting",),
        "kv_usage": ("kv_cache_utilization",),
    },
    counters={
        "prompt_tokens": ("prompt_tokens_total",),
        "generation_tokens": ("generation_tokens_total",),
        "finished": ("request_success_total", "num_requests_completed_total"),
        "prefix_hits": ("prompt_cached_tokens_total",),
        "prefix_queries": ("prompt_tokens_total",),
        "draft_tokens": ("spec_decode_num_draft_tokens_total",),
        "accepted_tokens": ("spec_decode_num_accepted_tokens_total",),
    },
    histograms={**_TIMES, "tpot": ("time_per_output_token_seconds",)},
    facts={
        "max_num_seqs": ("max_batch_size_runtime", "max_batch_size_static"),
        "max_num_batched_tokens": ("max_num_tokens_runtime",),
        "num_gpu_blocks": ("kv_cache_max_blocks",),
        "block_size": ("kv_cache_tokens_per_block",),
    },
    live=False,
)

LLAMA_CPP = Engine(
    "llama.cpp",
    ("llamacpp:", "llamacpp_"),
    gauges={
        "running": ("requests_processing",),
        "waiting": ("requests_deferred",),
        "kv_usage": ("kv_cache_usage_ratio",),
    },
    counters={
        "prompt_tokens": ("prompt_tokens_total",),
        "generation_tokens": ("tokens_predicted_total",),
        "steps": ("n_decode_total",),
    },
    means={SLOT_STEPS: ("n_busy_slots_per_decode", "n_decode_total")},
    live=False,
)

TRITON = Engine(
    "Triton",
    ("nv_",),
    gauges={
        "running": (_labelled("trt_llm_request_metrics", "request_type", "active"),),
        "waiting": ("inference_pending_request_count",),
        "kv_usage": (_labelled("trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "fraction"),),
    },
    counters={
        "finished": ("inference_request_success",),
        "samples": ("inference_count",),
        "steps": ("inference_exec_count",),
        "queue_ms": (Name("inference_queue_duration_us", unit=1e-3),),
        "compute_ms": (Name("inference_compute_infer_duration_us", unit=1e-3),),
        "request_ms": (Name("inference_request_duration_us", unit=1e-3),),
    },
    facts={
        "max_num_seqs": (_labelled("trt_llm_request_metrics", "request_type", "max"),),
        "num_gpu_blocks": (_labelled("trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "max"),),
        "block_size": (_labelled("trt_llm_kv_cache_block_metrics", "kv_cache_block_type", "tokens_per"),),
    },
)

ENGINES = (VLLM, SGLANG, TRTLLM, LLAMA_CPP, TRITON)

RANKS = ("tp_rank", "pp_rank", "moe_ep_rank")
"""Labels of processes that compute one engine's steps together: each publishes the same."""

REPLICAS = ("engine", "dp_rank", "model_name")
"""Labels of engines beside each other, which add up."""
