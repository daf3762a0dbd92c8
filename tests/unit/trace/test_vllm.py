"""vLLM logs: every shape of line, what is told apart, and that whole blocks of lines give what a slow loop finds."""

import io
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from latfit.errors import BadInput
from latfit.trace.coverage import reading_notes
from latfit.trace.read import ingest
from latfit.trace.readers import vllm as reader
from latfit.trace.readers.source import Options, open_source
from latfit.trace.table import Trace

COUNTS = "0 context requests, 0 context tokens, 20 generation requests, 20 generation tokens"
OLD = (
    f"(EngineCore_DP0 pid=2010410) INFO 12-22 21:44:40 [core.py:349] Iteration(515): {COUNTS}, "
    "iteration elapsed time: 10.99 ms\n"
)
NEW = (
    "(APIServer pid=7) INFO 12-22 21:44:40 [loggers.py:199] Engine 000: Iteration(12): 1 context requests, 512 context "
    "tokens, 3 generation requests, 3 generation tokens, iteration elapsed time: 25.10 ms, GPU KV cache usage: 41.2%\n"
)
START = "(EngineCore pid=9) INFO 12-22 21:40:00 [core.py:97] Initializing a V1 LLM engine (v0.12.0) with config: m=1\n"


def step(
    index: int,
    *,
    name: str = "EngineCore_DP0 pid=1",
    clock: str = "12-22 21:44:40",
    counts: str = COUNTS,
    ms: str = "10.99",
    tail: str = "",
) -> str:
    return f"({name}) INFO {clock} [core.py:349] Iteration({index}): {counts}, iteration elapsed time: {ms} ms{tail}\n"


def capacity(tokens: str, name: str = "EngineCore_DP0 pid=1", device: str = "GPU") -> str:
    return f"({name}) INFO 12-22 21:40:10 [kv_cache_utils.py:1286] {device} KV cache size: {tokens} tokens\n"


def parsed(log: str | bytes, folder: Path) -> Trace:
    path = folder / "server.log"
    path.write_bytes(log if isinstance(log, bytes) else log.encode())
    return reader.read(open_source(path), Options())


class TestShapes:
    def test_the_line_of_the_engine(self, tmp_path: Path) -> None:
        trace = parsed(OLD, tmp_path)
        assert {name: column.tolist() for name, column in trace.columns.items()} == {
            "B": [20],
            "S": [20],
            "T_ms": [10.99],
            "t_s": [0.0],
            "run": ["EngineCore_DP0/1"],
            "phase": ["decode"],
            "prefill_requests": [0],
            "prefill_tokens": [0],
            "replica": ["EngineCore_DP0"],
            "step": [515],
        }
        logged = (datetime(1972, 12, 22, 21, 44, 40) - datetime(1972, 1, 1)).total_seconds()  # into a leap year
        assert trace.provenance == {
            "format": "vllm",
            "lines": 1,
            "iteration_lines": 1,
            "cut_lines": 0,
            "engines": 1,
            "runs": 1,
            "kv_capacity_tokens": {},
            "log_clock_s": [logged, logged],
        }

    def test_the_line_of_the_api_server(self, tmp_path: Path) -> None:
        trace = parsed(NEW, tmp_path)
        found = {name: trace[name][0] for name in ("B", "S", "T_ms", "phase", "replica", "step", "kv_usage")}
        assert found == {
            "B": 4,
            "S": 515,
            "T_ms": 25.10,
            "phase": "mixed",
            "replica": "Engine 000",
            "step": 12,
            "kv_usage": 41.2 / 100,
        }
        assert (trace["prefill_requests"][0], trace["prefill_tokens"][0]) == (1, 512)
        assert "context_tokens" not in trace

    @pytest.mark.parametrize(
        "line",
        [
            f"Iteration(515): {COUNTS}, iteration elapsed time: 10.99 ms",
            "\x1b[0;36m(EngineCore_DP0 pid=2)\x1b[0;0m " + OLD.partition(") ")[2],
            OLD.replace("Iteration(", "\x1b[01;31m\x1b[KIteration(\x1b[m\x1b[K").replace(
                "10.99", "\x1b[1m10.99\x1b[0m"
            ),
            OLD.replace("INFO", "\x1b[32mINFO\x1b[0m").replace("[core", "\x1b[90m[core"),
            OLD.replace("\n", "\r\n"),
            "\ufeff" + OLD,
            "2026-04-19T12:19:08.142Z stdout F " + OLD,
            "Loading: 10%\rLoading: 20%\r" + OLD,
            '{"asctime": "2025-12-22 21:44:40,001", "message": "' + OLD.rstrip() + '"}\n',
            OLD.replace("10.99 ms", "10.990 ms (some new thing)"),
            "x" * 100_000 + OLD,
        ],
    )
    def test_what_stands_around_a_step_does_not_matter(self, line: str, tmp_path: Path) -> None:
        for log in (line, line + line, START + line):
            trace = parsed(log, tmp_path)
            rows = len(trace)
            assert [trace[name].tolist() for name in ("B", "S", "T_ms", "step")] == [
                [20] * rows,
                [20] * rows,
                [10.99] * rows,
                [515] * rows,
            ]
            assert rows == log.count("10.99")

    def test_invalid_utf_8_hurts_nothing(self, tmp_path: Path) -> None:
        log = (
            b"\xff\xfe\x00\x80 garbage \xc3\n" + OLD.encode().replace(b"DP0", b"DP\xff") + b"\xe2\x82\n" + OLD.encode()
        )
        trace = parsed(log, tmp_path)
        assert trace["B"].tolist() == [20, 20]
        assert trace["replica"].tolist() == ["EngineCore_DP\ufffd", "EngineCore_DP0"]

    def test_dummy_and_empty_steps_are_kept_and_marked(self, tmp_path: Path) -> None:
        empty = COUNTS.replace("20", "0")
        tail = " (dummy), GPU KV cache usage: 0.0%"
        trace = parsed(
            step(0, counts=empty, tail=tail, ms="0.00") + step(1, tail=", GPU KV cache usage: 100.0%"), tmp_path
        )
        assert trace["B"].tolist() == [0, 20]
        assert trace["dummy"].tolist() == [True, False]
        assert trace["phase"].tolist() == ["", "decode"]
        assert trace["T_ms"].tolist() == [0.0, 10.99]
        assert trace["kv_usage"].tolist() == [0.0, 1.0]


