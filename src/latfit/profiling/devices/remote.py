"""Run a device in a child process, driven over a pipe.

A child can be capped at an instruction set, and an out-of-memory kill becomes a limit of its cell. A waiting child is
stopped: spinning library threads (OpenBLAS: 0.1 s) would slow the next child's first steps up to three times.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from latfit.profiling.devices.device import Device, DeviceFailed, DeviceOutOfMemory
from latfit.profiling.shapes import StepShape

_PR_SET_PDEATHSIG = 1  # prctl's option: the signal that a process gets when the thread that made it ends


class RemoteDevice:
    """The device that a picklable `opener(*arguments)` opens in a child with more environment variables.

    A turn begins with `prepare`, and ends the other's. Raises what the opener raises.
    """

    _holder: "ClassVar[RemoteDevice | None]" = None  # the device whose turn it is

    def __init__(
        self, opener: Callable[..., Device], arguments: tuple[Any, ...], environment: Mapping[str, str] | None = None
    ) -> None:
        self._opener, self._arguments, self._environment = opener, arguments, dict(environment or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self._resting = self._ends_with_parent = False
        self._asked = 0
        self._open()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self._ask, method)

    def prepare(self, cell: StepShape) -> None:
        holder, RemoteDevice._holder = RemoteDevice._holder, self
        if holder is not None and holder is not self:
            holder.rest()
        if self._child is not None and self._child.poll() is not None:
            self.close()  # it ended while it rested, not because of this cell
        if self._child is None:
            self._open()
        self._ask("prepare", cell)

    def rest(self) -> None:
        """Stop the child until its next call, unless it would then outlive this process."""
        if self._child is not None and self._ends_with_parent:
            self._resting = True  # first: after Ctrl-C between the two a spare SIGCONT is harmless
            self._child.send_signal(signal.SIGSTOP)

    def _wake(self, child: subprocess.Popen[bytes]) -> None:
        if self._resting:
            child.send_signal(signal.SIGCONT)
            self._resting = False

    def now_s(self) -> float:
        return time.perf_counter()

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        self._wake(child)
        self._pipe.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def _open(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        command = f"from latfit.profiling.devices.remote import serve; serve({theirs.fileno()})"
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-c", command],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=2,  # output of libraries goes to stderr
            start_new_session=True,  # Ctrl-C reaches the parent only
            env={**os.environ, **self._environment, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )
        theirs.close()
        try:
            self.name, self.path, self._ends_with_parent = self._ask("open", self._opener, self._arguments)
        except DeviceOutOfMemory as error:
            remedy = "Choose a smaller --model or fewer --processes."
            raise DeviceFailed(f"its process ended while it opened: {error}", where="device", remedy=remedy) from None
        except BaseException:
            self.close()
            raise

    def _ask(self, method: str, *arguments: Any) -> Any:
        child = self._child
        if child is None:
            raise DeviceOutOfMemory("its process is gone")
        self._wake(child)
        try:
            self._asked += 1
            self._pipe.send((self._asked, method, arguments))
            answered = 0
            while answered != self._asked:  # Ctrl-C may have left the answer to an earlier question unread
                answered, failed, answer = self._pipe.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            code = child.wait()
            self.close()
            why = "killed, most likely for memory" if code == -signal.SIGKILL else f"ended with exit code {code}"
            raise DeviceOutOfMemory(f"its process was {why}") from None
        if failed:
            raise answer
        return answer


def serve(pipe: int) -> None:
    ends_with_parent = False
    if sys.platform.startswith("linux"):  # the kernel kills this process when its parent ends, even while stopped
        ends_with_parent = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) == 0
    questions = Connection(pipe)
    device: Device | None = None
    with suppress(EOFError, OSError):
        while True:
            number, method, arguments = questions.recv()
            try:
                if method == "open":
                    device = arguments[0](*arguments[1])
                    answer: Any = device.name, device.path, ends_with_parent
                else:
                    answer = getattr(device, method)(*arguments)
                failed = False
            except Exception as error:  # noqa: BLE001 - whatever it is, the parent decides
                failed, answer = True, _portable(error)
            questions.send((number, failed, answer))
    if device is not None:
        device.close()


def _portable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error's constructor may be anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
