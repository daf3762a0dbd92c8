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
from latfit.trace.clean import clean
from latfit.trace.parquet import columns_of, write_trace
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

    def test_a_compressed_parquet_file_is_to_be_decompressed(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "t.parquet", planted_trace(0.1))
        with pytest.raises(BadInput, match="in a gzip file"):
            table(tmp_path, gzip.compress((tmp_path / "t.parquet").read_bytes()))

    def test_lists_in_a_column_are_cleaned_and_written(self, tmp_path: Path) -> None:
        more = np.array([["a"], None, ["b", "c"]], dtype=object)
        numbers = {name: np.array([1.0, 2.0, 3.0]) for name in ("B", "S", "T_ms", "step")}
        cleaned = clean(Trace({**numbers, "run": more, "more": more})).trace
        write_trace(tmp_path / "t.parquet", cleaned)
        assert pq.read_table(tmp_path / "t.parquet").column("more").to_pylist() == more.tolist()

    def test_json_objects_may_differ(self, tmp_path: Path) -> None:
        lines = '{"B": 1, "S": 1, "T_ms": 2.5}\n{"B": 2, "T_ms": "3.5", "tags": [1]}\nnoise\n{"B": 3, "S": null, "T_ms"'
        trace = table(tmp_path, lines)
        assert trace["B"].tolist() == [1, 2]
        assert np.array_equal(trace["S"], [1, np.nan], equal_nan=True)
        assert trace["T_ms"].tolist() == [2.5, 3.5]
        assert trace.provenance == {"bad_lines": 1, "cut_lines": 1}

    def test_moments_become_seconds(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms,t_s\n1,1,2,2026-01-01 10:00:00\n1,1,2,2026-01-01 10:00:01.5\n")
        assert trace["t_s"].tolist() == [0, 1.5]

    def test_columns_that_contradict_each_other_are_left_to_cleaning(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms,prefill_tokens\n4,2,5,9\n0,-1,-5,1\n")
        assert (trace["B"].tolist(), trace["S"].tolist(), trace["T_ms"].tolist()) == ([4, 0], [2, -1], [5, -5])


class TestArrow:
    """Columns pass between Arrow and NumPy by their buffers; Arrow's own conversion is the second method."""

    COLUMNS = pa.table(
        {
            "whole": pa.array([1, 2, None, 4]),
            "small": pa.array([1, 2, 3, 4], pa.uint16()),
            "real": pa.array([1.5, None, float("nan"), -0.0]),
            "single": pa.array([1.5, None, 2, 3], pa.float32()),
            "flag": pa.array([True, False, True, True]),
            "unknown": pa.array([True, None, False, True]),
            "text": pa.array(["a", None, "\u00e9", "a"]),
            "long": pa.array(["a", None, "b", ""], pa.large_string()),
            "label": pa.array(["x", None, "y", "x"]).dictionary_encode(),
            "code": pa.array([5, None, 7, 5]).dictionary_encode(),
            "bytes": pa.array([b"x", b"\xff", None, b""]),
            "empty": pa.nulls(4),
        }
    )

    @pytest.mark.parametrize("rows", [slice(0, 4), slice(1, 4), slice(0, 2), slice(3, 3)])
    def test_columns_are_what_arrow_makes_of_them(self, rows: slice) -> None:
        part = self.COLUMNS.slice(rows.start, rows.stop - rows.start)
        for frame in (part, pa.concat_tables([part, self.COLUMNS])):
            found = columns_of(frame, "it")
            for name in frame.column_names:
                column = frame.column(name)
                plain = column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
                expected = plain.to_numpy()
                assert found[name].dtype == expected.dtype, name
                np.testing.assert_array_equal(found[name], expected, err_msg=name)


class TestText:
    def test_labels_that_are_not_utf8_are_replaced(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms,model\n1,1,2,Größe\n1,1,3,plain\n".encode("cp1252"))
        assert trace["model"].tolist() == ["Gr\ufffd\ufffde", "plain"]

    def test_a_header_that_is_not_utf8(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms,größe\n1,1,2,7\n".encode("cp1252"))
        assert trace["gr\ufffd\ufffde"].tolist() == [7]

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
    def test_what_windows_writes(self, encoding: str, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms,model\r\n1,64,2.5,ä\r\n".encode(encoding))
        assert (trace["S"].tolist(), trace["model"].tolist()) == ([64], ["ä"])

    def test_semicolons_and_decimal_commas(self, tmp_path: Path) -> None:
        assert table(tmp_path, "B;S;T_ms\n1;64;2,5\n2;64;3\n")["T_ms"].tolist() == [2.5, 3]

    def test_integers_as_text(self, tmp_path: Path) -> None:
        trace = table(tmp_path, 'B,S,T_ms\n"1"," 64","2.5"\n"2","x","3"\n')
        assert trace["B"].tolist() == [1, 2]
        assert np.array_equal(trace["S"], [64, np.nan], equal_nan=True)

    def test_lines_of_another_width_are_counted(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,S,T_ms\n1,1,2\n1,1,3\n1,1,4\n2,6")
        assert (trace["T_ms"].tolist(), trace.provenance) == ([2, 3, 4], {"bad_lines": 1})

    def test_mostly_lines_of_another_width_are_no_table(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="not a table"):
            table(tmp_path, "B,S,T_ms\n1,1\n1,1\n1,1,3\n")

    def test_two_columns_of_one_name(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="two columns are called 'S'"):
            table(tmp_path, "B,S,S,T_ms\n1,1,1,2\n")


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

    @pytest.mark.parametrize(
        ("header", "candidates"),
        [
            ("batch,batch_size,tokens,T_ms", "batch, batch_size"),
            ("B,tokens,num_tokens,T_ms", "tokens, num_tokens"),
            ("B,S,latency_ms,time_us", "latency_ms, time_us"),
        ],
    )
    def test_several_candidates_are_listed(self, header: str, candidates: str, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=candidates) as caught:
            table(tmp_path, f"{header}\n1,1,1,5\n")
        assert "--map" in caught.value.remedy

    def test_latfits_own_names_and_the_map_come_first(self, tmp_path: Path) -> None:
        trace = table(tmp_path, "B,batch,S,T_ms,latency_ms\n1,9,1,5,7\n")
        assert (trace["B"].tolist(), trace["batch"].tolist(), trace["T_ms"].tolist()) == ([1], [9], [5])
        assert "column_map" not in trace.provenance
        mapped = table(tmp_path, "B,batch,S,T_ms,latency_ms\n1,9,1,5,7\n", Options({"T_ms": "latency_ms"}))
        assert mapped["T_ms"].tolist() == [7]

    def test_a_bare_latency_needs_its_unit(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="no column T_ms"):
            table(tmp_path, "B,S,latency\n1,1,5000\n")
        assert table(tmp_path, "B,S,latency\n1,1,5000\n", Options(unit="us"))["T_ms"] == pytest.approx([5])

    def test_a_name_and_a_unit_that_contradict_each_other(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="is in us by its name, but --unit says s"):
            table(tmp_path, "B,S,latency_us\n1,1,5000\n", Options(unit="s"))
        trace = table(tmp_path, "B,S,latency_us\n1,1,5\n", Options({"T_ms": "latency_us"}, "ms"))
        assert trace["T_ms"].tolist() == [5]

    def test_missing_columns_are_named_with_those_that_are_there(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="no column S, T_ms"):
            table(tmp_path, "batch,x\n1,2\n")


class TestUnits:
    @pytest.mark.parametrize(("value", "unit"), [(0.0042, "s"), (250000, "us"), (30e6, "ns")])
    def test_a_median_that_no_step_takes_asks_for_the_unit(self, value: float, unit: str, tmp_path: Path) -> None:
        content = f"B,S,T_ms\n1,1,{value}\n1,1,{value}\n2,2,12\n"
        with pytest.raises(BadInput, match=f"looks like {unit}") as caught:
            table(tmp_path, content)
        assert f"--unit {unit}" in caught.value.remedy
        assert table(tmp_path, content, Options(unit="ms"))["T_ms"][0] == value

    def test_times_that_are_zero_or_missing_do_not_count(self, tmp_path: Path) -> None:
        assert len(table(tmp_path, "B,S,T_ms\n1,1,0\n1,1,0\n1,1,\n1,1,-3\n1,1,7\n")) == 5

    def test_what_latfit_wrote_is_in_milliseconds(self, tmp_path: Path) -> None:
        trace = planted_trace(0.1)
        tiny = trace.with_columns(T_ms=trace["T_ms"] * 1e-6)
        write_trace(tmp_path / "t.parquet", tiny.with_provenance(cpu="tiny"))
        assert np.array_equal(read(tmp_path / "t.parquet")["T_ms"], tiny["T_ms"])
