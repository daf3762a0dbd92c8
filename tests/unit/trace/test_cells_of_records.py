"""Folders of an engine's records: what a pass over their cells takes is what reading their files takes."""

from pathlib import Path

import numpy as np
import pytest

import latfit
from latfit.api import engine_settings_of, read
from latfit.cli.app import run
from latfit.errors import BadInput
from latfit.trace.parquet import write_trace
from latfit.trace.read import timed
from latfit.trace.table import Trace

FILES = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of one recording: steps 20 % apart of their own time, two pauses, and a preempted request."""
    rng = np.random.default_rng(2)
    for file in range(FILES):
        n = 600
        B = rng.integers(1, 9, n)
        prefill = np.where(rng.random(n) < 0.1, 64, 0)
        T = (5.0 + 0.5 * B + 0.02 * prefill) * np.exp(rng.normal(0, 0.02, n))
        gaps = 0.2 * T
        gaps[rng.choice(n, 2, replace=False)] = 3000.0
        S = B + prefill
        S[100] = B[100] + 300  # a preempted request computes 301 tokens again
        columns = {
            "B": B + (prefill > 0),
            "S": S,
            "T_ms": T,
            "t_s": 40.0 * file + np.concatenate([[0.0], np.cumsum(T + gaps)[:-1]]) / 1e3,
            "step": n * file + np.arange(n),
            "prefill_requests": (prefill > 0).astype(np.int64),
            "prefill_tokens": prefill.astype(np.int64),
            "queued_requests": np.zeros(n, dtype=np.int64),
            "phase": np.where(prefill > 0, "mixed", "decode").astype(object),
            "run": np.full(n, "r", dtype=object),
            "replica": np.full(n, "0", dtype=object),
        }
        origin = {"run_started": "x", "run": "r", "num_speculative_tokens": 0, "block_size": 16, "max_num_seqs": 64}
        origin |= {"kv_capacity_tokens": 6400, "async_scheduling": False}
        (tmp_path / "traces").mkdir(exist_ok=True)
        write_trace(tmp_path / "traces" / f"{file}.parquet", Trace(columns, origin))
    return tmp_path / "traces"


def test_the_period_is_that_of_the_files(folder: Path) -> None:
    files = timed(read(f"{folder}/*.parquet"), None)
    cells = read(folder, cells_time="auto")
    assert files.time == cells.time == "period"
    weights = cells.trace.floats("cell_rows")
    # A file's last step has its successor in the next file, which a batch does not see.
    assert weights.sum() == pytest.approx(len(files.trace), abs=FILES)
    mean = np.average(cells.trace.floats("T_ms"), weights=weights)
    assert mean == pytest.approx(files.trace.floats("T_ms").mean(), rel=2e-3)
    assert cells.dropped["no_period"] == pytest.approx(files.dropped["no_period"], abs=FILES)
    phases = {name: cells.trace.floats("cell_rows")[cells.trace["phase"] == name].sum() for name in ("decode", "mixed")}
    assert phases["mixed"] == pytest.approx(np.count_nonzero(files.trace["phase"] == "mixed"), abs=FILES)


def test_a_fit_says_what_it_took(folder: Path) -> None:
    found = latfit.fit(folder, model="linear")
    assert found.time == "period"
    assert "exceeds T_ms by 20 %" in found.time_line
    own = latfit.fit(folder, model="linear", time="compute")
    assert own.time == "compute"
    assert found.predict(B=4)["T_ms"][0] == pytest.approx(1.2 * own.predict(B=4)["T_ms"][0], rel=0.01)
    assert found.evaluate(folder).summary()


def test_cells_know_the_engine(folder: Path) -> None:
    found = engine_settings_of(latfit.fit(folder, model="linear"))
    assert (found.settings.kv_blocks, found.settings.max_num_seqs) == (400, 64)
    assert not found.settings.asynchronous
    assert set(found.origin.values()) == {found.files[0], "assumed"}


def test_commands(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(["fit", "traces", "--model", "linear", "--force"]) == 0
    assert "The period was fitted" in " ".join(capsys.readouterr().out.split())
    assert run(["fit", "traces.cells.parquet", "--model", "linear", "--force"]) == 0
    assert "The period was fitted" in " ".join(capsys.readouterr().out.split())
    assert run(["fit", "traces.cells.parquet", "--model", "linear", "--time", "compute"]) == 3
    assert "made of periods" in capsys.readouterr().err
    assert run(["fit", "traces/0.parquet", "--cells", "--model", "linear", "--time", "compute", "--force"]) == 0
    assert "T_ms was fitted all the same" in " ".join(capsys.readouterr().out.split())
    assert run(["fit", "0.cells.parquet", "--model", "linear", "--time", "period"]) == 3
    assert "made of the steps' own times" in capsys.readouterr().err


def test_steps_that_know_no_period(folder: Path) -> None:
    table = {"B": np.arange(1, 200), "S": np.arange(1, 200), "T_ms": np.arange(1, 200) + 5.0}
    for file in folder.iterdir():
        file.unlink()
    write_trace(folder / "plain.parquet", Trace(table))
    assert read(folder, cells_time="auto").time == "compute"
    with pytest.raises(BadInput, match="when the next one began"):
        read(folder, cells_time="period")
