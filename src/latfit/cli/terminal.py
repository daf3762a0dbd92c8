"""What surrounds a command: streams that are closed, break or lack letters, warnings of libraries, Ctrl-C.

A reader that goes away (`| head`) does not stop the work: what nobody reads any more is dropped, files are written, and
the exit code is that of the command. LATFIT_DEBUG=1 shows what is hidden here: tracebacks, and what libraries warn of.
"""

import codecs
import contextlib
import io
import logging
import os
import signal
import sys
import threading
import warnings
from types import FrameType, TracebackType
from typing import Any, TextIO

DEBUG = "LATFIT_DEBUG"
LETTERS = "latfit.letters"
"""How letters are printed that an encoding lacks, as Python calls such a rule."""

PLAIN = {
    "µ": "u", "±": "+/-", "≥": ">=", "≤": "<=", "×": "x", "–": "-", "−": "-", "…": "...", "·": "*", "²": "^2",
    "ρ": "rho", "τ": "tau", "λ": "lambda", "σ": "sigma", "α": "alpha", "β": "beta", "→": "->", "\xa0": " ",
}  # fmt: skip

AGAIN_S = 0.01
"""After which an interrupt that was lost comes again."""

_interrupts: list[int] = []


def debugging() -> bool:
    """Whether a developer asks for what users are spared."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def interrupted() -> bool:
    """Whether Ctrl-C was pressed: a library that is interrupted while it loads may raise anything."""
    return bool(_interrupts)


def prepare() -> None:
    """Make the process one in which a command can print, warn and be interrupted."""
    _open_what_is_closed()
    codecs.register_error(LETTERS, _in_plain_letters)
    for name in ("stdout", "stderr"):
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):  # no stream of the operating system
            setattr(sys, name, _Stream.instead_of(getattr(sys, name)))
    if not debugging():
        _silence_libraries()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note_and_interrupt)


def quiet_end() -> None:
    """From here on Ctrl-C ends the process at once: while an interpreter ends, it would show a traceback."""
    if signal.getsignal(signal.SIGINT) is _note_and_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_at_once(code: int) -> None:
    """End the process without waiting for threads that still compute, which no signal stops."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


class _Stream(io.TextIOWrapper):
    """A text stream that goes nowhere once its reader is gone."""

    @classmethod
    def instead_of(cls, stream: TextIO) -> "_Stream":
        if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, cls):
            raise io.UnsupportedOperation
        by_line, through = stream.line_buffering, stream.write_through
        # Where nobody set a locale Python falls back to ASCII, and terminals know UTF-8.
        encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding
        return cls(stream.detach(), encoding, LETTERS, None, by_line, through)

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            _drop(self)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            _drop(self)


def drop_output(*streams: TextIO) -> None:
    """Streams that cannot take any more go nowhere; what is still in their buffers must not fail again at the end."""
    for stream in streams:
        _drop(stream)


def _drop(stream: TextIO) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _open_what_is_closed() -> None:
    """A descriptor below 3 that is closed would be given to the next file that is opened, and printed into."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter, "?") for letter in lacking), error.end


def _silence_libraries() -> None:
    """What libraries warn of is for their callers: latfit says itself what a user should know."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of workers
    logging.lastResort = logging.NullHandler()
    sys.unraisablehook = _again_if_interrupted
    sys.excepthook = _unless_interrupted


def _again_if_interrupted(ignored: Any) -> None:
    """Ctrl-C that comes where nothing can be raised, in a callback while modules load, is lost: it comes again."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()


def _unless_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A module in C whose loading Ctrl-C interrupts prints why it cannot load, before it raises something else."""
    if not interrupted():
        sys.__excepthook__(kind, error, trace)


def _note_and_interrupt(number: int, frame: FrameType | None) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt
