"""What surrounds a command: broken pipes, encodings, warnings of libraries, Ctrl-C.

LATFIT_DEBUG=1 shows what is hidden here: tracebacks and warnings of libraries.
"""

import contextlib
import io
import logging
import os
import signal
import sys
import warnings
from types import FrameType
from typing import TextIO

DEBUG = "LATFIT_DEBUG"

_interrupts: list[int] = []


def debugging() -> bool:
    return os.environ.get(DEBUG, "0") not in ("", "0")


def interrupted() -> bool:
    return bool(_interrupts)


def prepare() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Where nobody set a locale Python falls back to ASCII, and terminals read UTF-8.
            ascii_only = stream.encoding.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968")
            stream.reconfigure(encoding="utf-8" if ascii_only else None, errors="replace")
    if not debugging():
        warnings.simplefilter("ignore")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of workers
        logging.lastResort = logging.NullHandler()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def end(code: int) -> None:
    """End the process; after Ctrl-C without waiting for compiled loops."""
    if interrupted():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while the interpreter ends
    sys.exit(code)


def drop_output(*streams: TextIO | None) -> None:
    """Let streams without a reader go nowhere."""
    for stream in streams:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
            os.close(nowhere)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt
