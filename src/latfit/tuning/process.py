"""An engine's server as a process of ours: started in a session of its own, ended with everything that it started."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from latfit.errors import BadInput

STOP_S = 30.0
"""How long an engine may take to end before it is killed."""

POLL_S = 0.05
CONNECT_S = 1.0


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
            left = _of_session(self.process.pid)
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, kind)
            while left and time.monotonic() < until:
                self.process.poll()
                time.sleep(POLL_S)
                left = _of_session(self.process.pid)
            if not left:
                break
        self.process.wait()


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
            raise BadInput(
                f"cannot be started: {error.strerror}", where=command[0], remedy="Check the command after --."
            ) from None
    return Engine(process, log)


def _of_session(session: int) -> list[int]:
    """Return the processes of a session that still run."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # after the name in parentheses: state, parent, group, session
            state, _, _, theirs = stat.read_text().rpartition(")")[2].split()[:4]
            if int(theirs) == session and state != "Z":
                pids.append(int(stat.parent.name))
    return pids
