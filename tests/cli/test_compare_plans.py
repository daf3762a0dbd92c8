"""`latfit compare` with a load: replicas, SLO and the origin of a change, on planted step times."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from latfit.cli.app import run

LOAD = ["--rate", "40/s", "--lengths", "100:50", "--ttft", "200ms", "--tpot", "20ms", "--kv-blocks", "4000"]
FIXED_MS, GROWTH = 5.0, 2.0


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """before: 4 + 0.3 B + 0.02 S ms. host: 5 ms more at every size. batch: the term of B twice as large."""
    folder = tmp_path_factory.mktemp("upgrade")
    rng = np.random.default_rng(8)
    B = np.tile([1, 2, 4, 8, 16, 32, 32], 100)
    S = B + np.tile([0, 0, 0, 0, 0, 0, 1], 100) * np.repeat(rng.integers(100, 480, 100), 7)
    noise = np.exp(rng.normal(0, 0.01, len(B)))
    planted = {
        "before": 4 + 0.3 * B + 0.02 * S,
        "host": 4 + FIXED_MS + 0.3 * B + 0.02 * S,
        "batch": 4 + GROWTH * 0.3 * B + 0.02 * S,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, T in planted.items():
            pd.DataFrame({"B": B, "S": S, "T_ms": T * noise}).to_csv(f"{name}.csv", index=False)
            assert run(["fit", f"{name}.csv", "--model", "linear", "--out", f"{name}.json", "--quiet"]) == 0
    return folder


def test_a_change_is_told_in_replicas_and_by_its_origin(
    fits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(fits)
    capsys.readouterr()
    files = ["before.json", "host.json", "batch.json"]
    assert run(["compare", *files, *LOAD, "--set", "price_per_hour=2", "--json"]) == 8
    host, batch = json.loads(capsys.readouterr().out)["upgrades"]
    for upgrade, fixed_ms, per_request_ms in ((host, FIXED_MS, 0.0), (batch, 0.3, 0.3)):
        for change in upgrade["changes"]:
            assert change["smallest_batch"] == 1
            grown = per_request_ms * (change["B"] - 1)
            assert change["fixed_ms"] == pytest.approx(fixed_ms, abs=0.1)
            assert change["growing_ms"] == pytest.approx(grown, abs=0.03 * change["before_ms"])
    assert run(["plan", "--fit", "batch.json", *LOAD, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["replicas"]["value"]
    assert (batch["replicas"], batch["price_per_hour"]) == (planned, 2 * planned)
    assert planned > batch["baseline_replicas"]
    assert not all(each["met"] for each in batch["as_before"])


def test_a_load_needs_its_rate_and_one_system(fits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(fits)
    assert run(["compare", "before.json", "host.json", "--rate", "40/s", "--each"]) == 2
    assert run(["compare", "before.json", "host.json", "--rate", "40/s"]) == 2
