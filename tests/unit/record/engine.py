"""A stand-in for vLLM: its statistics' dataclasses (fields as in 0.26 to 0.33), its config, and an engine's loop; and
ways to look at what was recorded."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from latfit.model.formulas import Saturation
from latfit.trace.parquet import read_parquet
from tests.conftest import REFERENCE


@dataclass
class IterationDetails:
    iteration_index: int
    num_ctx_requests: int
    num_ctx_tokens: int
    num_generation_requests: int
    num_generation_tokens: int
    elapsed_ms: float
    num_encoder_inputs: int = 0
    num_encoder_output_tokens: int = 0
    is_dummy: bool = False


@dataclass
class PrefixCacheStats:
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass
class SpecDecodingStats:
    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass
class FinishedRequestStats:
    mean_time_per_output_token: float = 0.0


@dataclass
class IterationStats:
    num_preempted_reqs: int = 0
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)


@dataclass
class SchedulerStats:
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    iteration_details: IterationDetails | None = None
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    spec_decoding_stats: SpecDecodingStats | None = None


CAPACITY_TOKENS = 100_000


def config(**changes: Any) -> SimpleNamespace:
    """The parts of a VllmConfig that latfit reads; `changes` are by part: cache_config={"block_size": 32}."""
    parts: dict[str, dict[str, Any]] = {
        "observability_config": {"enable_logging_iteration_details": True},
        "scheduler_config": {"async_scheduling": False, "max_num_seqs": 256, "max_num_batched_tokens": 8192},
        "parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        "cache_config": {"block_size": 16, "num_gpu_blocks": None, "kv_cache_size_tokens": CAPACITY_TOKENS},
        "model_config": {"model": "org/model-8b", "max_model_len": 4096, "dtype": "bfloat16"},
        "device_config": {"device_type": "cuda"},
    }
    return SimpleNamespace(
        **{part: SimpleNamespace(**{**facts, **changes.get(part, {})}) for part, facts in parts.items()}
    )


def engine_loop(steps: int, seed: int = 0) -> Iterator[SchedulerStats]:
    """Decode with a prefill chunk now and then; the latency is the reference model's, without noise."""
    random = np.random.default_rng(seed)
    for step in range(steps):
        prefill = int(random.random() < 0.4)
        chunk = int(2 ** random.integers(2, 12)) if prefill else 0
        decode = int(2 ** random.integers(0, 8))
        B, S = np.array([float(prefill + decode)]), np.array([float(chunk + decode)])
        T = float(Saturation().latency_ms(REFERENCE, {"B": B, "S": S})[0])
        details = IterationDetails(step, prefill, chunk, decode, decode, T)
        yield SchedulerStats(decode + prefill, int(random.integers(0, 5)), 1, step, 0, float(random.random()), details)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def steps_in(folder: Path) -> list[int]:
    return [step for file in files(folder) for step in read_parquet(file)["step"].tolist()]


def until(happened: Callable[[], object], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
