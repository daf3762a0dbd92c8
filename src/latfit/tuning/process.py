"""An engine's server as a process of ours, started in a session of its own and ended with all that it started, and what
is recorded beside a load: its `/metrics` in a thread, and the steps that latfit's plug-in writes."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from latfit.errors import BadInput
from latfit.metrics import Server
from latfit.record import MetricsRecorder

STOP_S = 30.0  # how long an engine may take to end before it is killed

POLL_S = 0.05
CONNECT_S = 1.0
EVERY_S = 0.5
LONGEST_S = 86_400.0
TRACE_DIR = "LATFIT_TRACE_DIR"  # the variable that makes the plug-in inside vLLM write steps, into this folder


@dataclass(frozen=True)
class Engine:
    """A running server. log: what it printed."""

    process: "subprocess.Popen[bytes]"
    log: Path

    def why_gone(self) -> str:
        """Return why the server is gone, with the last line of its log; empty while it runs."""
        code = self.process.poll()
        if code is None:
            return ""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"the engine ended with exit code {code}{f': {lines[-1][:200]}' if lines else ''} ({self.log})"

    def stop(self, patience_s: float = STOP_S) -> None:
        """End the server and everything of its session: by SIGTERM, after this time by SIGKILL."""
        for kind in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + patience_s
            left = self._left()
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, kind)
            while left and time.monotonic() < until:
                time.sleep(POLL_S)
                left = self._left()
            if not left:
                break
        self.process.wait()

    def _left(self) -> set[int]:
        """Return the processes of its session that still run; without /proc, at least the server."""
        pids = {self.process.pid} if self.process.poll() is None else set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                # after the name in parentheses: state, parent, group, session
                state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    pids.add(int(stat.parent.name))
        return pids


def start_engine(command: Sequence[str], log: Path, environment: Mapping[str, str], url: str) -> Engine:
    """Start a server. url: where it will answer. Raises BadInput if something answers there already, or if there is no
    such program."""
    address = urlsplit(url)
    with suppress(OSError), socket.create_connection((address.hostname or "", address.port or 80), CONNECT_S):
        raise BadInput("something answers here already", where=url, remedy="Stop it, or give another --port.")
    with log.open("wb") as printed:
        try:
            process = subprocess.Popen(
                [*command],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            log.unlink()
            raise BadInput(
                f"cannot be started: {error.strerror}", where=command[0], remedy="Check the command after --."
            ) from None
    return Engine(process, log)


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
