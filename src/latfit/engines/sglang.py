"""SGLang: https://docs.sglang.io/docs/references/production_metrics.

Its plain token counters rise when requests end, `realtime_tokens_total` as steps are made; forward passes are counted
by CUDA graph.
"""

from latfit.engines.engine import FIRST_COME, REQUEST_TIMES, Engine, Option, labelled, named

SGLANG = Engine(
    "SGLang",
    ("sglang:", "sglang_"),
    gauges=named(running="num_running_reqs", waiting="num_queue_reqs", kv_usage="token_usage"),
    counters=named(
        prompt_tokens="prompt_tokens_total",
        prefill_tokens=labelled("realtime_tokens_total", "mode", "prefill_compute"),
        decode_tokens=labelled("realtime_tokens_total", "mode", "decode"),
        generation_tokens="generation_tokens_total",
        steps="cuda_graph_passes_total",
        finished="num_requests_total",
        preemptions="num_retracted_requests_total",
        prefix_queries="prompt_tokens_total",
        prefix_hits="cached_tokens_total",
    ),
    histograms={
        **REQUEST_TIMES,
        **named(
            itl=("inter_token_latency_seconds", "time_per_output_token_seconds"),
            prompt_lengths="prompt_tokens_histogram",
            output_lengths="generation_tokens_histogram",
        ),
    },
    facts=named(kv_capacity_tokens="max_total_num_tokens", block_size="page_size"),
    settings={"max_running_requests": "max_num_seqs", "chunked_prefill_size": "max_num_batched_tokens"},
    settings_places=("/get_server_info", "/server_info"),
    metrics_help="--enable-metrics",
    recording_flag="--enable-metrics",
    steps_help="Start SGLang of a version that publishes cuda_graph_passes_total and realtime_tokens_total.",
    port=30000,
    graph_sizes="cuda_graph_bs",
    passes_flag="--enable-forward-pass-metrics",
    key="sglang",
    options=(
        Option("requests", "max_running_requests"),
        Option("tokens", "chunked_prefill_size"),
        Option("chunked", "enable_mixed_chunk", True),
        Option("whole", "chunked_prefill_size", -1),
        Option("whole", "max_prefill_tokens"),
        Option("length", "context_length"),
        Option("priority", "enable_priority_scheduling", True),
        Option("in_turn", "disable_overlap_schedule", True),
        Option("gpu_prompts", "kt_gpu_prefill_token_threshold"),  # of KTransformers' build
        Option("parallel", "tensor_parallel_size"),
    ),
    orders=(FIRST_COME, "priority"),
    program=("python3", "-m", "sglang.launch_server"),
    model_option=("--model-path",),
    cache_help="SGLang says at its start how many it has (`max_total_num_tokens`); --mem-fraction-static is unchanged.",
)
