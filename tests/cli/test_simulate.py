"""`latfit simulate` as users call it: results on stdout, the JSON contract, files, and errors in their own words."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from latfit.cli.app import run

PATHS = ["--path", "gpu=8ms+0.05ms*256", "--path", "amx=exp:2ms"]
SMALL = ["--requests", "110000", "--replications", "2"]


def simulated(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[dict[str, object]]]:
    assert run(["simulate", "policies", *arguments, "--json"]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    document: dict[str, list[dict[str, object]]] = json.loads(out.out)
    return document


def test_sweep_and_resume(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ("--sweep", "rate=100/s,400/s; t-cut=2ms,4ms", "--policy", "cutoff", "--policy", "gpu-only")
    files = ("--out", "runs.parquet")
    runs = simulated(*sweep, *files, *PATHS, *SMALL, capsys=capsys)["runs"]
    # T_cut is the cut-off's own: greedy batching has one point a rate.
    assert [(each["policy"], each["rate_per_s"]) for each in runs] == [
        *[("cutoff", 100)] * 2, ("gpu-only", 100), *[("cutoff", 400)] * 2, ("gpu-only", 400)
    ]  # fmt: skip
    assert pq.read_table("runs.parquet").num_rows == 6
    again = simulated(*sweep, *files, "--resume", *PATHS, *SMALL, capsys=capsys)["runs"]
    assert again == runs


@pytest.mark.parametrize(
    "load",
    [
        ["--rate", "200/s", "--law", "gamma:2"],
        ["--rate", "200/s", "--law", "bursts:4:0.1:1s"],
        ["--rate", "200/s", "--class", "chat:0.3:50ms", "--class", "batch:0.7", "--set", "ageing=20ms"],
        ["--users", "20", "--think", "50ms"],
        ["--arrivals", "requests.csv"],
        ["--arrivals", "requests.csv", "--rate", "200/s"],
        ["--set", "load_curve=day.csv", "--rate", "200/s"],
    ],
)
def test_loads(load: list[str], in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f"{i * 0.01},{5 + i % 7},3\n" for i in range(400))
    Path("requests.csv").write_text("t_s,prompt_tokens,output_tokens\n" + rows)
    Path("day.csv").write_text("t_s,rate_per_s\n0,100\n1,300\n2,100\n")
    # Recorded requests are as many as there are, and more are refused.
    size = ["--replications", "2"] if "--arrivals" in load else SMALL
    (found,) = simulated(*load, *PATHS, *size, capsys=capsys)["runs"]
    assert found["stable"] is True
    if "--users" in load:
        assert found["rate_per_s"] is None
    if "--class" in load:
        assert [each["class"] for each in found["by_class"]] == ["chat", "batch"]  # type: ignore[attr-defined]


def test_overload_is_told_and_ends_with_5(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "policies", "--rate", "20000/s", *PATHS, *SMALL, "--json"]) == 5
    out = capsys.readouterr()
    assert json.loads(out.out)["runs"][0]["stable"] is False
    assert "gpu-only carries 12,300 req/s" in out.err  # 12,307.7, never rounded up


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--rate", "500/s"], 3, "hardware.json"),
        (["--rate", "500", *PATHS], 2, "rate with its unit"),
        ([*PATHS], 2, "no load is given"),
        (["--rate", "5/s", "--policy", "best", *PATHS], 2, "'best' is not known"),
        (["--rate", "5/s", "--sweep", "colour=red", *PATHS], 2, "'colour' is not a setting"),
        (["--rate", "5/s", "--policy", "fixed", "--sweep", "batch=red", *PATHS], 2, "is no count"),
        (["--users", "3", "--arrivals", "x.csv", *PATHS], 2, "contradict"),
        (["--rate", "5/s", "--set", "by_prompt=yes", *PATHS], 2, "no prompt lengths"),
        (["--users", "0", *PATHS], 2, "--users"),
        (["--users", "3", "--sweep", "rate=5/s", *PATHS], 2, "has no rate"),
        (["--arrivals", "missing.csv", *PATHS], 3, "missing.csv"),
        (["--arrivals", "zero.csv", *PATHS], 3, "request 2 needs output_tokens"),
    ],
)
def test_errors(arguments: list[str], code: int, words: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("zero.csv").write_text("t_s,prompt_tokens,output_tokens\n0,5,5\n1,5,0\n")
    assert run(["simulate", "policies", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