class TestContext:
    def test_usage_times_capacity(self, tmp_path: Path) -> None:
        trace = parsed(capacity("1,234,567", "EngineCore pid=9") + NEW, tmp_path)
        assert trace["context_tokens"].tolist() == [41.2 / 100 * 1234567]
        assert trace.provenance["kv_capacity_tokens"] == {"Engine 000": 1234567}

    def test_each_engine_has_its_own(self, tmp_path: Path) -> None:
        log = capacity("1,000") + capacity("2,000", "EngineCore_DP1 pid=2", "CPU") + NEW
        trace = parsed(log + NEW.replace("000", "001") + NEW.replace("000", "002"), tmp_path)
        assert trace["context_tokens"].tolist() == pytest.approx([412, 824, np.nan], nan_ok=True)

    def test_of_several_workers_the_smallest_and_after_a_restart_the_new_one(self, tmp_path: Path) -> None:
        log = capacity("3,000") + capacity("1,000") + NEW + START + capacity("2,000") + NEW
        assert parsed(log, tmp_path)["context_tokens"].tolist() == pytest.approx([412, 824])


class TestRuns:
    def test_interleaved_engines_are_told_apart(self, tmp_path: Path) -> None:
        log = "".join(step(k, name=f"EngineCore_DP{r} pid={r + 5}", ms=f"{r}.5") for k in range(50) for r in (1, 0, 3))
        trace = parsed(log, tmp_path)
        for rank in (0, 1, 3):
            rows = trace.select(trace["replica"] == f"EngineCore_DP{rank}")
            assert rows["step"].tolist() == list(range(50))
            assert set(rows["run"]) == {f"EngineCore_DP{rank}/1"}
            assert set(rows["T_ms"]) == {rank + 0.5}
        assert (trace.provenance["engines"], trace.provenance["runs"]) == (3, 3)

    @pytest.mark.parametrize(
        ("again", "runs"),
        [
            (step(0) + step(1), 2),  # the counter starts again
            (step(20), 2),  # it does, and the first lines are lost
            (START.replace("EngineCore", "EngineCore_DP0") + step(42), 2),
            (START.replace("(EngineCore pid=9) ", "") + step(42), 2),
            (START.replace("EngineCore", "EngineCore_DP1") + step(42), 1),  # another engine starts
            (step(42, name="EngineCore_DP0 pid=99"), 2),
            (step(40), 1),  # twice the same line
            (step(39) + step(42) + step(41), 1),  # written a little out of order
        ],
    )
    def test_a_start_begins_a_run(self, again: str, runs: int, tmp_path: Path) -> None:
        trace = parsed("".join(step(k) for k in range(41)) + again, tmp_path)
        assert sorted(set(trace["run"])) == [f"EngineCore_DP0/{k + 1}" for k in range(runs)]
        assert trace.provenance["engines"] == 1


