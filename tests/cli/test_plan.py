"""`latfit plan`: ten-odd lines, the contract, what makes an impossible plan possible, exit codes, files."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from latfit.cli.app import run
from latfit.files import write_json
from latfit.hardware.profile import HardwareProfile
from latfit.trace import Trace
from latfit.trace.parquet import write_trace
from tests.conftest import planted_trace
from tests.unit.planning.test_plan import fit_with, line, machine

Captured = pytest.CaptureFixture[str]
SMALL = {"B": [1, 64], "S": [1, 64]}


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def keep(folder: Path, profile: HardwareProfile) -> Path:
    write_json(folder / "hardware.json", profile.to_json())
    return folder


@pytest.fixture
def both(in_tmp: Path) -> Path:
    return keep(in_tmp, machine(amx=line(0, 2, domain=SMALL), gpu=line(12, 0.05, domain=SMALL)))


@pytest.fixture
def gpu(in_tmp: Path) -> Path:
    return keep(in_tmp, machine(gpu=line(4, 0.1, domain=SMALL)))


def test_the_default_is_the_decision_and_fits_a_terminal(both: Path, capsys: Captured) -> None:
    assert latfit("plan", "--sla", "20ms", "--rate", "100/s") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 17
    told = " ".join(text.split())
    assert told.startswith("Serve 100 req/s of 1 token each with amx, greedy batches: p99 response ")
    thresholds = r"B1 \d+ requests .* B2 \d+ requests .* T_cut 8\.\d+ ms wait .*"
    assert re.search(thresholds + r" 1 replica needed. Capacity [\d.]+ req/s", told)
    assert "vllm serve" not in told  # its sequences leave room for prefill and would carry less than the batches
    assert "Next: latfit report --sla 20ms --rate 100/s" in told
    assert latfit("plan", "--set", "sla_ms=20", "--rate", "100/s", "--set", "max_batch=16") == 0
    assert "Next:" not in capsys.readouterr().out  # a page would not know of max_batch


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--rate", "0/s"], 2),
        (["--rate", "500"], 2),
        (["--rate", "5/s", "--arrivals", "a.csv"], 2),
        (["--replicas", "0"], 2),
        (["--set", "max_batch=0"], 2),
        (["--context", "-1"], 2),
        (["--transfer", "3"], 2),
        (["--prompt-tokens", "0"], 2),
        (["--percentile", "100"], 2),
        (["--tokens-per-request", "65"], 3),
        (["--arrivals", "none.csv"], 3),
        (["--hardware", "none.json"], 3),
    ],
)
def test_what_a_user_gets_wrong(arguments: list[str], code: int, gpu: Path, capsys: Captured) -> None:
    assert latfit("plan", "--sla", "20ms", *arguments) == code
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert len(told.strip().splitlines()) >= 2


def test_an_infeasible_load_is_explained_once(gpu: Path, capsys: Captured) -> None:
    assert latfit("plan", "--sla", "20ms", "--rate", "100000/s", "--tokens-per-request", "1") == 5
    printed = capsys.readouterr()
    found = re.search(r"(\S+) replicas needed. Capacity (\S+) req/s", printed.out)
    assert found is not None
    replicas, capacity = found.groups()
    assert f"hint: Give --replicas {replicas.replace(',', '')}" in printed.err
    assert capacity not in printed.err


def test_an_sla_given_in_ms_is_shown_with_its_unit(gpu: Path, capsys: Captured) -> None:
    latfit("plan", "--set", "sla_ms=20")
    assert "--tpot 20.0ms" in capsys.readouterr().out
    assert latfit("plan", "--set", "sla_ms=2") == 5
    assert "error: --sla 2.0ms: the plan is infeasible" in capsys.readouterr().err


def test_a_rate_needs_lengths_where_steps_depend_on_them(in_tmp: Path, capsys: Captured) -> None:
    write_trace(Path("steps.parquet"), planted_trace(0.03))
    assert latfit("fit", "steps.parquet", "--model", "saturation", "--path", "gpu") == 0
    capsys.readouterr()
    assert latfit("plan", "--sla", "50ms", "--rate", "5/s") == 2
    assert "--lengths 1000:250" in capsys.readouterr().err
    assert latfit("plan", "--sla", "50ms", "--rate", "5/s", "--tokens-per-request", "1", "--json") in (0, 5)


def test_a_fit_alone_is_a_machine_of_one_path(in_tmp: Path, capsys: Captured) -> None:
    write_trace(Path("steps.parquet"), planted_trace(0.03))
    assert latfit("fit", "steps.parquet", "--model", "saturation", "--path", "gpu") == 0
    said = []
    for machine_of in ("--hardware", "hardware.json"), ("--fit", "steps.fit.json"):
        capsys.readouterr()
        assert latfit("plan", "--sla", "50ms", *machine_of, "--json") == 0
        said.append(json.loads(capsys.readouterr().out)["answer"])
    assert said[0] == said[1]


def test_the_largest_steps_are_three_rows(in_tmp: Path, capsys: Captured) -> None:
    """T = 4 + 0.1 B + 0.02 S ms within 20 ms; the next command has the same percentile and context."""
    keep(in_tmp, machine(gpu=fit_with([4, 0.1, 0.02], "linear", domain={"B": [1, 256], "S": [1, 4096]})))
    assert latfit("plan", "--sla", "20ms", "--percentile", "90%", "--context", "700") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"decode 133 requests without prefill, on gpu prefill 795 tokens, at B = 1 on gpu mixed", told)
    mixed = re.search(r"mixed (\d+) \+ \d+ requests .* leave room for prefill in each step", told)
    assert mixed is not None
    assert f" {mixed[1]} * " in told  # the recommended row
    assert "--lengths 700:250 --ttft p90:1s --tpot p90:20ms" in told


def test_times_that_do_not_depend_on_the_batch_support_no_plan_of_a_load(in_tmp: Path, capsys: Captured) -> None:
    B = np.repeat([1.0, 2, 4, 8, 16, 32], 30)
    write_trace(Path("steps.parquet"), Trace({"B": B, "S": B, "T_ms": np.full(len(B), 10.0)}))
    assert latfit("fit", "steps.parquet", "--path", "gpu", "--force") == 0
    capsys.readouterr()
    assert latfit("plan", "--sla", "50ms", "--rate", "100/s", "--tokens-per-request", "1") == 4
    assert "vllm serve" not in capsys.readouterr().out
