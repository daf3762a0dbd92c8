"""`latfit ledger`: a plan compared with a run that the slow reference engine served at planted step times."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from latfit.cli.app import run
from latfit.simulation.engine.settings import EngineSettings
from latfit.validation import Ledger, LedgerEntry, PromisedFigure
from latfit.workload.requests import make_requests
from tests.oracle.engine_reference import Engine

RATE_PER_S, REQUESTS = 8.0, 400
LOAD = ["--rate", f"{RATE_PER_S}/s", "--lengths", "200:40", "--replicas", "1", "--kv-blocks", "4000"]
ENGINE = ["--set", "max_num_seqs=16", "--set", "max_num_batched_tokens=512"]


def step_ms(B: np.ndarray, S: np.ndarray) -> np.ndarray:
    return 4 + 0.5 * B + 0.05 * S


def serve(slower: float = 1.0) -> pd.DataFrame:
    """Requests as the reference engine serves them, steps slower by a factor."""
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1e3 / RATE_PER_S, REQUESTS))
    lengths = np.full(REQUESTS, 200), np.full(REQUESTS, 40)
    settings = EngineSettings(
        max_num_seqs=16, max_num_batched_tokens=512, kv_blocks=4000, block_size=16, asynchronous=False
    )

    def cost(chunks: list[tuple[int, int, bool]]) -> float:
        noise = np.exp(rng.normal(0, 0.02))
        return float(slower * noise * step_ms(np.array(len(chunks)), np.array(sum(chunk for chunk, _, _ in chunks))))

    engine = Engine(make_requests(arrivals, *lengths), settings, cost)
    engine.run()
    return pd.DataFrame(
        [
            {
                "t_s": each.arrival / 1e3,
                "prompt_tokens": each.prompt,
                "output_tokens": each.output,
                "first_token_s": each.first / 1e3,
                "last_token_s": each.last / 1e3,
            }
            for each in engine.all
        ]
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a fit of the planted steps and plan.json."""
    folder = tmp_path_factory.mktemp("ledger")
    rng = np.random.default_rng(4)
    B = np.tile([1, 2, 4, 8, 12, 16, 16], 120)
    S = (
        B
        + np.tile([0, 0, 0, 0, 0, 0, 400], 120)
        + np.repeat(rng.integers(0, 100, 120), 7) * np.tile([0] * 6 + [1], 120)
    )
    T = step_ms(B, S) * np.exp(rng.normal(0, 0.02, len(B)))
    pd.DataFrame({"B": B, "S": S, "T_ms": T}).to_csv(folder / "steps.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["fit", "steps.csv", "--model", "linear", "--out", "fit.json", "--quiet"]) == 0
        limits = ["--ttft", "p90:100ms", "--tpot", "p90:25ms"]
        plan = ["plan", "--fit", "fit.json", *LOAD, *ENGINE, *limits, "--synchronous", "--out", "plan.json", "--quiet"]
        assert run(plan) == 0
        for name, slower in (("as-planned.csv", 1.0), ("slower.csv", 1.5)):
            serve(slower).to_csv(name, index=False)
    return folder


def test_promises_are_compared_with_what_was_measured(
    planned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(planned)
    ledger = tmp_path / "ledger.json"
    assert run(["ledger", "add", "plan.json", "as-planned.csv", "--ledger", str(ledger)]) == 0
    assert "2 of 2 promises kept, in 1 run" in capsys.readouterr().out
    assert run(["ledger", "add", "plan.json", "slower.csv", "--ledger", str(ledger)]) == 0
    capsys.readouterr()
    assert run(["ledger", "show", "--ledger", str(ledger), "--report", str(tmp_path / "page"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first, second = document["entries"]
    assert [figure["name"] for figure in first["figures"]] == ["p90 TTFT", "p90 TPOT"]
    covered = [[PromisedFigure.from_json(each).covered for each in entry["figures"]] for entry in (first, second)]
    assert covered == [[True, True], [False, False]]
    assert document["coverage_pct"] == 50
    assert "promises kept" in (tmp_path / "page" / "simulation.html").read_text()


def test_requests_without_an_answer_are_slower_than_any_limit(
    planned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(planned)
    rows = pd.read_csv("as-planned.csv")
    rows.loc[rows.index % 5 == 0, ["first_token_s", "last_token_s"]] = np.nan
    rows.to_csv(tmp_path / "failing.csv", index=False)
    add = ["ledger", "add", "plan.json", str(tmp_path / "failing.csv"), "--ledger", str(tmp_path / "ledger.json")]
    assert run([*add, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["entries"][0]["failed"] == REQUESTS // 5
    assert found["kept"] == 0


def test_a_plan_that_promises_nothing_is_refused(
    planned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(planned)
    missed = ["plan", "--fit", "fit.json", *LOAD, *ENGINE, "--ttft", "5ms", "--out", str(tmp_path / "missed.json")]
    assert run(missed) == 5
    assert run(["ledger", "add", str(tmp_path / "missed.json"), "as-planned.csv"]) == 3
    assert "promises nothing" in capsys.readouterr().err
    assert run(["ledger", "add", "plan.json"]) == 3
    assert run(["ledger", "show", "--ledger", str(tmp_path / "none.json")]) == 3


def entry(*, covered: bool) -> LedgerEntry:
    figure = PromisedFigure(
        name="p99 TTFT",
        limit_ms=110.0,
        planned_ms=100.0 if covered else 50.0,
        planned_interval_ms=(90.0, 110.0) if covered else (40.0, 55.0),
        measured_ms=100.0,
        interval_ms=(95.0, 105.0),
    )
    about: dict[str, Any] = {"added": "2026-01-01T00:00:00Z", "subject": "gpu", "plan": "plan.json", "run": "run.json"}
    return LedgerEntry(**about, planned_per_s=10.0, measured_per_s=10.0, requests=10_000, figures=[figure])


def test_coverage_has_the_interval_of_clopper_and_pearson() -> None:
    """18 of 20: 68.3 to 98.8 % (Clopper and Pearson's exact interval, R's binom.test)."""
    ledger = Ledger([entry(covered=i < 18) for i in range(20)])
    assert ledger.coverage_pct is not None
    share, (low, high) = ledger.coverage_pct
    assert (share, round(low, 1), round(high, 1)) == (90.0, 68.3, 98.8)


def test_a_client_that_gets_all_tokens_at_once_tests_no_interval() -> None:
    """Its TPOT is 0 ms."""
    (figure,) = entry(covered=True).figures
    assert replace(figure, measured_ms=0.0, interval_ms=(0.0, 0.0)).covered is None
