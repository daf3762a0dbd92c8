"""LatfitStatLogger: vLLM loads it from the entry points `vllm.stat_logger_plugins` and calls it for every step.

It runs in the event loop of vLLM's API server, where an exception fails every request in flight: each method catches
everything. Without vLLM this module imports all the same.
"""

import importlib
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from latfit.engines import engine_named
from latfit.errors import WrongUsage
from latfit.record.recorder import BY_REQUEST, Buffers, Step, StepRecorder
from latfit.trace import path_on
from latfit.units import parse_bytes

SCHEDULERS = "latfit.record.vllm_scheduler."  # these schedulers record the steps themselves
FACTS = (
    (
        "scheduler_config",
        "async_scheduling max_num_seqs max_num_batched_tokens long_prefill_token_threshold enable_chunked_prefill",
    ),
    ("parallel_config", "pipeline_parallel_size data_parallel_size distributed_executor_backend"),
    ("cache_config", "block_size enable_prefix_caching cache_dtype"),
    ("model_config", "max_model_len dtype quantization"),
    ("device_config", "device_type"),
)
LIMITS = (
    ("LATFIT_TRACE_ROWS", Buffers.rows_per_file, 1, 10_000_000),
    ("LATFIT_TRACE_PENDING", Buffers.max_pending, 0, 1000),
    ("LATFIT_TRACE_SECONDS", Buffers.flush_s, 1, 86_400),
)
"""Settings that are numbers: default, least and most."""
NO_REQUESTS = tuple(Step._field_defaults[name] for name in BY_REQUEST)

# A child of vLLM's logger: what is said appears among vLLM's own lines.
log = logging.getLogger("vllm.latfit")

if TYPE_CHECKING:

    class StatLoggerBase:
        """What vLLM's class of this name means to a type checker that may not have vLLM."""

else:
    try:
        StatLoggerBase = importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        StatLoggerBase = object


@dataclass(frozen=True)
class Settings:
    """Where to record, and how much to hold. Without `path`, vLLM's device decides it."""

    folder: Path
    buffers: Buffers = field(default_factory=Buffers)
    path: str | None = None


class OutputPeriods:
    """Times of steps under asynchronous scheduling, where vLLM reports only how long it waited for the result.

    A step takes from one output to the next: the time between tokens of a request that decodes in both; without one,
    the outputs' arrival here counts, and behind a pause the wait.
    """

    def __init__(self) -> None:
        self._last_s = 0.0
        self._paused = True

    def step_ms(self, waited_ms: float, now_s: float, scheduler_stats: Any, iteration_stats: Any) -> float:
        paused, self._paused = self._paused, scheduler_stats.num_running_reqs + scheduler_stats.num_waiting_reqs == 0
        last_s, self._last_s = self._last_s, now_s
        if paused:
            return waited_ms
        periods_s = getattr(iteration_stats, "inter_token_latencies_iter", None)
        return 1e3 * min(periods_s) if periods_s else max(waited_ms, 1e3 * (now_s - last_s))


class LatfitStatLogger(StatLoggerBase):
    """Record the steps of one vLLM engine."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.recorder: StepRecorder | None = None
        self._config = vllm_config
        self._flag: bool | None = None
        self._periods: OutputPeriods | None = None
        try:
            settings = settings_from(os.environ)
            if settings is None:
                return
            if str(getattr(vllm_config.scheduler_config, "scheduler_cls", "")).startswith(SCHEDULERS):
                log.info("latfit records in the engine's scheduler, not here")
                return
            self.recorder = recorder_of(settings, vllm_config, engine_index)
            if self.recorder.check_folder():
                log.info("latfit records the steps of engine %d into %s", engine_index, settings.folder)
            self._flag = getattr(vllm_config.observability_config, "enable_logging_iteration_details", None)
            if self._flag is False:
                self._say_flag()
            if getattr(vllm_config.scheduler_config, "async_scheduling", False):
                self._periods = OutputPeriods()
            server, servers = _api_server(vllm_config)
            if servers > 1:
                text = "API server %d of %d: each is told of a part of the engines' steps, and none of the others; "
                log.warning(text + "start one (--api-server-count 1) to measure", server + 1, servers)
        except Exception as error:  # noqa: BLE001  a server that starts matters more than its trace
            log.warning("latfit records nothing (%s: %s)", type(error).__name__, error)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any = None, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Take the step that `scheduler_stats` describes, if any. vLLM makes a logger for each engine."""
        recorder = self.recorder
        if recorder is None or scheduler_stats is None:
            return
        try:
            for seconds in getattr(iteration_stats, "time_to_first_tokens_iter", ()):
                recorder.add_time("ttft_ms", 1e3 * seconds)
            for ended in getattr(iteration_stats, "finished_requests", ()):
                recorder.add_time("tpot_ms", 1e3 * getattr(ended, "mean_time_per_output_token", 0.0))
            details = getattr(scheduler_stats, "iteration_details", None)
            if details is None:
                # With the flag, statistics between two steps have none; a config that doesn't know it is too old.
                if self._flag is None:
                    self._say_flag()
                return
            prefix = getattr(scheduler_stats, "prefix_cache_stats", None)
            drafts = getattr(scheduler_stats, "spec_decoding_stats", None)
            now_s, T_ms, waited_ms = monotonic(), details.elapsed_ms, math.nan
            if self._periods is not None and not details.is_dummy:
                waited_ms = T_ms
                T_ms = self._periods.step_ms(T_ms, now_s, scheduler_stats, iteration_stats)
            recorder.add(
                (
                    details.iteration_index,
                    T_ms,
                    details.num_ctx_requests,
                    details.num_ctx_tokens,
                    details.num_generation_requests,
                    details.num_generation_tokens,
                    scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs,
                    scheduler_stats.kv_cache_usage,
                    details.num_encoder_inputs,
                    details.num_encoder_output_tokens,
                    details.is_dummy,
                    getattr(iteration_stats, "num_preempted_reqs", 0),
                    0 if prefix is None else prefix.queries,
                    0 if prefix is None else prefix.hits,
                    0 if drafts is None else drafts.num_draft_tokens,
                    0 if drafts is None else drafts.num_accepted_tokens,
                    waited_ms,
                    *NO_REQUESTS,
                ),
                now_s,
            )
        except Exception as error:  # noqa: BLE001  see the module's text
            recorder.refuse(error)

    def log_engine_initialized(self) -> None:
        if self.recorder is None:
            return
        try:
            self.recorder.kv_capacity_tokens = kv_capacity_tokens(self._config)
        except Exception as error:  # noqa: BLE001  see the module's text
            log.warning("latfit records no context tokens (%s: %s)", type(error).__name__, error)

    def log(self) -> None:
        """Do nothing: vLLM calls it every ten seconds."""

    def close(self) -> None:
        """Write what is pending. vLLM never calls it; the end of the process does."""
        if self.recorder is not None:
            self.recorder.close()

    def _say_flag(self) -> None:
        self._flag = False
        vllm = engine_named("vLLM")
        text = "latfit sees no steps: start vLLM (%s) with %s"
        log.warning(text, vllm.recording_versions, vllm.recording_flag)


