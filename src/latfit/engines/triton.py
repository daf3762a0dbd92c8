"""Triton: requests and executions of any model, and the gauges of its TensorRT-LLM backend."""

from latfit.engines.engine import Engine, Name, Option, labelled, named

CACHE = "trt_llm_kv_cache_block_metrics"
REQUESTS = "trt_llm_request_metrics"

TRITON = Engine(
    "Triton",
    ("nv_",),
    gauges=named(
        running=labelled(REQUESTS, "request_type", "active"),
        waiting="inference_pending_request_count",
        kv_usage=labelled(CACHE, "kv_cache_block_type", "fraction"),
    ),
    counters=named(
        finished="inference_request_success",
        samples="inference_count",
        steps="inference_exec_count",
        queue_ms=Name("inference_queue_duration_us", unit=1e-3),
        compute_ms=Name("inference_compute_infer_duration_us", unit=1e-3),
        request_ms=Name("inference_request_duration_us", unit=1e-3),
    ),
    facts=named(
        max_num_seqs=labelled(REQUESTS, "request_type", "max"),
        num_gpu_blocks=labelled(CACHE, "kv_cache_block_type", "max"),
        block_size=labelled(CACHE, "kv_cache_block_type", "tokens_per"),
    ),
    busiest_by="inference_compute_infer_duration_us",
    metrics_help="its metrics' port, 8002",
    port=8002,
    key="triton",
    options=(Option("requests", "max_batch_size"),),
)
