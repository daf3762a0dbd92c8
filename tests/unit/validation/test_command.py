"""`latfit validate` as scripts see it."""

import json
from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitResult, FitStatus
from latfit.simulation.engine.run import serve
from latfit.simulation.engine.settings import EngineSettings
from latfit.simulation.engine.step_cost import linear_costs
from latfit.trace.parquet import write_trace
from latfit.trace.table import Trace
from latfit.workload.requests import make_requests

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    """A fit of T = 8 + 0.05 B + 0.02 S, and a run measured on an engine that costs exactly that."""
    values = {"tau_0": 8.0, "tau_B": 0.05, "tau_S": 0.02}
    parameters = {name: Estimate(value, None, None, None, "ms") for name, value in values.items()}
    measured = {"B": [1, 4096], "S": [1, 65536]}
    FitResult("linear", FitStatus.CONVERGED, parameters, domain=measured).write(in_tmp / "a.fit.json")
    write_run(in_tmp, padded_graphs=True)
    return in_tmp


def write_run(folder: Path, *, padded_graphs: bool) -> None:
    """What the engine served. padded_graphs: steps of decoding cost what those of captured batches do."""
    rng = np.random.default_rng(0)
    arrival_ms = np.sort(rng.uniform(0, 10_000, 60))
    requests = make_requests(arrival_ms, rng.integers(10, 300, 60), rng.integers(2, 90, 60))
    settings = EngineSettings(kv_blocks=400, padded_graphs=padded_graphs)
    made = serve(requests, linear_costs(8.0, 0.05, 0.02), settings)
    columns = (
        arrival_ms / 1e3,
        requests.prompt_tokens,
        requests.output_tokens,
        made.first_ms / 1e3,
        made.last_ms / 1e3,
    )
    lines = [",".join(repr(float(value)) for value in row) for row in zip(*columns, strict=True)]
    head = "t_s,prompt_tokens,output_tokens,first_token_s,last_token_s"
    (folder / "run.csv").write_text("\n".join([head, *lines]) + "\n")


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def test_the_verdict_comes_first(folder: Path, capsys: Captured) -> None:
    assert latfit("validate", "a.fit.json", "run.csv", "--kv-blocks", 400) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Simulation agrees")
    assert len(shown.splitlines()) <= 12
    assert latfit("validate", "a.fit.json", "run.csv", "--kv-blocks", 400, "-v") == 0
    assert "without the first token" in capsys.readouterr().out


