"""The nightly job: its exit codes, what it keeps, and which day it compares with."""

import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd
import pytest

from tests.conftest import ROOT
from tests.stand_in import live, serving, steady

SCRIPT = ROOT / "examples" / "nightly.sh"
SAMPLE = ROOT / "sample_traces" / "cpu_numpy_tiny.parquet"


def night(source: Path | str, kept: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, **settings}
    return subprocess.run(["bash", SCRIPT, source, kept], env=given, capture_output=True, text=True)


def day(kept: Path, ago: int) -> Path:
    return kept / (datetime.now(UTC) - timedelta(days=ago)).strftime("%Y-%m-%d")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one good day, eight days ago."""
    kept = tmp_path_factory.mktemp("kept")
    done = night(SAMPLE, kept)
    assert done.returncode == 0, done.stderr
    assert "first night" in done.stdout
    day(kept, 0).rename(day(kept, 8))
    return kept


def after(first: Path, folder: Path) -> Path:
    return Path(shutil.copytree(first, folder / "kept"))


@pytest.mark.nightly
def test_a_day_keeps_trace_fit_and_page(first: Path) -> None:
    assert {"trace.parquet", "fit.json", "report", "log.txt", "good"} <= {each.name for each in day(first, 8).iterdir()}


@pytest.mark.nightly
def test_steps_that_became_slower_end_with_8_and_are_no_baseline(first: Path, tmp_path: Path) -> None:
    kept = after(first, tmp_path)
    rows = pd.read_parquet(SAMPLE)
    rows.loc[rows["phase"] == "decode", "T_ms"] *= 1.2
    rows.to_csv(tmp_path / "slow.csv", index=False)
    done = night(tmp_path / "slow.csv", kept)
    assert done.returncode == 8
    assert " +20 % " in (day(kept, 0) / "compare.txt").read_text()
    assert not (day(kept, 0) / "good").exists()


@pytest.mark.nightly
def test_the_baseline_is_a_week_old_and_old_days_go(first: Path, tmp_path: Path) -> None:
    kept = after(first, tmp_path)
    for ago in (3, 40, 41):
        day(kept, ago).mkdir()
        (day(kept, ago) / "good").touch()
    done = night(SAMPLE, kept, LATFIT_KEEP="3")
    assert done.returncode == 0, done.stderr
    assert f"as fast as {day(kept, 8)}/trace.parquet" in " ".join(done.stdout.split())
    assert {each.name for each in kept.iterdir()} == {day(kept, ago).name for ago in (0, 3, 8)}


@pytest.mark.nightly
def test_a_server_is_recorded(tmp_path: Path) -> None:
    with serving(live(steady(300.0, 8, 0.018, waiting=12))) as url:
        done = night(url, tmp_path / "kept", LATFIT_DURATION="4s", LATFIT_PATH="cpu")
    assert done.returncode == 0, done.stderr
    assert (day(tmp_path / "kept", 0) / "report" / "report.html").exists()


def test_a_server_that_is_not_there_ends_with_3(tmp_path: Path) -> None:
    done = night("http://127.0.0.1:1", tmp_path / "kept", LATFIT_DURATION="1s")
    assert done.returncode == 3
    assert "cannot be reached" in done.stderr


@pytest.mark.nightly
def test_a_night_without_steps_ends_with_what_failed(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("B,S,T_ms\n")
    done = night(tmp_path / "empty.csv", tmp_path / "kept")
    assert done.returncode == 3
    assert "the table has no rows" in done.stderr
