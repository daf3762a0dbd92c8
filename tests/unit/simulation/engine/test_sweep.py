"""Sweeps of engines: what is varied, where it goes, and what is refused."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from latfit.api import simulate_engine, values_of
from latfit.cli.app import run
from latfit.errors import WrongUsage
from latfit.files import dumps
from latfit.model import FitResult
from latfit.model.fit_parts import Estimate
from latfit.model.fit_result import FitStatus
from latfit.simulation import EngineSettings, Running

Captured = pytest.CaptureFixture[str]
VALUES = {"tau_0": 8.0, "tau_B": 0.05, "tau_S": 0.02}
FIT = FitResult(
    "linear",
    FitStatus.CONVERGED,
    {key: Estimate(value, None, None, None, "ms") for key, value in VALUES.items()},
    domain={"B": [1, 4096], "S": [1, 65536]},
)
SMALL: dict[str, Any] = {"kv_blocks": 400, "requests": 200, "replications": 2}


def swept(vary: dict[str, list[Any]], **more: Any) -> Any:
    rate = None if "rate" in vary or "users" in vary else "5/s"
    return simulate_engine(FIT, rate, "64:32", vary=vary, **{**SMALL, **more})


def test_every_combination_is_what_it_is_alone() -> None:
    found = swept({"rate": ["5/s", "20/s"], "max_num_seqs": [2, 64], "replicas": [1, 3]})
    frame = found.frame
    assert frame[["rate_per_s", "max_num_seqs", "replicas"]].to_numpy().round(9).tolist() == [
        [rate, seqs, replicas] for rate in (5, 20) for seqs in (2, 64) for replicas in (1, 3)
    ]
    alone = simulate_engine(FIT, "20/s", "64:32", engine={"max_num_seqs": 64}, replicas=3, **SMALL)
    assert frame.iloc[-1]["latency_p99_ms"] == alone.frame.iloc[0]["latency_p99_ms"]


def test_the_file_is_gone_on_with_and_is_the_same_for_any_workers(tmp_path: Path) -> None:
    out = tmp_path / "s.parquet"
    vary: dict[str, list[Any]] = {"replicas": [1, 2], "route": ["least-loaded", "predicted-latency"]}
    part = swept({**vary, "replicas": [2]}, out=out)
    assert len(pd.read_parquet(out)) == len(part.runs) == 2
    whole = swept(vary, out=out, resume=True, running=Running(workers=1), classes=())
    again = swept(vary, running=Running(workers=3))
    assert [dumps(run.to_json()) for run in whole.runs] == [dumps(run.to_json()) for run in again.runs]
    assert [(run.routing.replicas, run.labels["route"]) for run in whole.runs] == [
        (replicas, route) for replicas in vary["replicas"] for route in vary["route"]
    ]
    table = pd.read_parquet(out)
    assert table["replicas"].tolist() == [1, 1, 2, 2]
    assert np.isfinite(table["latency_p99_ms"]).all()


def test_texts_of_a_sweep() -> None:
    assert values_of("replicas=1..3, 5; rate = 10/s,20/s") == {
        "replicas": ["1", "2", "3", "5"],
        "rate": ["10/s", "20/s"],
    }
    assert values_of(["replicas=1..2", "rate=10/s"]) == {"replicas": ["1", "2"], "rate": ["10/s"]}
    assert values_of("replicas=²..³") == {"replicas": ["²..³"]}  # digits to Python, but no number
    for text in ("replicas", "replicas=", "replicas=4..1", "replicas=1;replicas=2", ["replicas=1", "replicas=2"]):
        with pytest.raises(WrongUsage, match="sweep"):
            values_of(text)


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ({"speed": [1]}, "no setting of engines"),
        ({"replicas": ["two"]}, "no value of replicas"),
        ({"synchronous": ["perhaps"]}, "no value of synchronous"),
        ({"replicas": range(1000), "max_num_seqs": range(1000)}, "points"),
    ],
)
def test_what_would_do_nothing_is_refused(vary: dict[str, list[Any]], said: str) -> None:
    with pytest.raises(WrongUsage, match=said):
        swept(vary)


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    FIT.write(in_tmp / "gpu.fit.json")
    seconds = np.arange(300) / 100.0
    lines = [f"{t:.3f},64,32" for t in seconds]
    (in_tmp / "r.csv").write_text("\n".join(["t_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return in_tmp


@pytest.mark.parametrize("load", [("--arrivals", "r.csv"), ("--rate", "100/s", "--lengths", "64:32")])
def test_overload_ends_with_what_would_carry_it(folder: Path, capsys: Captured, load: tuple[str, ...]) -> None:
    drawn = () if "--arrivals" in load else ("--requests", "2000", "--replications", "1")
    command = ["simulate", "engine", "--fit", "gpu.fit.json", "--kv-blocks", "400", "--max-num-seqs", "16"]
    assert run([*command, *load, *drawn]) == 5
    needed = re.search(r"--replicas (\d+) would carry it", " ".join(capsys.readouterr().err.split()))
    assert needed
    assert run([*command, *load, *drawn, "--replicas", needed[1]]) == 0


def test_a_sweep_on_the_command_line(folder: Path, capsys: Captured) -> None:
    command = "simulate engine --fit gpu.fit.json --kv-blocks 400 --lengths 64:32 --requests 200 --replications 1"
    asked = ["--sweep", "rate=5/s; max-num-seqs=4,8; replicas=1..2", "--out", "s.parquet"]
    assert run([*command.split(), *asked]) == 0
    assert "max_num_seqs 4, replicas 2 has the lowest" in capsys.readouterr().out
    assert len(pd.read_parquet("s.parquet")) == 4


@pytest.mark.parametrize(
    "name", ["kv_blocks", "max_num_batched_tokens", "max_num_seqs", "block_size", "long_prefill_token_threshold"]
)
def test_counts_beyond_64_bits(name: str) -> None:
    asked: dict[str, Any] = {name: 2**63}
    with pytest.raises(WrongUsage, match="more than any engine has"):
        EngineSettings(**asked)
