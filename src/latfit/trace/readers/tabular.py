"""Tables of anybody's: Parquet, Feather or Arrow, CSV and its like, and JSON lines of flat objects.

A map may rename the columns and a unit scale the latency; names that say what they are need neither.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from latfit.errors import BadInput
from latfit.trace.readers.delimited import header_of, numbers, read_delimited, texts
from latfit.trace.readers.jsonlines import Tally, number, records, starts_as_json
from latfit.trace.readers.naming import check_unit, named_columns, provenance_of
from latfit.trace.readers.reader import Options, Reader
from latfit.trace.readers.source import Source
from latfit.trace.schema import BY_NAME
from latfit.trace.store import columns_of, read_parquet
from latfit.trace.table import Array, Trace

PARQUET_MAGIC = b"PAR1"
ARROW_FILE_MAGIC = b"ARROW1"
OLD_FEATHER_MAGIC = b"FEA1"
ARROW_STREAM_MAGIC = b"\xff\xff\xff\xff"
MOST_COLUMNS = 4096


def recognises(head: bytes) -> bool:
    """Parquet, Feather, Arrow, JSON, or text whose first line has at least two columns."""
    return _is_binary(head) or starts_as_json(head) or bool(header_of(head))


def read(source: Source, options: Options) -> Trace:
    """The table as a trace. Cells that are not numbers where numbers belong become NaN, for cleaning to count."""
    found = _found(source)
    named = named_columns(found.columns, options, source.name)
    columns = {name: _typed(name, column) for name, column in named.columns.items()}
    columns["T_ms"] = columns["T_ms"] * named.ms_per_unit
    if not (_is_binary(source.head) and found.provenance):  # a trace that latfit wrote is in milliseconds
        check_unit(columns["T_ms"], options, source.name)
    return Trace(columns, {**found.provenance, **provenance_of(named)})


def read_columns(source: Source, required: Sequence[str]) -> Trace:
    """A table that need not hold latencies, with latfit's own column names. Raises BadInput where one is missing."""
    found = _found(source)
    if missing := [name for name in required if name not in found]:
        raise BadInput(
            f"no column {', '.join(missing)} (there are {', '.join(found.columns)})",
            where=source.name,
            remedy=f"Give a table with the columns {', '.join(required)}.",
        )
    columns = {name: _typed(name, column) for name, column in found.columns.items()}
    broken = np.logical_or.reduce([~np.isfinite(columns[name]) for name in required])
    if broken.any():
        raise BadInput(
            f"row {int(np.argmax(broken)) + 1} has no number in {' or '.join(required)}",
            where=source.name,
            remedy="Correct or leave out the row.",
        )
    return Trace(columns, found.provenance)


def _found(source: Source) -> Trace:
    """What the container holds, under the names of the file."""
    if _is_binary(source.head):
        return _read_binary(source)
    if starts_as_json(source.head):
        return _read_json(source)
    table = read_delimited(source)
    return Trace(table.columns, Tally(bad=table.bad_lines).facts())


def _is_binary(head: bytes) -> bool:
    return head.startswith((PARQUET_MAGIC, ARROW_FILE_MAGIC, OLD_FEATHER_MAGIC, ARROW_STREAM_MAGIC))


def _read_binary(source: Source) -> Trace:
    import pyarrow as pa

    if source.compression is not None:
        raise BadInput(
            f"a table in a {source.compression} file",
            where=source.name,
            remedy="Decompress it: Parquet and Feather are compressed inside.",
        )
    try:
        if source.head.startswith(PARQUET_MAGIC):
            return read_parquet(source.path, source.name)
        return Trace(columns_of(_arrow_table(source), source.name))
    except (pa.ArrowException, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = (str(error).splitlines() or ["damaged"])[0][:200]
        raise BadInput(
            f"not a whole table ({reason})", where=source.name, remedy="It may be cut short: copy or make it again."
        ) from None


def _arrow_table(source: Source) -> Any:
    """The table, checked: a damaged one would lead outside its buffers."""
    from pyarrow import ipc

    if source.head.startswith(OLD_FEATHER_MAGIC):
        raise BadInput(
            "is in the first version of Feather, which Arrow no longer reads",
            where=source.name,
            remedy="Save it again in the second version (or as Parquet).",
        )
    with source.open() as stream:
        is_stream = source.head.startswith(ARROW_STREAM_MAGIC)
        table = (ipc.open_stream if is_stream else ipc.open_file)(stream).read_all()
    table.validate(full=True)
    return table


def _read_json(source: Source) -> Trace:
    """Flat objects as columns; a value that is itself an object or a list is left out."""
    tally = Tally()
    columns: dict[str, list[Any]] = {}
    for row, record in enumerate(records(source, tally)):
        for name, value in record.items():
            if not isinstance(value, (dict, list)):
                columns.setdefault(name.strip(), [None] * row)[row:] = [value]
        if len(columns) > MOST_COLUMNS:
            raise BadInput(
                f"has more than {MOST_COLUMNS} different keys",
                where=source.name,
                remedy="Give a table: one object a step, with the same keys in each.",
            )
        for column in columns.values():
            if len(column) == row:
                column.append(None)
    if not columns:
        raise BadInput(
            "holds no flat JSON object",
            where=source.name,
            remedy='Give one object a line, such as {"B": 1, "S": 1, "T_ms": 9.5}.',
        )
    return Trace({name: _array(column) for name, column in columns.items()}, tally.facts())


def _array(values: list[Any]) -> Array:
    """Integers and floats as such, so that a label keeps its look; anything else as objects."""
    kinds = {type(value) for value in values}
    if kinds == {int} and all(abs(value) < 1 << 63 for value in values):
        return np.array(values, dtype=np.int64)
    if kinds <= {int, float, type(None)} and kinds & {int, float}:
        return np.array([number(value) for value in values], dtype=np.float64)
    return np.array(values, dtype=object)


def _typed(name: str, column: Array) -> Array:
    """The column in its declared kind; a label that is not declared keeps numbers and is text otherwise."""
    kind = BY_NAME[name].kind if name in BY_NAME else None
    if kind in ("int", "float"):
        return _seconds(column) if column.dtype.kind == "M" else numbers(column)
    if kind == "text":
        return texts(column)
    if kind == "flag":
        return np.array([value in (True, 1, "true", "True", "1") for value in column.tolist()], dtype=bool)
    return texts(column) if column.dtype.kind == "O" else column


def _seconds(moments: Array) -> Array:
    """Points in time as seconds from the first of them."""
    known = moments[~np.isnat(moments)]
    first = known.min() if len(known) else moments[:1]
    return np.asarray((moments - first) / np.timedelta64(1, "s"), dtype=np.float64)


READER = Reader("table", "a table with columns B, S and T_ms, or others with --map", recognises, read)
