"""Files that are damaged or made to hurt: rows are left out and counted, sizes bounded, what was written read again."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from latfit.errors import BadInput
from latfit.trace.clean import clean
from latfit.trace.coverage import reading_notes
from latfit.trace.parquet import read_parquet, write_trace
from latfit.trace.read import CleanTrace, ingest
from latfit.trace.table import Trace

ROWS = [f"{b},{b},{9 + b / 10}" for b in range(1, 41)]


def csv(folder: Path, *, changed: bytes, at: int = 20) -> CleanTrace:
    lines = [b"B,S,T_ms", *(row.encode() for row in ROWS)]
    lines[at + 1] = changed
    (folder / "t.csv").write_bytes(b"\n".join(lines) + b"\n")
    return ingest(folder / "t.csv")


class TestOneBadRow:
    @pytest.mark.parametrize(
        "changed",
        [b"21,21,5,9,9", b"21,21", b"2\xff1,21,5,9", b'"21,21', b"2\xff1,21,9", b"21,\x00,9", b"x,y,z", b'21,"21,9'],
    )
    def test_is_left_out_and_counted(self, changed: bytes, tmp_path: Path) -> None:
        found = csv(tmp_path, changed=changed)
        assert len(found) == 39
        told = found.everything.provenance.get("bad_lines", 0) + found.dropped.get("non_finite", 0)
        assert told == 1
        if found.everything.provenance.get("bad_lines"):
            assert reading_notes(found) == ["1 line was unreadable and not read."]


class TestBounds:
    def test_a_table_without_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("latfit.memory.free_memory_bytes", lambda: 1000)
        (tmp_path / "t.csv").write_text("B,S,T_ms\n" + "1,1,5\n" * 1000)
        with pytest.raises(BadInput, match="of memory to read"):
            ingest(tmp_path / "t.csv")

    def test_no_damaged_footer_ends_the_process(self, tmp_path: Path) -> None:
        """Some made Arrow abort it."""
        write_trace(tmp_path / "t.parquet", Trace({name: np.array([1.0, 2.0]) for name in ("B", "S", "T_ms")}))
        program = (
            "import sys; from pathlib import Path; from latfit.errors import BadInput\n"
            "from latfit.trace.parquet import read_parquet\n"
            "file = Path(sys.argv[1]); whole = file.read_bytes()\n"
            "start = len(whole) - 8 - int.from_bytes(whole[-8:-4], 'little')\n"
            "for at in range(start, start + 64):\n"
            "    file.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1:])\n"
            "    try: read_parquet(file)\n"
            "    except BadInput: pass\n"
        )
        ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "t.parquet")], capture_output=True)
        assert ended.returncode == 0, ended.stderr.decode()

    def test_a_page_with_other_bytes_is_refused(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        columns = {"B": np.ones(5000), "S": np.ones(5000), "T_ms": rng.uniform(1, 2, 5000)}
        write_trace(tmp_path / "t.parquet", Trace(columns))
        whole = bytearray((tmp_path / "t.parquet").read_bytes())
        whole[len(whole) // 2] ^= 1
        (tmp_path / "t.parquet").write_bytes(whole)
        with pytest.raises(BadInput, match="not a whole Parquet file"):
            read_parquet(tmp_path / "t.parquet")


HUGE = st.sampled_from([0.0, -1.0, 1.5, 2.0**31, 2.0**40, 2.0**53, 2.0**63, 1e300, -1e300, np.inf, -np.inf, np.nan])
COLUMNS = ("B", "S", "T_ms", "context_tokens", "prefill_tokens", "prefill_context_tokens", "queued_requests", "step")


class TestLimits:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(odd=st.lists(st.tuples(st.sampled_from(COLUMNS), st.integers(0, 19), HUGE), max_size=8))
    def test_what_was_written_is_read_as_it_was(self, odd: list[tuple[str, int, float]], tmp_path: Path) -> None:
        columns = {name: np.arange(20.0) % 7 for name in COLUMNS}
        columns |= {"B": 1 + np.arange(20.0) % 4, "S": 10 + np.arange(20.0), "T_ms": 5 + np.arange(20.0)}
        for name, row, value in odd:
            columns[name][row] = value
        found = clean(Trace(columns))
        write_trace(tmp_path / "t.parquet", found.trace)
        again = read_parquet(tmp_path / "t.parquet")
        for name in found.trace.columns:
            assert np.array_equal(again.floats(name), found.trace.floats(name), equal_nan=True)
        second = clean(again)
        assert "bad_value" not in second.dropped
        assert "non_finite" not in second.dropped


class TestCells:
    @pytest.mark.parametrize(
        ("name", "value"), [("cell_rows", np.inf), ("cell_rows", -1.0), ("B", -3.0), ("T_ms", 0.0)]
    )
    def test_that_are_none_are_refused(self, name: str, value: float) -> None:
        columns = {"B": np.ones(9), "S": np.ones(9), "T_ms": np.full(9, 5.0), "cell_rows": np.full(9, 7.0)}
        columns[name][4] = value
        with pytest.raises(BadInput, match="row 5 is no cell"):
            clean(Trace(columns))


def with_provenance(provenance: object, file: Path) -> Path:
    table = pa.table({"B": [1, 2], "S": [1, 2], "T_ms": [5.0, 6.0], "cell_rows": [2.0, 3.0]})
    stored = json.dumps({"schema": "latfit.trace/1", "provenance": provenance})
    pq.write_table(table.replace_schema_metadata({"latfit": stored}), file)
    return file


@pytest.mark.parametrize("provenance", [None, [], 1])
def test_a_provenance_that_is_no_object_is_refused(provenance: object, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not a latfit trace"):
        ingest(with_provenance(provenance, tmp_path / "t.parquet"))


@pytest.mark.parametrize(
    "provenance", [{"parts": None}, {"cells": 3, "parts": [1]}, {"cells": {"rows_read": "x", "dropped": 1}}]
)
def test_facts_of_other_types_are_passed_over(provenance: object, tmp_path: Path) -> None:
    found = ingest(with_provenance(provenance, tmp_path / "t.parquet"))
    assert reading_notes(found) == []
    assert found.rows_read == 5
