"""The formats that latfit reads. Each reader returns a Trace with latfit's column names and drops no rows."""

from latfit.errors import BadInput, WrongUsage, refuse_taken
from latfit.trace.readers import requests, table, vllm
from latfit.trace.readers.engines import DYNAMO, SGLANG, TRTLLM
from latfit.trace.readers.simulators import LLMSERVINGSIM, SPLITWISE, VIDUR
from latfit.trace.readers.source import Options, Reader, Source, open_source
from latfit.trace.readers.step_lines import LLAMA_BENCH, SGLANG_LOG, TRTLLM_LOG

READERS: list[Reader] = [
    *(vllm.READER, TRTLLM, DYNAMO, SGLANG),
    *(TRTLLM_LOG, SGLANG_LOG, LLAMA_BENCH),
    *(SPLITWISE, VIDUR, LLMSERVINGSIM),
    requests.READER,
    table.READER,  # last: more special formats are tables too
]

CONTAINERS = ("csv", "tsv", "jsonl", "parquet", "feather")
"""Other names for a table; its bytes show which of them it is."""

__all__ = ["READERS", "Options", "Reader", "Source", "add_reader", "open_source", "reader_for"]


def add_reader(reader: Reader) -> None:
    """Register a format, tried before tables. Raises WrongUsage for a name that is taken."""
    refuse_taken(reader.name, [*(each.name for each in READERS), *CONTAINERS], "reader")
    READERS.insert(READERS.index(table.READER), reader)


def reader_for(source: Source, name: str = "auto") -> Reader:
    """Return the reader called `name`, or the one that recognises the source. Raises WrongUsage, BadInput."""
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
