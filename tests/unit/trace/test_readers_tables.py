"""The reader of anybody's tables: containers, encodings, names, units, and what it refuses."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather, ipc

from latfit.errors import BadInput
from latfit.trace.parquet import write_trace
from latfit.trace.readers import table as tabular
from latfit.trace.readers.source import Options, open_source
from latfit.trace.table import Trace
from tests.conftest import planted_trace


def read(path: Path, options: Options | None = None) -> Trace:
    source = open_source(path)
    assert tabular.READER.recognises(source.head)
    return tabular.READER.read(source, options or Options())


def table(folder: Path, content: str | bytes, options: Options | None = None) -> Trace:
    (folder / "t").write_bytes(content if isinstance(content, bytes) else content.encode())
    return read(folder / "t", options)


CONTAINERS = (
    "parquet",
    "feather",
    "feather1",
    "arrow",
    "stream",
    "csv",
    "csv.gz",
    "csv.zst",
    "tsv",
    "jsonl",
    "json.gz",
)


def write(folder: Path, container: str, columns: Mapping[str, Sequence[object]]) -> Path:
    """The columns in a container, the last part of whose name may be a compression."""
    target = folder / f"t.{container}"
    kind, _, compression = container.partition(".")
    frame = pa.table(dict(columns))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    separator = "\t" if kind == "tsv" else ","
    lines = [separator.join(columns)] + [separator.join(map(str, row.values())) for row in rows]
    if kind == "parquet":
        pq.write_table(frame, target)
    elif kind == "feather":
        feather.write_feather(frame, target)
    elif kind in ("arrow", "stream"):
        with (ipc.new_file if kind == "arrow" else ipc.new_stream)(target, frame.schema) as writer:
            writer.write_table(frame)
    else:
        text = {"jsonl": "\n".join(map(json.dumps, rows)), "json": json.dumps(rows, indent=2)}.get(
            kind, "\n".join(lines)
        )
        if compression == "zst":
            with pa.output_stream(str(target), compression="zstd") as stream:
                stream.write(text.encode())
        else:
            target.write_bytes(gzip.compress(text.encode()) if compression else text.encode())
    return target


class TestContainers:
    @pytest.mark.parametrize("container", CONTAINERS)
    def test_every_container_gives_the_same_rows(self, container: str, tmp_path: Path) -> None:
        columns: dict[str, Sequence[object]]
        columns = {"B": [1, 2], "S": [1, 64], "T_ms": [2.5, 3.25], "model": ["a", "ä"], "tp": [1, 4]}
        trace = read(write(tmp_path, container, columns))
        assert {name: trace[name].tolist() for name in columns} == columns
        assert trace["tp"].dtype.kind == "i"

    def test_a_buffer_larger_than_any_memory_is_damage(self, tmp_path: Path) -> None:
        """Compressed buffers begin with their size."""
        target = write(tmp_path, "feather", {name: list(range(1, 1001)) for name in ("B", "S", "T_ms")})
        damaged = target.read_bytes().replace((8000).to_bytes(8, "little"), (1 << 47).to_bytes(8, "little"))
        with pytest.raises(BadInput, match="not a whole table"):
            table(tmp_path, damaged)

    def test_moments_become_seconds(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms,t_s\n1,1,2,2026-01-01 10:00:00\n1,1,2,2026-01-01 10:00:01.5\n")
        assert trace["t_s"].tolist() == [0, 1.5]


class TestText:
    @pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
    def test_what_windows_writes(self, encoding: str, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms,model\r\n1,64,2.5,ä\r\n".encode(encoding))
        assert (trace["S"].tolist(), trace["model"].tolist()) == ([64], ["ä"])

    def test_semicolons_and_decimal_commas(self, tmp_path: Path) -> None:
        assert table(tmp_path, "B;S;T_ms\n1;64;2,5\n2;64;3\n")["T_ms"].tolist() == [2.5, 3]

    def test_lines_of_another_width_are_counted(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms\n1,1,2\n1,1,3\n1,1,4\n2,6")
        assert (trace["T_ms"].tolist(), trace.provenance) == ([2, 3, 4], {"bad_lines": 1})


class TestNames:
    @pytest.mark.parametrize(
        ("header", "ms"),
        [
            ("batch,tokens,latency_ms", 30.0),
            ("Batch Size,num_tokens,time_ms", 30.0),
            ("batch-size,total_tokens,duration_ms", 30.0),
            ("num_reqs,tokens,latency_us", 0.03),
            ("b,s,latency_s", 30000.0),
            ("B,S,latency_ns", 30e-6),
        ],
    )
    def test_names_that_say_what_they_are(self, header: str, ms: float, tmp_path: Path) -> None:
        content = f"{header}\n4,64,30\n"
        if ms < 0.005:
            with pytest.raises(BadInput, match="median"):
                table(tmp_path, content)
            return
        trace = table(tmp_path, content)
        assert trace["T_ms"] == pytest.approx([ms])
        assert (trace["B"].tolist(), trace["S"].tolist()) == ([4], [64])
        assert trace.provenance["column_map"]["T_ms"] == header.split(",")[2]

    def test_a_bare_latency_needs_its_unit(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="no column T_ms"):
            table(tmp_path, "B,S,latency\n1,1,5000\n")
        assert table(tmp_path, "B,S,latency\n1,1,5000\n", Options(unit="us"))["T_ms"] == pytest.approx([5])


class TestUnits:
    @pytest.mark.parametrize(("value", "unit"), [(0.0042, "s"), (250000, "us"), (30e6, "ns")])
    def test_a_median_that_no_step_takes_asks_for_the_unit(self, value: float, unit: str, tmp_path: Path) -> None:
        content = f"B,S,T_ms\n1,1,{value}\n1,1,{value}\n2,2,12\n"
        with pytest.raises(BadInput, match=f"looks like {unit}") as caught:
            table(tmp_path, content)
        assert f"--unit {unit}" in caught.value.remedy
        assert table(tmp_path, content, Options(unit="ms"))["T_ms"][0] == value

    def test_what_latfit_wrote_is_in_milliseconds(self, tmp_path: Path) -> None:
        trace = planted_trace(0.1)
        tiny = trace.with_columns(T_ms=trace["T_ms"] * 1e-6)
        write_trace(tmp_path / "t.parquet", tiny.with_provenance(cpu="tiny"))
        assert np.array_equal(read(tmp_path / "t.parquet")["T_ms"], tiny["T_ms"])
