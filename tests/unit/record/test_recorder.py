"""What the recorder promises the engine: whole files, every row or a count of those lost, and never an exception."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from latfit.record.recorder import Buffers, Step, StepRecorder
from latfit.trace.parquet import read_parquet, write_trace
from latfit.trace.table import KINDS, Trace
from tests.unit.record.engine import files, steps_in, until

COLUMNS_FED = ("step", "T_ms", "prefill_requests", "prefill_tokens", "queued_requests", "kv_usage", "dummy")


def feed(recorder: StepRecorder, count: int, start: int = 0) -> None:
    for step in range(start, start + count):
        recorder.add(Step(step, 1.0 + step, step % 3, 10 * (step % 3), 2, 2, queued_requests=step % 5, kv_usage=0.5))


class Disk:
    """A disk that stands still until it is told to go on, and can refuse."""

    def __init__(self) -> None:
        self.moves = threading.Event()
        self.reached = threading.Event()
        self.full = False

    def write(self, target: Path, trace: Trace) -> None:
        self.reached.set()
        assert self.moves.wait(60)
        if self.full:
            raise OSError(28, "No space left on device")
        write_trace(target, trace)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """Every recorder writes to it."""
    found = Disk()
    monkeypatch.setattr("latfit.record.recorder.write_trace", found.write)
    return found


class TestFiles:
    def test_a_file_every_n_rows_and_the_rest_at_the_end(self, tmp_path: Path) -> None:
        recorder = StepRecorder(tmp_path / "new" / "folder", buffers=Buffers(rows_per_file=10), replica="3")
        feed(recorder, 25)
        recorder.close()
        written = files(tmp_path / "new" / "folder")
        assert [file.name for file in written] == [f"trace-{recorder.run}-3-{n:06d}.parquet" for n in range(3)]
        assert [len(read_parquet(file)) for file in written] == [10, 10, 5]
        assert (recorder.rows_written, recorder.rows_dropped, recorder.rows_refused) == (25, 0, 0)

    def test_columns_and_types_are_those_of_a_trace(self, tmp_path: Path) -> None:
        recorder = StepRecorder(tmp_path, labels={"path": "gpu", "tp": 2}, facts={"engine": "none"})
        recorder.kv_capacity_tokens = 1000
        feed(recorder, 3)
        recorder.close()
        trace = read_parquet(files(tmp_path)[0])
        assert trace["B"].tolist() == [2, 3, 4]
        assert trace["S"].tolist() == [2, 12, 22]
        assert trace["phase"].tolist() == ["decode", "mixed", "mixed"]
        assert trace["context_tokens"].tolist() == [500] * 3
        assert trace["run"].tolist() == [recorder.run] * 3
        assert (trace["replica"][0], trace["path"][0], trace["tp"][0]) == ("0", "gpu", 2)
        kinds = {"int": "i", "float": "f", "text": "O", "flag": "b"}
        for name in set(KINDS) & set(trace.columns):
            assert trace[name].dtype.kind == kinds[KINDS[name]], name
        assert trace.provenance["engine"] == "none"
        assert trace.provenance["kv_capacity_tokens"] == 1000

    def test_the_period_lasts_until_the_next_step_of_a_file_starts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Steps of 250 ms end at 0.5, 1.0, 11.0 and 11.4 s; no request is left after the second.
        now = iter([100.0, 100.5, 101.0, 111.0, 111.4])
        monkeypatch.setattr("latfit.record.recorder.monotonic", lambda: next(now))
        recorder = StepRecorder(tmp_path)
        for step, prefill in enumerate((1, 0, 1, 0)):
            recorder.add(Step(step, 250.0, prefill, 9 * prefill, 1 - prefill, 1 - prefill, queued_requests=0))
        recorder.close()
        found = read_parquet(files(tmp_path)[0])["period_ms"]
        assert found == pytest.approx([500, np.nan, 400, np.nan], nan_ok=True)

    count = st.integers(0, 2**31 - 1)
    step = st.tuples(
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        count,
        st.integers(0, 2**62),
        count,
        st.floats(0, 1),
        st.booleans(),
    )

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
    @given(fed=st.lists(step, max_size=20), rows_per_file=st.integers(1, 8))
    def test_rows_are_those_that_were_fed(
        self, fed: list[tuple[Any, ...]], rows_per_file: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        folder = tmp_path_factory.mktemp("fed")
        recorder = StepRecorder(folder, buffers=Buffers(rows_per_file=rows_per_file, max_pending=20))
        for number, T_ms, requests, tokens, queued, usage, dummy in fed:
            recorder.add(
                Step(number, T_ms, requests, tokens, 0, 0, queued_requests=queued, kv_usage=usage, dummy=dummy)
            )
        recorder.close()
        read = [read_parquet(file) for file in files(folder)]
        assert [row for part in read for row in zip(*(part[name].tolist() for name in COLUMNS_FED), strict=True)] == fed


class TestTheDisk:
    def test_the_oldest_files_of_recorders_go(self, tmp_path: Path) -> None:
        """Those of an earlier run first; what no recorder wrote stays, and so does the file just written."""
        before = StepRecorder(tmp_path, buffers=Buffers(rows_per_file=10))
        feed(before, 10)
        before.close()
        (tmp_path / "trace-mine.parquet").write_bytes(b"x" * 100_000)
        size = files(tmp_path)[0].stat().st_size
        recorder = StepRecorder(tmp_path, buffers=Buffers(rows_per_file=10, keep_bytes=2.5 * size))
        feed(recorder, 50)
        recorder.close()
        assert [file.name for file in files(tmp_path)] == [
            f"trace-{recorder.run}-0-000003.parquet",
            f"trace-{recorder.run}-0-000004.parquet",
            "trace-mine.parquet",
        ]
        assert recorder.files_deleted == 4
        assert read_parquet(files(tmp_path)[1]).provenance["files_deleted_so_far"] == 3

    def test_a_folder_is_tried_and_what_is_wrong_is_said(self, tmp_path: Path, caplog: Any) -> None:
        assert StepRecorder(tmp_path / "new").check_folder()
        assert list((tmp_path / "new").iterdir()) == []
        (tmp_path / "file").touch()
        recorder = StepRecorder(tmp_path / "file" / "folder")
        recorder.advice = "choose another"
        assert not recorder.check_folder()
        assert "choose another" in caplog.text


class TestTheEngineComesFirst:
    def test_a_standing_disk_drops_rows_and_counts_them(self, disk: Disk, tmp_path: Path, caplog: Any) -> None:
        recorder = StepRecorder(tmp_path, buffers=Buffers(rows_per_file=10, max_pending=2))
        feed(recorder, 10)
        assert disk.reached.wait(20)
        feed(recorder, 30 + 7, start=10)
        # Ten rows are being written, and the queue has 30, two files and one that fills: seven more are lost.
        assert recorder.rows_dropped == 7
        disk.moves.set()
        until(lambda: recorder.rows_written == 40)
        feed(recorder, 5, start=47)
        recorder.close()
        assert steps_in(tmp_path) == [*range(40), *range(47, 52)]
        counts = [read_parquet(file).provenance["rows_dropped_so_far"] for file in files(tmp_path)]
        assert counts[0] <= 7
        assert counts[-1] == 7
        assert [r.getMessage().split(":")[0] for r in caplog.records] == ["latfit drops steps of its trace"]

    def test_a_disk_that_stays_full_costs_what_no_queue_holds(self, disk: Disk, tmp_path: Path, caplog: Any) -> None:
        disk.full = True
        disk.moves.set()
        recorder = StepRecorder(tmp_path, buffers=Buffers(rows_per_file=10, max_pending=1))
        feed(recorder, 10)
        until(lambda: bool(caplog.records))
        feed(recorder, 20 + 5, start=10)
        assert recorder.rows_dropped == 5
        recorder.close()
        assert recorder.rows_dropped == 35
        assert "No space left" in caplog.text

    @pytest.mark.parametrize("rows_per_file", [10, 100])
    def test_rows_that_a_full_disk_refused_are_written_when_it_has_room(
        self, disk: Disk, tmp_path: Path, caplog: Any, rows_per_file: int
    ) -> None:
        disk.full = True
        disk.moves.set()
        recorder = StepRecorder(tmp_path, buffers=Buffers(rows_per_file, first_s=0.1, flush_s=0.1))
        feed(recorder, 30)
        until(lambda: bool(caplog.records))
        disk.full = False
        feed(recorder, 5, start=30)
        recorder.close()
        assert steps_in(tmp_path) == list(range(35))
        assert recorder.rows_dropped == 0
        assert len(caplog.records) == 1

    def test_what_is_no_number_is_refused_and_counted(self, tmp_path: Path, caplog: Any) -> None:
        recorder = StepRecorder(tmp_path)
        strange: list[Any] = [None, "7", 2**40, 1.5, object()]
        for value in strange:
            recorder.add(Step(0, 1.0, value, 0, 1, 1, queued_requests=0))
        feed(recorder, 2)
        recorder.close()
        assert recorder.rows_refused == len(strange)
        assert len(caplog.records) == 1
        trace = read_parquet(files(tmp_path)[0])
        assert trace["T_ms"].tolist() == [1.0, 2.0]
        assert trace.provenance["rows_refused_so_far"] == len(strange)

    def test_a_thread_that_cannot_be_started_is_tried_again(
        self, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        recorder = StepRecorder(tmp_path, buffers=Buffers(rows_per_file=2, max_pending=0))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            feed(recorder, 3)
        feed(recorder, 2, start=3)
        recorder.close()
        assert steps_in(tmp_path) == [3, 4]
        assert recorder.rows_refused == 3


@pytest.fixture(autouse=True)
def _warnings_are_caught(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
