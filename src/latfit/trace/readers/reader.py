"""What a reader is: a name, a way to recognise its format from the first bytes, and a way to turn it into a trace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from latfit.trace.readers.source import Source
from latfit.trace.table import Trace


@dataclass(frozen=True)
class Options:
    """How a table is to be read: {latfit's name: the name in the file}, and the unit of its latency column."""

    column_map: Mapping[str, str] = field(default_factory=dict)
    unit: str | None = None


@dataclass(frozen=True)
class Reader:
    """One format.

    recognises: whether the first bytes (decompressed, up to 64 KiB, perhaps cut inside a line) are of this format.
    read: all steps in file order; it drops nothing, and marks what cleaning may drop (columns `dummy`, `idle`). Raises
    BadInput. path: the execution path of what it reads, where the format implies one.
    """

    name: str
    describes: str
    recognises: Callable[[bytes], bool]
    read: Callable[[Source, Options], Trace]
    path: str | None = None
