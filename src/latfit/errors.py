"""Errors that a user can correct, with their exit codes."""

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import ClassVar

silent: ContextVar[bool] = ContextVar("silent", default=False)  # whether only errors go to stderr


def printable(text: str) -> str:
    """Return the text with unprintable characters escaped."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\xa0" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def tell(text: str) -> None:
    """Print progress to stderr at once, unless silent."""
    if not silent.get():
        print(printable(text), file=sys.stderr, flush=True)


class LatfitError(Exception):
    """Base of errors raised on purpose: what is wrong, where (file, option, row), what to do."""

    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, exit_code: int = 1) -> None:
        cls.exit_code = exit_code

    def __init__(self, found: str, *, remedy: str, where: str | None = None) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.found}\n{self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        """Keep keyword arguments when an error comes from a worker."""
        return partial(type(self), remedy=self.remedy, where=self.where), (self.found,)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Give errors of the block their place if they have none."""
    try:
        yield
    except LatfitError as error:
        error.where = error.where or where
        raise


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class WrongUsage(LatfitError, exit_code=2):
    """Options that contradict each other or cannot be read."""


def refuse(wrong: bool, found: str, where: str, remedy: str) -> None:
    if wrong:
        raise WrongUsage(found, where=where, remedy=remedy)


def no_address(url: str, of: str) -> WrongUsage:
    """Return the error for what is no HTTP address; screens and logs keep it, so it shows no password."""
    remedy = "Write http://localhost:8000, without a user or a password."
    return WrongUsage(f"{url.rpartition('@')[2]!r} is no address of {of}", where="URL", remedy=remedy)


def refuse_taken(name: str, known: Collection[str], what: str) -> None:
    if name in known:
        raise WrongUsage(f"there is a {what} called {name!r}", where=f"add_{what}", remedy="Give yours another name.")


class BadInput(LatfitError, exit_code=3):
    """Data that is missing, broken, or not what it claims to be."""


class FitNotUsable(LatfitError, exit_code=4):
    """The data do not support the requested model."""


class SlaOutOfReach(LatfitError, exit_code=5):
    """No operating point meets the SLA."""


class HardwareMissing(LatfitError, exit_code=6):
    """The host lacks the requested device or instruction set."""


class TargetNotWritable(LatfitError, exit_code=7):
    """A result could not be stored."""


class Regression(LatfitError, exit_code=8):
    """A comparison found a slowdown beyond the tolerance."""


class Interrupted(LatfitError, exit_code=130):
    """The user stopped the run."""
