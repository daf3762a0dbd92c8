"""From a file to clean rows: what is read, what is dropped and why, and what is refused."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from latfit.errors import BadInput, LatfitError, TargetNotWritable, WrongUsage
from latfit.trace.clean import CleanOptions
from latfit.trace.parquet import write_trace
from latfit.trace.read import Reading, check_one_machine, data_facts, ingest, parse_column_map, read_again
from latfit.trace.table import KINDS, Trace
from tests.conftest import ROOT, planted_trace


def csv(folder: Path, text: str, name: str = "t.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


class TestReading:
    def test_a_written_trace_reads_back(self, tmp_path: Path) -> None:
        trace = planted_trace(0.1).with_provenance(cpu="x <script>").with_columns(path=np.array(["cpu"] * 43))
        write_trace(tmp_path / "t.parquet", trace)
        again = ingest(tmp_path / "t.parquet").trace
        assert again.provenance == {"cpu": "x <script>"}
        for name in ("B", "S", "T_ms", "path"):
            assert np.array_equal(again[name], trace[name])

    def test_stored_types_are_those_of_the_format(self, tmp_path: Path) -> None:
        write_trace(tmp_path / "t.parquet", planted_trace(0.1))
        schema = pq.read_schema(tmp_path / "t.parquet")
        assert [str(schema.field(name).type) for name in ("B", "S", "T_ms")] == ["int32", "int64", "double"]

    def test_the_same_rows_are_found_again(self, tmp_path: Path) -> None:
        trace = planted_trace(0.1)
        label = np.where(trace["B"] > 8, "gpu", "cpu").astype(object)
        write_trace(tmp_path / "t.parquet", trace.with_columns(path=label))
        read = ingest(tmp_path / "t.parquet", Reading(where="S > 16"))
        for system, rows in read.trace.systems():
            again = read_again(data_facts(read, system, rows))
            assert np.array_equal(again["T_ms"], rows["T_ms"])

    def test_a_fit_that_kept_dummy_steps_by_a_former_rule_finds_them_again(self, tmp_path: Path) -> None:
        trace = planted_trace(0.1)
        write_trace(tmp_path / "t.parquet", trace.with_columns(dummy=np.arange(len(trace)) < 7))
        read = ingest(tmp_path / "t.parquet")
        facts = data_facts(read, {}, read.trace)
        assert len(read_again(facts)) == len(trace) - 7
        facts["reading"]["cleaning"]["keep"] = ["dummy"]
        assert len(read_again(facts)) == len(trace)

    def test_a_changed_source_is_not_the_same_rows(self, tmp_path: Path) -> None:
        source = csv(tmp_path, "B,S,T_ms\n1,1,2\n")
        facts = data_facts(ingest(source), {}, ingest(source).trace)
        csv(tmp_path, "B,S,T_ms\n1,1,3\n")
        with pytest.raises(BadInput, match="changed"):
            read_again(facts)


class TestCleaning:
    def test_each_reason_is_counted_once(self, tmp_path: Path) -> None:
        rows = ["1,1,5", "1,1,nan", "1,,5", "1,1,inf", "1,1,0", "1,1,-3", "0,1,5", "4,2,5", "1,1,900", "x,1,5"]
        source = csv(tmp_path, "B,S,T_ms\n" + "\n".join(rows) + "\n")
        read = ingest(source, Reading(cleaning=CleanOptions(max_ms=300, most=True)))
        assert read.dropped == {"non_finite": 4, "zero_time": 1, "bad_value": 3, "max_t": 1}
        assert (read.rows_read, read.rows_used) == (10, 1)


class TestSystems:
    def test_several_machines_are_listed_with_their_filters(self, measured_steps: Path) -> None:
        source = measured_steps / "splitwise_a100_h100_tp4_tp8.parquet"
        with pytest.raises(BadInput, match="6 systems") as caught:
            check_one_machine(ingest(source))
        assert "--where" in caught.value.remedy
        assert "--each" in caught.value.remedy
        shown = caught.value.found.split(": ", 1)[1].split(" (210 rows)")[0]
        check_one_machine(ingest(source, Reading(where=shown)))

    def test_each_has_its_own_host_time(self, tmp_path: Path) -> None:
        """Two models whose steps take 10 ms and come every 12 and every 20 ms."""
        model, B = np.repeat(["a", "b"], 40), np.tile([1.0, 2.0, 4.0, 8.0], 20)
        period = np.where(model == "a", 12.0, 20.0)
        columns = {"B": B, "S": B, "T_ms": np.full(80, 10.0), "period_ms": period, "model": model.astype(object)}
        write_trace(tmp_path / "t.parquet", Trace(columns))
        steps = ingest(tmp_path / "t.parquet")
        for name, every in (("a", 12.0), ("b", 20.0)):
            host = data_facts(steps, {"model": name}, steps.trace)["host"]
            assert host == {"decode": {"T_ms": 10.0, "period_ms": every}}


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("empty.parquet", b""),
            ("empty.csv", b""),
            ("cut.parquet", b"PAR1" + b"\x15\x04" * 40),
            ("foreign.bin", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
            ("page.html", b"<!doctype html><html><body>no trace</body></html>"),
            ("columns.csv", b"a,b\n1,2\n"),
            ("header.csv", b"B,S,T_ms\n"),
            ("words.csv", b"B,S,T_ms\nx,y,z\n"),
            ("negative.csv", b"B,S,T_ms\n1,1,-1\n1,1,-2\n"),
            ("ragged.csv", b"B,S,T_ms\n1,1\n1,1,1,1\n"),
        ],
    )
    def test_is_said_in_one_to_three_lines(self, name: str, content: bytes, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInput) as caught:
            ingest(tmp_path / name)
        assert name in str(caught.value)
        assert 1 <= str(caught.value).count("\n") + 1 <= 3

    def test_missing_file_and_folder(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match="no such file"):
            ingest(tmp_path / "none.parquet")
        with pytest.raises(BadInput, match="is a folder"):
            ingest(tmp_path)

    def test_a_trace_of_another_version(self, tmp_path: Path) -> None:
        table = pa.table({"B": [1], "S": [1], "T_ms": [1.0]}).replace_schema_metadata({"latfit": '{"schema": "x/9"}'})
        pq.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(BadInput, match="x/9"):
            ingest(tmp_path / "t.parquet")

    def test_map_and_unit_are_checked(self, tmp_path: Path) -> None:
        source = csv(tmp_path, "B,S,latency\n1,1,2\n")
        with pytest.raises(BadInput, match="no column nothing"):
            ingest(source, Reading({"T_ms": "nothing"}))
        with pytest.raises(WrongUsage, match="not a unit"):
            ingest(source, Reading(unit="parsec"))
        for text in ("latency", "X=latency", "T_ms="):
            with pytest.raises(WrongUsage, match="does not map"):
                parse_column_map(text)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        content=st.one_of(
            st.binary(max_size=400), st.text(alphabet="BST_ms,0123456789.-\n\"'", max_size=200).map(str.encode)
        )
    )
    def test_any_bytes_are_rows_or_an_error_of_ours(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "any").write_bytes(content)
        try:
            assert len(ingest(tmp_path / "any").trace) > 0
        except LatfitError as error:
            assert error.exit_code == 3


class TestWriting:
    def test_an_unwritable_target(self, tmp_path: Path) -> None:
        with pytest.raises(TargetNotWritable, match="does not exist"):
            write_trace(tmp_path / "none" / "t.parquet", planted_trace(0.1))


def test_the_format_page_names_every_column() -> None:
    page = (ROOT / "docs" / "formats.md").read_text()
    assert [name for name in KINDS if f"`{name}`" not in page] == []
