"""Vidur's simulator on recorded arrivals, with its Sarathi policy and a cost that needs no profile.

Run by the Python that has Vidur's requirements, with Vidur's source on its path:
`PYTHONPATH=VIDUR python benchmarks/vidur_peer.py ARRIVALS.csv REQUESTS REPLICAS BLOCKS OUT.csv`. ARRIVALS has `t_s,
prompt_tokens, output_tokens`, OUT gets `ttft_ms, latency_ms` of each request in the order of arrival. Prints one JSON
object: steps, makespan_s, loop_cpu_s (processor time of the event loop alone). A step takes 8 + 0.05 tokens + 0.02 B
ms; chunk 2048, at most 256 requests, blocks of 16 tokens.
"""

import json
import sys
import tempfile
import time
from typing import Any

import pandas as pd

NOT_STORED = (
    "write_json_trace", "enable_chrome_trace", "store_plots", "store_operation_metrics",
    "store_token_completion_metrics", "store_request_metrics", "store_batch_metrics", "store_utilization_metrics",
)  # fmt: skip


def step_ms(tokens: int, requests: int) -> float:
    return 8 + 0.05 * tokens + 0.02 * requests


def build(arrivals: str, count: int, out: str, replicas: int, blocks: int) -> tuple[Any, dict[str, int]]:
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
            **dict.fromkeys(NOT_STORED, False),
            wandb_project=None,
        ),
    )
    return Simulator(made), steps


def main() -> None:
    """Serve the arrivals; write the times of requests."""
    arrivals, count, replicas, blocks, out = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        simulator, steps = build(arrivals, int(count), folder, int(replicas), int(blocks))
        requests = sorted((event._request for _, event in simulator._event_queue), key=lambda each: each.id)
        spent = time.process_time()
        simulator.run()
        spent = time.process_time() - spent
    ends = [(each.prefill_completed_at, each.completed_at, each.arrived_at) for each in requests]
    times = pd.DataFrame([((first - came) * 1000, (last - came) * 1000) for first, last, came in ends])
    times.to_csv(out, index=False, header=["ttft_ms", "latency_ms"])
    print(json.dumps({"steps": steps["count"], "makespan_s": simulator._time, "loop_cpu_s": spent}))


if __name__ == "__main__":
    main()
