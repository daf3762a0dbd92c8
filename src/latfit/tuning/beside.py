"""A server recorded beside a load: its `/metrics` in a thread, and the steps that latfit's plug-in writes."""

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from latfit.metrics import Server
from latfit.record import MetricsRecorder

EVERY_S = 0.5
LONGEST_S = 86_400.0
TRACE_DIR = "LATFIT_TRACE_DIR"
"""The variable that makes the plug-in inside vLLM write steps, into this folder."""


@contextmanager
def recording(url: str, out: Path) -> Iterator[MetricsRecorder]:
    """Record a server's `/metrics` until the block ends, then write the trace. Raises BadInput if the server publishes
    none, or none that count steps."""
    server = Server(url)
    recorder = MetricsRecorder(out, {}, server.settings())
    recorder.take(server.first())
    ended = threading.Event()

    def record() -> None:
        for reading in server.readings(EVERY_S, LONGEST_S):
            recorder.take(reading)
            if ended.is_set():
                return

    with ThreadPoolExecutor(1) as pool:
        recorded = pool.submit(record)
        try:
            yield recorder
        finally:
            ended.set()
            wait([recorded])
            recorder.write()
    recorded.result()


def find_steps(folder: Path, recorder: MetricsRecorder, cold: Collection[Path]) -> list[Path]:
    """Return the traces of a run: single steps where the plug-in wrote them, else the busy windows of `/metrics`.

    cold: files of the plug-in from before the engine was warm.
    """
    single = files_in(folder).difference(cold)
    return sorted(single) or ([recorder.out] if any(not row["idle"] for row in recorder.rows) else [])


def files_in(folder: Path) -> set[Path]:
    """Return the files of steps that the plug-in has written so far."""
    return set(folder.glob("*.parquet"))
