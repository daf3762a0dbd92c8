"""The recording scheduler over a stand-in for vLLM's: chunked prefill of a few requests, told by hand."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from latfit.record.vllm_scheduler import RecordingAsyncScheduler, RecordingScheduler, terms_of
from latfit.trace.parquet import read_parquet
from latfit.trace.table import Trace
from tests.unit.record.engine import SchedulerStats, config

pytestmark = pytest.mark.skipif(
    RecordingScheduler.__base__ is not object, reason="vLLM's own scheduler is here, which needs a loaded model"
)


class Engine:
    """Plans prompts first come first served within a budget of tokens, and counts what is planned as computed."""

    def __init__(self, *, vllm_config: Any, budget: int = 8) -> None:
        self.vllm_config = vllm_config
        self.budget = budget
        self.requests: dict[str, SimpleNamespace] = {}
        self.waiting: list[str] = ["another"]
        self.ended = False

    def add(self, name: str, prompt: int, generated: int = 0) -> None:
        self.requests[name] = SimpleNamespace(
            num_prompt_tokens=prompt, num_output_tokens=generated, num_computed_tokens=0
        )

    def schedule(self) -> SimpleNamespace:
        left, chunks = self.budget, {}
        for name, each in self.requests.items():
            known = each.num_prompt_tokens + each.num_output_tokens
            if tokens := min(known - each.num_computed_tokens, left):
                chunks[name] = tokens
                each.num_computed_tokens += tokens
                left -= tokens
        return SimpleNamespace(
            num_scheduled_tokens=chunks, total_num_scheduled_tokens=self.budget - left, preempted_req_ids={"gone"}
        )

    def make_stats(self) -> SchedulerStats:
        return SchedulerStats(num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.25)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        for name in scheduler_output.num_scheduled_tokens:
            each = self.requests[name]
            each.num_output_tokens += each.num_computed_tokens == each.num_prompt_tokens + each.num_output_tokens
        return {0: self.make_stats()}

    def shutdown(self) -> None:
        self.ended = True


class Recording(RecordingScheduler, Engine):  # type: ignore[misc]  # what vLLM's own are said to be
    """The stand-in, recorded."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LATFIT_TRACE_DIR", str(tmp_path / "traces"))
    return tmp_path / "traces"


def steps(scheduler: Recording, count: int) -> Iterator[Any]:
    for _ in range(count):
        output = scheduler.schedule()
        yield output
        scheduler.update_from_output(output, None)


def recorded(folder: Path) -> Trace:
    (file,) = folder.glob("*.parquet")
    return read_parquet(file)


def test_terms_of_single_requests(folder: Path) -> None:
    """Prompts of 10 and 6 tokens within 8 a step: chunks of 8; of 2 behind 8 and of 6; then both decode."""
    scheduler = Recording(vllm_config=config())
    scheduler.add("a", 10)
    scheduler.add("b", 6)
    list(steps(scheduler, 3))
    scheduler.shutdown()
    assert scheduler.ended
    trace = recorded(folder)
    found = {
        "B": [1, 2, 2],
        "S": [8, 8, 2],
        "prefill_requests": [1, 2, 0],
        "prefill_tokens": [8, 8, 0],
        "context_tokens": [0, 8, 16],
        "prefill_context_tokens": [0, 8, 0],
        "prefill_attention": [8 * 4, 2 * (8 + 1) + 6 * 3, 0],
        "longest_prefill": [8, 10, 0],
        "recomputed_tokens": [0, 0, 0],
        "queued_requests": [3, 3, 3],
        "preemptions": [1, 1, 1],
        "kv_usage": [0.25] * 3,
        "step": [0, 1, 2],
        "phase": ["prefill", "prefill", "decode"],
    }
    assert {name: trace[name].tolist() for name in found} == found
    assert trace.provenance["source"] == "vllm scheduler"
    assert trace.provenance["max_num_seqs"] == 256


def test_what_is_computed_again_is_prefill() -> None:
    request = SimpleNamespace(num_prompt_tokens=4, num_output_tokens=3, num_computed_tokens=7)
    assert terms_of({"a": 7}, {"a": request}, 0) == (1, 7, 0, 0, 24.5, 7, 7)


def test_a_request_with_drafts_decodes() -> None:
    request = SimpleNamespace(num_prompt_tokens=4, num_output_tokens=3, num_computed_tokens=9)
    assert terms_of({"a": 3}, {"a": request}, 2) == (0, 0, 6, 0, 0.0, 0, 0)
    assert terms_of({"a": 3}, {"a": request}, 1)[0] == 1


def test_a_step_lasts_from_its_planning_or_the_end_of_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planned at 1 and ended at 3 s; the next planned meanwhile, at 2, and ended at 3.5 s."""
    scheduler = Recording(vllm_config=config())
    scheduler.add("a", 10)
    now = iter([1.0, 2.0, 3.0, 3.5])
    monkeypatch.setattr("latfit.record.vllm_scheduler.monotonic", lambda: next(now))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, None)
    scheduler.update_from_output(second, None)
    scheduler.shutdown()
    trace = recorded(folder)
    assert trace["T_ms"] == pytest.approx([2000.0, 500.0])
    assert np.diff(trace["t_s"]) == pytest.approx([2.0])


def test_the_config_decides_which_of_vllms_schedulers_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingScheduler, "__init__", lambda self, vllm_config: None)
    for asynchronous, kind in ((False, RecordingScheduler), (True, RecordingAsyncScheduler)):
        found = RecordingScheduler(vllm_config=config(scheduler_config={"async_scheduling": asynchronous}))
        assert type(found) is kind


def test_what_fails_is_counted_and_the_engine_goes_on(folder: Path) -> None:
    scheduler = Recording(vllm_config=config())
    scheduler.add("a", 10)
    for output in steps(scheduler, 2):
        del output.total_num_scheduled_tokens
    scheduler.add("b", 3)
    list(steps(scheduler, 1))
    scheduler.shutdown()
    assert recorded(folder)["step"].tolist() == [0]
    assert recorded(folder).provenance["rows_refused_so_far"] == 2
