"""`latfit tune` as people call it: what it would do, what it refuses, and the whole loop on a small engine."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.engine_loop.server import SWITCHES, Skipped, installation, make_model, make_python_path

from latfit.cli.app import run
from latfit.stats import FloatArray
from tests.conftest import ROOT, free_port

SMALL = [sys.executable, str(ROOT / "tests" / "small_engine.py")]
LOAD = ["--rate", "40/s", "--lengths", "60:20", "--ttft", "200ms", "--tpot", "20ms"]


@pytest.mark.parametrize(
    ("command", "started"),
    [
        ("vllm serve M --port 8001", "vllm serve M --port 8001 --host 127.0.0.1 --enable-logging-iteration-details"),
        ("llama-server -m M --host ::1", "llama-server -m M --host ::1 --metrics"),
        (
            "llama-server -m M --host ::1 --api-key=A=B --metrics",
            'llama-server -m M --host ::1 --api-key "$LATFIT_ENGINE_TOKEN" --metrics',
        ),
    ],
)
def test_a_dry_run_starts_nothing(command: str, started: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run(["tune", *LOAD, "--dry-run", "--", *command.split()]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"Start: {started} 2." in told
    assert "20 req/s, 40 req/s, 80 req/s for 60 s each" in told
    assert signal.getsignal(signal.SIGTERM) is before
    assert not [*in_tmp.iterdir()]


def test_a_program_that_does_not_exist_leaves_no_folder(in_tmp: Path) -> None:
    assert run(["tune", *LOAD, "--", "no-such-engine", "--port", str(free_port())]) == 3
    assert not [*in_tmp.iterdir()]
    (mine := in_tmp / "mine").mkdir()
    assert run(["tune", *LOAD, "--out", "mine", "--", "no-such-engine", "--port", str(free_port())]) == 3
    assert mine.is_dir()


SLOS = LOAD[4:]


def _record(target: Path, moments_s: FloatArray) -> Path:
    """Write arrivals of requests with 60 and 20 tokens."""
    rows = [f"{moment},60,20" for moment in moments_s]
    target.write_text("\n".join(["t_s,prompt_tokens,output_tokens", *rows, ""]))
    return target


def test_the_busiest_part_of_recorded_requests_is_sent(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """101 requests a second apart, then 101 a tenth of a second apart; half as fast, 10 s have half of the latter."""
    moments_s = np.concatenate([np.arange(101.0), 100 + np.arange(1, 102) / 10])
    _record(in_tmp / "day.csv", moments_s)
    words = ["tune", "--arrivals", "day.csv", *SLOS, "--dry-run", "--load", "10.05s"]
    for more, told in (
        ([], "5 req/s, 10 req/s, 20 req/s with 101 recorded requests"),
        (["--rate", f"{201 / moments_s[-1] / 2}/s"], "2.5 req/s, 5 req/s, 10 req/s with 51 recorded requests"),
    ):
        assert run([*words, *more, "--", "vllm", "serve", "M"]) == 0
        assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (LOAD, "no engine is given"),
        ([*SLOS, "--arrivals", "few.csv", "--", "vllm"], "2 recorded requests in 60 s are too few"),
        ([*LOAD, "--arrivals", "few.csv", "--", "vllm"], "contradict"),
        ([*LOAD, "--url", "http://localhost:1", "--", "vllm"], "contradict"),
        ([*LOAD[:4], "--", "vllm"], "no SLO is given"),
        ([*SLOS, "--", "vllm"], "no load is given"),
        ([*LOAD, "--load", "5", "--", "vllm"], "--load"),
        ([*LOAD, "--", "vllm", "serve", "M", "--port", "99999"], "'http://127.0.0.1:99999' is no address"),
        ([*LOAD, "--url", "ftp://here"], "is no address of a server"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], told: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = _record(in_tmp / "few.csv", np.array([0.0, 1.0]))
    assert run(["tune", *words]) == (3 if "too few" in told else 2)
    assert told in " ".join(capsys.readouterr().err.split())
    assert [*in_tmp.iterdir()] == [few]


def test_an_engine_that_dies_under_load_is_named(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four requests warm it up at least twice; the first load has 20."""
    engine = [*SMALL, "--port", str(free_port()), "--dies-after", "30"]
    assert run(["tune", *LOAD, "--load", "1s", "--", *engine]) == 3
    told = " ".join(capsys.readouterr().err.split())
    assert "the engine ended with exit code 9" in told
    assert "engine-1.log" in told


