"""`latfit.read`: the same steps from files and from tables of every kind in memory; what cannot be read is said."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import latfit
from latfit.cli.app import run
from latfit.errors import BadInput, LatfitError, WrongUsage
from latfit.trace import Trace, write_trace
from tests.conftest import planted_trace


class Polars:
    """What latfit uses of a Polars frame."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.columns = table.column_names

    def to_arrow(self) -> pa.Table:
        return self.table


class Capsule:
    """A table of which nothing is known but Arrow's C stream."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


KINDS = {
    "pandas": pd.DataFrame,
    "pandas, indexed": lambda columns: pd.DataFrame(columns).set_index(["B", "S"]),
    "pandas, nullable": lambda columns: pd.DataFrame(columns).convert_dtypes(),
    "mapping": dict,
    "lists": lambda columns: {name: column.tolist() for name, column in columns.items()},
    "arrow": pa.table,
    "arrow batch": pa.record_batch,
    "polars": lambda columns: Polars(pa.table(columns)),
    "capsule": lambda columns: Capsule(pa.table(columns)),
    "trace": Trace,
}


def columns() -> dict[str, Any]:
    return {name: np.asarray(column) for name, column in planted_trace(0.05, repeats=2).columns.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_every_kind_are_the_same_steps(kind: str) -> None:
    found = latfit.read(KINDS[kind](columns()))
    assert len(found) == found.rows_read == 86
    for name, column in columns().items():
        assert found.trace.floats(name) == pytest.approx(column, rel=0)


def test_options_are_those_of_the_command_line(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of microseconds under names of its own, with steps of two machines and one of no time."""
    table = pd.DataFrame(columns()).assign(machine=["a", "b"] * 43)
    table.loc[5, "T_ms"] = 0.0
    table = table.assign(latency=1e3 * table["T_ms"]).drop(columns="T_ms").rename(columns={"B": "batch"})
    table.to_csv("steps.csv", index=False)
    options: dict[str, Any] = {"map": {"B": "batch", "T_ms": "latency"}, "unit": "us", "where": "machine == 'b'"}
    found = latfit.read(table, **options)
    assert (found.rows_read, dict(found.dropped)) == (43, {"zero_time": 1})
    assert found.frame["T_ms"].to_numpy() == pytest.approx(
        table["latency"][(table["machine"] == "b") & (table["latency"] > 0)] / 1e3
    )
    assert latfit.read("steps.csv", **{**options, "map": "B=batch,T_ms=latency"}).frame.equals(found.frame)
    command = ("--map", "B=batch,T_ms=latency", "--unit", "us", "--where", "machine == 'b'", "--json")
    assert run(["ingest", "steps.csv", *command]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["rows_read"], printed["rows_used"], printed["dropped"]) == (43, 42, {"zero_time": 1})


def test_files_and_globs(in_tmp: Path) -> None:
    for i in range(2):
        write_trace(in_tmp / f"part{i}.parquet", planted_trace(0.05, seed=i))
    assert len(latfit.read("part*.parquet")) == len(latfit.read(["part0.parquet", Path("part1.parquet")])) == 86
    assert len(latfit.read(in_tmp)) > 0  # a folder becomes weighted cells, in memory
    assert not list(in_tmp.glob("*.cells.parquet"))


@pytest.mark.parametrize(
    ("source", "options", "kind", "words"),
    [
        (3, {}, BadInput, "neither a file nor a table"),
        ("none.parquet", {}, BadInput, "no such file"),
        ({"B": [1], "S": [1, 2], "T_ms": [1.0]}, {}, BadInput, "differ in length"),
        (pd.DataFrame({"batch": [1, 2], "y": [1, 2]}), {}, BadInput, "no column S, T_ms"),
        (pd.DataFrame([[1, 2]], columns=["B", "B"]), {}, BadInput, "two columns are called 'B'"),
        (pa.table([[1], [1]], names=["B", "B"]), {}, BadInput, "two columns are called 'B'"),
        ({"B": [1.0] * 9, "S": [1.0] * 9, "T_ms": [1e6] * 9}, {}, BadInput, "looks like"),
        ({"B": [], "S": [], "T_ms": []}, {}, BadInput, "no rows"),
        ({"B": [1], "S": [1], "T_ms": [1.0]}, {"unit": "weeks"}, WrongUsage, "not a unit"),
        ({"B": [1], "S": [1], "T_ms": [1.0]}, {"map": "B=x"}, BadInput, "no column x"),
        ({"B": [1], "S": [1], "T_ms": [1.0]}, {"keep": ["nonsense"]}, WrongUsage, "nonsense"),
        ({"B": [1], "S": [1], "T_ms": [1.0]}, {"where": "B > 3"}, BadInput, "no row matches"),
    ],
)
def test_what_cannot_be_read_is_said(source: Any, options: Any, kind: type[LatfitError], words: str) -> None:
    with pytest.raises(kind) as caught:
        latfit.read(source, **options)
    assert words in str(caught.value)
    assert "--" not in str(caught.value).splitlines()[0]  # parameters, not options
