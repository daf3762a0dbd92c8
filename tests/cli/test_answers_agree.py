"""Two commands that are asked the same question give the same answer, over several fits and percentiles."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.trace import Trace, write_trace
from tests.conftest import ROOT

SAMPLES = ROOT / "sample_traces"
TRACES = (pytest.param("smollm2", marks=pytest.mark.nightly), "phases")
PERCENTILES = (90,)
SLA_MS = {"smollm2": 400.0, "phases": 12.0}

Ask = Callable[[str], Any]


def phases_trace() -> Trace:
    """Planted: decode with 2 % noise, prefill with 15 %, so that limits of all steps together hold for neither."""
    rng = np.random.default_rng(5)
    B, S = (np.repeat(axis, 40) for axis in map(np.ravel, np.meshgrid([1.0, 2, 4, 8, 16, 32, 64], [1.0, 64, 256])))
    S = np.where(S == 1, B, S + B)
    decode = S == B
    T = (2 + 0.05 * B + 0.01 * S) * np.exp(rng.normal(0, np.where(decode, 0.02, 0.15)))
    prefill = np.where(decode, 0, S - B + 1)
    return Trace({"B": B, "S": S, "T_ms": T, "prefill_tokens": prefill, "prefill_requests": 1.0 * (prefill > 0)})


@pytest.fixture(scope="module", params=TRACES)
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Name of the trace, and a folder with its fit and a profile of it as path cpu beside a nominal gpu."""
    folder = tmp_path_factory.mktemp(request.param)
    write_trace(folder / "phases.parquet", phases_trace())
    source = {
        "smollm2": f"{SAMPLES}/cpu_openvino_bf16_smollm2-135m.parquet --model auto",
        "phases": "phases.parquet --model linear",
    }[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(shlex.split(f"fit {source} --path cpu --out cpu.fit.json --hardware alone.json -q")) == 0
        assert run(shlex.split("hardware add cpu cpu.fit.json")) == 0
        assert run(shlex.split("hardware add gpu --nominal launch=12ms,slope=0.05ms")) == 0
    return request.param, folder


@pytest.fixture
def ask(fitted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command with --json in the folder, and gives what it says."""
    monkeypatch.chdir(fitted[1])

    def answer(command: str) -> Any:
        capsys.readouterr()
        code = run([*shlex.split(command), "--json"])
        told = capsys.readouterr()
        assert code in (0, 4, 5), told.err
        return json.loads(told.out)

    return answer


def limits(ask: Ask, percentile: int, B: int, S: list[int], **columns: int) -> list[float | None]:
    """What `latfit predict` says that so many percent of steps stay below, at each S."""
    level = round(2 * percentile / 100 - 1, 9)
    told = "".join(f" --{name.replace('_', '-')} {value}" for name, value in columns.items())
    rows = ask(f"predict cpu.fit.json -B {B} {' '.join(f'-S {s}' for s in S)} --level {level}{told}")["rows"]
    return [row["high"] for row in rows]


@pytest.mark.parametrize("percentile", PERCENTILES)
def test_steps_that_a_plan_lets_through_are_those_that_predict_sees_below_the_limit(
    percentile: int, fitted: tuple[str, Path], ask: Ask
) -> None:
    sla = SLA_MS[fitted[0]]
    plan = ask(f"plan --sla {sla}ms --percentile {percentile}")
    rows = [row for row in plan["inverse"]["S_at_B"] if row["path"] == "cpu" and row["S_max"] > row["B"]]
    compared = 0
    for row in rows:
        B, S = row["B"], row["S_max"]
        prefill = {} if fitted[0] != "phases" else {"prefill_requests": 1, "prefill_tokens": S - B + 1}
        (inside,) = limits(ask, percentile, B, [S], **prefill)
        assert inside is not None
        assert inside <= sla * (1 + 1e-9), row
        if rows_end(fitted[1]) != S:
            longer = {} if fitted[0] != "phases" else {"prefill_requests": 1, "prefill_tokens": S - B + 2}
            (beyond,) = limits(ask, percentile, B, [S + 1], **longer)
            assert beyond is not None
            assert beyond > sla, row
            compared += 1
    assert compared >= 3


def rows_end(folder: Path) -> float:
    """The most tokens of a step that the fit has seen."""
    return float(json.loads((folder / "cpu.fit.json").read_text())["domain"]["S"][1])


def test_B1_is_where_the_typical_steps_cross(ask: Ask, fitted: tuple[str, Path]) -> None:
    B1 = ask(f"plan --sla {SLA_MS[fitted[0]]}ms")["B1"]["value"]
    if B1 is None:
        return

    def cpu(B: int) -> float:
        return float(ask(f"predict cpu.fit.json -B {B}")["rows"][0]["T_ms"])

    assert cpu(B1) >= 12 + 0.05 * B1
    assert B1 == 1 or cpu(B1 - 1) < 12 + 0.05 * (B1 - 1)


def test_responses_planned_are_responses_simulated(fitted: tuple[str, Path], ask: Ask) -> None:
    """Greedy batches on the measured path at a high load: p99 and mean of two programs that share the fit and its
    scatter, but neither arrivals nor loop. (The curve of smollm2 bends so that at .9 its queue has rare long states.)
    """
    sla = 1000 * SLA_MS[fitted[0]]

    def greedy(rate: float) -> Any:
        plan = ask(f"plan --sla {sla}ms --rate {rate:.6g}/s --tokens-per-request 1 --hardware alone.json")
        return next(way for way in plan["strategies"] if "greedy" in way["name"])

    rate = (0.6 if fitted[0] == "smollm2" else 0.9) * greedy(1)["rate_limit_per_s"]
    planned = greedy(rate)
    (run,) = ask(f"simulate policies --policy gpu-only --rate {rate:.6g}/s --hardware alone.json")["runs"]
    for said, planned_ms in (("mean", planned["mean_ms"]), ("p99", planned["percentile_ms"])):
        low, high = run["latency_ms"]["ci"][said]
        assert low * 0.98 <= planned_ms <= high * 1.02, said