def test_a_terminated_tune_leaves_no_engine(in_tmp: Path) -> None:
    port = free_port()
    words = [sys.executable, "-m", "latfit", "tune", *LOAD, "--load", "2s", "--", *SMALL, "--port", str(port)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("Sending"):
                child.terminate()
        assert child.wait() == 130
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.nightly
def test_the_limit_of_an_engine_is_found_and_raised(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four requests at once take 160 tokens of 5 ms for a second of arrivals: too slow. More at once do. The key
    goes to the engine, and into no file or output."""
    engine = [*SMALL, "--port", str(free_port()), "--max-num-seqs", "4", "--api-key", "hidden-from-view"]
    code = run(["tune", *LOAD, "--load", "5s", "--json", "--", *engine])
    shown, told = capsys.readouterr()
    found = json.loads(shown)
    assert code == 0, found
    kept = [each.read_bytes() for each in Path("tuned").rglob("*") if each.is_file()]
    assert not [text for text in (shown.encode(), told.encode(), *kept) if b"hidden-from-view" in text]
    assert found["kept"]
    assert found["restarts"] == 2
    assert found["settings"]["max_num_seqs"] > 4
    assert "enable_prefix_caching" not in found["settings"]  # no load repeats a prompt of another
    before, after = found["runs"][0], found["runs"][-1]
    ttft = [next(each["measured_ms"] for each in run["figures"] if "TTFT" in each["name"]) for run in (before, after)]
    assert ttft[1] < 200 < ttft[0]
    assert {"plan.json", "engine.fit.json", "tune.json", "vllm.yaml"} <= {each.name for each in Path("tuned").iterdir()}


@pytest.mark.nightly
def test_recorded_bursts_are_sent_and_planned_as_recorded(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten bursts of ten requests, on an engine that runs one at a time: 20 steps of at least 4.27 ms each."""
    _record(in_tmp / "bursts.csv", np.repeat(np.arange(10.0), 10) + np.tile(np.arange(10) / 1000, 10))
    engine = [*SMALL, "--port", str(free_port()), "--max-num-seqs", "1"]
    slos = ["--ttft", "700ms", "--tpot", "30ms"]
    code = run(["tune", "--arrivals", "bursts.csv", *slos, "--load", "20s", "--json", "--", *engine])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    before, after = found["runs"][0], found["runs"][-1]
    assert before["requests"] == after["requests"] == 100
    assert found["rate_per_s"] == pytest.approx(99 / 9.009)
    ttft = [next(each["measured_ms"] for each in run["figures"] if "TTFT" in each["name"]) for run in (before, after)]
    assert ttft[1] < 700 < 9 * 20 * 4.27 <= ttft[0]


@pytest.fixture
def real_vllm(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a real vLLM with a small model; skips where none is installed."""
    try:
        vllm = installation(os.environ.get("LATFIT_VLLM"))
        make_model(vllm, in_tmp / "model")
    except Skipped as reason:
        pytest.skip(f"{reason}; LATFIT_VLLM names its environment")
    for name, value in (*SWITCHES.items(), ("PYTHONPATH", str(make_python_path(vllm, in_tmp)))):
        monkeypatch.setenv(name, value)
    options = "--load-format dummy --dtype bfloat16 --max-model-len 1024 --served-model-name m --enforce-eager"
    return [str(vllm.vllm), "serve", str(in_tmp / "model"), *options.split(), "--port", str(free_port())]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_real_vllm_is_tuned(real_vllm: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wide limits, which a busy machine keeps too."""
    load = ["--rate", "2/s", "--lengths", "60:20:0.5", "--ttft", "20s", "--tpot", "2s", "--load", "20s"]
    code = run(["tune", *load, "--json", "--", *real_vllm])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    assert found["engine"] == "vLLM"
    assert found["steps"] == "steps"
    assert 1 <= found["restarts"] <= 2
    assert [run["failed"] for run in found["runs"]] == [0] * len(found["runs"])
    planned = [each for run in found["runs"][1:] for each in run["figures"]]
    assert planned
    assert all(each["planned_ms"] is not None for each in planned)
    # vLLM tells the options that it took, and nothing of it is left
    number = found["settings"]["max_num_seqs"]
    assert f"'max_num_seqs': {number}" in (in_tmp / "tuned" / f"engine-{found['restarts'] + 1}.log").read_text()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(real_vllm[-1])))
