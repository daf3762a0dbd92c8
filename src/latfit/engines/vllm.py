"""vLLM: https://docs.vllm.ai/en/stable/usage/metrics. Before 0.9 the KV and the prefix cache are called gpu_..., and
time_per_output_token_seconds are distances of tokens."""

from latfit.engines.engine import FIRST_COME, REQUEST_TIMES, Engine, Option, labelled, named

VLLM = Engine(
    "vLLM",
    ("vllm:", "vllm_", "ray_vllm_"),
    gauges=named(
        running="num_requests_running",
        waiting="num_requests_waiting",
        kv_usage=("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ),
    counters=named(
        prompt_tokens="prompt_tokens_total",
        prefill_tokens=labelled("prompt_tokens_by_source_total", "source", "local_compute"),
        generation_tokens="generation_tokens_total",
        finished="request_success_total",
        preemptions="num_preemptions_total",
        prefix_queries=("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
        prefix_hits=("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
        draft_tokens="spec_decode_num_draft_tokens_total",
        accepted_tokens="spec_decode_num_accepted_tokens_total",
    ),
    histograms={
        **REQUEST_TIMES,
        **named(
            tpot="request_time_per_output_token_seconds",
            itl=("inter_token_latency_seconds", "time_per_output_token_seconds"),
            step_tokens="iteration_tokens_total",
            prompt_lengths="request_prompt_tokens",
            output_lengths="request_generation_tokens",
        ),
    },
    settings={
        name: name for name in ("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "num_speculative_tokens")
    },
    recording_flag="--enable-logging-iteration-details",
    recording_versions="0.27 or newer",
    graph_sizes="cudagraph_capture_sizes",
    passes_flag="--forward-pass-metrics-port",
    key="vllm",
    options=(
        Option("requests", "max_num_seqs"),
        Option("tokens", "max_num_batched_tokens"),
        Option("chunk", "long_prefill_token_threshold"),
        Option("chunked", "enable_chunked_prefill", True),
        Option("whole", "enable_chunked_prefill", False),
        Option("length", "max_model_len"),
        Option("priority", "scheduling_policy", "priority"),
        Option("in_turn", "async_scheduling", False),
        Option("parallel", "tensor_parallel_size"),
        Option("prefix", "enable_prefix_caching", True),
    ),
    orders=(FIRST_COME, "priority"),
    program=("vllm", "serve"),
    negatable=True,
    cache_help="vLLM says at its start how many it has (`KV cache size`); --gpu-memory-utilization is unchanged.",
    settings_places=("/server_info?config_format=json",),  # with VLLM_SERVER_DEV_MODE=1
    info=(
        "cache_config_info",
        {
            "block_size": "block_size",
            "num_gpu_blocks": "num_gpu_blocks",
            "kv_cache_size_tokens": "kv_capacity_tokens",
            "enable_prefix_caching": "enable_prefix_caching",
        },
    ),
)
