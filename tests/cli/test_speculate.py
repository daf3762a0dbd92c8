"""`latfit speculate`: the batch from which drafting stops paying, in closed form and simulated."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import latfit
from latfit.api import speculate
from latfit.cli.app import run
from latfit.trace import Trace, write_trace

FIXED, PER_REQUEST, PER_TOKEN = 6.0, 0.1, 0.2
K, ACCEPTANCE, DRAFT_MS = 3, 0.6, 0.3
GAIN = 1 + 0.6 + 0.36 + 0.216
OPTIONS = ["--draft-tokens", str(K), "--acceptance", str(ACCEPTANCE), "--draft-cost", f"{DRAFT_MS}ms"]


def step_ms(B: np.ndarray, S: np.ndarray) -> np.ndarray:
    return np.asarray(FIXED + PER_REQUEST * B + PER_TOKEN * S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculate")
    rng = np.random.default_rng(3)
    B = np.tile([1, 2, 4, 8, 16, 32, 48], 80)
    S = B * np.repeat(np.tile([1, 2, 4, 1], 20), 7)
    T = step_ms(B, S) * np.exp(rng.normal(0, 0.01, len(B)))
    pd.DataFrame({"B": B, "S": S, "prefill_requests": 0, "prefill_tokens": 0, "T_ms": T}).to_csv(
        folder / "steps.csv", index=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["fit", "steps.csv", "--model", "linear", "--out", "steps.fit.json", "--quiet"]) == 0
    return folder


def test_it_stops_paying_where_the_closed_form_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """gain (f + (r + t) B) = f + k d + (r + (1 + k) t) B."""
    exact = ((GAIN - 1) * FIXED - K * DRAFT_MS) / (PER_REQUEST + (1 + K) * PER_TOKEN - GAIN * (PER_REQUEST + PER_TOKEN))
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert run(["speculate", "steps.fit.json", *OPTIONS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    low, high = found["stops_interval"]
    assert low <= np.ceil(exact) <= high
    assert found["stops_at"] == pytest.approx(exact, rel=0.1)
    for row in found["rows"]:
        B = np.array(row["B"])
        true = GAIN * step_ms(B, B) / (step_ms(B, (1 + K) * B) + K * DRAFT_MS)
        assert row["speedup"] == pytest.approx(float(true), rel=0.02)


def test_the_simulated_engine_is_as_much_faster(folder: Path) -> None:
    """Eight users in a closed loop who decode nearly all the time, eight answers each."""
    drafts: dict[str, Any] = {"draft_tokens": K, "acceptance": ACCEPTANCE, "draft_cost": f"{DRAFT_MS}ms"}
    found = speculate(folder / "steps.fit.json", **drafts)
    (row,) = (each for each in found.result.rows if each.B == 8)
    load: dict[str, Any] = {"users": 8, "think": "0ms", "lengths": "1:800", "requests": 64, "kv_blocks": 8000}
    load["synchronous"] = True
    plain, drafted = (
        latfit.simulate_engine(latfit.Fit.load(folder / "steps.fit.json"), **load, **more).runs[0].summary
        for more in ({}, drafts)
    )
    assert drafted.output_tokens_per_s / plain.output_tokens_per_s == pytest.approx(row.speedup, rel=0.02)


def test_drafts_and_acceptance_come_from_the_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted: each of 80 x 111 requests drafts 2 and gains 0.6 + 0.36 tokens in the mean."""
    monkeypatch.chdir(folder)
    steps = pd.read_csv("steps.csv")
    B = steps["B"].to_numpy()
    columns = {
        **{name: steps[name].to_numpy() for name in ("prefill_requests", "prefill_tokens", "T_ms")},
        "B": B,
        "S": 3 * B,
        "draft_tokens": 2 * B,
        "accepted_tokens": np.random.default_rng(1).multinomial(B, (0.4, 0.24, 0.36)) @ (0, 1, 2),
        "step": np.arange(len(B)),
    }
    columns["T_ms"] = step_ms(B, 3 * B)
    write_trace(Path("drafting.parquet"), Trace(columns, {"run_started": "x", "num_speculative_tokens": 2}))
    assert run(["fit", "drafting.parquet", "--model", "linear", "--out", "drafting.fit.json", "--quiet"]) == 0
    capsys.readouterr()
    assert run(["speculate", "steps.fit.json", "--drafts", "drafting.fit.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["draft_tokens"] == 2
    assert abs(found["acceptance"] - 0.6) <= 4 * found["acceptance_se"] < 0.04
