"""`latfit simulate engine` as scripts see it."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitResult, FitStatus

Captured = pytest.CaptureFixture[str]
MEASURED = {"B": [1, 4096], "S": [1, 65536]}


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    """Step costs and recorded arrivals."""
    for name, tau_0 in (("gpu", 8.0), ("amx", 20.0)):
        values = {"tau_0": tau_0, "tau_B": 0.05, "tau_S": 0.02}
        parameters = {key: Estimate(value, None, None, None, "ms") for key, value in values.items()}
        fit = FitResult("linear", FitStatus.CONVERGED, parameters, domain=MEASURED)
        fit.write(in_tmp / f"{name}.fit.json")
    rng = np.random.default_rng(0)
    rows = zip(np.sort(rng.uniform(0, 20, 80)), rng.integers(10, 300, 80), rng.integers(2, 90, 80), strict=True)
    lines = [f"{t:.6f},{p},{o}" for t, p, o in rows]
    (in_tmp / "r.csv").write_text("\n".join(["t_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return in_tmp


def latfit(*arguments: object) -> int:
    return run(["simulate", "engine", *(str(argument) for argument in arguments)])


RECORDED = ("--engine", "chunked-prefill", "--fit", "gpu.fit.json", "--kv-blocks", 400, "--arrivals", "r.csv")
DRAWN = ("--engine", "chunked-prefill", "--fit", "gpu.fit.json", "--kv-blocks", 400, "--lengths", "64:32")


def test_orders_and_rates_are_compared_on_one_load(folder: Path, capsys: Captured) -> None:
    asked = (
        "--rate",
        "5/s",
        "--rate",
        "10/s",
        "--requests",
        200,
        "--replications",
        2,
        "--order",
        "fcfs",
        "--order",
        "sjf",
    )
    assert latfit(*DRAWN, *asked, "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(each["order"], round(each["rate_per_s"], 6)) for each in runs] == [
        ("fcfs", 5.0), ("sjf", 5.0), ("fcfs", 10.0), ("sjf", 10.0),
    ]  # fmt: skip
    assert all(each["requests"] == 400 for each in runs)
    low, high = runs[0]["ttft_ms"]["ci"]["mean"]
    assert low < runs[0]["ttft_ms"]["mean"] < high


def test_prefill_apart_and_replicas(folder: Path, capsys: Captured) -> None:
    assert latfit(*RECORDED, "--prefill-on", "amx.fit.json", "--transfer", "2ms+1us", "--json") == 0
    apart = json.loads(capsys.readouterr().out)["runs"][0]
    assert latfit(*RECORDED, "--replicas", 2, "--set", "route=least-loaded", "--json") == 0
    routed = json.loads(capsys.readouterr().out)["runs"][0]
    assert apart["settings"]["prefill_replicas"] == 1
    assert routed["settings"]["prefill_replicas"] == 0
    assert apart["requests"] == routed["requests"] == 80
    assert routed["settings"]["replicas"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([*RECORDED, "--order", "whim"], 2, "'whim' is not an order"),
        ([*RECORDED, "--set", "prefix_hit_rate=1"], 2, "--set prefix_hit_rate"),
        ([*RECORDED, "--set", "acceptance=2", "--set", "draft_tokens=2"], 2, "--set draft_tokens"),
        ([*DRAWN], 2, "--rate"),
        ([*DRAWN, "--users", 3, "--rate", "5/s"], 2, "--rate"),
        ([*DRAWN, "--users", 300, "--requests", 500], 2, "5 of each user"),
        ([*DRAWN, "--users", 3, "--prefill-on", "amx.fit.json"], 2, "no closed loop"),
        ([*RECORDED, "--users", 3], 2, "contradict"),
        ([*DRAWN, "--rate", "5/s", "--class", "chat:0.3:speed=4ms"], 2, "is not a class"),
        ([*DRAWN, "--rate", "5/s", "--lengths", "9000:5"], 3, "more than the KV cache holds"),
        ([*DRAWN, "--rate", "5/s", "--fit", "none.fit.json"], 3, "no such fit"),
        ([*DRAWN, "--rate", "900/s", "--requests", 2000, "--replications", 1], 5, "no engine carries 900 req/s"),
    ],
)
def test_mistakes_are_told(folder: Path, capsys: Captured, arguments: list[object], code: int, said: str) -> None:
    assert latfit(*arguments) == code
    assert said in capsys.readouterr().err


def test_users_who_wait_for_answers(folder: Path, capsys: Captured) -> None:
    """One user alone: 33 steps of 8 + 0.05 + 0.02 ms, 64 prompt tokens in the first, then a second of thinking."""
    asked = ("--users", 1, "--think", "1s", "--requests", 3000, "--replications", 2, "--set", "service=deterministic")
    assert latfit(*DRAWN, *asked, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    alone = 32 * (8 + 0.07) + 63 * 0.02
    assert found["latency_ms"]["mean"] == pytest.approx(alone)
    assert found["rate_per_s"] == found["throughput_per_s"] == pytest.approx(1e3 / (1e3 + alone), rel=0.05)
    assert found["users"] == 1
    restless = (*asked[:3], "0ms", *asked[4:])
    assert latfit(*DRAWN, *restless, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["throughput_per_s"] == pytest.approx(1e3 / alone, rel=1e-3)
    assert latfit(*DRAWN, "--users", 40, "--replicas", 2, "--set", "route=shortest-queue", "--requests", 2000) == 0
    assert "40 users are served" in capsys.readouterr().out
