"""`latfit tune` as people call it: what it would do, what it refuses, and the whole loop on a small engine."""

import json
import sys
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.conftest import ROOT, free_port

SMALL = [sys.executable, str(ROOT / "tests" / "small_engine.py")]
LOAD = ["--rate", "40/s", "--lengths", "60:20", "--ttft", "200ms", "--tpot", "20ms"]


def test_a_dry_run_starts_nothing(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", *LOAD, "--dry-run", "--", "vllm", "serve", "M", "--port", "8001"]) == 0
    told = capsys.readouterr().out
    assert "Start: vllm serve M --port 8001 --host 127.0.0.1 --enable-logging-iteration-details" in " ".join(
        told.split()
    )
    assert "20 req/s, 40 req/s, 80 req/s" in told
    assert not [*in_tmp.iterdir()]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (LOAD, "no engine is given"),
        ([*LOAD, "--url", "http://localhost:1", "--", "vllm"], "contradict"),
        ([*LOAD[:4], "--", "vllm"], "no SLO is given"),
        ([*LOAD[4:], "--", "vllm"], "no load is given"),
        ([*LOAD, "--load", "5", "--", "vllm"], "--load"),
    ],
)
def test_what_is_missing_is_named(
    words: list[str], told: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", *words]) == 2
    assert told in capsys.readouterr().err
    assert not [*in_tmp.iterdir()]


@pytest.mark.nightly
def test_the_limit_of_an_engine_is_found_and_raised(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four requests at once take 160 tokens of 5 ms for a second of arrivals: too slow. More at once do."""
    engine = [*SMALL, "--port", str(free_port()), "--max-num-seqs", "4"]
    code = run(["tune", *LOAD, "--load", "5s", "--json", "--", *engine])
    found = json.loads(capsys.readouterr().out)
    assert code == 0, found
    assert found["kept"]
    assert found["restarts"] == 2
    assert found["settings"]["max_num_seqs"] > 4
    assert "enable_prefix_caching" not in found["settings"]  # no load repeats a prompt of another
    before, after = found["runs"][0], found["runs"][-1]
    ttft = [next(each["measured_ms"] for each in run["figures"] if "TTFT" in each["name"]) for run in (before, after)]
    assert ttft[1] < 200 < ttft[0]
    assert {"plan.json", "engine.fit.json", "tune.json", "vllm.yaml"} <= {each.name for each in Path("tuned").iterdir()}
