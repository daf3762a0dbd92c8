"""`latfit ingest` and `latfit trace show` as users and scripts see them."""

import json
from pathlib import Path

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


def test_most_dropped_is_3_unless_accepted(in_tmp: Path, capsys: Captured) -> None:
    write_trace(in_tmp / "async.parquet", changed(serving_log(), slice(0, 1500), 0))
    assert latfit("fit", "async.parquet") == 3
    assert "--allow-drops" in capsys.readouterr().err
    assert latfit("ingest", "async.parquet", "--allow-drops") == 0
    assert "plug-in" in capsys.readouterr().out
    assert latfit("fit", "async.parquet", "--allow-drops") == 0
    assert "plug-in" in capsys.readouterr().out


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
