"""A stat logger that writes what vLLM itself found of every finished request, a JSON line each, into the file that
LATFIT_ENGINE_LOOP names. Histograms of `/metrics` tell quantiles only as buckets; this is what goes into them.

Loaded by vLLM in its API process from an entry point, so it imports nothing of latfit.
"""

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase  # type: ignore[import-not-found, unused-ignore]

FIELDS = (
    "request_id",
    "num_prompt_tokens",
    "num_generation_tokens",
    "num_preemptions",
    "num_cached_tokens",
    "queued_time",
    "prefill_time",
    "inference_time",
    "decode_time",
    "mean_time_per_output_token",
    "e2e_latency",
)


class RequestProbe(StatLoggerBase):  # type: ignore[misc, unused-ignore]
    """Of one engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        name = os.environ.get("LATFIT_ENGINE_LOOP")
        self.file = Path(name).open("a", buffering=1) if name else None  # noqa: SIM115  as long as the server lives

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, **_: Any) -> None:
        """One line for each request that ended with this step, one for the first tokens in it."""
        if self.file is None or iteration_stats is None:
            return
        if iteration_stats.time_to_first_tokens_iter:
            print(json.dumps({"ttft": iteration_stats.time_to_first_tokens_iter}), file=self.file)
        now_s = iteration_stats.iteration_timestamp
        for each in iteration_stats.finished_requests:
            told = {name: getattr(each, name, None) for name in FIELDS}
            print(json.dumps({**told, "arrival": now_s - each.e2e_latency}), file=self.file)

    def log_engine_initialized(self) -> None:
        """Nothing."""

    def log(self) -> None:
        """Nothing."""
