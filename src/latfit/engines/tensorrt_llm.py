"""TensorRT-LLM: `trtllm-serve` with return_perf_metrics, `/prometheus/metrics`. Tokens are counted when requests
end."""

from latfit.engines.engine import REQUEST_TIMES, Engine, Option, named

TENSORRT_LLM = Engine(
    "TensorRT-LLM",
    ("trtllm_", "trtllm:"),
    gauges=named(running="num_requests_running", waiting="num_requests_waiting", kv_usage="kv_cache_utilization"),
    counters=named(
        prompt_tokens="prompt_tokens_total",
        generation_tokens="generation_tokens_total",
        finished=("request_success_total", "num_requests_completed_total"),
        prefix_hits="prompt_cached_tokens_total",
        prefix_queries="prompt_tokens_total",
        draft_tokens="spec_decode_num_draft_tokens_total",
        accepted_tokens="spec_decode_num_accepted_tokens_total",
    ),
    histograms={**REQUEST_TIMES, **named(tpot="time_per_output_token_seconds")},
    facts=named(
        max_num_seqs=("max_batch_size_runtime", "max_batch_size_static"),
        max_num_batched_tokens="max_num_tokens_runtime",
        num_gpu_blocks="kv_cache_max_blocks",
        block_size="kv_cache_tokens_per_block",
    ),
    live=False,
    key="trtllm",
    options=(
        Option("requests", "max_batch_size"),
        Option("tokens", "max_num_tokens"),
        Option("chunked", "enable_chunked_prefill", True),
        Option("whole", "enable_chunked_prefill", False),
        Option("length", "max_seq_len"),
        Option("in_turn", "disable_overlap_scheduler", True),
        Option("parallel", "tensor_parallel_size"),
        Option("admission", "capacity_scheduler_policy", "MAX_UTILIZATION"),
    ),
    cache_help="TensorRT-LLM says at its start how many it has; kv_cache_config is unchanged.",
    steps_help="Record its iterations instead: latfit ingest reads what enable_iter_perf_stats publishes.",
)
