"""`latfit ingest` and `latfit trace show` as users and scripts see them."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from latfit.cli.app import run
from latfit.trace.parquet import write_trace
from tests.conftest import planted_trace
from tests.unit.trace.test_clean import changed, serving_log

Captured = pytest.CaptureFixture[str]


def latfit(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


@pytest.fixture
def log(in_tmp: Path) -> Path:
    write_trace(in_tmp / "log.parquet", changed(serving_log(), slice(0, 7), 4))
    return in_tmp / "log.parquet"


def test_contract_and_file(log: Path, in_tmp: Path, capsys: Captured) -> None:
    assert latfit("ingest", log, "--json", "--dropped", "dropped.parquet", "--out", "clean.parquet") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows_read"] == 2000
    assert facts["rows_used"] == 1993
    assert facts["dropped"] == {"cold_start": 7}
    assert facts["out"] == "clean.parquet"
    assert pq.read_metadata(in_tmp / "clean.parquet").num_rows == 1993
    side = pq.read_table(in_tmp / "dropped.parquet")
    assert side["reason"].to_pylist() == ["cold_start"] * 7


def test_what_is_read_is_not_written_over(log: Path, in_tmp: Path, capsys: Captured) -> None:
    before = log.read_bytes()
    assert latfit("ingest", log, "--out", in_tmp / "log.parquet") == 2
    assert "--out: " in capsys.readouterr().err
    assert log.read_bytes() == before


def test_several_files_and_globs_are_one_trace_with_a_run_each(log: Path, in_tmp: Path, capsys: Captured) -> None:
    write_trace(in_tmp / "log2.parquet", serving_log(seed=1))
    assert latfit("ingest", "log*.parquet", "--json", "--out", "both.parquet") == 0
    assert json.loads(capsys.readouterr().out)["rows_used"] == 3993
    runs = set(pq.read_table(in_tmp / "both.parquet")["run"].to_pylist())
    assert len(runs) == 2
    assert latfit("fit", "both.parquet", "--quiet") == 0


def test_standard_input(log: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.read_bytes())))
    assert latfit("ingest", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows_read"] == 2000


def test_nothing_matches(in_tmp: Path, capsys: Captured) -> None:
    assert latfit("ingest", "none*.log") == 3
    assert "no file matches" in capsys.readouterr().err


def test_most_dropped_is_3_unless_accepted(in_tmp: Path, capsys: Captured) -> None:
    write_trace(in_tmp / "async.parquet", changed(serving_log(), slice(0, 1500), 0))
    assert latfit("fit", "async.parquet") == 3
    assert "--allow-drops" in capsys.readouterr().err
    assert latfit("ingest", "async.parquet", "--allow-drops") == 0
    assert "plug-in" in capsys.readouterr().out
    assert latfit("fit", "async.parquet", "--allow-drops") == 0
    assert "plug-in" in capsys.readouterr().out


def test_switched_rules(log: Path, capsys: Captured) -> None:
    assert latfit("ingest", log, "--keep", "cold_start", "--json") == 0
    assert json.loads(capsys.readouterr().out)["dropped"] == {}
    assert latfit("ingest", log, "--keep", "nonsense") == 2


def test_show_says_what_is_there_and_what_is_missing(log: Path, in_tmp: Path, capsys: Captured) -> None:
    assert latfit("trace", "show", log, "--picture", "coverage.png") == 0
    out = capsys.readouterr().out
    assert "dropped 7 cold_start" in out
    assert "no prefill steps (S > B)" in out
    assert (in_tmp / "coverage.png").read_bytes().startswith(b"\x89PNG")


def test_a_fit_of_several_files_can_be_read_again(in_tmp: Path, capsys: Captured) -> None:
    for i in range(2):
        write_trace(in_tmp / f"part{i}.parquet", planted_trace(0.02, repeats=2, seed=i))
    assert latfit("fit", "part0.parquet", "part1.parquet", "--model", "saturation", "--path", "cpu") == 0
    assert latfit("report") == 0
    assert "left out" not in capsys.readouterr().err
    document = json.loads((in_tmp / "part0.fit.json").read_text())
    assert document["data"]["rows_used"] == 172
    assert np.isfinite(document["metrics"]["mape_pct"])


class TestCells:
    @pytest.fixture
    def folder(self, in_tmp: Path) -> Path:
        (in_tmp / "parts").mkdir()
        for i in range(3):
            write_trace(in_tmp / "parts" / f"{i}.parquet", planted_trace(0.03, repeats=8, seed=i))
        return in_tmp / "parts"

    def test_a_folder_is_fitted_through_its_cells(self, folder: Path, in_tmp: Path, capsys: Captured) -> None:
        """Rows and cells give the same parameters, to less than a standard error."""
        assert latfit("fit", folder, "--model", "saturation", "--path", "cpu", "--json") == 0
        cells = json.loads(capsys.readouterr().out)
        assert (in_tmp / "parts.cells.parquet").exists()
        assert cells["data"]["rows_used"] == 3 * 344
        assert latfit("fit", str(folder / "*.parquet"), "--model", "saturation", "--path", "cpu", "--json") == 0
        rows = json.loads(capsys.readouterr().out)
        for name, found in cells["parameters"].items():
            if rows["parameters"][name]["std_error"]:
                assert abs(found["value"] - rows["parameters"][name]["value"]) < rows["parameters"][name]["std_error"]

    @pytest.mark.nightly
    def test_on_a_cluster_the_cells_are_the_same(self, folder: Path, in_tmp: Path, capsys: Captured) -> None:
        pytest.importorskip("distributed", reason="the extra `dask` is not installed")
        assert latfit("ingest", folder, "--out", "here.parquet", "--json") == 0
        assert latfit("ingest", folder, "--out", "there.parquet", "--scheduler", "local", "--json") == 0
        here, there = (pq.read_table(in_tmp / f"{name}.parquet") for name in ("here", "there"))
        assert here.column_names == there.column_names
        for name in ("B", "S", "T_ms", "cell_rows"):
            assert here[name].to_pylist() == pytest.approx(there[name].to_pylist(), rel=1e-9)

    def test_a_bad_file_is_named_or_left_out(self, folder: Path, capsys: Captured) -> None:
        (folder / "bad.parquet").write_bytes(b"PAR1 not really")
        assert latfit("fit", folder) == 3
        assert "bad.parquet" in capsys.readouterr().err
        assert latfit("fit", folder, "--model", "saturation", "--set", "skip_bad=yes") == 0

    def test_what_tells_of_a_folder_is_no_trace(self, folder: Path, capsys: Captured) -> None:
        for name in ("README.md", "LICENSE", "overview.png"):
            (folder / name).write_bytes(b"no trace")
        assert latfit("fit", folder, "--model", "saturation") == 0
        (folder / "steps.csv").write_text("B,S,T_ms\n1,1,2\n")
        assert latfit("fit", folder) == 3
        assert "steps.csv" in capsys.readouterr().err
