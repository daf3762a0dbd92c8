"""Tables read in chunks: the rows, their types and the facts are those of the same table read at once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from latfit.cli.app import run
from latfit.trace import long_table

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def rows() -> pd.DataFrame:
    """Steps of two machines with everything in them that cleaning looks for, in any order but their own."""
    rng = np.random.default_rng(3)
    n = 900
    B = rng.integers(1, 9, n)
    S = B * rng.choice([1, 16], n)
    T = (3 + 0.1 * B + 0.02 * S) * np.exp(0.02 * rng.standard_normal(n))
    frame = pd.DataFrame({"B": B, "S": S, "T_ms": T, "t_s": np.cumsum(T) / 1e3, "step": np.arange(n)})
    frame["run"] = np.where(np.arange(n) < n // 2, "one", "two")
    frame["hardware"] = np.where(rng.random(n) < 0.5, "a100", "h100")
    frame["context_tokens"] = np.where(rng.random(n) < 0.3, np.nan, 100.0 * B)
    frame["warmup"] = np.arange(n) % 300 == 0
    frame["note"] = rng.integers(0, 5, n)
    frame.loc[[0, 1, 450, 451], "T_ms"] *= 20  # cold starts
    frame.loc[100:105, "T_ms"] = 1e-4  # next to no time
    frame.loc[200, "T_ms"] = np.nan
    frame.loc[201, "S"] = 0
    frame.loc[300, "T_ms"] *= 4  # an outlier
    return pd.concat([frame, frame.iloc[500:503]], ignore_index=True)  # the same steps again


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_table, "CHUNK_ROWS", 97)
    monkeypatch.setattr(long_table, "CHUNK_BYTES", 5000)


def written(source: Path, *options: str) -> tuple[Any, Any]:
    """The trace and the dropped rows that `latfit ingest` writes, with the facts of the reading."""
    names = (source.with_name("clean.parquet"), source.with_name("dropped.parquet"))
    assert run(["ingest", str(source), "--out", str(names[0]), "--dropped", str(names[1]), "--quiet", *options]) == 0
    found = []
    for name in names:
        table = pq.read_table(name)
        document = json.loads(table.schema.metadata[b"latfit"])["provenance"]
        ingested = document.pop("ingest", {"data": None})["data"]
        found.append((table.replace_schema_metadata(None), document, ingested))
    return found[0], found[1]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
@pytest.mark.parametrize("options", [(), ("--where", "hardware == 'h100'"), ("--drop", "outlier", "--unit", "s")])
def test_chunks_give_what_the_whole_gives(
    ending: str,
    options: tuple[str, ...],
    rows: pd.DataFrame,
    in_tmp: Path,
    chunked: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = in_tmp / f"rows.{ending}"
    rows.to_parquet(source, index=False) if ending == "parquet" else rows.to_csv(source, index=False)
    at_once = written(source, *options)
    monkeypatch.setattr(long_table, "LONG_BYTES", 0)
    in_chunks = written(source, *options)
    for one, other in zip(at_once, in_chunks, strict=True):
        assert one[0].schema == other[0].schema
        assert one[0].to_pandas().equals(other[0].to_pandas())
        assert one[1:] == other[1:]
    assert pq.ParquetFile(in_tmp / "clean.parquet").num_row_groups > 5
    reasons = set(in_chunks[1][0]["reason"].to_pylist())
    assert {"cold_start", "zero_time", "duplicate"} <= reasons


def test_what_chunks_cannot_settle_is_read_at_once(
    rows: pd.DataFrame, in_tmp: Path, chunked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_table, "LONG_BYTES", 0)
    mixed = rows.assign(note=[str(note) if i < 800 else "late" for i, note in enumerate(rows["note"])])
    mixed.to_csv("mixed.csv", index=False)
    timed = rows.assign(t_s=pd.to_datetime(rows["t_s"], unit="s"))
    timed.to_parquet("timed.parquet", index=False)
    for name in ("mixed.csv", "timed.parquet"):
        assert run(["ingest", name, "--out", "clean.parquet", "--quiet"]) == 0
        assert pq.ParquetFile("clean.parquet").num_row_groups == 1
    assert set(pq.read_table("clean.parquet").column_names) == set(rows.columns)


def test_errors_are_those_of_a_table_in_memory(
    rows: pd.DataFrame, in_tmp: Path, chunked: None, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(long_table, "LONG_BYTES", 0)
    rows.to_parquet("rows.parquet", index=False)
    rows.assign(T_ms=rows["T_ms"] * 1e9).to_parquet("slow.parquet", index=False)
    for arguments, code, told in (
        (["rows.parquet", "--where", "hardware == 'l4'"], 3, "no row matches"),
        (["slow.parquet"], 3, "--unit"),
        (["rows.parquet", "--map", "B=batch"], 3, "no column batch"),
    ):
        assert run(["ingest", *arguments, "--out", "clean.parquet"]) == code
        assert told in capsys.readouterr().err
        assert not (in_tmp / "clean.parquet").exists()


def test_lines_that_are_no_rows_are_counted(rows: pd.DataFrame, in_tmp: Path, chunked: None, capsys: Captured) -> None:
    rows.to_csv("rows.csv", index=False)
    with Path("rows.csv").open("a") as stream:
        stream.write("1,2,3\n" * 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_table, "LONG_BYTES", 0)
        assert run(["ingest", "rows.csv", "--out", "clean.parquet"]) == 0
    assert "3 lines were unreadable" in capsys.readouterr().out
