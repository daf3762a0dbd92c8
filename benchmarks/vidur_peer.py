"""Vidur's simulator on recorded arrivals, with its Sarathi policy and a cost that needs no profile.

Run by the Python that has Vidur's requirements, with Vidur's source on its path:
`PYTHONPATH=VIDUR python benchmarks/vidur_peer.py ARRIVALS.csv REQUESTS [REPLICAS BLOCKS CSV [vllm]]`. ARRIVALS has
`t_s, prompt_tokens, output_tokens`. Prints one JSON object: requests, steps, makespan_s, loop_s (the event loop alone,
wall clock), loop_cpu_s (processor time). CSV: a file for each request's `ttft_ms, latency_ms`, in the order of arrival.
vllm: with vLLM's rules where the cache is full (`like_vllm`). A step takes 8 + 0.05 tokens + 0.02 B ms; chunk 2048, at
most 256 requests, 40,000 blocks of 16 tokens, one replica.
"""

import json
import sys
import tempfile
import time
from typing import Any

import pandas as pd


def step_ms(tokens: int, requests: int) -> float:
    return 8 + 0.05 * tokens + 0.02 * requests


def build(arrivals: str, count: int, out: str, replicas: int = 1, blocks: int = 40_000) -> tuple[Any, dict[str, int]]:
    """(Vidur's simulator, a counter of its steps)."""
    import vidur.config as config
    from vidur.entities import ExecutionTime
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.simulator import Simulator

    rows = pd.read_csv(arrivals).head(count)
    trace = f"{out}/trace.csv"
    names = {"t_s": "arrived_at", "prompt_tokens": "num_prefill_tokens", "output_tokens": "num_decode_tokens"}
    rows.rename(columns=names)[list(names.values())].to_csv(trace, index=False)
    steps = {"count": 0}

    class Predictor:
        def get_execution_time(self, batch: Any, stage: int) -> Any:
            steps["count"] += 1
            return ExecutionTime(1, step_ms(sum(batch.num_tokens), len(batch.requests)), *([0.0] * 18))

    ExecutionTimePredictorRegistry.get = classmethod(lambda cls, *args, **kwargs: Predictor())
    Simulator._write_output = lambda simulator: None  # registered to run at exit, where the folder is gone
    made = config.SimulationConfig(
        time_limit=0,
        cluster_config=config.ClusterConfig(
            num_replicas=replicas,
            replica_config=config.ReplicaConfig(model_name="meta-llama/Llama-2-7b-hf", device="a100"),
            replica_scheduler_config=config.SarathiSchedulerConfig(
                batch_size_cap=256, block_size=16, watermark_blocks_fraction=0.0, num_blocks=blocks, chunk_size=2048
            ),
        ),
        request_generator_config=config.TraceRequestGeneratorConfig(
            trace_file=trace, prefill_scale_factor=1, decode_scale_factor=1, time_scale_factor=1, max_tokens=32_768
        ),
        metrics_config=config.MetricsConfig(
            output_dir=out,
            write_metrics=False,
            write_json_trace=False,
            enable_chrome_trace=False,
            store_plots=False,
            store_operation_metrics=False,
            store_token_completion_metrics=False,
            store_request_metrics=False,
            store_batch_metrics=False,
            store_utilization_metrics=False,
            wandb_project=None,
        ),
    )
    return Simulator(made), steps


def like_vllm() -> None:
    """A request that decodes needs a free block only where its last one is full, and none is admitted in a step that
    preempted another. (What stays: the whole prompt's blocks are taken at admission, not chunk by chunk.)"""
    from vidur.entities import Request
    from vidur.scheduler.replica_scheduler.sarathi_replica_scheduler import SarathiReplicaScheduler as Scheduler

    restart, can_allocate, next_batch = Request.restart, Scheduler._can_allocate_request, Scheduler._get_next_batch
    step = {"preempted": False}

    def restarted(request: Any) -> None:
        step["preempted"] = True
        restart(request)

    def allowed(scheduler: Any, request: Any) -> bool:
        held = scheduler._allocation_map.get(request.id)
        if held is None:
            return not step["preempted"] and bool(can_allocate(scheduler, request))
        room = held * scheduler._config.block_size
        return bool(request.num_processed_tokens <= room or can_allocate(scheduler, request))

    def planned(scheduler: Any) -> Any:
        step["preempted"] = False
        return next_batch(scheduler)

    Request.restart, Scheduler._can_allocate_request, Scheduler._get_next_batch = restarted, allowed, planned


def main() -> None:
    given = sys.argv[3:]
    if "vllm" in given:
        like_vllm()
    with tempfile.TemporaryDirectory() as out:
        simulator, steps = build(sys.argv[1], int(sys.argv[2]), out, *(int(each) for each in given[:2]))
        requests = sorted((event._request for _, event in simulator._event_queue), key=lambda each: each.id)
        started, spent = time.perf_counter(), time.process_time()
        simulator.run()
        loop_s, loop_cpu_s = time.perf_counter() - started, time.process_time() - spent
        answer = {
            "requests": int(sys.argv[2]),
            "steps": steps["count"],
            "makespan_s": simulator._time,
            "loop_s": loop_s,
            "loop_cpu_s": loop_cpu_s,
        }
    if len(given) > 2:
        ends = [(each.prefill_completed_at, each.completed_at, each.arrived_at) for each in requests]
        times = pd.DataFrame([((first - came) * 1000, (last - came) * 1000) for first, last, came in ends])
        times.to_csv(given[2], index=False, header=["ttft_ms", "latency_ms"])
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
