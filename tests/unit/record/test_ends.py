"""The end of a process that records, in each way that one can end; and a child that is forked from it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from latfit.trace.parquet import read_parquet
from tests.conftest import ROOT
from tests.unit.record.engine import files, steps_in, until


class TestEnds:
    FEED = """
        import logging, multiprocessing, os, sys
        from pathlib import Path
        from latfit.record import Buffers, Step, StepRecorder

        folder = Path(sys.argv[1])
        recorder = StepRecorder(folder, buffers=Buffers(rows_per_file=50))

        def feed(count):
            for step in range(count):
                recorder.add(Step(step, 1.0, 0, 0, 2, 2, queued_requests=0))
    """

    def start(self, ending: str, folder: Path) -> "subprocess.Popen[bytes]":
        program = textwrap.dedent(self.FEED) + textwrap.dedent(ending)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen([sys.executable, "-c", program, str(folder)], env=environment)

    def test_the_end_of_the_program_writes_what_is_pending(self, tmp_path: Path) -> None:
        assert self.start("feed(120)", tmp_path).wait(60) == 0
        assert [len(read_parquet(file)) for file in files(tmp_path)] == [50, 50, 20]

    def test_so_does_an_exception(self, tmp_path: Path) -> None:
        assert self.start("feed(7)\nsys.stderr.close()\nraise SystemExit(5)", tmp_path).wait(60) == 5
        assert len(steps_in(tmp_path)) == 7

    def test_a_kill_leaves_whole_files_only(self, tmp_path: Path) -> None:
        engine = self.start("while True: feed(1000)", tmp_path)
        until(lambda: len(files(tmp_path)) > 20)
        engine.send_signal(signal.SIGKILL)
        engine.wait(60)
        assert {len(read_parquet(file)) for file in files(tmp_path)} == {50}

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
    def test_a_forked_child_is_a_run_of_its_own(self, tmp_path: Path) -> None:
        """The child has neither the parent's thread nor its rows; `multiprocessing` ends it without atexit."""
        ending = """
        feed(7)
        child = multiprocessing.get_context("fork").Process(target=feed, args=(11,))
        child.start()
        child.join()
        feed(3)
        sys.exit(child.exitcode)
        """
        assert self.start(ending, tmp_path).wait(60) == 0
        rows: dict[str, int] = {}
        for file in files(tmp_path):
            trace = read_parquet(file)
            rows[trace["run"][0]] = rows.get(trace["run"][0], 0) + len(trace)
        assert sorted(rows.values()) == [10, 11]
