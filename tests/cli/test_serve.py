"""`latfit serve` from its start to its end, before stand-in engines."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import latfit.api as api
from latfit.cli.app import run
from latfit.errors import HardwareMissing, Interrupted, WrongUsage
from tests.unit.live.front.engine import SSE, Answer, StandInEngine, streamed, whole
from tests.unit.live.front.running import PROMPT


@contextmanager
def engine_in_thread(answer: Answer) -> Iterator[StandInEngine]:
    found, loop = StandInEngine(answer), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(found.start(), loop).result(5)
    try:
        yield found
    finally:
        asyncio.run_coroutine_threadsafe(found.stop(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


class Serving:
    """The command in a process of its own. url: where it listens.  said: its first line."""

    def __init__(self, *arguments: str, open_files: int = 0, **environment: str) -> None:
        command = [sys.executable, "-m", "latfit", "serve", "--port", "0", *arguments]
        if open_files:
            command = ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh", *command]
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        assert self.process.stderr is not None
        self.said = ""
        while "by " not in self.said or not self.said.rstrip().endswith("."):  # its line may be wrapped
            line = self.process.stderr.readline()
            assert line, self.said
            self.said += line
        found = re.search(r"http://[\d.]+:\d+", self.said)
        assert found is not None
        self.url = found[0]

    def ask(self, path: str = "/v1/completions", body: bytes | None = PROMPT, **headers: str) -> bytes:
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            found: bytes = answer.read()
        return found

    def end(self, *signals: int) -> tuple[int, str, str]:
        for number in signals:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_it_serves_until_it_is_told_to_stop_and_says_what_it_did(number: int) -> None:
    with engine_in_thread(streamed(SSE)) as gpu, engine_in_thread(whole(b"{}")) as cpu:
        engines = (f"gpu={gpu.url}", f"cpu={cpu.url}")
        serving = Serving(*engines, "--times", "gpu=800ms", "--times", "cpu=3s", "--slots", "gpu=2")
        said = " ".join(serving.said.split())
        assert said.endswith("by three-stage: gpu (2 slots, 800 ms a reply), cpu (8 slots, 3 s a reply); T_cut 800 ms.")
        assert [serving.ask() for _ in range(3)] == [b"".join(SSE)] * 3
        code, out, _ = serving.end(number)
    assert (code, out) == (0, "Served 3 requests (3 to gpu, 0 to cpu).\n")
    assert len(gpu.asked) == 3


def test_its_json_counts_requests_and_tokens_come_from_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first-token\n")
    with engine_in_thread(whole(b"{}")) as gpu:
        classes = ("--class", "chat", "--class", "batch", "--ageing", "5s")
        serving = Serving(gpu.url, "--token-file", str(file), *classes, LATFIT_ENGINE_TOKEN="theirs-then")
        assert "; chat before batch, 5 s of waiting worth one class." in " ".join(serving.said.split())
        with pytest.raises(urllib.error.HTTPError, match="401"):
            serving.ask()
        assert serving.ask(Authorization="Bearer first-token") == b"{}"
        assert json.loads(serving.ask("/health", None))["status"] == "ready"
        code, _, _ = serving.end(signal.SIGTERM)
        assert code == 0
        assert gpu.asked[0].header("authorization") == "Bearer theirs-then"


def _said_at_once(caller: socket.socket) -> bytes:
    caller.setblocking(False)
    try:
        return caller.recv(1000)
    except OSError:
        return b""


@pytest.mark.nightly
def test_too_few_open_files_are_reported_at_the_start() -> None:
    command = [sys.executable, "-m", "latfit", "serve", "--port", "0", "x"]
    limited = ["sh", "-c", 'ulimit -n 24; exec "$@"', "sh", *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == WrongUsage.exit_code
    assert "24 open files are allowed" in done.stderr


def test_a_second_signal_cuts_off_what_runs() -> None:
    with engine_in_thread(streamed(SSE * 200, 0.1)) as gpu:
        serving = Serving(gpu.url)
        request = urllib.request.Request(f"{serving.url}/v1/completions", PROMPT)
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read(10)
            serving.process.send_signal(signal.SIGTERM)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                serving.ask()
            code, _, err = serving.end(signal.SIGTERM)
    assert code == Interrupted.exit_code
    assert "stopped before all accepted requests had ended" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Missing argument"),
        (["http://x", "http://y"], "is not a name with its value"),
        (["gpu=ftp://x"], "is no address of an engine"),
        (["gpu=http://x:99999"], "is no address of an engine"),
        (["http://["], "is no address of an engine"),
        (["http://me:mine@x"], "is no address of an engine"),
        (["http://a b"], "is no address of an engine"),
        (["a=x", "a=y"], "is given twice"),
        (["a=x", "b=y"], "needs the time of a reply of a and b"),
        (["a=x", "b=y", "c=z"], "3 engines"),
        (["a\nb=x", "c=y", "--policy", "gpu-only"], "is not a name with its value"),
        (["a=x", "--times", "b=1s"], "there is no engine 'b'"),
        (["a=x", "--times", "a=1"], "'1' is not a duration"),
        (["a=x", "--slots", "a=0"], "is no count"),
        (["a=x", "--slots", "a=²"], "is no count"),
        (["a=x", "--policy", "three-stage", "--times", "a=1s"], "needs two"),
        (["a=x", "--class", "chat", "--class", "chat"], "are not distinct names"),
        (["a=x", "--class", "chat", "--class", "b c"], "are not distinct names"),
        (["a=x", "--class", "chat", "--class", "batch", "--ageing", "0s"], "0s"),
        (["a=x", "--token-file", "/nowhere"], "cannot be read"),
        (["a=x", "--host", "203.0.113.1"], "cannot listen"),
        (["a=x", "--host", "..x"], "cannot listen"),
    ],
)
def test_what_cannot_work_is_said_at_once(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "0", *arguments]) in (2, 7)
    told = " ".join(capsys.readouterr().err.split())
    assert says in told
    assert "mine" not in told


@pytest.mark.parametrize("package", ["aiohttp", pytest.param("prometheus_client", marks=pytest.mark.nightly)])
def test_what_is_missing_is_named_with_what_brings_it(package: str) -> None:
    without = (
        f"import sys; sys.modules[{package!r}] = None; from latfit.cli.app import run; sys.exit(run(['serve', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == HardwareMissing.exit_code
    assert f"{package} is not installed" in done.stderr
    assert "pip install 'latfit[live]'" in done.stderr


@pytest.mark.parametrize("token", ["7letter", "with space in it", "with\nline-end", "ünïcödé-letters"])
def test_a_token_that_no_header_can_hold_is_refused_without_being_told(token: str) -> None:
    with pytest.raises(WrongUsage) as told:
        api.serve({"gpu": "http://127.0.0.1:9"}, token=token)
    assert token not in str(told.value)


@pytest.mark.parametrize(("host", "token", "warned"), [("0.0.0.0", None, True), ("0.0.0.0", "a-token-of-ours", False)])
def test_who_listens_for_everybody_without_a_token_is_told(host: str, token: str | None, warned: bool) -> None:
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        signal.raise_signal(signal.SIGTERM)

    api.serve("http://127.0.0.1:9", host=host, port=0, token=token, ready=stop)
    assert ("No token is set" in said[0]) is warned


def test_times_come_from_fits_for_requests_of_the_given_lengths() -> None:
    """A step takes 10 ms + 0.1 ms a token: the prompt's of 500 tokens 60 ms, and 100 further ones of 4 requests 10.4 ms
    each; requests of the other path 2 ms a token."""
    said: list[str] = []

    def stop(text: str) -> None:
        said.append(text)
        signal.raise_signal(signal.SIGTERM)

    hardware = {"gpu": "launch=10ms,per_token=0.1ms", "cpu": "launch=1us,per_token=2ms"}
    engines = {"gpu": "http://127.0.0.1:9", "cpu": "http://127.0.0.1:9"}
    api.serve(engines, port=0, hardware=hardware, lengths="500:101", slots={"gpu": 4, "cpu": 1}, ready=stop)
    assert said[0].endswith("three-stage: gpu (4 slots, 1.1 s a reply), cpu (1 slot, 1.2 s a reply); T_cut 1.1 s.")
