"""Loads on a small engine over real HTTP, engines started and stopped, and the options of a command."""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from urllib.request import ProxyHandler, build_opener

import numpy as np
import pytest

from latfit.api.requests import TuneRequest
from latfit.api.tuning import Loop, Tuned
from latfit.engines import engine_started_by
from latfit.errors import BadInput
from latfit.exporting import with_flags
from latfit.metrics import Reading, ServerState, Unanswered
from latfit.profiling.host.machine import LoadReading
from latfit.record import MetricsRecorder
from latfit.tuning import Answered, Engine, Run, send_load, start_engine, until_answered
from latfit.validation import PromisedFigure
from latfit.workload import PrefixBlocks, make_requests
from tests.conftest import ROOT, free_port

SMALL = [sys.executable, str(ROOT / "tests" / "small_engine.py")]
STEP_MS = 4 + 0.25 + 0.02
"""The shortest step of the small engine: one request decodes."""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[str]:
    """Address of a small engine that runs one request at a time."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine = start_engine([*SMALL, "--port", str(port), "--max-num-seqs", "1"], tmp_path / "log", {}, url)
    try:
        assert until_answered(url, 20.0, engine.why_gone) == "small"
        yield url
    finally:
        engine.stop()


def test_times_count_from_when_a_request_is_due(small: str) -> None:
    """Ten requests at once on one slot: the k-th waits for k whole requests before it."""
    requests = make_requests(np.zeros(10), np.full(10, 20), np.full(10, 5))
    answers = send_load(small, "small", requests, seed=0)
    assert [each.failure for each in answers] == [""] * 10
    assert {(each.prompt_tokens, each.output_tokens) for each in answers} == {(20, 5)}
    latency = np.sort([each.latency_ms for each in answers])
    assert np.all(latency >= STEP_MS * 5 * np.arange(1, 11))
    assert all(each.tpot_ms > 0 for each in answers)
    assert all(each.ttft_ms + 4 * each.tpot_ms == pytest.approx(each.latency_ms) for each in answers)


def test_prompts_share_the_blocks_that_were_recorded(small: str) -> None:
    """Of four prompts the third has the contents of the first. Another load has other contents."""
    blocks = PrefixBlocks(8, np.array([0, 2, 4, 6, 7]), np.array([5, 6, 5, 7, 5, 6, 9]))
    requests = replace(make_requests(np.arange(4.0), [16, 16, 16, 30], np.ones(4)), prefix=blocks)
    for load in range(2):
        answers = send_load(small, "small", requests, seed=load)
        assert [each.failure for each in answers] == [""] * 4
    with build_opener(ProxyHandler({})).open(f"{small}/metrics") as answer:
        hits = re.search(rb"prefix_cache_hits_total{.*} (\d+)", answer.read())
    assert hits is not None
    assert int(hits[1]) == 2 * 16


def test_a_refusal_is_a_failure_of_that_request(small: str) -> None:
    (found,) = send_load(f"{small}/nowhere", "small", make_requests(np.zeros(1), np.ones(1), np.ones(1)), seed=0)
    assert found.failure.startswith("404")


def test_an_engine_that_ends_is_told_with_its_last_line(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    engine = start_engine([sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log", {}, url)
    with pytest.raises(BadInput, match="exit code 1: no such model"):
        until_answered(url, 20.0, engine.why_gone)


def test_a_wrong_key_is_refused_at_once(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine = start_engine([*SMALL, "--port", str(port), "--api-key", "right"], tmp_path / "log", {}, url)
    try:
        with pytest.raises(BadInput, match="answered 401"):
            until_answered(url, 20.0, engine.why_gone, "wrong")
        assert until_answered(url, 20.0, engine.why_gone, "right") == "small"
    finally:
        engine.stop()


def test_no_engine_starts_where_another_answers(small: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="already"):
        start_engine([sys.executable, "-c", "print('started')"], tmp_path / "second", {}, small)
    assert not (tmp_path / "second").exists()


def test_no_such_program_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        start_engine(["/nowhere/vllm"], tmp_path / "log", {}, f"http://127.0.0.1:{free_port()}")


def test_stopping_ends_what_the_engine_started(tmp_path: Path) -> None:
    """A child that ignores SIGTERM is killed."""
    child = "import os,signal,time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess,sys; subprocess.run([sys.executable, '-c', {child!r}])"
    url = f"http://127.0.0.1:{free_port()}"
    engine: Engine = start_engine([sys.executable, "-c", parent], tmp_path / "log", {}, url)
    while not (printed := (tmp_path / "log").read_text()).endswith("\n"):
        time.sleep(0.02)
    assert _runs(int(printed))
    engine.stop(patience_s=0.2)
    assert not _runs(int(printed))
    assert not _runs(engine.process.pid)


def _runs(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("measured_ms", "failed", "chosen"),
    [
        ((90.0, 80.0), (0, 0), {"max_num_seqs": 8}),  # both keep 100 ms: the planned settings
        ((90.0, 120.0), (0, 0), {}),  # only the engine as started does
        ((90.0, 80.0), (0, 1), {}),  # a failed request keeps no limit
        ((120.0, 110.0), (0, 0), {"max_num_seqs": 8}),  # neither does: those that were planned last
    ],
)
def test_settings_that_kept_the_slos_are_chosen(
    measured_ms: tuple[float, float], failed: tuple[int, int], chosen: dict[str, int], tmp_path: Path
) -> None:
    loop = Loop(TuneRequest(["vllm", "serve"], rate="8/s", lengths="9:9", ttft="100ms", out=tmp_path))
    for name, settings, measured, lost in zip(
        ("as started", "as planned"), ({}, {"max_num_seqs": 8}), measured_ms, failed, strict=True
    ):
        figure = PromisedFigure(name="p99 TTFT", limit_ms=100.0, measured_ms=measured, interval_ms=(0.0, measured))
        run = Run(
            name=name,
            settings=settings,
            rate_per_s=8.0,
            requests=100,
            failed=lost,
            late_ms=0.0,
            others=0.0,
            figures=[figure],
        )
        loop.runs.append(run)
        loop.settings = settings
    loop.choose()
    found = Tuned(loop.result())
    assert found.result.settings == chosen
    assert found.kept == (measured_ms != (120.0, 110.0))
    assert ("--max-num-seqs 8" in found.result.command) == bool(chosen)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve M", "serve M --max-num-seqs 8 --no-async-scheduling"),
        ("serve M --max-num-seqs 4 --port 1", "serve M --port 1 --max-num-seqs 8 --no-async-scheduling"),
        ("serve --max_num_seqs=4 M", "serve M --max-num-seqs 8 --no-async-scheduling"),
        ("serve --async-scheduling M", "serve M --max-num-seqs 8 --no-async-scheduling"),
        ("serve --no-async-scheduling M", "serve M --max-num-seqs 8 --no-async-scheduling"),
    ],
)
def test_options_take_the_place_of_those_in_the_command(command: str, expected: str) -> None:
    assert with_flags(command.split(), {"max_num_seqs": 8, "async_scheduling": False}) == expected.split()


@pytest.mark.parametrize(
    ("command", "engine"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B", "vLLM"),
        ("python -m vllm.entrypoints.openai.api_server --model m", "vLLM"),
        ("docker run --gpus all vllm/vllm-openai:latest --model m", "vLLM"),
        ("/opt/vllm/bin/llama-server --model sglang.gguf", "llama.cpp"),
        ("python3 -m sglang.launch_server --model vllm-test", "SGLang"),
        ("./my-server serve", None),
    ],
)
def test_an_engine_is_known_by_its_command(command: str, engine: str | None) -> None:
    found = engine_started_by(command.split())
    assert (found.name if found else None) == engine


@pytest.mark.parametrize(
    ("command", "url"),
    [
        ("vllm serve M", "http://127.0.0.1:8000"),
        ("vllm serve M --host 0.0.0.0 --port 1 --port=81", "http://127.0.0.1:81"),
        ("vllm serve M --host=10.0.0.7", "http://10.0.0.7:8000"),
        ("llama-server -m M --host ::1", "http://[::1]:8080"),
        ("python3 -m sglang.launch_server --host ::", "http://[::1]:30000"),
    ],
)
def test_an_engine_is_asked_where_its_command_lets_it_listen(command: str, url: str) -> None:
    assert Loop(TuneRequest(command.split(), rate="8/s", lengths="9:9", ttft="1s")).url == url


def test_an_engine_without_the_option_that_records_is_told_so(tmp_path: Path) -> None:
    old = tmp_path / "vllm"
    old.write_text("#!/bin/sh\necho usage: vllm\necho vllm: error: unrecognized arguments: $5\nexit 2\n")
    old.chmod(0o755)
    port = str(free_port())
    loop = Loop(TuneRequest([str(old), "--port", port], rate="8/s", lengths="9:9", ttft="1s", out=tmp_path))
    with pytest.raises(BadInput, match="unrecognized arguments") as error, loop.engine_up():
        pass
    assert "vLLM 0.27 or newer" in error.value.remedy


def test_steps_of_the_warm_up_and_of_a_disturbed_load_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder writes the steps of load 0, 1, ... a moment after it. Load 2 is disturbed, and sent again."""
    loop = Loop(TuneRequest(["vllm"], rate="8/s", lengths="9:9", ttft="1s", load="1s", out=tmp_path))
    sent: list[Timer] = []
    recorder = MetricsRecorder(tmp_path, last=Reading(0.0, 0.0, b"", ServerState("vLLM")))

    def send(*_: object) -> list[Answered]:
        (tmp_path / "steps-0").mkdir(exist_ok=True)
        sent.append(Timer(0.1, (tmp_path / "steps-0" / f"{len(sent)}.parquet").touch))
        sent[-1].start()
        recorder.take(Unanswered("busy"))  # a reading before the first window of the load
        recorder.rows.append({"idle": False, "load": len(sent) - 1})
        return [Answered(0.0, 0.0, 0.01, 0.1, 9, 9)]

    @contextmanager
    def engine_up() -> Iterator[str]:
        yield "m"
        for timer in sent:
            timer.join()

    @contextmanager
    def recording(url: str, out: Path) -> Iterator[MetricsRecorder]:
        recorder.rows.clear()
        yield recorder

    monkeypatch.setattr("latfit.api.tuning.SAVED_S", 0)
    monkeypatch.setattr("latfit.api.tuning.send_load", send)
    monkeypatch.setattr("latfit.api.tuning.warm_up", lambda warm: warm(0))
    monkeypatch.setattr("latfit.api.tuning.recording", recording)
    monkeypatch.setattr("latfit.api.tuning.LoadWatch", lambda: lambda: LoadReading(2.0 * (len(sent) == 3), 1))
    monkeypatch.setattr(loop, "engine_up", engine_up)
    loop.measure(["", "as started"], [0.5, 1.0])
    assert len(sent) == 4
    assert [each.stem for each in loop.traces] == ["1", "3"]
    assert [each["load"] for each in recorder.rows] == [1, 3]
    assert loop.all_single
