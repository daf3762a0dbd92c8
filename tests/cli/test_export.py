"""`latfit export` from end to end: what a plan prints is what its export says, files appear whole or not at all."""

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


def test_a_plan_of_requests_prints_what_its_export_says(steps: Path, capsys: Captured) -> None:
    plan = "plan --rate 20/s --lengths 30:5 --ttft 500ms --replicas 1 --synchronous --out plan.json"
    assert run(plan.split()) in (0, 4)
    told = " ".join([*capsys.readouterr().out.split(), ""])
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
        ({"kind": "", "schema": "latfit.fit/1"}, "vllm", 3, "not a latfit plan (schema is 'latfit.fit/1')"),
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
