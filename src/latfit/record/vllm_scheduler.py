"""vLLM's schedulers with a record of the steps they plan, and of the requests of each step.

`vllm serve MODEL --scheduler-cls latfit.record.vllm_scheduler.RecordingScheduler`. A step's T is from when it was
planned, or the one before had ended, to its result. Without vLLM this module imports all the same.
"""

import importlib
import os
from collections import deque
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

from latfit.record.recorder import Row, StepRecorder
from latfit.record.vllm_plugin import draft_tokens, log, recorder_of, settings_from

if TYPE_CHECKING:

    class Scheduler:
        """What vLLM's classes mean to a type checker that may not have vLLM."""

        vllm_config: Any
        requests: Mapping[str, Any]

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def make_stats(self, *args: Any, **kwargs: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any: ...
        def shutdown(self) -> None: ...

    AsyncScheduler = Scheduler
else:
    try:
        Scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
        AsyncScheduler = importlib.import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        Scheduler = AsyncScheduler = object


Terms = tuple[int, int, int, int, float, int, int]
"""Sums over a step's requests, as in `Step`: prefill requests and tokens, then the fields `BY_REQUEST`."""
NO_TERMS: Terms = (0, 0, 0, 0, 0.0, 0, 0)


def terms_of(scheduled: Mapping[str, int], requests: Mapping[str, Any], drafts: int) -> Terms:
    """Sum up a step with `scheduled` tokens by request, which count as computed already.

    A request decodes if its whole prompt is cached and it computes at most 1 + `drafts` tokens; else it is in prefill.
    """
    n = P = K = KP = L = again = 0
    A = 0.0
    for name, p in scheduled.items():
        request = requests[name]
        k = request.num_computed_tokens - p
        K += k
        if p <= 1 + drafts and k >= request.num_prompt_tokens:
            continue
        n += 1
        P += p
        KP += k
        A += p * (k + 0.5 * p)
        L = max(L, k + p)
        if request.num_output_tokens:
            again += p
    return n, P, K, KP, A, L, again


class StepsInFlight:
    """Steps of one engine between planning and result. `latest`: statistics of the last step, or None."""

    def __init__(self, recorder: StepRecorder, drafts: int) -> None:
        self.recorder = recorder
        self.drafts = drafts
        self.latest: Any = None
        self._planned: deque[tuple[Any, float, Terms]] = deque()
        self._last_end = 0.0
        self._count = 0

    def plan(self, output: Any, requests: Mapping[str, Any]) -> None:
        """Never raises."""
        try:
            terms = terms_of(output.num_scheduled_tokens, requests, self.drafts)
            self._planned.append((output, monotonic(), terms))
        except Exception as error:  # noqa: BLE001  the engine must outlive what is recorded of it
            self.recorder.refuse(error)

    def end(self, output: Any, ended_s: float, waiting: int) -> None:
        """Never raises."""
        try:
            planned: Any = None
            planned_s, terms = 0.0, NO_TERMS
            while self._planned and planned is not output:  # earlier ones without a result are forgotten
                planned, planned_s, terms = self._planned.popleft()
            began_s = max(planned_s, self._last_end)
            self._last_end = ended_s
            if planned is output and output.total_num_scheduled_tokens > 0:
                self.recorder.add(self._step(output, terms, 1e3 * (ended_s - began_s), waiting), ended_s)
                self._count += 1
        except Exception as error:  # noqa: BLE001  see above
            self.recorder.refuse(error)

    def _step(self, output: Any, terms: Terms, T_ms: float, waiting: int) -> Row:
        stats, tokens = self.latest, output.total_num_scheduled_tokens
        prefix, drafts = getattr(stats, "prefix_cache_stats", None), getattr(stats, "spec_decoding_stats", None)
        if stats is not None:
            waiting = stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0)
        prefill_requests, prefill_tokens, *by_request = terms
        return (
            *(self._count, T_ms, prefill_requests, prefill_tokens),
            *(len(output.num_scheduled_tokens) - prefill_requests, tokens - prefill_tokens, waiting),
            *(getattr(stats, "kv_cache_usage", float("nan")), 0, 0, False),
            len(getattr(output, "preempted_req_ids", None) or ()),
            *((0, 0) if prefix is None else (prefix.queries, prefix.hits)),
            *((0, 0) if drafts is None else (drafts.num_draft_tokens, drafts.num_accepted_tokens)),
            float("nan"),  # wait_ms
            *by_request,
        )


def steps_of(config: Any) -> StepsInFlight | None:
    """Return what records the steps of an engine with this config, or None. Never raises."""
    try:
        settings = settings_from(os.environ)
        if settings is None:
            return None
        engine = getattr(config.parallel_config, "data_parallel_rank", 0)
        recorder = recorder_of(settings, config, engine, by_request=True)
        if recorder.check_folder():
            log.info("latfit records the steps of engine %d in its scheduler, into %s", engine, settings.folder)
        return StepsInFlight(recorder, draft_tokens(config) or 0)
    except Exception as error:  # noqa: BLE001  an engine that starts matters more than its trace
        log.warning("latfit records nothing (%s: %s)", type(error).__name__, error)
        return None


class RecordingScheduler(Scheduler):
    """vLLM's scheduler, synchronous or asynchronous as its config says, with a record of its steps."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> "RecordingScheduler":
        if cls is RecordingScheduler and getattr(vllm_config.scheduler_config, "async_scheduling", False):
            cls = RecordingAsyncScheduler
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps = steps_of(self.vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        if self._steps is not None:
            self._steps.plan(output, self.requests)
        return output

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)
        if self._steps is not None:
            self._steps.latest = stats
        return stats

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        ended_s, steps = monotonic(), self._steps
        found = super().update_from_output(scheduler_output, model_runner_output)
        if steps is not None:
            steps.end(scheduler_output, ended_s, len(getattr(self, "waiting", ())))
        return found

    def shutdown(self) -> None:
        super().shutdown()
        if self._steps is not None:
            self._steps.recorder.close()


class RecordingAsyncScheduler(RecordingScheduler, AsyncScheduler):
    """RecordingScheduler under asynchronous scheduling."""