def settings_from(environment: Mapping[str, str]) -> Settings | None:
    """Return the settings in `LATFIT_TRACE_…`; None without a folder. A bad value gives the default."""
    folder = environment.get("LATFIT_TRACE_DIR", "").strip()
    if not folder:
        log.info("latfit records nothing: set LATFIT_TRACE_DIR to a folder for its traces")
        return None
    numbers = []
    for name, default, low, high in LIMITS:
        text, number = environment.get(name, "").strip(), math.nan
        with suppress(ValueError):
            number = float(text or default)
        if not low <= number <= high:
            log.warning("latfit: %s=%r is not a number from %g to %g; %g is used", name, text, low, high, default)
            number = default
        numbers.append(number)
    size = environment.get("LATFIT_TRACE_KEEP", "").strip()
    try:
        keep_bytes = parse_bytes(size, option="LATFIT_TRACE_KEEP") if size else None
    except WrongUsage:
        log.warning("latfit: LATFIT_TRACE_KEEP=%r is not a size such as 20GB; all files are kept", size)
        keep_bytes = None
    buffers = Buffers(int(numbers[0]), int(numbers[1]), numbers[2], keep_bytes=keep_bytes)
    return Settings(Path(folder).expanduser(), buffers, environment.get("LATFIT_TRACE_PATH", "").strip() or None)


def kv_capacity_tokens(config: Any) -> int | None:
    """Return the tokens of one engine's KV cache; None if the config has none, or only for all engines."""
    cache = config.cache_config
    tokens = getattr(cache, "kv_cache_size_tokens", None)
    if tokens:
        return int(tokens)
    blocks, size = getattr(cache, "num_gpu_blocks", None), getattr(cache, "block_size", None)
    if not blocks or not size or config.parallel_config.data_parallel_size > 1:
        return None
    return int(blocks) * int(size)


def recorder_of(settings: Settings, config: Any, engine_index: int, *, by_request: bool = False) -> StepRecorder:
    device = str(config.device_config.device_type)
    recorder = StepRecorder(
        settings.folder,
        replica=str(engine_index),
        buffers=settings.buffers,
        labels={
            "path": settings.path or path_on(device),
            "hardware": _of_vllm("vllm.platforms", "current_platform.get_device_name") or device,
            "model": str(getattr(config.model_config, "model", "unknown")),
            "tp": int(config.parallel_config.tensor_parallel_size),
        },
        facts=_facts(config, "vllm scheduler" if by_request else "vllm stat logger"),
        log=log,
    )
    recorder.by_request = by_request
    recorder.advice = "set LATFIT_TRACE_DIR to a folder that this process can write"
    recorder.kv_capacity_tokens = kv_capacity_tokens(config)
    return recorder


def _facts(config: Any, source: str) -> dict[str, Any]:
    settings = [(getattr(config, part, None), name) for part, names in FACTS for name in names.split()]
    found = {name: getattr(part, name) for part, name in settings if hasattr(part, name)}
    plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in found.items()}
    server, servers = _api_server(config)
    return {
        "source": source,
        "vllm": _of_vllm("vllm", "__version__"),
        **plain,
        "num_speculative_tokens": draft_tokens(config),
        "api_server": server,
        "api_servers": servers,
    }


def draft_tokens(config: Any) -> int | None:
    """None if unknown."""
    drafts = getattr(config, "speculative_config", None)
    if drafts is None:
        return 0 if hasattr(config, "speculative_config") else None
    tokens = getattr(drafts, "num_speculative_tokens", None)
    return tokens if isinstance(tokens, int) else None


def _api_server(config: Any) -> tuple[int, int]:
    """Return which of how many API servers this process is: each sees the steps whose tokens it sends."""
    parallel = getattr(config, "parallel_config", None)
    servers = getattr(parallel, "_api_process_count", 1)
    server = getattr(parallel, "_api_process_rank", 0)
    return (max(server, 0), servers) if isinstance(server, int) and isinstance(servers, int) else (0, 1)


def _of_vllm(module: str, name: str) -> str | None:
    """Return a text of vLLM, or what its function returns; None if there is none."""
    try:
        found = attrgetter(name)(importlib.import_module(module))
        text: str = found() if callable(found) else found
        return text or None
    except Exception:  # noqa: BLE001  drivers fail in many ways, and a label is not worth any of them
        return None
