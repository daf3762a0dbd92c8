"""`latfit export` from end to end: what a plan prints is what its export says, files appear whole or not at all."""

import hashlib
import json
import re
import shlex
from pathlib import Path

import pytest

from latfit.cli.app import run
from tests.unit.exporting.parsers import options
from tests.unit.exporting.plans import of_requests

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def steps(in_tmp: Path) -> Path:
    run(["hardware", "add", "gpu", "--nominal", "launch=4ms,slope=0.1ms,per_token=0.01ms,max_batch=64"])
    return in_tmp


def test_a_plan_of_steps_prints_what_its_export_says(steps: Path, capsys: Captured) -> None:
    assert run(["plan", "--sla", "13ms", "--out", "plan.json"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    printed = re.search(r"vllm serve ((?:--[a-z-]+ (?:\d+ )?)+)", told)
    assert printed is not None
    assert run(["export", "vllm", "plan.json", "--out", "out"]) == 0
    digest = hashlib.sha256(Path("plan.json").read_bytes()).hexdigest()
    assert f"plan.json (sha256 {digest[:12]})" in " ".join(Path("out/vllm.yaml").read_text().split())
    assert options(Path("out/vllm.sh").read_text()) == shlex.split(printed[1])


def test_a_plan_of_requests_prints_what_its_export_says(steps: Path, capsys: Captured) -> None:
    plan = "plan --rate 20/s --lengths 30:5 --ttft 500ms --replicas 1 --synchronous --out plan.json"
    assert run(plan.split()) in (0, 4)
    told = " ".join(capsys.readouterr().out.split())
    printed = re.search(r"vllm serve MODEL ((?:--[a-z-]+ (?:\d+ )?)+)", told)
    assert printed is not None
    assert "--no-async-scheduling" in printed[1]
    document = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**document, "unsupported": []}))
    assert run(["export", "vllm", "plan.json", "--out", "vllm.sh"]) == 0
    assert options(Path("vllm.sh").read_text()) == shlex.split(printed[1])


@pytest.mark.parametrize(
    ("changed", "arguments", "code", "told"),
    [
        ({"feasible": False}, "vllm", 5, "cannot be met"),
        ({"unsupported": ["steps of 900"]}, "vllm", 4, "not supported"),
        ({}, "tgi", 2, "Take one of vllm, sglang, trtllm, llamacpp, triton, tensorrt, kubernetes."),
        ({}, "triton", 2, "latfit plan --sla"),
        ({}, "vllm --shape input:B", 2, "has no effect on vllm"),
        ({"engines": 3}, "vllm", 3, "latfit plan --out plan.json"),
        ({}, "vllm --out missing/vllm.yaml", 7, "Make it: mkdir -p"),
        ({}, "vllm --out out.txt", 2, "Name a folder"),
    ],
)
def test_errors(
    in_tmp: Path, capsys: Captured, changed: dict[str, object], arguments: str, code: int, told: str
) -> None:
    Path("plan.json").write_text(json.dumps(of_requests(**changed)))
    target, *rest = arguments.split()
    assert run(["export", target, "plan.json", *rest]) == code
    assert told in capsys.readouterr().err
    assert [path.name for path in in_tmp.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("number", ["9" * 400, "1e400", "NaN", "-Infinity"])
@pytest.mark.parametrize(
    "key", ["rate_per_s", "highest_rate_per_s", "steps_may_be_slower_pct", "limit_ms", "error_pct"]
)
def test_a_number_beyond_all_quantities(key: str, number: str, in_tmp: Path, capsys: Captured) -> None:
    text = re.sub(rf'"{key}": [^,}}]+', f'"{key}": {number}', json.dumps(of_requests()))
    Path("plan.json").write_text(text)
    assert run(["export", "vllm", "plan.json"]) == 3
    told = capsys.readouterr().err
    assert "plan.json: not a plan" in told
    assert "Make it again" in told


def test_what_is_printed_is_what_is_written(in_tmp: Path, capsys: Captured) -> None:
    Path("plan.json").write_text(json.dumps(of_requests()))
    run(["export", "trtllm", "plan.json"])
    printed = capsys.readouterr().out
    run(["export", "trtllm", "plan.json", "--out", "there/trtllm"])
    assert Path("there/trtllm/trtllm.yaml").read_text() == printed