class TestTime:
    @pytest.mark.parametrize(
        ("clocks", "seconds"),
        [
            (["12-22 21:44:40", "12-22 21:44:40", "12-22 21:44:43"], [0, 0, 3]),
            (["12-31 23:59:59", "01-01 00:00:01"], [0, 2]),
            (["05-01 10:00:05", "05-01 10:00:04", "05-01 10:00:06"], [0, 0, 1]),  # out of order
            (["10-26 02:59:59", "10-26 02:00:00", "10-26 02:00:01"], [0, 0, 1]),  # the clock is set back
            (["01-01 00:00:00", "12-31 23:59:59", "01-01 00:00:01"], [0, 0, 1]),
            (["05-01 10:00:05", "no time", "05-01 10:00:06"], [0, np.nan, 1]),
            (["05-01 10:00:05", "13-01 10:00:05", "05-32 10:00:05", "05-01 24:00:05"], [0, np.nan, np.nan, np.nan]),
        ],
    )
    def test_seconds_from_the_start_of_the_run(self, clocks: list[str], seconds: Any, tmp_path: Path) -> None:
        trace = parsed("".join(step(k, clock=clock) for k, clock in enumerate(clocks)), tmp_path)
        np.testing.assert_array_equal(trace["t_s"], seconds)


class TestCut:
    @pytest.mark.parametrize("size", range(1, len(OLD.rstrip()) + 1))
    def test_a_cut_last_line_is_no_step(self, size: int, tmp_path: Path) -> None:
        trace = parsed(OLD + OLD[:size], tmp_path)
        whole = OLD[:size].endswith(" ms")
        assert len(trace) == 1 + whole
        cut = re.search(r"Iteration\(\d", OLD[:size]) is not None and not whole
        assert trace.provenance["cut_lines"] == cut
        assert trace.provenance["lines"] == 2

    def test_no_step_says_how_to_start_vllm(self, tmp_path: Path) -> None:
        for log in (START, START + OLD[:-5], "x"):
            with pytest.raises(BadInput) as caught:
                parsed(log, tmp_path)
            assert "--enable-logging-iteration-details" in caught.value.remedy


class TestSources:
    @pytest.mark.parametrize(
        "head", [OLD, NEW, START, "\x1b[0;36m" + START, "noise\n" * 1000 + OLD, "INFO 05-07 05:58:43 [x.py:3] y"]
    )
    def test_heads_of_logs(self, head: str) -> None:
        assert reader.recognises(head.encode())

    @pytest.mark.parametrize(
        "head", ["", "B,S,T_ms\n1,1,2\n", '{"iter": 1}\n', "Iteration(5) of the loop\n", "INFO: done\n", "\0\xff"]
    )
    def test_heads_of_others(self, head: str) -> None:
        assert not reader.recognises(head.encode("latin-1"))


LINES = st.sampled_from(
    [
        OLD,
        NEW,
        START,
        step(3, name="EngineCore_DP1 pid=2"),
        capacity("12,345"),
        "\x1b[0;36m" + OLD,
        OLD[:60],
        "noise\n",
        "x" * 600,
        "\n",
    ]
)


class TestProperties:
    @given(st.lists(LINES, max_size=12).map("".join), st.integers(1, 700))
    def test_blocks_make_no_difference(self, log: str, block: int) -> None:
        traces = []
        for size in (block, 1 << 20):
            with suppress(BadInput):
                traces.append(reader.trace_of(reader.scan_log(io.BytesIO(log.encode()), size), "log"))
        assert len(traces) in (0, 2)
        for name in traces[0].columns if traces else ():
            np.testing.assert_array_equal(traces[0][name], traces[1][name], err_msg=name)


PLAIN = re.compile(
    rb"\((\S+) pid=(\d+)\) \w+ (\d\d-\d\d \d\d:\d\d:\d\d) .*?Iteration\((\d+)\): (\d+) context requests, (\d+) context"
    rb" tokens, (\d+) generation requests, (\d+) generation tokens, iteration elapsed time: ([\d.]+) ms"
    rb"(?:, GPU KV cache usage: ([\d.]+)%)?"
)


