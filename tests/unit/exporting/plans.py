"""Documents of plans, small enough to be read."""

import copy
import functools
from typing import Any

import latfit

FIT = {
    "fit": "h100.parquet", "model": "roofline", "error_pct": 6.4, "error_pct_by_phase": {"decode": 5.0, "mixed": 9.0},
    "path": "gpu", "system": {"path": "gpu", "hardware": "H100"},
}  # fmt: skip
TARGET = {"target": "p99 TTFT", "value_ms": 400.0, "interval": [380.0, 420.0], "limit_ms": 500.0, "met": True}
VLLM = {"max_num_seqs": 96, "max_num_batched_tokens": 4096, "long_prefill_token_threshold": 512}


def of_requests(**changed: Any) -> dict[str, Any]:
    """A plan of three engines, with some of its entries changed."""
    found: dict[str, Any] = {
        "kind": "serving",
        "request": "a request is mean 2,000 prompt and 300 output tokens",
        "rate_per_s": 40.0,
        "users": None,
        "feasible": True,
        "promise": "meets",
        "binding": "p99 TTFT",
        "targets": [TARGET],
        "replicas": {"value": 3},
        "engine": {"order": "fcfs", "prefix_hit_rate": 0.0, "kv_blocks": 1000, "block_size": 16},
        "engines": {
            "vllm": dict(VLLM),
            "sglang": {"max_running_requests": 96, "chunked_prefill_size": 4096, "enable_mixed_chunk": True},
            "trtllm": {"max_batch_size": 96, "max_num_tokens": 4096, "enable_chunked_prefill": True},
            "llamacpp": {"parallel": 96, "batch_size": 4096},
        },
        "tensor_parallel": None,
        "route": "round-robin",
        "kv_cache": "1,000 blocks (given)",
        "highest_rate_per_s": 47.39,
        "steps_may_be_slower_pct": 11.0,
        "fits": [FIT],
        "warnings": [{"code": "drift", "message": "Steps got slower.", "remedy": "Measure again."}],
        "unsupported": [],
        "notes": ["KV cache: 1,000 blocks (given)."],
    }
    return {**found, **changed}


def with_schedule(asked: list[list[float]], span_s: float, window_s: float = 1800.0) -> dict[str, Any]:
    """That plan with replicas over a day: from when on how many are asked for, 2 minutes ahead of what needs them."""
    windows = [{"t_s": k * window_s, "rate_per_s": 1.0, "replicas": 1} for k in range(round(span_s / window_s))]
    found = {
        "window_s": window_s, "start_up_s": 120.0, "windows": windows, "replicas_at": asked, "targets": [TARGET],
        "feasible": True, "replica_hours": 40.0, "slo_attainment": 1.0, "price_per_million_tokens": None,
        "fixed": {"replica_hours": 72.0, "slo_attainment": 1.0, "price_per_million_tokens": None},
    }  # fmt: skip
    return of_requests(schedule=found)


def with_pair(**changed: Any) -> dict[str, Any]:
    """That plan with one replica that prefills and two that decode beside it."""
    found = {
        "feasible": True, "prefill_replicas": 1, "replicas": 2, "transfer_ms": [2.0, 0.001], "engine": None,
        "engines": {"vllm": {**VLLM, "max_num_seqs": 128}}, "targets": [TARGET], "highest_rate_per_s": 44.0,
    }  # fmt: skip
    return of_requests(prefill_apart={**found, **changed})


@functools.cache
def _planned(paths: tuple[tuple[str, str], ...], sla: str, rate: str | None) -> dict[str, Any]:
    return latfit.plan(dict(paths), sla, rate).to_json()


def of_batches(sla: str = "20ms", rate: str = "400/s") -> dict[str, Any]:
    """CPU of 2 ms and a GPU of 12 ms and 0.05 ms a request, neither measured: a T_cut at 400/s."""
    paths = {"amx": "p50=1.3863ms", "gpu": "launch=12ms,slope=0.05ms"}
    return copy.deepcopy(_planned(tuple(paths.items()), sla, rate))


def of_steps() -> dict[str, Any]:
    """T = 4 + 0.1 B + 0.01 S: at 13 ms 81 requests decode, of which 64 were asked for."""
    return copy.deepcopy(_planned((("gpu", "launch=4ms,slope=0.1ms,per_token=0.01ms,max_batch=64"),), "13ms", None))
