"""One file a source. Each reader turns what it finds into a Trace with latfit's column names; none drops rows."""

from latfit.errors import BadInput, WrongUsage, refuse_taken
from latfit.trace.readers import dynamo, llmservingsim, requests, sglang, splitwise, table, trtllm, vidur
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.source import Source, open_source
from latfit.trace.readers.vllm import reader as vllm

READERS: list[Reader] = [
    vllm.READER,
    trtllm.READER,
    dynamo.READER,
    sglang.READER,
    splitwise.READER,
    vidur.READER,
    llmservingsim.READER,
    requests.READER,
    table.READER,
]
"""Every format. Tables come last: a more special reader that also recognises the bytes goes before them."""

CONTAINERS = ("csv", "tsv", "jsonl", "parquet", "feather")
"""Other words for a table; which of them it is, its bytes say."""

__all__ = ["READERS", "Options", "Reader", "Source", "add_reader", "open_source", "reader_for"]


def add_reader(reader: Reader) -> None:
    """Read a format of your own: by its name, or where it recognises the first bytes, before they pass for a table.

    Raises WrongUsage for a name that is taken.
    """
    refuse_taken(reader.name, [*(each.name for each in READERS), *CONTAINERS], "reader")
    READERS.insert(READERS.index(table.READER), reader)


def reader_for(source: Source, name: str = "auto") -> Reader:
    """The reader called `name`, or the one that recognises the source's first bytes.

    Raises WrongUsage for an unknown name, BadInput where no format or more than one fits.
    """
    if name != "auto":
        wanted = table.READER.name if name in CONTAINERS else name
        named = next((reader for reader in READERS if reader.name == wanted), None)
        if named is None:
            known = ", ".join([*(reader.name for reader in READERS), *CONTAINERS])
            raise WrongUsage(f"{name!r} is not a format", where="--format", remedy=f"Choose one of: auto, {known}.")
        return named
    fitting = [reader for reader in READERS if reader.recognises(source.head)]
    special = [reader for reader in fitting if reader is not table.READER]
    if len(special) > 1:
        names = ", ".join(reader.name for reader in special)
        raise BadInput(f"may be of several formats: {names}", where=source.name, remedy="Say which with --format.")
    if not fitting:
        raise BadInput(
            "not a format that latfit reads",
            where=source.name,
            remedy=f"It reads {'; '.join(reader.describes for reader in READERS)}.",
        )
    return (special or fitting)[0]