@pytest.mark.nightly
def test_a_log_is_read_and_cleaned_in_the_time_of_a_plain_loop(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "server.log").open("w") as log:
        for i, (size, ms, usage) in enumerate(rng.random((100_000, 3)).tolist()):
            n = 1 + int(200 * size)
            counts = f"0 context requests, 0 context tokens, {n} generation requests, {n} generation tokens"
            tail = f", GPU KV cache usage: {100 * usage:.1f}%"
            clock = f"12-22 {i // 90_000:02}:{i // 1500 % 60:02}:{i // 25 % 60:02}"
            log.write(step(i, counts=counts, ms=f"{5 + n / 50 + ms:.2f}", tail=tail, clock=clock))

    def plain_loop() -> int:
        rows = []
        with (tmp_path / "server.log").open("rb") as log:
            for line in log:
                if found := PLAIN.search(line):
                    name, pid, clock, *counts, ms, usage = found.groups()
                    rows.append((name, int(pid), clock, *map(int, counts), float(ms), float(usage)))
        return len(rows)

    def seconds(call: Callable[[], int]) -> float:
        begun = time.process_time()
        assert call() == 100_000
        return time.process_time() - begun

    times = [(seconds(lambda: ingest(tmp_path / "server.log").rows_read), seconds(plain_loop)) for _ in range(3)]
    ours, plain = map(min, zip(*times, strict=True))
    assert ours <= plain


class TestNoCompiler:
    @pytest.mark.parametrize("name", ["server.log", "table.csv", "table.parquet"])
    def test_reading_and_cleaning_load_neither_numba_nor_pandas(self, name: str, tmp_path: Path) -> None:
        rows = [(k % 7 + 1, k % 7 + 1, 10.0 + k % 7) for k in range(50)]
        if name == "server.log":
            (tmp_path / name).write_text(START + "".join(step(k, ms=f"{10 + k % 7}.5") for k in range(50)))
        elif name == "table.csv":
            (tmp_path / name).write_text("B,S,T_ms,model\n" + "".join(f"{B},{S},{T},a\n" for B, S, T in rows))
        else:
            columns = dict(zip(("B", "S", "T_ms"), zip(*rows, strict=True), strict=True))
            pq.write_table(pa.table({**columns, "model": ["a"] * 50}), tmp_path / name)
        code = (
            "import sys; from latfit.trace.read import ingest; from latfit.trace.parquet import write_trace; "
            "from pathlib import Path; write_trace(Path(sys.argv[2]), ingest(sys.argv[1]).trace); "
            "print([name for name in ('numba', 'pandas', 'scipy.stats') if name in sys.modules])"
        )
        command = [sys.executable, "-c", code, str(tmp_path / name), str(tmp_path / "out.parquet")]
        assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"


def windows_log(running: list[int], generated: list[float], prompt: float = 400.0) -> str:
    """Lines of every ten seconds, without iteration lines."""
    return "".join(
        f"(APIServer pid=1) INFO 11-22 12:{second // 60:02}:{second % 60:02} [loggers.py:335] Engine 000: Avg prompt"
        f" throughput: {prompt} tokens/s, Avg generation throughput: {tokens} tokens/s, Running: {requests} reqs,"
        " Waiting: 3 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%\n"
        for second, requests, tokens in zip(range(0, 3600, 10), running, generated, strict=False)
    )


class TestWindows:
    def test_ten_seconds_are_a_row(self, tmp_path: Path) -> None:
        """32 requests that get 1,600 tokens a second take 20 ms a step, and 400 prompt tokens a second are 8 a step."""
        trace = parsed(windows_log([32] * 4, [1600.0] * 4), tmp_path)
        assert len(trace) == 3
        np.testing.assert_allclose(trace["B"], 32)
        np.testing.assert_allclose(trace["T_ms"], 20)
        np.testing.assert_allclose(trace["S"], 40)
        np.testing.assert_allclose(trace["window_ms"], 10_000)
        np.testing.assert_allclose(trace["window_steps"], 500)
        assert trace["queued_requests"].tolist() == [3, 3, 3]
        assert trace["t_s"].tolist() == [0, 10, 20]

    def test_idle_and_unsteady_windows_are_told_apart(self, tmp_path: Path) -> None:
        log = windows_log([30, 32, 0, 0, 8, 16, 16], [1600.0, 1550.0, 600.0, 0.0, 90.0, 500.0, 800.0])
        trace = parsed(log, tmp_path)
        assert trace["idle"].tolist() == [False, True, True, True, False]
        assert trace.provenance["unsteady"] == 1
        np.testing.assert_allclose(trace["T_ms"][[0, -1]], [31 / 1550 * 1e3, 20])

    def test_windows_say_that_they_are_coarse(self, tmp_path: Path) -> None:
        path = tmp_path / "server.log"
        path.write_text(windows_log([32] * 4 + [8] + [32] * 8, [1600.0] * 13))
        (note,) = (each for each in reading_notes(ingest([str(path)])) if "coarse" in each)
        assert "windows of about ten seconds" in note
        assert "2 in which the load changed too much are left out" in note
        path.write_text(NEW)
        assert not any("coarse" in each for each in reading_notes(ingest([str(path)])))