def test_json_and_files(folder: Path, capsys: Captured) -> None:
    wanted = ("--kv-blocks", 400, "--json", "--out", "v.json", "--figure", "v.png", "--calibrate")
    assert latfit("validate", "a.fit.json", "run.csv", *wanted) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((folder / "v.json").read_text())
    assert document["agrees"] is True
    assert document["calibration"]["requests"] == 20
    assert document["scored"] == 40
    assert set(document["metrics"]) == set(document["definitions"])
    assert (folder / "v.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_of_another_machine_is_refused(folder: Path, capsys: Captured) -> None:
    """Every moment of the run twice as late: a token takes twice as long as the fit's steps make it."""
    found = json.loads((folder / "a.fit.json").read_text())
    limits = {"ratio_quantiles": {"0.5": 1.0, "0.95": 1.1}, "lower_quantiles": {"0.5": 1.0, "0.95": 0.9}}
    found["intervals"] = {**limits, "by_phase": {"decode": limits}}
    for name in ("tau_0", "tau_B", "tau_S"):
        found["parameters"][name]["value"] *= 0.4
    (folder / "fast.fit.json").write_text(json.dumps(found))
    assert latfit("validate", "fast.fit.json", "run.csv", "--kv-blocks", 400) == 4
    printed = capsys.readouterr()
    assert printed.out.startswith("This run is not of the fitted machine: 2.")
    assert "--force" in printed.err
    assert latfit("validate", "fast.fit.json", "run.csv", "--kv-blocks", 400, "--force") == 0


def test_strict_makes_a_difference_an_error(folder: Path, capsys: Captured) -> None:
    slow = json.loads((folder / "a.fit.json").read_text())
    slow["parameters"]["tau_0"]["value"] = 12.0
    (folder / "slow.fit.json").write_text(json.dumps(slow))
    assert latfit("validate", "slow.fit.json", "run.csv", "--kv-blocks", 400, "--prefill-fit", "a.fit.json") == 0
    assert capsys.readouterr().out.startswith("Simulation differs")
    assert latfit("validate", "slow.fit.json", "run.csv", "--kv-blocks", 400, "--strict") == 4


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run.csv", "--kv-blocks", 8], 3, "more than the KV cache holds"),
        (["run.csv", "--kv-blocks", 400, "--set", "batching=magic"], 2, "'magic' is no value of batching"),
        (["run.csv", "--kv-blocks", 400, "--max-num-batched-tokens", 9], 2, "a budget of 9 tokens"),
        (["none.csv", "--kv-blocks", 400], 3, "no such file"),
        (["run.csv", "--kv-blocks", 400, "--out", "nowhere/v.json"], 7, "nowhere"),
    ],
)
def test_mistakes_are_told(folder: Path, capsys: Captured, arguments: list[object], code: int, said: str) -> None:
    assert latfit("validate", "a.fit.json", *arguments) == code
    assert said in capsys.readouterr().err


@pytest.fixture
def recorded(folder: Path) -> Path:
    """Steps as the engine makes them, some with more cached tokens than it holds, and what it said at its start."""
    rng = np.random.default_rng(4)
    n = 600
    prefill = np.where(rng.random(n) < 0.4, rng.integers(8, 200, n), 0)
    decode = rng.integers(1, 40, n)
    B, S = decode + (prefill > 0), decode + prefill
    context = decode * rng.integers(50, 250, n)
    T = np.exp(rng.normal(0, 0.002, n)) * (8.0 + 0.05 * B + 0.02 * S)
    T[context > 399 * 16] *= 5  # steps of another engine
    columns = {
        "B": B,
        "S": S,
        "T_ms": T,
        "prefill_requests": (prefill > 0).astype(int),
        "prefill_tokens": prefill,
        "context_tokens": context,
    }
    settings = {"vllm": "0.32.0", "block_size": 16, "kv_capacity_tokens": 6400, "max_num_seqs": 256}
    told = {**settings, "max_num_batched_tokens": 2048, "async_scheduling": True, "run_started": "2026-01-01"}
    write_run(folder, padded_graphs=False)
    write_trace(folder / "engine.parquet", Trace({name: np.asarray(c) for name, c in columns.items()}, told))
    return folder


class TestByItself:
    def test_steps_are_fitted_and_the_engine_is_known(self, recorded: Path, capsys: Captured) -> None:
        assert latfit("validate", "engine.parquet", "run.csv", "--model", "linear", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["agrees"] is True
        assert found["engine"]["kv_blocks"] == 400
        assert found["settings_from"]["max_num_seqs"] == "engine.parquet"
        left_out = [each["message"] for each in found["warnings"] if each["code"] == "assumed"]
        assert len(left_out) == 1
        assert "more cached tokens than the KV cache holds (6,384)" in left_out[0]

    def test_options_go_before_what_the_trace_says(self, recorded: Path, capsys: Captured) -> None:
        named = ("--set", "draft_tokens=2", "--set", "order=sjf")
        given = ("--force", "--kv-blocks", 300, "--synchronous", *named, "--replicas", 2)
        assert latfit("validate", "engine.parquet", "run.csv", "--model", "linear", *given, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["engine"]["kv_blocks"] == 300
        assert {name for name, source in found["settings_from"].items() if source == "given"} == {
            "kv_blocks",
            "synchronous",
            "draft_tokens",
        }
