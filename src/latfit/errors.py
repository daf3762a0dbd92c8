"""Errors that a user can mend. Each says what was found, where, and what to do, and carries its exit code."""

import sys
from collections.abc import Collection
from contextvars import ContextVar

silent: ContextVar[bool] = ContextVar("silent", default=False)
"""Whether nothing goes to stderr but errors."""


def printable(text: str) -> str:
    """Return the text with the escape (`\\x1b`) of every character that is not printable, but line breaks.

    Names in files may hold control sequences of terminals, or characters that reverse or hide the text around them.
    """
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\xa0" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def tell(text: str) -> None:
    """A line for who waits, on stderr at once."""
    if not silent.get():
        print(printable(text), file=sys.stderr, flush=True)


class LatfitError(Exception):
    """Base of every error that latfit raises on purpose.

    found: what is wrong, in one line.  where: the file, option or row it was found in.  remedy: what to do.
    """

    exit_code = 1

    def __init__(self, found: str, *, remedy: str, where: str | None = None) -> None:
        super().__init__(found)
        self.found = found
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.found}\n{self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        """Keyword arguments survive pickling, as on the way from a worker."""
        return _remade, (type(self), self.found, self.where, self.remedy)


def _remade(kind: type[LatfitError], found: str, where: str | None, remedy: str) -> LatfitError:
    return kind(found, where=where, remedy=remedy)


def first_line(error: BaseException) -> str:
    """What another library says of an error, short enough for a line of ours."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class WrongUsage(LatfitError):
    """Options that contradict each other or cannot be read."""

    exit_code = 2


def refuse_taken(name: str, known: Collection[str], what: str) -> None:
    """Raises WrongUsage where something of that kind already goes by the name."""
    if name in known:
        raise WrongUsage(f"there is a {what} called {name!r}", where=f"add_{what}", remedy="Give yours another name.")


class BadInput(LatfitError):
    """Data that is missing, broken, or not what it claims to be."""

    exit_code = 3


class FitNotUsable(LatfitError):
    """The data cannot carry the model that was asked for."""

    exit_code = 4


class SlaOutOfReach(LatfitError):
    """No operating point meets the SLA."""

    exit_code = 5


class HardwareMissing(LatfitError):
    """The machine lacks the device or instruction set that was asked for."""

    exit_code = 6


class TargetNotWritable(LatfitError):
    """A result could not be stored."""

    exit_code = 7


class Regression(LatfitError):
    """A comparison found one side slower than it may be."""

    exit_code = 8


class Interrupted(LatfitError):
    """The user stopped the run; what was measured so far has been kept where the message says."""

    exit_code = 130
